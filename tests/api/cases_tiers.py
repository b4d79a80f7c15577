"""Constraints on the SLO, the tiers and their numbers, each broken once or more; see `cases`."""

from __future__ import annotations

from tests.api.cases import (
    SLO,
    TIERS,
    Case,
    single_edit,
    text_cases,
)
from tests.api.manifests import ABSENT, aggregated, service

SLOS = [
    single_edit(SLO, {}, "needs ttft, tpot or e2e"),
    single_edit(SLO, {"percentile": 99}, "needs ttft, tpot or e2e"),
    single_edit(SLO, {"itl": "40ms"}, "needs ttft, tpot or e2e"),
    single_edit(
        SLO,
        {"ttft": "1s", "percentile": 0},
        "must be at least 1",
        "greater than or equal to 1",
        at="spec.slo.percentile",
    ),
    single_edit(
        SLO,
        {"ttft": "1s", "percentile": 100},
        "must be at most 99",
        "less than or equal to 99",
        at="spec.slo.percentile",
    ),
    *[
        single_edit(
            f"spec.slo.{name}", value, "must be a duration with a unit (us, ms, s, m, h), such as 500ms or 1.5s"
        )
        for name in ("ttft", "tpot", "e2e", "itl")
        for value in ("500", "half a second", "-1s", "1 s", "", ".5s", "1.s", "1d")
    ],
    *[
        single_edit(f"spec.slo.{name}", value, "must be longer than zero and at most one hour")
        for name in ("ttft", "tpot", "e2e", "itl")
        for value in ("0s", "0.0ms", "0.9ns", "61m", "3600.1s")
    ],
    *[
        Case({SLO: {"ttft": "1s", "ttftPerKToken": value}}, "spec.slo.ttftPerKToken", "must be a duration with a unit")
        for value in ("100", "-1ms", "", "fast", "1ms per token")
    ],
    *[
        Case({SLO: {"ttft": "1s", "ttftPerKToken": value}}, "spec.slo.ttftPerKToken", "must be at most one hour")
        for value in ("1h1ns", "61m")
    ],
    Case(
        {SLO: {"ttft": "1s", "ttftPerKToken": "1" * 33}}, "spec.slo.ttftPerKToken", "must have at most 32", "Too long"
    ),
    Case(
        {SLO: {"tpot": "50ms", "ttftPerKToken": "100ms"}},
        "spec.slo.ttftPerKToken",
        "ttftPerKToken needs ttft, to which it is added",
    ),
    *[
        Case(
            {SLO: {"ttft": ttft, "e2e": e2e}},
            "spec.slo.e2e",
            f"e2e {e2e} must be longer than ttft {ttft}, because it includes it: raise e2e, or lower ttft",
        )
        for ttft, e2e in (("1s", "1s"), ("1s", "1000ms"), ("1h", "59m59.999s"), ("500ms", "1ns"), ("0.5s", "500000us"))
    ],
    Case({SLO: {"ttft": "soon", "e2e": "1s"}}, "spec.slo.ttft", "must be a duration with a unit"),
    Case({SLO: {"e2e": "20s", "ttftPerKToken": "1s"}}, "spec.slo.ttftPerKToken", "ttftPerKToken needs ttft"),
    Case({SLO: {"e2e": "20s"}}, "spec.slo.ttft", "ttft is required with e2e if there is a prefill tier"),
    Case({SLO: {"e2e": "20s", "tpot": "1s"}}, "spec.slo.ttft", "ttft is required with e2e if there is a prefill"),
    *text_cases("spec.slo.ttft", 32, may_be_empty=True, build=lambda digits: f"{len(digits) * '1'}s"),
    *text_cases("spec.slo.tpot", 32, may_be_empty=True, build=lambda digits: f"{len(digits) * '1'}s"),
    *[
        Case({SLO: {"ttft": "1s", name: "1" * 33}}, f"spec.slo.{name}", "must have at most 32", "Too long")
        for name in ("e2e", "itl")
    ],
]

