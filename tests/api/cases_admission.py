"""The constraints on admission, and on tiers that go to zero, each broken once or more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.api.cases import BAD_DURATIONS, DURATION, LONG, Case, one, text
from tests.api.cases_scaling import BAD_DECIMALS
from tests.api.manifests import Manifest, aggregated, service

ADMISSION = "spec.admission"
CLASSES, TENANTS, FALLBACK = f"{ADMISSION}.classes", f"{ADMISSION}.tenants", f"{ADMISSION}.fallback"
SLO = {"ttft": "1s", "tpot": "50ms"}


def promised(**edits: Any) -> Manifest:
    """A prefill and a decode tier with a promise."""
    return service(**{"spec.slo": SLO, **edits})


def _one(path: str, value: Any, says: str, server: str = "", **more: Any) -> Case:
    return one(path, value, says, server, base=promised, **more)


def _downgrade(name: str) -> Manifest:
    return {"whenFull": "Downgrade", "fallback": {"name": name}}


_SERVICE_NAME = "must begin with a lower-case letter, end with a letter or digit"

WHOLE = [
    one(ADMISSION, {}, "slo is needed with admission: requests are let in while its targets", at="spec.slo"),
    one(ADMISSION, {"classes": [{"name": "a", "slo": {"tpot": "1s"}}]}, "slo is needed with admission", at="spec.slo"),
    one(ADMISSION, {}, "slo is needed with admission", at="spec.slo", base=aggregated),
    *[
        _one(f"{ADMISSION}.whenFull", value, "must be 'Hold', 'Shed' or 'Downgrade', not", "Unsupported value")
        for value in ("hold", "", "Queue")
    ],
    _one(ADMISSION, {"whenFull": "Downgrade"}, "whenFull: Downgrade needs fallback, the InferenceService", at=FALLBACK),
    *[
        _one(
            ADMISSION, {"fallback": {"name": "small"}, **more}, "fallback is only for whenFull: Downgrade", at=FALLBACK
        )
        for more in ({}, {"whenFull": "Hold"}, {"whenFull": "Shed"})
    ],
    _one(
        ADMISSION,
        {"whenFull": "Downgrade", "fallback": {}},
        "is required",
        "Required value",
        at=f"{FALLBACK}.name",
    ),
    *text(
        ADMISSION,
        40,
        _SERVICE_NAME,
        ("1small", "Small", "my.small", "small-", "other/small", "small\n"),
        at=f"{FALLBACK}.name",
        build=_downgrade,
        base=promised,
    ),
    Case(
        {"metadata.name": "itself", ADMISSION: _downgrade("itself")},
        f"{FALLBACK}.name",
        "must be another service: this one is full when its fallback is asked",
        base=promised,
    ),
    _one(f"{ADMISSION}.maxHeld", 0, "must be at least 1", "greater than or equal to 1"),
    _one(f"{ADMISSION}.maxHeld", 100_001, "must be at most 100000", "less than or equal to 100000"),
]


def _class(fields: Manifest, field: str, says: str, server: str = "", **more: Any) -> Case:
    return _one(CLASSES, [{"name": "a", **fields}], says, server, at=f"{CLASSES}[0]{field}", **more)


def _shares(*shares: str) -> Case:
    classes = [{"name": f"c{number}", "guaranteedShare": share} for number, share in enumerate(shares)]
    return _one(CLASSES, classes, "guaranteedShare of all classes together must be at most 100%")


def _held(*classes: Manifest) -> Case:
    says = "whenFull: Shed holds nothing, so no class may have holdFor"
    return _one(ADMISSION, {"whenFull": "Shed", "classes": list(classes)}, says, at=CLASSES)


def _listed(path: str, longest: int, missing: Manifest, says: str, wrong: Sequence[str]) -> list[Case]:
    """A list that is a map by its items' names. missing: an item without one."""
    return [
        _one(path, [{"name": f"a{i}"} for i in range(longest + 1)], f"must have at most {longest} entries", "Too many"),
        _one(
            path, [missing], "is required", "Required value", at=f"{path}[0].name", typed=(path, "omits all key fields")
        ),
        _one(
            path,
            [{"name": "a"}, {"name": "b"}, {"name": "a"}],
            "a is there twice",
            "Duplicate value",
            at=f"{path}[2]",
            typed=(path, "duplicate entries"),
        ),
        *text(
            path,
            64 if path == TENANTS else 63,
            says,
            wrong,
            at=f"{path}[0].name",
            build=lambda name: [{"name": name}],
            base=promised,
        ),
    ]


