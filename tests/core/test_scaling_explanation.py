"""Explanation of a decision: its steps, its summary, and the effect of one replica fewer."""

from __future__ import annotations

import math
from dataclasses import replace

from plimsoll.core.autoscaling.decision_state import DecisionState, TierDecisionState, TimedReplicas
from plimsoll.core.autoscaling.observations import LaggingSignals, SizingResult
from plimsoll.core.capacity.tier_model import Constraint
from tests.core.scaling_fixtures import (
    STEPS,
    decide_one,
    observed_tier,
)


def test_decide_explains_eight_steps_in_order() -> None:
    found = decide_one(observed_tier(4.2, 3))
    assert [step.name for step in found.steps] == STEPS
    assert found.steps[-1].replicas == found.replicas == found.recommended == 5


def test_decision_reason_has_forecast_capacity_and_alternative() -> None:
    found = decide_one(observed_tier(4.1, 3))
    assert found.summary == (
        "forecast 41 req/s in 60 s needs 5 (SLO capacity 10 req/s each, limited by TPOT); "
        "3 would give p95 TPOT 71 ms, target 50 ms"
    )


def test_decision_alternative_names_attainment_or_overload() -> None:
    need = observed_tier(4.1, 3).sizing
    assert isinstance(need, SizingResult)
    assert (
        "3 would meet the SLO for 80.0% of the requests"
        in decide_one(observed_tier(4.1, 3, sizing=replace(need, tpot_s=0.04))).summary
    )
    assert (
        "3 could not carry the load" in decide_one(observed_tier(4.1, 3, sizing=replace(need, tpot_s=math.inf))).summary
    )
    assert decide_one(observed_tier(4.1, 5)).counterfactual is None


def test_decision_alternative_with_itl_binding_names_itl() -> None:
    need = observed_tier(4.1, 3).sizing
    assert isinstance(need, SizingResult)
    gaps = replace(need, constraint=Constraint.ITL, attainment=0.999, attainment_one_fewer=0.99, tpot_s=0.04)
    assert decide_one(observed_tier(4.1, 3, sizing=gaps)).summary.endswith(
        "limited by itl); 3 would exceed the inter-token latency target"
    )
    assert decide_one(observed_tier(4.1, need.replicas, sizing=gaps)).counterfactual is None
    assert (
        "meet the SLO for 80.0% of the requests"
        in decide_one(observed_tier(4.1, 3, sizing=replace(gaps, attainment=0.8))).summary
    )


def test_decision_reason_of_scale_down_names_one_fewer() -> None:
    state = DecisionState(0.0, {"serve": TierDecisionState(downscale_candidates=(TimedReplicas(2, -1000.0),))})
    assert decide_one(observed_tier(1.5, 4), state=state).summary.endswith(
        "1 would meet the SLO for 60.0% of the requests, target 95%"
    )


def test_decision_reason_has_measured_latency_and_target() -> None:
    measured = LaggingSignals(tpot_s=0.044, ttft_s=0.2)
    reported = decide_one(observed_tier(4.1, 3, lagging=measured)).summary
    assert "(SLO capacity 10 req/s each, limited by TPOT: p95 44 ms now, target 50 ms);" in reported
    need = observed_tier(4.1, 3).sizing
    assert isinstance(need, SizingResult)
    first = decide_one(observed_tier(4.1, 3, lagging=measured, sizing=replace(need, constraint=Constraint.TTFT)))
    assert "limited by TTFT: p95 200 ms now, target 500 ms)" in first.summary
    slots = decide_one(observed_tier(4.1, 3, lagging=measured, sizing=replace(need, constraint=Constraint.SLOTS)))
    assert "limited by slots)" in slots.summary
