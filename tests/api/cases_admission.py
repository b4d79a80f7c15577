"""The constraints on admission, and on tiers that go to zero, each broken once or more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.api.cases import BAD_DURATIONS, DURATION, TOO_MANY_DIGITS, Case, single_edit, text_cases
from tests.api.cases_scaling import BAD_DECIMALS
from tests.api.manifests import Manifest, aggregated, service

ADMISSION = "spec.admission"
CLASSES, TENANTS, FALLBACK = f"{ADMISSION}.classes", f"{ADMISSION}.tenants", f"{ADMISSION}.fallback"
SLO = {"ttft": "1s", "tpot": "50ms"}


def service_with_slo(**edits: Any) -> Manifest:
    """A prefill and a decode tier with a promise."""
    return service(**{"spec.slo": SLO, **edits})


def _one(path: str, value: Any, says: str, server: str = "", **more: Any) -> Case:
    return single_edit(path, value, says, server, base=service_with_slo, **more)


def _downgrade(name: str) -> Manifest:
    return {"whenFull": "Downgrade", "fallback": {"name": name}}


_SERVICE_NAME = "must begin with a lower-case letter, end with a letter or digit"

ADMISSION_RULES = [
    single_edit(
        ADMISSION, {}, "slo is required with admission: requests are admitted while its targets", at="spec.slo"
    ),
    single_edit(
        ADMISSION, {"classes": [{"name": "a", "slo": {"tpot": "1s"}}]}, "slo is required with admission", at="spec.slo"
    ),
    single_edit(ADMISSION, {}, "slo is required with admission", at="spec.slo", base=aggregated),
    *[
        _one(f"{ADMISSION}.whenFull", value, "must be 'Queue', 'Shed' or 'Downgrade', not", "Unsupported value")
        for value in ("queue", "", "Hold")
    ],
    _one(ADMISSION, {"whenFull": "Downgrade"}, "whenFull: Downgrade needs fallback, the InferenceService", at=FALLBACK),
    *[
        _one(
            ADMISSION,
            {"fallback": {"name": "small"}, **more},
            "fallback is allowed only with whenFull: Downgrade",
            at=FALLBACK,
        )
        for more in ({}, {"whenFull": "Queue"}, {"whenFull": "Shed"})
    ],
    _one(
        ADMISSION,
        {"whenFull": "Downgrade", "fallback": {}},
        "is required",
        "Required value",
        at=f"{FALLBACK}.name",
    ),
    *text_cases(
        ADMISSION,
        40,
        _SERVICE_NAME,
        ("1small", "Small", "my.small", "small-", "other/small", "small\n"),
        at=f"{FALLBACK}.name",
        build=_downgrade,
        base=service_with_slo,
    ),
    Case(
        {"metadata.name": "itself", ADMISSION: _downgrade("itself")},
        f"{FALLBACK}.name",
        "must be another service: this one is full when it uses its fallback",
        base=service_with_slo,
    ),
    _one(f"{ADMISSION}.maxQueued", 0, "must be at least 1", "greater than or equal to 1"),
    _one(f"{ADMISSION}.maxQueued", 100_001, "must be at most 100000", "less than or equal to 100000"),
]


def _class(fields: Manifest, field: str, says: str, server: str = "", **more: Any) -> Case:
    return _one(CLASSES, [{"name": "a", **fields}], says, server, at=f"{CLASSES}[0]{field}", **more)


def _shares(*shares: str) -> Case:
    classes = [{"name": f"c{number}", "guaranteedShare": share} for number, share in enumerate(shares)]
    total = sum(int(share.removesuffix("%")) for share in shares)
    says = f"the guaranteedShare values of all classes must add up to at most 100%, not {total}%"
    return _one(CLASSES, classes, says)


def _queue_times(*classes: Manifest) -> Case:
    says = "whenFull: Shed queues no request, so no class may have maxQueueTime"
    return _one(ADMISSION, {"whenFull": "Shed", "classes": list(classes)}, says, at=CLASSES)


def _list_rules(path: str, longest: int, missing: Manifest, says: str, wrong: Sequence[str]) -> list[Case]:
    """A list that is a map by its items' names. missing: an item without one."""
    return [
        _one(path, [{"name": f"a{i}"} for i in range(longest + 1)], f"must have at most {longest} entries", "Too many"),
        _one(
            path, [missing], "is required", "Required value", at=f"{path}[0].name", typed=(path, "omits all key fields")
        ),
        _one(
            path,
            [{"name": "a"}, {"name": "b"}, {"name": "a"}],
            "a is listed twice",
            "Duplicate value",
            at=f"{path}[2]",
            typed=(path, "duplicate entries"),
        ),
        *text_cases(
            path,
            64 if path == TENANTS else 63,
            says,
            wrong,
            at=f"{path}[0].name",
            build=lambda name: [{"name": name}],
            base=service_with_slo,
        ),
    ]


