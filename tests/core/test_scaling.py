"""The scaling decision: each step alone, what must hold whatever comes, and what a restart must not change."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core.forecast import Odds, Unknown, spare_replicas
from plimsoll.core.knee import Constraint
from plimsoll.core.lifecycle import Starting
from plimsoll.core.scaling import (
    Limit,
    Mark,
    Measured,
    Need,
    Observation,
    Policy,
    State,
    TierPolicy,
    TierState,
    decide,
    summed,
)
from plimsoll.core.sizing import Infeasible
from plimsoll.core.slo import Slo
from tests.core.scaling_lab import (
    BUSY,
    NEVER,
    OFTEN,
    REPLICA_WORK,
    SLO,
    STEPS,
    bounds,
    coming,
    counts,
    decided,
    needed,
    pair,
    quiet,
    said,
    tier,
)

# Without signals

limits_of = st.integers(0, 1000).flatmap(lambda low: st.tuples(st.just(low), st.integers(low, 1000)))


@given(st.dictionaries(st.sampled_from(["prefill", "decode", "serve"]), limits_of))
def test_decide_unobserved_tier_has_minimum(tiers: dict[str, tuple[int, int]]) -> None:
    found = decide(Observation(), Policy({name: TierPolicy(*b) for name, b in tiers.items()}), 0.0).tiers
    assert found.keys() == tiers.keys()
    for name, (low, _) in tiers.items():
        assert found[name].replicas == low
        assert [(step.name, step.replicas) for step in found[name].steps] == [("limits", low)]
        assert found[name].why == f"minReplicas is {low}"


# Explanation


def test_decide_explains_eight_steps_in_order() -> None:
    found = decided(tier(4.2, 3))
    assert [step.name for step in found.steps] == STEPS
    assert found.steps[-1].replicas == found.replicas == found.recommended == 5


def test_decision_reason_has_forecast_capacity_and_alternative() -> None:
    found = decided(tier(4.1, 3))
    assert found.why == (
        "forecast 41 req/s in 60 s needs 5 (knee 10 req/s each, TPOT binds); 3 would give p95 TPOT 71 ms, target 50 ms"
    )


def test_decision_alternative_names_attainment_or_overload() -> None:
    need = tier(4.1, 3).need
    assert isinstance(need, Need)
    assert "3 would keep 80.0% in promise" in decided(tier(4.1, 3, need=replace(need, tpot_s=0.04))).why
    assert "3 could not keep up with it" in decided(tier(4.1, 3, need=replace(need, tpot_s=math.inf))).why
    assert decided(tier(4.1, 5)).counterfactual is None


def test_decision_alternative_with_itl_binding_names_itl() -> None:
    need = tier(4.1, 3).need
    assert isinstance(need, Need)
    gaps = replace(need, constraint=Constraint.ITL, attained=0.999, one_fewer=0.99, tpot_s=0.04)
    assert decided(tier(4.1, 3, need=gaps)).why.endswith("itl binds); 3 would have too many long gaps between tokens")
    assert decided(tier(4.1, need.replicas, need=gaps)).counterfactual is None
    assert "keep 80.0% in promise" in decided(tier(4.1, 3, need=replace(gaps, attained=0.8))).why


def test_decide_unknown_demand_with_high_itl_scales_up() -> None:
    lost = Unknown("the gateways do not answer")
    long = tier(lost, 3, measured=Measured(itl_s=0.09))
    assert decided(long).replicas == 3  # not promised
    policy = Policy({"serve": bounds()}, replace(SLO, itl_s=0.05))
    found = decide(Observation({"serve": long}, State(), pause=BUSY), policy, 0.0).tiers["serve"]
    assert found.replicas > 3
    assert "p99 itl 90 ms, target 50 ms" in found.why


def test_decision_reason_of_scale_down_names_one_fewer() -> None:
    state = State(0.0, {"serve": TierState(lower=(Mark(2, -1000.0),))})
    assert decided(tier(1.5, 4), state=state).why.endswith("1 would keep 60.0% in promise, target 95%")


def test_decision_reason_has_measured_latency_and_target() -> None:
    measured = Measured(tpot_s=0.044, ttft_s=0.2)
    told = decided(tier(4.1, 3, measured=measured)).why
    assert "(knee 10 req/s each, TPOT binds: p95 44 ms now, target 50 ms);" in told
    need = tier(4.1, 3).need
    assert isinstance(need, Need)
    first = decided(tier(4.1, 3, measured=measured, need=replace(need, constraint=Constraint.TTFT)))
    assert "TTFT binds: p95 200 ms now, target 500 ms)" in first.why
    slots = decided(tier(4.1, 3, measured=measured, need=replace(need, constraint=Constraint.SLOTS)))
    assert "slots binds)" in slots.why


# Demand and need


@given(
    work=st.floats(0.01, 50),
    more=st.floats(0, 50),
    replicas=st.integers(0, 60),
    odds=st.sampled_from([NEVER, OFTEN]),
    warm=st.integers(0, 3),
)
def test_decide_more_demand_never_gives_fewer_replicas(
    work: float, more: float, replicas: int, odds: Odds, warm: int
) -> None:
    """Among loads that are there: arrivals that stopped say nothing of growth, and are held for by their absence."""
    policy = bounds(0, 200, warm_replicas=warm)
    less_, more_ = (decided(tier(coming(w, odds), replicas), policy) for w in (work, work + more))
    assert less_.replicas <= more_.replicas


@given(work=st.floats(0, 50), replicas=st.integers(0, 60), ready=st.integers(0, 60), least=st.integers(0, 5))
def test_decide_is_never_below_required_replicas(work: float, replicas: int, ready: int, least: int) -> None:
    seen = tier(work, replicas, min(ready, replicas))
    assert isinstance(seen.need, Need)
    assert decided(seen, bounds(least, 200)).replicas >= max(least, seen.need.replicas)


def test_standby_is_added_while_it_pays_off() -> None:
    found = decided(tier(coming(0.8, OFTEN), 1), miss_cost=5.0)
    assert found.replicas > 1
    assert "more against a leap" in said(found, "need").why
    assert decided(tier(coming(0.8, OFTEN), 1), miss_cost=0.0).replicas == 1
    assert decided(tier(coming(0.8, OFTEN), 1), miss_cost=50.0).replicas > found.replicas


@given(work=st.floats(0.1, 30), miss_cost=st.floats(0, 50))
def test_standby_equals_greedy_result(work: float, miss_cost: float) -> None:
    demand = coming(work, OFTEN)
    need = needed(demand, 1)
    bought = spare_replicas(OFTEN, work, REPLICA_WORK, need.replicas, 40, miss_cost)
    assert decided(tier(demand, 1), bounds(1, 40), miss_cost=miss_cost).replicas == need.replicas + bought


def test_standby_uncertain_level_adds_none() -> None:
    assert decided(tier(coming(0.8, OFTEN, error=0.05), 1), miss_cost=5.0).replicas == 1
    old = State(0.0, {"serve": TierState(lower=(Mark(1, -1000.0),))})
    assert decided(tier(coming(0.8, OFTEN, error=0.05), 2), state=old, miss_cost=5.0).replicas == 2


def test_standby_existing_is_kept_within_margin() -> None:
    just = 1.0 / (
        0.8 * OFTEN.between(1.0 / 0.8, 2.0 / 0.8)
    )  # the miss cost at which the second replica is worth its price
    old = State(0.0, {"serve": TierState(lower=(Mark(1, -1000.0),))})
    for share, bought, kept in ((1.1, 2, 2), (0.9, 1, 2), (0.7, 1, 1)):
        assert decided(tier(coming(0.8, OFTEN), 1), miss_cost=share * just).replicas == bought
        assert decided(tier(coming(0.8, OFTEN), 2), state=old, miss_cost=share * just).replicas == kept


def test_warm_replicas_add_to_need_and_prevent_zero() -> None:
    policy = bounds(0, 16, warm_replicas=2)
    assert decided(tier(2.5, 3), policy).replicas == 5
    assert decided(tier(0.0, 2), policy).replicas == 2


def test_decide_between_need_and_release_keeps_replicas() -> None:
    for replicas in (2, 3):
        seen = tier(1.98, replicas)
        state = State(0.0, {"serve": TierState(lower=(Mark(2, -1e6),))})
        assert decided(seen, state=state).replicas == replicas
    assert "3 are kept, too near the boundary" in said(decided(tier(1.98, 3)), "need").why


def test_decide_infeasible_slo_sizes_for_feasible_targets() -> None:
    need = tier(2.5, 1).need
    assert isinstance(need, Need)
    broken = Infeasible(Constraint.TTFT, Slo(0.95, 0.61, 0.0, 0.05))
    found = decided(tier(2.5, 1, need=replace(need, infeasible=broken)))
    assert found.replicas == 3
    assert Limit.INFEASIBLE in found.limits
    assert "no number of replicas keeps the promise (TTFT breaks it), sized for TTFT 610 ms" in found.why


# Unknown, stale and partial


@given(replicas=st.integers(1, 16), ready=st.integers(0, 16), hours=st.floats(0, 100))
def test_decide_unknown_demand_freezes_replicas(replicas: int, ready: int, hours: float) -> None:
    seen = tier(Unknown("the gateways do not answer"), replicas, min(ready, replicas))
    found = decided(seen, now_s=3600.0 * hours, state=State(0.0, {"serve": TierState(lower=(Mark(1, 0.0),))}))
    assert (found.replicas, found.held) == (replicas, True)
    assert "the gateways do not answer" in found.why


def test_decide_old_sample_freezes_and_reports_age() -> None:
    found = decided(tier(coming(0.5, age_s=45.0), 4))
    assert (found.replicas, found.held) == (4, True)
    assert "45 s old" in said(found, "demand").why


def test_decide_partial_coverage_prevents_scale_down() -> None:
    state = State(0.0, {"serve": TierState(lower=(Mark(1, -1e6),))})
    assert decided(tier(0.5, 4, coverage=0.5), state=state).replicas == 4
    assert decided(tier(4.5, 4, coverage=0.5), state=state).replicas == 5
    assert "50% answered" in said(decided(tier(0.5, 4, coverage=0.5)), "need").why


def test_scaled_sum_partial_readings_are_scaled_to_all() -> None:
    assert summed([2.0, Unknown("gone"), 4.0, math.nan]) == (12.0, 0.5)
    assert summed([2.0, 4.0]) == (6.0, 1.0)
    nothing, coverage = summed([Unknown("gone"), -1.0])
    assert isinstance(nothing, Unknown)
    assert coverage == 0.0


def test_replica_limits_apply_to_frozen_tier() -> None:
    assert decided(tier(Unknown("lost"), 4), bounds(1, 3)).replicas == 3
    assert decided(tier(Unknown("lost"), 1), bounds(2, 3)).replicas == 2


# Feedback


def tail_scale_after(tail_scale: float, measured_s: float, now_s: float = 10.0, **differing: Any) -> float:
    need = tier(2.5, 3).need
    assert isinstance(need, Need)
    usual: dict[str, Any] = {"need": replace(need, law_tpot_s=0.03), "measured": Measured(tpot_s=measured_s)}
    state = State(0.0, {"serve": TierState(tail_scale=tail_scale)})
    observation = Observation({"serve": tier(2.5, 3, **(usual | differing))}, state)
    return decide(observation, Policy({"serve": bounds()}, SLO), now_s).state.tiers["serve"].tail_scale


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
        need = tier(2.5, 3).need
        assert isinstance(need, Need)
        seen = tier(2.5, 3, need=replace(need, law_tpot_s=0.03 * scale), measured=Measured(tpot_s=0.03 * true_scale))
        state = State(10.0 * tick, {"serve": TierState(tail_scale=scale)})
        found = decide(Observation({"serve": seen}, state), Policy({"serve": bounds()}, SLO), 10.0 * (tick + 1))
        scale = found.state.tiers["serve"].tail_scale
        seen_scales.append(scale)
    assert seen_scales == sorted(seen_scales)
    assert scale == pytest.approx(true_scale, rel=0.06)
    assert scale <= true_scale


def test_tail_scale_is_kept_while_fleet_or_coverage_changes() -> None:
    assert tail_scale_after(1.0, 0.04, ready=2) == 1.0
    assert tail_scale_after(1.0, 0.04, coverage=0.5) == 1.0
    assert tail_scale_after(1.0, math.nan) == 1.0


def test_decide_known_demand_ignores_lagging_signals() -> None:
    bad = Measured(tpot_s=0.5, ttft_s=5.0, waiting=100.0, kv_used=0.99, preemptions_per_s=3.0)
    assert decided(tier(2.5, 3, measured=bad)).replicas == 3


# Pending


def test_pending_replicas_count_with_eta() -> None:
    pods = (Starting("a", 0.0, "pull", 0.0), Starting("b", -15.0, "load", -5.0))
    found = decided(tier(3.5, 4, 2, starting=pods))
    assert found.replicas == 4
    assert len(found.etas_s) == 2
    assert found.etas_s[0] < found.etas_s[1]
    assert "2 ready, 2 starting, the next in" in said(found, "pending").why


def test_overdue_replicas_are_reported_and_replaced_once() -> None:
    late = (Starting("a", -1000.0), Starting("b", -900.0))
    found = decided(tier(3.5, 4, 2, starting=late))
    assert found.overdue == ("a", "b")
    assert found.replicas == 6
    assert "2 overdue for" in found.why
    every = (*late, Starting("c", -500.0), Starting("d", -500.0))
    assert decided(tier(3.5, 6, 2, starting=every)).replicas == 6
    assert decided(tier(3.5, 6, 4, starting=late)).overdue == ("a", "b")


def test_overdue_replicas_of_frozen_tier_are_reported_only() -> None:
    found = decided(tier(Unknown("lost"), 4, 2, starting=(Starting("a", -1000.0), Starting("b", -900.0))))
    assert (found.replicas, found.overdue) == (4, ("a", "b"))


def test_overdue_replacement_is_removed_once_enough_are_ready() -> None:
    late = (Starting("a", -1000.0),)
    state = State(0.0, {"serve": TierState(lower=(Mark(4, -1000.0),))})
    assert decided(tier(3.5, 5, 4, starting=late), state=state).replicas == 4


# Joint


def test_scale_to_zero_requires_both_tiers_idle() -> None:
    away = quiet(1e4)
    serving = pair(tier(0.0, 1), tier(1.5, 2), pause=away)
    assert counts(serving) == (1, 2)
    assert "at least 1, since the other tier serves" in said(serving.tiers["prefill"], "joint").why
    assert counts(pair(tier(0.0, 0), tier(0.5, 1), pause=quiet(1.0))) == (1, 1)
    assert counts(pair(tier(0.0, 1), tier(0.5, 1), pause=away)) == (0, 0)
    dear = tier(0.5, 1, need=replace(needed(coming(0.5), 1), request_gpu_s=1e3))
    assert counts(pair(tier(0.0, 1), dear, pause=away)) == (1, 1), "a cold return would cost the other one dearly"


def test_scale_to_zero_is_blocked_by_other_tier_minimum() -> None:
    observation = Observation({"prefill": tier(0.0, 1), "decode": tier(0.0, 1)}, pause=quiet(1e4))
    assert counts(decide(observation, Policy({"prefill": bounds(1), "decode": bounds(0)}, SLO), 0.0)) == (1, 1)


def test_scale_to_zero_is_blocked_by_frozen_tier() -> None:
    assert counts(pair(tier(0.0, 1), tier(Unknown("lost"), 2), pause=Unknown("lost"))) == (1, 2)


def test_scale_from_zero_sizes_both_tiers_by_backlog() -> None:
    back = pair(tier(0.1, 0, backlog_gpu_s=150.0), tier(0.1, 0, backlog_gpu_s=30.0))
    assert counts(back) == (3, 1)
    lone = pair(tier(Unknown("no sample yet"), 0, backlog_gpu_s=0.2), tier(Unknown("no sample yet"), 0))
    assert counts(lone) == (1, 1)


def test_tier_ratio_raises_the_smaller_tier() -> None:
    assert counts(pair(tier(0.9, 1), tier(3.8, 4), prefill_per_decode=(0.5, 2.0))) == (2, 4)
    found = pair(tier(3.8, 4), tier(0.9, 1), prefill_per_decode=(0.5, 2.0))
    assert counts(found) == (4, 2)
    assert "at most 2 prefill replicas" in found.tiers["decode"].why


def test_decision_names_tier_nearest_to_capacity() -> None:
    found = pair(tier(1.8, 2), tier(3.9, 8))
    assert found.binding == "prefill"
    assert "90% of its load line is used; prefill binds" in said(found.tiers["prefill"], "joint").why