SHAPES = [
    single_edit(TIERS, ABSENT, "is required", "Required value"),
    single_edit(TIERS, {}, "has no tier: use either serve alone, or prefill and decode"),
    single_edit(TIERS, {"prefill": {}}, "has prefill alone: use either"),
    single_edit(TIERS, {"decode": {}}, "has decode alone: use either"),
    single_edit(TIERS, {"prefill": {}, "serve": {}}, "has prefill and serve: use either"),
    single_edit(TIERS, {"decode": {}, "serve": {}}, "has decode and serve: use either"),
    single_edit(TIERS, {"prefill": {}, "decode": {}, "serve": {}}, "has prefill, decode and serve: use either"),
]


def sizes(tier: str) -> list[Case]:
    """The numbers of one tier: every tier is tried, since each has a copy of the rules in the CRD."""
    base = aggregated if tier == "serve" else service
    at = f"spec.tiers.{tier}"
    return [
        single_edit(f"{at}.minReplicas", -1, "must be at least 0", "greater than or equal to 0", base=base),
        single_edit(f"{at}.minReplicas", 1001, "must be at most 1000", "less than or equal to 1000", base=base),
        single_edit(f"{at}.maxReplicas", 0, "must be at least 1", "greater than or equal to 1", base=base),
        single_edit(f"{at}.maxReplicas", 1001, "must be at most 1000", "less than or equal to 1000", base=base),
        Case(
            {f"{at}.minReplicas": 3, f"{at}.maxReplicas": 2},
            f"{at}.maxReplicas",
            "maxReplicas 2 must not be below minReplicas 3: raise maxReplicas, or lower minReplicas",
            base=base,
        ),
        single_edit(f"{at}.gpus", -1, "must be at least 0", "greater than or equal to 0", base=base),
        single_edit(f"{at}.gpus", 65, "must be at most 64", "less than or equal to 64", base=base),
        single_edit(f"{at}.nodes", 0, "must be at least 1", "greater than or equal to 1", base=base),
        single_edit(f"{at}.nodes", 17, "must be at most 16", "less than or equal to 16", base=base),
        single_edit(
            f"{at}.exclusiveTopology",
            "example.com/rack",
            "exclusiveTopology is allowed only with nodes above 1",
            base=base,
        ),
        *[
            single_edit(
                f"{at}.gpuResource",
                name,
                "must be an extended resource of the form DOMAIN/NAME, such as nvidia.com/gpu",
                base=base,
            )
            for name in ("gpu", "Nvidia.com/gpu", "nvidia.com/", "nvidia.com/gpu/x", "/gpu")
        ],
        single_edit(f"{at}.gpuResource", "a/" + "b" * 252, "must have at most 253 characters", "Too long", base=base),
        *[
            single_edit(
                f"{at}.rollout.{name}", value, "must be a number of pods from 0 to 1000, or a percentage", base=base
            )
            for name in ("maxSurge", "maxUnavailable")
            for value in (-1, 1001, "1", "101%", "-1%", "%", "1.5%")
        ],
        *[
            Case(
                {f"{at}.rollout": {"maxSurge": surge, "maxUnavailable": unavailable}},
                f"{at}.rollout.maxUnavailable",
                "maxSurge and maxUnavailable must not both be 0",
                base=base,
            )
            for surge, unavailable in ((0, 0), ("0%", 0), (0, "0%"), ("00%", "0%"))
        ],
        single_edit(f"{at}.rollout.maxSurge", 0, "must not both be 0", at=f"{at}.rollout.maxUnavailable", base=base),
        *text_cases(f"{at}.rollout.maxSurge", 8, may_be_empty=True, base=base),
        *text_cases(f"{at}.rollout.maxUnavailable", 8, may_be_empty=True, base=base),
    ]


TIER_NUMBERS = [case for tier in ("prefill", "decode", "serve") for case in sizes(tier)]

TIER_CASES = [*SLOS, *SHAPES, *TIER_NUMBERS]