CLASS_LISTS = [
    *_list_rules(
        CLASSES,
        16,
        {"priority": 1},
        "must have only lower-case letters, digits and '-', and begin and end with a letter or digit",
        ("Chat", "a b", "-a", "a-", "a.b", "a_b", "ä", "a\n"),
    ),
    _one(CLASSES, [], "must have at least one class; omit the field for a single class of all requests"),
    _class({"priority": -1001}, ".priority", "must be at least -1000", "greater than or equal to -1000"),
    _class({"priority": 1001}, ".priority", "must be at most 1000", "less than or equal to 1000"),
    *[_class({"maxQueueTime": value}, ".maxQueueTime", DURATION) for value in BAD_DURATIONS],
    *[
        _class({"maxQueueTime": value}, ".maxQueueTime", "must be at most 120 seconds")
        for value in ("120s1ns", "3m", "1h")
    ],
    _class({"maxQueueTime": TOO_MANY_DIGITS}, ".maxQueueTime", "must have at most 32 characters", "Too long"),
    *[
        _class({"guaranteedShare": value}, ".guaranteedShare", "must be a whole percentage from 0% to 90%")
        for value in ("", "10", "91%", "100%", "-1%", "0.5%", "010%", "half", "9%%", "5%\n")
    ],
    _class({"guaranteedShare": TOO_MANY_DIGITS}, ".guaranteedShare", "must have at most 8 characters", "Too long"),
    *[
        _class({"maxUtilization": value}, ".maxUtilization", "must be a whole percentage from 10% to 100%")
        for value in ("", "50", "0%", "9%", "09%", "101%", "110%", "-10%", "99.5%", "full", "50%\n")
    ],
    _class({"maxUtilization": TOO_MANY_DIGITS}, ".maxUtilization", "must have at most 8 characters", "Too long"),
    _shares("51%", "50%"),
    _shares("90%", "0%", "9%", "2%"),
    _shares(*["7%"] * 15),
    _queue_times({"name": "a", "maxQueueTime": "10s"}),
    _queue_times({"name": "a"}, {"name": "b", "maxQueueTime": "0s"}),
]


def _targets(targets: Manifest, field: str, says: str, server: str = "") -> Case:
    return _class({"slo": targets}, f".slo{field}", says, server)


CLASS_TARGETS = [
    _targets({}, "", "needs ttft, tpot or e2e"),
    _targets({"ttft": "2s", "e2e": "1s"}, ".e2e", "e2e 1s must be longer than ttft 2s"),
    _targets({"ttftPerKToken": "1ms", "tpot": "1s"}, ".ttftPerKToken", "ttftPerKToken needs ttft, to which it is"),
    *[
        case
        for name in ("ttft", "tpot", "e2e")
        for case in (
            *[_targets({name: value}, f".{name}", DURATION) for value in BAD_DURATIONS],
            *[
                _targets({name: value}, f".{name}", "must be longer than zero and at most one hour")
                for value in ("0s", "61m")
            ],
            _targets({name: TOO_MANY_DIGITS}, f".{name}", "must have at most 32 characters", "Too long"),
        )
    ],
    _targets({"ttft": "1s", "ttftPerKToken": "fast"}, ".ttftPerKToken", DURATION),
    _targets({"ttft": "1s", "ttftPerKToken": "61m"}, ".ttftPerKToken", "must be at most one hour"),
    _targets(
        {"ttft": "1s", "ttftPerKToken": TOO_MANY_DIGITS},
        ".ttftPerKToken",
        "must have at most 32 characters",
        "Too long",
    ),
]


def _tenant(fields: Manifest, field: str, says: str, server: str = "") -> Case:
    return _one(TENANTS, [{"name": "a", **fields}], says, server, at=f"{TENANTS}[0]{field}")


