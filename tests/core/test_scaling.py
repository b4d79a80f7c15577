"""The scaling decision: each step alone, what must hold whatever comes, and what a restart must not change."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core.autoscaling.decide import decide
from plimsoll.core.autoscaling.decision_state import DecisionState, TierDecisionState, TimedReplicas
from plimsoll.core.autoscaling.observations import LaggingSignals, ServiceObservation, SizingResult, scaled_sum
from plimsoll.core.autoscaling.scaling_decision import ScalingLimit
from plimsoll.core.autoscaling.scaling_policy import ScalingPolicy, TierPolicy
from plimsoll.core.autoscaling.startup_time import StartingPod
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
    STEPS,
    counts,
    decide_one,
    decide_pair,
    idle_status,
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


# Explanation


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


def test_decide_unknown_demand_with_high_itl_scales_up() -> None:
    lost = Unavailable("the gateways do not answer")
    long = observed_tier(lost, 3, lagging=LaggingSignals(itl_s=0.09))
    assert decide_one(long).replicas == 3  # not promised
    policy = ScalingPolicy({"serve": replica_bounds()}, replace(SLO, itl_s=0.05))
    found = decide(ServiceObservation({"serve": long}, DecisionState(), idle_period=BUSY), policy, 0.0).tiers["serve"]
    assert found.replicas > 3
    assert "p99 itl 90 ms, target 50 ms" in found.summary


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


# Feedback


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


# Pending


def _ready_since(at_s: float | None) -> DecisionState:
    """The last start ended then."""
    return DecisionState(0.0, {"serve": TierDecisionState(ready_increased_s=at_s)})


def test_pending_replicas_count_with_eta() -> None:
    pods = (StartingPod("a", 0.0, "pull", 0.0), StartingPod("b", -15.0, "load", -5.0))
    found = decide_one(observed_tier(3.5, 4, 2, starting=pods))
    assert found.replicas == 4
    assert len(found.etas_s) == 2
    assert found.etas_s[0] < found.etas_s[1]
    assert "2 ready, 2 starting, the next in" in step_message(found, "pending").reason


def test_overdue_replicas_are_reported_and_replaced_once() -> None:
    late = (StartingPod("a", -1000.0), StartingPod("b", -900.0))
    found = decide_one(observed_tier(3.5, 4, 2, starting=late), state=_ready_since(-800.0))
    assert found.overdue == ("a", "b")
    assert found.replicas == 6
    assert "2 overdue by" in found.summary
    every = (*late, StartingPod("c", -500.0), StartingPod("d", -500.0))
    assert decide_one(observed_tier(3.5, 6, 2, starting=every), state=_ready_since(-800.0)).replicas == 6
    assert decide_one(observed_tier(3.5, 6, 4, starting=late)).overdue == ("a", "b")


@pytest.mark.parametrize("ready_s", [None, -1000.0])
def test_one_overdue_replica_is_replaced_if_all_may_be_slow(ready_s: float | None) -> None:
    late = tuple(StartingPod(f"p{n}", -1000.0) for n in range(3))
    found = decide_one(observed_tier(3.5, 4, 1, starting=late), state=_ready_since(ready_s))
    assert (found.replicas, len(found.overdue)) == (5, 3)
    assert (
        "replacements ordered: 1, until a start in time shows that they hang" in step_message(found, "pending").reason
    )


def test_one_overdue_replica_is_replaced_after_a_slow_start() -> None:
    late = tuple(StartingPod(f"p{n}", -1000.0) for n in range(3))
    tier = observed_tier(3.5, 4, 1, starting=late)
    slow = replace(tier, startup_model=tier.startup_model._replace(slow_starts=1))
    assert decide_one(slow, state=_ready_since(-10.0)).replicas == 5
    assert decide_one(tier, state=_ready_since(-10.0)).replicas == 7


def test_hanging_replicas_are_replaced_until_enough_are_ready() -> None:
    """Three pods hang, and the replacements start one after the other."""
    hanging = tuple(StartingPod(f"p{n}", -1000.0) for n in range(3))
    ordered = [
        decide_one(observed_tier(3.5, 7, ready, starting=hanging), state=_ready_since(-10.0)).replicas
        for ready in (2, 3)
    ]
    assert ordered == [7, 7]


def test_replica_on_silent_node_is_replaced_and_told_by_its_node() -> None:
    lost = (StartingPod("a", -1.0, silent_node="node-3"),)
    found = decide_one(observed_tier(3.5, 4, 3, starting=lost))
    assert found.replicas == 5
    assert (
        "1 on nodes that do not report, not counted (node-3), replacements ordered: 1"
        in step_message(found, "pending").reason
    )


@pytest.mark.parametrize(
    ("silent", "ready", "since_s", "replicas"),
    [(2, 2, -1.0, 6), (3, 1, -1.0, 4), (4, 0, -1.0, 4), (3, 1, -1000.0, 7)],
    ids=["half", "most", "all", "most, beyond the start-up limit"],
)
def test_most_replicas_on_silent_nodes_are_awaited(silent: int, ready: int, since_s: float, replicas: int) -> None:
    """Lost reports of all nodes do not double the fleet; lost nodes are replaced after the start-up limit."""
    lost = tuple(StartingPod(f"p{n}", since_s, silent_node=f"node-{n}") for n in range(silent))
    found = decide_one(observed_tier(3.5, 4, ready, starting=lost))
    assert found.replicas == replicas
    is_awaited = "because most replicas are on such nodes" in step_message(found, "pending").reason
    assert is_awaited == (replicas == 4)


def test_overdue_replicas_of_frozen_tier_are_reported_only() -> None:
    found = decide_one(
        observed_tier(Unavailable("lost"), 4, 2, starting=(StartingPod("a", -1000.0), StartingPod("b", -900.0)))
    )
    assert (found.replicas, found.overdue) == (4, ("a", "b"))


def test_overdue_replacement_is_removed_once_enough_are_ready() -> None:
    late = (StartingPod("a", -1000.0),)
    state = DecisionState(0.0, {"serve": TierDecisionState(downscale_candidates=(TimedReplicas(4, -1000.0),))})
    assert decide_one(observed_tier(3.5, 5, 4, starting=late), state=state).replicas == 4


# Joint


def test_scale_to_zero_requires_both_tiers_idle() -> None:
    away = idle_status(1e4)
    serving = decide_pair(observed_tier(0.0, 1), observed_tier(1.5, 2), pause=away)
    assert counts(serving) == (1, 2)
    assert "at least 1, because the other tier has replicas" in step_message(serving.tiers["prefill"], "ratio").reason
    assert counts(decide_pair(observed_tier(0.0, 0), observed_tier(0.5, 1), pause=idle_status(1.0))) == (1, 1)
    assert counts(decide_pair(observed_tier(0.0, 1), observed_tier(0.5, 1), pause=away)) == (0, 0)
    dear = observed_tier(0.5, 1, sizing=replace(sizing_for(make_forecast(0.5), 1), request_gpu_s=1e3))
    assert counts(decide_pair(observed_tier(0.0, 1), dear, pause=away)) == (1, 1), (
        "a cold return would cost the other one dearly"
    )


def test_scale_to_zero_is_blocked_by_other_tier_minimum() -> None:
    observation = ServiceObservation(
        {"prefill": observed_tier(0.0, 1), "decode": observed_tier(0.0, 1)}, idle_period=idle_status(1e4)
    )
    assert counts(
        decide(observation, ScalingPolicy({"prefill": replica_bounds(1), "decode": replica_bounds(0)}, SLO), 0.0)
    ) == (1, 1)


def test_scale_to_zero_is_blocked_by_frozen_tier() -> None:
    assert counts(
        decide_pair(observed_tier(0.0, 1), observed_tier(Unavailable("lost"), 2), pause=Unavailable("lost"))
    ) == (1, 2)


def test_scale_from_zero_sizes_both_tiers_by_backlog() -> None:
    back = decide_pair(observed_tier(0.1, 0, backlog_gpu_s=150.0), observed_tier(0.1, 0, backlog_gpu_s=30.0))
    assert counts(back) == (3, 1)
    lone = decide_pair(
        observed_tier(Unavailable("no sample yet"), 0, backlog_gpu_s=0.2),
        observed_tier(Unavailable("no sample yet"), 0),
    )
    assert counts(lone) == (1, 1)


def test_tier_ratio_raises_the_smaller_tier() -> None:
    assert counts(decide_pair(observed_tier(0.9, 1), observed_tier(3.8, 4), prefill_per_decode=(0.5, 2.0))) == (2, 4)
    found = decide_pair(observed_tier(3.8, 4), observed_tier(0.9, 1), prefill_per_decode=(0.5, 2.0))
    assert counts(found) == (4, 2)
    assert "at most 2 prefill replicas" in found.tiers["decode"].summary


def test_decision_names_tier_nearest_to_capacity() -> None:
    found = decide_pair(observed_tier(1.8, 2), observed_tier(3.9, 8))
    assert found.binding_tier == "prefill"
    assert "90% of its SLO capacity used; binding tier: prefill" in step_message(found.tiers["prefill"], "ratio").reason
