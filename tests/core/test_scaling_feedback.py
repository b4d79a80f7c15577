"""Measured latency against the model's: the scale of the TPOT tail."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from plimsoll.core.autoscaling.decide import decide
from plimsoll.core.autoscaling.decision_state import DecisionState, TierDecisionState, TimedReplicas
from plimsoll.core.autoscaling.observations import LaggingSignals, ServiceObservation, SizingResult
from plimsoll.core.autoscaling.scaling_decision import TierDecision
from plimsoll.core.autoscaling.scaling_policy import ScalingPolicy
from plimsoll.core.capacity.sizing import Infeasible
from plimsoll.core.capacity.tier_model import Constraint
from tests.core.scaling_fixtures import (
    SLO,
    decide_one,
    observed_tier,
    replica_bounds,
    step_message,
)


def tail_scale_after(tail_scale: float, measured_s: float, now_s: float = 10.0, **differing: Any) -> float:
    need = observed_tier(2.5, 3).sizing
    assert isinstance(need, SizingResult)
    usual: dict[str, Any] = {"sizing": replace(need, model_tpot_s=0.03), "lagging": LaggingSignals(tpot_s=measured_s)}
    state = DecisionState(0.0, {"serve": TierDecisionState(tpot_tail_scale=tail_scale)})
    observation = ServiceObservation({"serve": observed_tier(2.5, 3, **(usual | differing))}, state)
    return (
        decide(observation, ScalingPolicy({"serve": replica_bounds()}, SLO), now_s).state.tiers["serve"].tpot_tail_scale
    )


def test_tail_scale_follows_latency_slowly_within_bounds() -> None:
    assert 1.0 < tail_scale_after(1.0, 0.04) < 1.01
    assert 0.99 < tail_scale_after(1.0, 0.02) < 1.0
    assert tail_scale_after(1.0, 0.0305) == 1.0  # chance
    assert tail_scale_after(1.0, 0.04, now_s=36_000.0) < 1.03  # one sample after a long gap is one sample
    assert tail_scale_after(2.0, 10.0) == 2.0
    assert tail_scale_after(0.6, 1e-6) == 0.6


def test_tail_scale_converges_without_overshoot() -> None:
    scale, true_scale, seen_scales = 1.0, 1.4, []
    for tick in range(720):
        need = observed_tier(2.5, 3).sizing
        assert isinstance(need, SizingResult)
        observed = observed_tier(
            2.5, 3, sizing=replace(need, model_tpot_s=0.03 * scale), lagging=LaggingSignals(tpot_s=0.03 * true_scale)
        )
        state = DecisionState(10.0 * tick, {"serve": TierDecisionState(tpot_tail_scale=scale)})
        found = decide(
            ServiceObservation({"serve": observed}, state),
            ScalingPolicy({"serve": replica_bounds()}, SLO),
            10.0 * (tick + 1),
        )
        scale = found.state.tiers["serve"].tpot_tail_scale
        seen_scales.append(scale)
    assert seen_scales == sorted(seen_scales)
    assert scale == pytest.approx(true_scale, rel=0.06)
    assert scale <= true_scale


def test_tail_scale_is_kept_while_fleet_or_coverage_changes() -> None:
    assert tail_scale_after(1.0, 0.04, ready=2) == 1.0
    assert tail_scale_after(1.0, 0.04, coverage=0.5) == 1.0
    assert tail_scale_after(1.0, math.nan) == 1.0


def test_decide_known_demand_ignores_lagging_signals() -> None:
    bad = LaggingSignals(tpot_s=0.5, ttft_s=5.0, waiting=100.0, kv_used=0.99, preemptions_per_s=3.0)
    assert decide_one(observed_tier(2.5, 3, lagging=bad)).replicas == 3


# Late first tokens against a model by which fewer replicas would do


def decision_with_late_load(carried_per_s: float, **sizing: Any) -> TierDecision:
    """Two are ready, and by the model one has been enough for long, for 10 requests/s."""
    observed = observed_tier(1.0, 2, carried_per_s=carried_per_s)
    assert isinstance(observed.sizing, SizingResult)
    observed = replace(observed, sizing=replace(observed.sizing, replicas=1, scale_down_replicas=1, **sizing))
    state = DecisionState(0.0, {"serve": TierDecisionState(downscale_candidates=(TimedReplicas(1, -1000.0),))})
    return decide_one(observed, now_s=1.0, state=state)


@pytest.mark.parametrize(("carried_per_s", "replicas"), [(9.0, 2), (10.0, 1), (4.0, 2), (math.inf, 1)])
def test_tier_does_not_go_back_to_a_load_that_was_late(carried_per_s: float, replicas: int) -> None:
    decision = decision_with_late_load(carried_per_s)
    assert decision.replicas == replicas
    reason = f"2 kept, because first tokens were late at more than {carried_per_s:g} req/s per replica"
    assert (reason in step_message(decision, "sizing").reason) == (replicas == 2)


def test_late_load_keeps_nothing_where_no_count_is_enough() -> None:
    assert decision_with_late_load(9.0, infeasible=Infeasible(Constraint.TTFT, None)).replicas == 1
