"""Modes, and what a decision keeps: the same after a restart."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core import codec
from plimsoll.core.autoscaling.decide import decide
from plimsoll.core.autoscaling.decision_state import (
    DecisionState,
    DownscaleRegret,
    TierDecisionState,
    TimedReplicas,
)
from plimsoll.core.autoscaling.observations import ServiceObservation, TierDemand
from plimsoll.core.autoscaling.scaling_policy import (
    ReplicaRateLimit,
    ScalingMode,
    ScalingPolicy,
    TierPolicy,
)
from plimsoll.core.autoscaling.startup_time import StartingPod
from plimsoll.core.demand.idle_periods import IdlePeriod
from plimsoll.core.types import Unavailable
from tests.core.scaling_fixtures import (
    BUSY,
    FREQUENT_GROWTH,
    NO_GROWTH,
    SLO,
    STEPS,
    counts,
    decide_one,
    idle_status,
    make_forecast,
    observed_tier,
    replica_bounds,
)

# Mode


@pytest.mark.parametrize("rest", [{"mode": ScalingMode.RECOMMEND}, {"mode": ScalingMode.OFF}, {"paused": True}])
def test_non_auto_mode_keeps_replicas_and_recommends(rest: dict[str, Any]) -> None:
    found = decide_one(observed_tier(4.2, 3), **rest)
    assert (found.replicas, found.recommended) == (3, 5)
    assert "replica count stays at 3, recommended 5" in found.summary
    assert "3 would give p95 TPOT 71 ms" in found.summary


# State


@st.composite
def services(draw: st.DrawFn) -> tuple[ServiceObservation, ScalingPolicy, float]:
    tiers, states = {}, {}
    for name in ("prefill", "decode"):
        replicas = draw(st.integers(0, 12))
        ready = draw(st.integers(0, replicas))
        starting = tuple(
            StartingPod(f"p{i}", draw(st.floats(0, 1000)), draw(st.sampled_from([None, "pull", "load"])), None,
                     draw(st.sampled_from([None, None, "no room"])))
            for i in range(replicas - ready)
        )  # fmt: skip
        demand: TierDemand | Unavailable = Unavailable("lost")
        if draw(st.booleans()):
            demand = make_forecast(
                draw(st.floats(0, 15)),
                draw(st.sampled_from([NO_GROWTH, FREQUENT_GROWTH])),
                age_s=draw(st.floats(0, 60)),
            )
        tiers[name] = observed_tier(demand, replicas, ready, starting=starting, backlog_gpu_s=draw(st.floats(0, 100)),
                           coverage=draw(st.sampled_from([0.5, 1.0])))  # fmt: skip
        marks = draw(st.lists(st.integers(0, 12), unique=True, max_size=4))
        lower = tuple(TimedReplicas(mark, draw(st.floats(0, 1000))) for mark in sorted(marks)[::-1])
        again, trials = sorted((draw(st.floats(0, 30)), draw(st.floats(0, 30))))
        states[name] = TierDecisionState(
            lower, downscale_regret=DownscaleRegret((), draw(st.integers(0, 12)), trials, again)
        )
    up = draw(st.sampled_from([None, ReplicaRateLimit(2, 60.0)]))
    least = draw(st.integers(0, 2))
    policy = ScalingPolicy(
        {name: replica_bounds(least, 10, scale_up_limit=up, warm_replicas=draw(st.integers(0, 1))) for name in tiers},
        SLO,
    )
    kinds: list[IdlePeriod | Unavailable] = [BUSY, idle_status(5.0), idle_status(1e4), Unavailable("silent")]
    pause = draw(st.sampled_from(kinds))
    return (
        ServiceObservation(tiers, DecisionState(900.0, states), pause),
        policy,
        1000.0,
    )


@given(services())
def test_decide_after_restart_or_repeat_is_equal(
    service: tuple[ServiceObservation, ScalingPolicy, float],
) -> None:
    observation, policy, now_s = service
    first = decide(observation, policy, now_s)
    stored = codec.decode(DecisionState, json.loads(json.dumps(codec.encode(observation.state))))
    assert decide(replace(observation, state=stored), policy, now_s) == first
    again = decide(replace(observation, state=first.state), policy, now_s)
    assert counts(again) == counts(first)
    assert codec.decode(DecisionState, json.loads(json.dumps(codec.encode(first.state)))) == first.state


@given(services())
def test_decide_any_input_is_within_limits_and_explained(
    service: tuple[ServiceObservation, ScalingPolicy, float],
) -> None:
    observation, policy, now_s = service
    found = decide(observation, policy, now_s)
    for name, one in found.tiers.items():
        assert policy.tiers[name].min_replicas <= one.replicas <= policy.tiers[name].max_replicas
        assert [step.name for step in one.steps] == STEPS
        assert all(step.reason for step in one.steps)
    free = policy.tiers["decode"].scale_up_limit is None
    if free and not any(
        pod.unschedulable_reason for observed in observation.tiers.values() for pod in observed.starting
    ):
        assert (found.tiers["prefill"].replicas == 0) == (found.tiers["decode"].replicas == 0)


def test_decision_state_is_about_a_kilobyte() -> None:
    marks = tuple(TimedReplicas(20 - i, 1_795_000_000.0 + i) for i in range(8))
    full = TierDecisionState(marks, marks, 1.234567, downscale_regret=DownscaleRegret(marks[:4], 20, 100 / 7, 100 / 9))
    assert len(json.dumps(codec.encode(DecisionState(1_795_000_000.0, {"prefill": full, "decode": full})))) < 1500


GOOD: dict[str, Any] = codec.encode(DecisionState(1.0, {"serve": TierDecisionState((TimedReplicas(2, 1.0),))}))


@pytest.mark.parametrize(
    "bad",
    [
        None,
        {},
        GOOD | {"version": 2},
        GOOD | {"at": "now"},
        GOOD | {"tiers": []},
        GOOD | {"tiers": {"serve": {}}},
        GOOD | {"tiers": {"serve": GOOD["tiers"]["serve"] | {"tailScale": math.nan}}},
        GOOD | {"tiers": {"serve": GOOD["tiers"]["serve"] | {"tailScale": 50.0}}},
        GOOD | {"tiers": {"serve": GOOD["tiers"]["serve"] | {"lower": [[-1, 0.0]]}}},
        GOOD | {"tiers": {"serve": GOOD["tiers"]["serve"] | {"lower": [[1, 0.0]] * 100}}},
        GOOD | {"tiers": {"serve": GOOD["tiers"]["serve"] | {"backoff": [True, 0.0]}}},
        GOOD | {"tiers": {"serve": GOOD["tiers"]["serve"] | {"replicas": 1.5}}},
    ],
)
def test_load_decision_state_invalid_state_raises(bad: Any) -> None:
    with pytest.raises(ValueError, match="scaling state"):
        codec.decode(DecisionState, bad)


def test_scaling_policy_invalid_values_raise() -> None:
    with pytest.raises(ValueError, match="min_replicas"):
        TierPolicy(3, 2)
    with pytest.raises(ValueError, match="warm_replicas"):
        TierPolicy(1, 2, warm_replicas=-1)
    with pytest.raises(ValueError, match="rate limit"):
        ReplicaRateLimit(0, 60.0)
    with pytest.raises(ValueError, match="prefill_per_decode"):
        ScalingPolicy({}, prefill_per_decode=(2.0, 1.0))
    with pytest.raises(ValueError, match="miss_cost"):
        ScalingPolicy({}, miss_cost=math.nan)
    with pytest.raises(ValueError, match="counts"):
        observed_tier(1.0, -1)
    with pytest.raises(ValueError, match="coverage"):
        observed_tier(1.0, 1, coverage=0.0)
    with pytest.raises(ValueError, match="now_s"):
        decide(ServiceObservation(), ScalingPolicy({}), math.nan)