TENANT_LISTS = [
    *_list_rules(
        TENANTS,
        256,
        {"weight": 2},
        "must have only printable ASCII characters without spaces, because it is a header value",
        ("a b", " a", "a\t", "a\n", "ä", "\u2028"),
    ),
    _tenant({"weight": 0}, ".weight", "must be at least 1", "greater than or equal to 1"),
    _tenant({"weight": 1001}, ".weight", "must be at most 1000", "less than or equal to 1000"),
    *[
        _tenant({"requestsPerSecond": value}, ".requestsPerSecond", "must be above 0 and below a million with at most")
        for value in (0, "0", "0.000", "0.0001", -1, 1_000_000, "1000000", "5/s", *BAD_DECIMALS)
    ],
    _tenant({"requestsPerSecond": "1" * 17}, ".requestsPerSecond", "must have at most 16 characters", "Too long"),
    _tenant({"tokensPerMinute": 0}, ".tokensPerMinute", "must be at least 1", "greater than or equal to 1"),
    _tenant(
        {"tokensPerMinute": 1_000_000_001},
        ".tokensPerMinute",
        "must be at most 1000000000",
        "less than or equal to 1000000000",
    ),
]


def _one_tier_at_zero(zero: str, other: str, **more: Any) -> Case:
    return Case(
        {f"spec.tiers.{zero}.minReplicas": 0, **more},
        f"spec.tiers.{other}.minReplicas",
        f"must be 0 because {zero}.minReplicas is 0: both tiers scale to zero together",
        base=service_with_slo,
    )


_ZERO_WITHOUT_SLO = (
    "slo is required if a tier has minReplicas 0: without it a tier at zero replicas is neither woken nor sized"
)
_ZERO_HOURS = [{"from": "20:00", "until": "06:00", "minReplicas": 0}]

ZEROS = [
    _one_tier_at_zero("prefill", "decode"),
    _one_tier_at_zero("decode", "prefill"),
    _one_tier_at_zero("prefill", "decode", **{"spec.tiers.decode.minReplicas": 2}),
    _one_tier_at_zero("decode", "prefill", **{"spec.tiers.prefill.minReplicas": 1}),
    single_edit("spec.tiers.serve.minReplicas", 0, _ZERO_WITHOUT_SLO, at="spec.slo", base=aggregated),
    Case({f"spec.tiers.{role}.minReplicas": 0 for role in ("prefill", "decode")}, "spec.slo", _ZERO_WITHOUT_SLO),
    *[
        single_edit(
            "spec.scaling.schedule",
            _ZERO_HOURS,
            "slo is required if an entry of scaling.schedule has minReplicas 0: without it a tier at zero",
            at="spec.slo",
            base=base,
        )
        for base in (service, aggregated)
    ],
    single_edit(
        "spec.scaling.schedule",
        [{**_ZERO_HOURS[0], "until": "07:00", "minReplicas": 2}, *_ZERO_HOURS],
        "slo is required if an entry of scaling.schedule has minReplicas 0",
        at="spec.slo",
    ),
]

_NEEDS_GENERATE = "is allowed only with task generate: other models have no output tokens"
_OUTPUT_LIMIT = {"requestLimits": {"maxOutputTokens": 5}}


def _limits(name: str, value: Any, says: str, server: str = "") -> list[Case]:
    """A limit of requests, of the service and of a class."""
    of_class = {"requestLimits": {name: value}}
    return [
        single_edit(f"spec.requestLimits.{name}", value, says, server),
        _class(of_class, f".requestLimits.{name}", says, server),
    ]


REQUEST_LIMITS = [
    *_limits("maxOutputTokens", 0, "must be at least 1", "greater than or equal to 1"),
    *_limits("maxOutputTokens", 100_000_001, "must be at most 100000000", "less than or equal to 100000000"),
    *[case for value in BAD_DURATIONS for case in _limits("maxDuration", value, DURATION)],
    *_limits("maxDuration", TOO_MANY_DIGITS, "must have at most 32 characters", "Too long"),
    *[
        case
        for value in ("999ms", "0s", "7201s", "2h1ms")
        for case in _limits("maxDuration", value, "must be from 1 second to 2 hours")
    ],
    *[
        case
        for value in ("1m", "45s", "0s", "")
        for case in _limits("idleTimeout", value, "must be '5s', '10s', '15s',", "Unsupported value")
    ],
    Case(
        {"spec.model.task": "embed", "spec.requestLimits": _OUTPUT_LIMIT["requestLimits"]},
        "spec.requestLimits.maxOutputTokens",
        f"maxOutputTokens {_NEEDS_GENERATE}",
        base=aggregated,
    ),
    Case(
        {"spec.model.task": "score", "spec.slo": {"ttft": "1s"}, CLASSES: [{"name": "a", **_OUTPUT_LIMIT}]},
        CLASSES,
        f"requestLimits.maxOutputTokens of a class {_NEEDS_GENERATE}",
        base=aggregated,
    ),
]

ADMISSION_CASES = [*ADMISSION_RULES, *CLASS_LISTS, *CLASS_TARGETS, *TENANT_LISTS, *ZEROS, *REQUEST_LIMITS]
