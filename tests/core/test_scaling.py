"""The replica count of a tier from its demand: need, standby and warm replicas, and demand that is not known."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core.autoscaling.decide import decide
from plimsoll.core.autoscaling.decision_state import DecisionState, TierDecisionState, TimedReplicas
from plimsoll.core.autoscaling.observations import LaggingSignals, ServiceObservation, SizingResult, scaled_sum
from plimsoll.core.autoscaling.scaling_decision import ScalingLimit
from plimsoll.core.autoscaling.scaling_policy import ScalingPolicy, TierPolicy
from plimsoll.core.capacity.sizing import Infeasible
from plimsoll.core.capacity.tier_model import Constraint
from plimsoll.core.demand.standby_value import GrowthDistribution, standby_replicas
from plimsoll.core.slo import Slo
from plimsoll.core.types import Unavailable
from tests.core.scaling_fixtures import (
    BUSY,
    FREQUENT_GROWTH,
    NO_GROWTH,
    REPLICA_WORK,
    SLO,
    decide_one,
    make_forecast,
    observed_tier,
    replica_bounds,
    sizing_for,
    step_message,
)

# Without signals

limits_of = st.integers(0, 1000).flatmap(lambda low: st.tuples(st.just(low), st.integers(low, 1000)))


@given(st.dictionaries(st.sampled_from(["prefill", "decode", "serve"]), limits_of))
def test_decide_unobserved_tier_has_minimum(tiers: dict[str, tuple[int, int]]) -> None:
    found = decide(ServiceObservation(), ScalingPolicy({name: TierPolicy(*b) for name, b in tiers.items()}), 0.0).tiers
    assert found.keys() == tiers.keys()
    for name, (low, _) in tiers.items():
        assert found[name].replicas == low
        assert [(step.name, step.replicas) for step in found[name].steps] == [("limits", low)]
        assert found[name].summary == f"minReplicas is {low}"


def test_decide_unknown_demand_with_high_itl_scales_up() -> None:
    lost = Unavailable("the gateways do not answer")
    long = observed_tier(lost, 3, lagging=LaggingSignals(itl_s=0.09))
    assert decide_one(long).replicas == 3  # not promised
    policy = ScalingPolicy({"serve": replica_bounds()}, replace(SLO, itl_s=0.05))
    found = decide(ServiceObservation({"serve": long}, DecisionState(), idle_period=BUSY), policy, 0.0).tiers["serve"]
    assert found.replicas > 3
    assert "p99 itl 90 ms, target 50 ms" in found.summary


# Demand and need


@given(
    work=st.floats(0.01, 50),
    more=st.floats(0, 50),
    replicas=st.integers(0, 60),
    odds=st.sampled_from([NO_GROWTH, FREQUENT_GROWTH]),
    warm=st.integers(0, 3),
)
def test_decide_more_demand_never_gives_fewer_replicas(
    work: float, more: float, replicas: int, odds: GrowthDistribution, warm: int
) -> None:
    """Among loads that are there: arrivals that stopped say nothing of growth, and are held for by their absence."""
    policy = replica_bounds(0, 200, warm_replicas=warm)
    less_, more_ = (decide_one(observed_tier(make_forecast(w, odds), replicas), policy) for w in (work, work + more))
    assert less_.replicas <= more_.replicas


@given(work=st.floats(0, 50), replicas=st.integers(0, 60), ready=st.integers(0, 60), least=st.integers(0, 5))
def test_decide_is_never_below_required_replicas(work: float, replicas: int, ready: int, least: int) -> None:
    observed = observed_tier(work, replicas, min(ready, replicas))
    assert isinstance(observed.sizing, SizingResult)
    assert decide_one(observed, replica_bounds(least, 200)).replicas >= max(least, observed.sizing.replicas)


def test_standby_is_added_while_it_pays_off() -> None:
    found = decide_one(observed_tier(make_forecast(0.8, FREQUENT_GROWTH), 1), miss_cost=5.0)
    assert found.replicas > 1
    assert "standby (" in step_message(found, "sizing").reason
    assert decide_one(observed_tier(make_forecast(0.8, FREQUENT_GROWTH), 1), miss_cost=0.0).replicas == 1
    assert decide_one(observed_tier(make_forecast(0.8, FREQUENT_GROWTH), 1), miss_cost=50.0).replicas > found.replicas


@given(work=st.floats(0.1, 30), miss_cost=st.floats(0, 50))
def test_standby_equals_greedy_result(work: float, miss_cost: float) -> None:
    demand = make_forecast(work, FREQUENT_GROWTH)
    need = sizing_for(demand, 1)
    bought = standby_replicas(FREQUENT_GROWTH, work, REPLICA_WORK, need.replicas, 40, miss_cost)
    assert (
        decide_one(observed_tier(demand, 1), replica_bounds(1, 40), miss_cost=miss_cost).replicas
        == need.replicas + bought
    )


def test_standby_is_not_replaced_before_half_of_it_is_used() -> None:
    state, ordered = DecisionState(), list[int]()
    for n, share in enumerate((2.8, 3.1, 2.9, 3.4, 3.6, 3.3)):
        demand = make_forecast(share * REPLICA_WORK, replace(FREQUENT_GROWTH, own_growth=1.0))
        observation = ServiceObservation({"serve": observed_tier(demand, 4)}, state, idle_period=BUSY)
        decision = decide(observation, ScalingPolicy({"serve": replica_bounds()}, SLO, miss_cost=2.0), float(n))
        state, ordered = decision.state, [*ordered, decision.tiers["serve"].replicas]
    assert ordered == [4, 4, 4, 4, 5, 5]


def test_standby_uncertain_level_adds_none() -> None:
    assert (
        decide_one(observed_tier(make_forecast(0.8, FREQUENT_GROWTH, level_error=0.05), 1), miss_cost=5.0).replicas == 1
    )
    old = DecisionState(0.0, {"serve": TierDecisionState(downscale_candidates=(TimedReplicas(1, -1000.0),))})
    assert (
        decide_one(
            observed_tier(make_forecast(0.8, FREQUENT_GROWTH, level_error=0.05), 2), state=old, miss_cost=5.0
        ).replicas
        == 2
    )


def test_standby_existing_is_kept_within_margin() -> None:
    just = 1.0 / (
        0.8 * FREQUENT_GROWTH.between(1.0 / 0.8, 2.0 / 0.8)
    )  # the miss cost at which the second replica is worth its price
    old = DecisionState(0.0, {"serve": TierDecisionState(downscale_candidates=(TimedReplicas(1, -1000.0),))})
    for share, bought, kept in ((1.1, 2, 2), (0.9, 1, 2), (0.7, 1, 1)):
        assert (
            decide_one(observed_tier(make_forecast(0.8, FREQUENT_GROWTH), 1), miss_cost=share * just).replicas == bought
        )
        assert (
            decide_one(
                observed_tier(make_forecast(0.8, FREQUENT_GROWTH), 2), state=old, miss_cost=share * just
            ).replicas
            == kept
        )


def test_warm_replicas_add_to_need_and_prevent_zero() -> None:
    policy = replica_bounds(0, 16, warm_replicas=2)
    assert decide_one(observed_tier(2.5, 3), policy).replicas == 5
    assert decide_one(observed_tier(0.0, 2), policy).replicas == 2


def test_decide_between_need_and_release_keeps_replicas() -> None:
    for replicas in (2, 3):
        observed = observed_tier(1.98, replicas)
        state = DecisionState(0.0, {"serve": TierDecisionState(downscale_candidates=(TimedReplicas(2, -1e6),))})
        assert decide_one(observed, state=state).replicas == replicas
    assert "3 kept, within the scale-down margin" in step_message(decide_one(observed_tier(1.98, 3)), "sizing").reason


def test_decide_infeasible_slo_sizes_for_feasible_targets() -> None:
    need = observed_tier(2.5, 1).sizing
    assert isinstance(need, SizingResult)
    broken = Infeasible(Constraint.TTFT, Slo(0.95, 0.61, 0.0, 0.05))
    found = decide_one(observed_tier(2.5, 1, sizing=replace(need, infeasible=broken)))
    assert found.replicas == 3
    assert ScalingLimit.INFEASIBLE in found.limits
    assert "no number of replicas meets the SLO (limited by TTFT), sized for TTFT 610 ms" in found.summary


# Unknown, stale and partial


@given(replicas=st.integers(1, 16), ready=st.integers(0, 16), hours=st.floats(0, 100))
def test_decide_unknown_demand_freezes_replicas(replicas: int, ready: int, hours: float) -> None:
    observed = observed_tier(Unavailable("the gateways do not answer"), replicas, min(ready, replicas))
    found = decide_one(
        observed,
        now_s=3600.0 * hours,
        state=DecisionState(0.0, {"serve": TierDecisionState(downscale_candidates=(TimedReplicas(1, 0.0),))}),
    )
    assert (found.replicas, found.is_held) == (replicas, True)
    assert "the gateways do not answer" in found.summary


def test_decide_old_sample_freezes_and_reports_age() -> None:
    found = decide_one(observed_tier(make_forecast(0.5, age_s=45.0), 4))
    assert (found.replicas, found.is_held) == (4, True)
    assert "45 s old" in step_message(found, "demand").reason


def test_decide_partial_coverage_prevents_scale_down() -> None:
    state = DecisionState(0.0, {"serve": TierDecisionState(downscale_candidates=(TimedReplicas(1, -1e6),))})
    assert decide_one(observed_tier(0.5, 4, coverage=0.5), state=state).replicas == 4
    assert decide_one(observed_tier(4.5, 4, coverage=0.5), state=state).replicas == 5
    assert "only 50% report metrics" in step_message(decide_one(observed_tier(0.5, 4, coverage=0.5)), "sizing").reason


def test_scaled_sum_partial_readings_are_scaled_to_all() -> None:
    assert scaled_sum([2.0, Unavailable("gone"), 4.0, math.nan]) == (12.0, 0.5)
    assert scaled_sum([2.0, 4.0]) == (6.0, 1.0)
    nothing, coverage = scaled_sum([Unavailable("gone"), -1.0])
    assert isinstance(nothing, Unavailable)
    assert coverage == 0.0


def test_replica_limits_apply_to_frozen_tier() -> None:
    assert decide_one(observed_tier(Unavailable("lost"), 4), replica_bounds(1, 3)).replicas == 3
    assert decide_one(observed_tier(Unavailable("lost"), 1), replica_bounds(2, 3)).replicas == 2