CLASS_LISTS = [
    *_listed(
        CLASSES,
        16,
        {"priority": 1},
        "must have only lower-case letters, digits and '-', and begin and end with a letter or digit",
        ("Chat", "a b", "-a", "a-", "a.b", "a_b", "ä", "a\n"),
    ),
    _one(CLASSES, [], "must have a class; leave it out for one class of all requests"),
    _class({"priority": -1001}, ".priority", "must be at least -1000", "greater than or equal to -1000"),
    _class({"priority": 1001}, ".priority", "must be at most 1000", "less than or equal to 1000"),
    *[_class({"holdFor": value}, ".holdFor", DURATION) for value in BAD_DURATIONS],
    *[_class({"holdFor": value}, ".holdFor", "must be at most 120 seconds") for value in ("120s1ns", "3m", "1h")],
    _class({"holdFor": LONG}, ".holdFor", "must have at most 32 characters", "Too long"),
    *[
        _class({"guaranteedShare": value}, ".guaranteedShare", "must be a whole percentage from 0% to 90%")
        for value in ("", "10", "91%", "100%", "-1%", "0.5%", "010%", "half", "9%%", "5%\n")
    ],
    _class({"guaranteedShare": LONG}, ".guaranteedShare", "must have at most 8 characters", "Too long"),
    *[
        _class({"fill": value}, ".fill", "must be a whole percentage from 10% to 100%")
        for value in ("", "50", "0%", "9%", "09%", "101%", "110%", "-10%", "99.5%", "full", "50%\n")
    ],
    _class({"fill": LONG}, ".fill", "must have at most 8 characters", "Too long"),
    _shares("51%", "50%"),
    _shares("90%", "0%", "9%", "2%"),
    _shares(*["7%"] * 15),
    _held({"name": "a", "holdFor": "10s"}),
    _held({"name": "a"}, {"name": "b", "holdFor": "0s"}),
]


def _targets(targets: Manifest, field: str, says: str, server: str = "") -> Case:
    return _class({"slo": targets}, f".slo{field}", says, server)


CLASS_TARGETS = [
    _targets({}, "", "needs ttft, tpot or e2e"),
    _targets({"ttft": "2s", "e2e": "1s"}, ".e2e", "e2e must be longer than ttft"),
    _targets({"ttftPerKToken": "1ms", "tpot": "1s"}, ".ttftPerKToken", "ttftPerKToken is added to ttft, which is"),
    *[
        case
        for name in ("ttft", "tpot", "e2e")
        for case in (
            *[_targets({name: value}, f".{name}", DURATION) for value in BAD_DURATIONS],
            *[
                _targets({name: value}, f".{name}", "must be longer than zero and at most one hour")
                for value in ("0s", "61m")
            ],
            _targets({name: LONG}, f".{name}", "must have at most 32 characters", "Too long"),
        )
    ],
    _targets({"ttft": "1s", "ttftPerKToken": "fast"}, ".ttftPerKToken", DURATION),
    _targets({"ttft": "1s", "ttftPerKToken": "61m"}, ".ttftPerKToken", "must be at most one hour"),
    _targets({"ttft": "1s", "ttftPerKToken": LONG}, ".ttftPerKToken", "must have at most 32 characters", "Too long"),
]


def _tenant(fields: Manifest, field: str, says: str, server: str = "") -> Case:
    return _one(TENANTS, [{"name": "a", **fields}], says, server, at=f"{TENANTS}[0]{field}")


TENANT_LISTS = [
    *_listed(
        TENANTS,
        256,
        {"weight": 2},
        "must have only letters, digits and signs of ASCII, without spaces: it is a header",
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


def _half_asleep(zero: str, other: str, **more: Any) -> Case:
    return Case(
        {f"spec.tiers.{zero}.minReplicas": 0, **more},
        f"spec.tiers.{other}.minReplicas",
        f"must be 0 as {zero}.minReplicas is: both tiers go to zero together, or neither does",
        base=promised,
    )


_UNPROMISED = "slo is needed where a tier has minReplicas 0: without it no tier at zero would be woken or sized"
_ZERO_HOURS = [{"from": "20:00", "until": "06:00", "minReplicas": 0}]

ZEROS = [
    _half_asleep("prefill", "decode"),
    _half_asleep("decode", "prefill"),
    _half_asleep("prefill", "decode", **{"spec.tiers.decode.minReplicas": 2}),
    _half_asleep("decode", "prefill", **{"spec.tiers.prefill.minReplicas": 1}),
    one("spec.tiers.serve.minReplicas", 0, _UNPROMISED, at="spec.slo", base=aggregated),
    Case({f"spec.tiers.{role}.minReplicas": 0 for role in ("prefill", "decode")}, "spec.slo", _UNPROMISED),
    *[
        one(
            "spec.scaling.schedule",
            _ZERO_HOURS,
            "slo is needed where an entry of scaling.schedule has minReplicas 0: without it no tier at zero",
            at="spec.slo",
            base=base,
        )
        for base in (service, aggregated)
    ],
    one(
        "spec.scaling.schedule",
        [{**_ZERO_HOURS[0], "until": "07:00", "minReplicas": 2}, *_ZERO_HOURS],
        "slo is needed where an entry of scaling.schedule has minReplicas 0",
        at="spec.slo",
    ),
]

ADMISSION_CASES = [*WHOLE, *CLASS_LISTS, *CLASS_TARGETS, *TENANT_LISTS, *ZEROS]
