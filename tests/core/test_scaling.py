"""The scaling decision: each step alone, what must hold whatever comes, and what a restart must not change."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core.forecast import Forecast, Odds, Pause, Pauses, Unknown, pauses, spare_replicas
from plimsoll.core.jumps import FACTORS
from plimsoll.core.knee import Constraint, Tier, profile
from plimsoll.core.latency import EngineLimits, KvTransfer, StepModel
from plimsoll.core.lifecycle import Starting, expecting
from plimsoll.core.load_line import slo_rate
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.scaling import (
    Ask,
    Decision,
    Demand,
    Limit,
    Line,
    Mark,
    Measured,
    Mode,
    Need,
    Observation,
    Policy,
    RateLimit,
    Returns,
    State,
    Step,
    TierDecision,
    TierObservation,
    TierPolicy,
    TierState,
    Window,
    decide,
    from_dict,
    line,
    needs,
    summed,
    to_dict,
)
from plimsoll.core.scaling.sized import margin_of
from plimsoll.core.sizing import Infeasible, Sizing, size
from plimsoll.core.slo import Slo
from plimsoll.core.workload import from_samples

HORIZON_S = 60.0
REPLICA_WORK = 1.0  # GPU-seconds per second that a replica carries within the promise
REQUEST_GPU_S = 0.1
LEDGER = expecting({"pull": 20.0, "load": 10.0})
SLO = Slo(0.95, 0.5, 0.0, 0.05)
NEVER = Odds(HORIZON_S, (1.000001, 2.0), (0.0, 0.0), 1.0)  # load never leaps
OFTEN = Odds(HORIZON_S, FACTORS, (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.01), 1.0)
BUSY = pauses.lasting(Pauses(), 0.0)  # requests come, and nothing is known of their pauses
STEPS = ["demand", "need", "feedback", "pending", "joint", "direction", "limits", "mode"]


def coming(work: float, odds: Odds = NEVER, **differing: Any) -> Demand:
    """A forecast that is all level, unless its parts are told."""
    parts = {"trend": 0.0, "season": 0.0, "burst": 0.0, "doubt": 0.0} | {
        name: value for name, value in differing.items() if name in ("trend", "season", "burst", "doubt")
    }
    rest = {name: value for name, value in differing.items() if name not in parts}
    usual: dict[str, Any] = {
        "error": 0.0,
        "horizon_s": odds.horizon_s,
        "quantile": 0.95,
        "age_s": 1.0,
        "history": 0.5,
        "memory": 1.0,
        "ordinary": work,
        "standing": work,
        "changed_s_ago": None,
        "rate_per_s": None,
        "tokens_per_s": None,
    }
    return Demand(Forecast(work=work + sum(parts.values()), level=work, **parts, **(usual | rest)), odds)


def needed(demand: Demand, ready: int, backlog_gpu_s: float = 0.0, replica_work: float = REPLICA_WORK) -> Need:
    """What `needs` would say of a tier whose load line is straight."""
    work = demand.forecast.work + (0.0 if ready else backlog_gpu_s / demand.forecast.horizon_s)
    told = demand.forecast
    margin = float(margin_of(*(np.array(part) for part in (work, told.doubt, told.error, told.memory))))
    replicas, release = (math.ceil(work * share / replica_work - 1e-9) for share in (1.0, margin))
    return Need(
        replicas, release, work / REQUEST_GPU_S, REQUEST_GPU_S, replica_work, Constraint.TPOT, 0.8, 0.6, 0.071, None
    )


def tier(
    demand: Demand | Unknown | float, replicas: int, ready: int | None = None, **differing: Any
) -> TierObservation:
    """A tier as observed; a number stands for a forecast that is all level."""
    found = coming(demand) if isinstance(demand, int | float) else demand
    here = replicas if ready is None else ready
    waiting = differing.get("backlog_gpu_s", 0.0)
    if "need" not in differing:
        differing["need"] = found if isinstance(found, Unknown) else needed(found, here, waiting)
    return TierObservation(replicas, here, LEDGER, found, **differing)


def quiet(away_s: float) -> Pause:
    """No request for so long, and nothing is known of earlier pauses."""
    return BUSY._replace(active=False, away_s=away_s)


def bounds(least: int = 1, most: int = 16, **differing: Any) -> TierPolicy:
    return TierPolicy(least, most, **differing)


def decided(
    seen: TierObservation,
    policy: TierPolicy | None = None,
    now_s: float = 0.0,
    state: State | None = None,
    pause: Pause | Unknown = BUSY,
    **rest: Any,
) -> TierDecision:
    """The decision on a service of one tier. rest: of the Policy."""
    observation = Observation({"serve": seen}, state or State(), pause=pause)
    return decide(observation, Policy({"serve": policy or bounds()}, SLO, **rest), now_s).tiers["serve"]


def pair(
    prefill: TierObservation,
    decode: TierObservation,
    now_s: float = 0.0,
    state: State | None = None,
    granted: int | None = None,
    least: int = 0,
    pause: Pause | Unknown = BUSY,
    **rest: Any,
) -> Decision:
    """The decision on a service of two tiers."""
    observation = Observation({"prefill": prefill, "decode": decode}, state or State(), granted, pause)
    return decide(observation, Policy({"prefill": bounds(least), "decode": bounds(least)}, SLO, **rest), now_s)


def counts(decision: Decision) -> tuple[int, ...]:
    return tuple(one.replicas for one in decision.tiers.values())


def said(decision: TierDecision, name: str) -> Step:
    return next(step for step in decision.steps if step.name == name)


# Without signals

limits_of = st.integers(0, 1000).flatmap(lambda low: st.tuples(st.just(low), st.integers(low, 1000)))


@given(st.dictionaries(st.sampled_from(["prefill", "decode", "serve"]), limits_of))
def test_a_tier_of_which_nothing_is_observed_has_its_minimum(tiers: dict[str, tuple[int, int]]) -> None:
    found = decide(Observation(), Policy({name: TierPolicy(*b) for name, b in tiers.items()}), 0.0).tiers
    assert found.keys() == tiers.keys()
    for name, (low, _) in tiers.items():
        assert found[name].replicas == low
        assert [(step.name, step.replicas) for step in found[name].steps] == [("limits", low)]
        assert found[name].why == f"minReplicas is {low}"


# Explanation


def test_the_explanation_is_the_eight_steps_in_order_and_the_last_one_is_the_answer() -> None:
    found = decided(tier(4.2, 3))
    assert [step.name for step in found.steps] == STEPS
    assert found.steps[-1].replicas == found.replicas == found.recommended == 5


def test_the_event_line_carries_forecast_need_knee_and_the_counterfactual() -> None:
    found = decided(tier(4.1, 3))
    assert found.why == (
        "forecast 41 req/s in 60 s needs 5 (knee 10 req/s each, TPOT binds); 3 would give p95 TPOT 71 ms, target 50 ms"
    )


def test_the_counterfactual_is_attainment_where_tpot_is_kept_and_says_when_a_fleet_cannot_keep_up() -> None:
    need = tier(4.1, 3).need
    assert isinstance(need, Need)
    assert "3 would keep 80.0% in promise" in decided(tier(4.1, 3, need=replace(need, tpot_s=0.04))).why
    assert "3 could not keep up with it" in decided(tier(4.1, 3, need=replace(need, tpot_s=math.inf))).why
    assert decided(tier(4.1, 5)).counterfactual is None


def test_where_gaps_bind_shares_say_nothing_of_fewer_replicas() -> None:
    need = tier(4.1, 3).need
    assert isinstance(need, Need)
    gaps = replace(need, constraint=Constraint.ITL, attained=0.999, one_fewer=0.99, tpot_s=0.04)
    assert decided(tier(4.1, 3, need=gaps)).why.endswith("itl binds); 3 would have too many long gaps between tokens")
    assert decided(tier(4.1, need.replicas, need=gaps)).counterfactual is None
    assert "keep 80.0% in promise" in decided(tier(4.1, 3, need=replace(gaps, attained=0.8))).why


def test_long_gaps_alone_order_more_where_demand_is_not_known() -> None:
    lost = Unknown("the gateways do not answer")
    long = tier(lost, 3, measured=Measured(itl_s=0.09))
    assert decided(long).replicas == 3  # not promised
    policy = Policy({"serve": bounds()}, replace(SLO, itl_s=0.05))
    found = decide(Observation({"serve": long}, State(), pause=BUSY), policy, 0.0).tiers["serve"]
    assert found.replicas > 3
    assert "p99 itl 90 ms, target 50 ms" in found.why


def test_a_step_down_tells_what_one_fewer_would_give() -> None:
    state = State(0.0, {"serve": TierState(lower=(Mark(2, -1000.0),))})
    assert decided(tier(1.5, 4), state=state).why.endswith("1 would keep 60.0% in promise")


# Demand and need


@given(
    work=st.floats(0.01, 50),
    more=st.floats(0, 50),
    replicas=st.integers(0, 60),
    odds=st.sampled_from([NEVER, OFTEN]),
    warm=st.integers(0, 3),
)
def test_more_demand_never_gives_fewer_replicas(work: float, more: float, replicas: int, odds: Odds, warm: int) -> None:
    """Among loads that are there: arrivals that stopped say nothing of growth, and are held for by their absence."""
    policy = bounds(0, 200, warm_replicas=warm)
    less_, more_ = (decided(tier(coming(w, odds), replicas), policy) for w in (work, work + more))
    assert less_.replicas <= more_.replicas


@given(work=st.floats(0, 50), replicas=st.integers(0, 60), ready=st.integers(0, 60), least=st.integers(0, 5))
def test_the_answer_is_never_below_what_is_known_to_be_needed(
    work: float, replicas: int, ready: int, least: int
) -> None:
    seen = tier(work, replicas, min(ready, replicas))
    assert isinstance(seen.need, Need)
    assert decided(seen, bounds(least, 200)).replicas >= max(least, seen.need.replicas)


def test_a_replica_in_reserve_is_bought_while_it_is_worth_its_price_and_no_further() -> None:
    found = decided(tier(coming(0.8, OFTEN), 1), miss_cost=5.0)
    assert found.replicas > 1
    assert "more against a leap" in said(found, "need").why
    assert decided(tier(coming(0.8, OFTEN), 1), miss_cost=0.0).replicas == 1
    assert decided(tier(coming(0.8, OFTEN), 1), miss_cost=50.0).replicas > found.replicas


@given(work=st.floats(0.1, 30), miss_cost=st.floats(0, 50))
def test_the_reserve_is_what_buying_one_by_one_would_end_at(work: float, miss_cost: float) -> None:
    demand = coming(work, OFTEN)
    need = needed(demand, 1)
    bought = spare_replicas(OFTEN, work, REPLICA_WORK, need.replicas, 40, miss_cost)
    assert decided(tier(demand, 1), bounds(1, 40), miss_cost=miss_cost).replicas == need.replicas + bought


def test_a_level_in_doubt_buys_no_reserve() -> None:
    assert decided(tier(coming(0.8, OFTEN, doubt=0.08), 1), miss_cost=5.0).replicas == 1
    old = State(0.0, {"serve": TierState(lower=(Mark(1, -1000.0),))})
    assert decided(tier(coming(0.8, OFTEN, doubt=0.08), 2), state=old, miss_cost=5.0).replicas == 2


def test_a_reserve_that_is_there_stays_until_it_is_clearly_not_worth_its_price() -> None:
    just = 1.0 / (
        0.8 * OFTEN.between(1.0 / 0.8, 2.0 / 0.8)
    )  # the miss cost at which the second replica is worth its price
    old = State(0.0, {"serve": TierState(lower=(Mark(1, -1000.0),))})
    for share, bought, kept in ((1.1, 2, 2), (0.9, 1, 2), (0.7, 1, 1)):
        assert decided(tier(coming(0.8, OFTEN), 1), miss_cost=share * just).replicas == bought
        assert decided(tier(coming(0.8, OFTEN), 2), state=old, miss_cost=share * just).replicas == kept


def test_warm_replicas_come_on_top_of_the_need_and_hold_the_fleet_above_zero() -> None:
    policy = bounds(0, 16, warm_replicas=2)
    assert decided(tier(2.5, 3), policy).replicas == 5
    assert decided(tier(0.0, 2), policy).replicas == 2


def test_between_need_and_release_nothing_moves() -> None:
    for replicas in (2, 3):
        seen = tier(1.98, replicas)
        state = State(0.0, {"serve": TierState(lower=(Mark(2, -1e6),))})
        assert decided(seen, state=state).replicas == replicas
    assert "3 are kept, too near the boundary" in said(decided(tier(1.98, 3)), "need").why


def test_a_promise_that_no_fleet_keeps_is_named_and_the_rest_sized_for_the_nearest() -> None:
    need = tier(2.5, 1).need
    assert isinstance(need, Need)
    broken = Infeasible(Constraint.TTFT, Slo(0.95, 0.61, 0.0, 0.05))
    found = decided(tier(2.5, 1, need=replace(need, infeasible=broken)))
    assert found.replicas == 3
    assert Limit.INFEASIBLE in found.limits
    assert "no number of replicas keeps the promise (TTFT breaks it), sized for TTFT 610 ms" in found.why


# Unknown, stale and partial


@given(replicas=st.integers(1, 16), ready=st.integers(0, 16), hours=st.floats(0, 100))
def test_unknown_demand_holds_however_long_it_lasts(replicas: int, ready: int, hours: float) -> None:
    seen = tier(Unknown("the gateways do not answer"), replicas, min(ready, replicas))
    found = decided(seen, now_s=3600.0 * hours, state=State(0.0, {"serve": TierState(lower=(Mark(1, 0.0),))}))
    assert (found.replicas, found.held) == (replicas, True)
    assert "the gateways do not answer" in found.why


def test_an_old_sample_holds_and_is_told_with_its_age() -> None:
    found = decided(tier(coming(0.5, age_s=45.0), 4))
    assert (found.replicas, found.held) == (4, True)
    assert "45 s old" in said(found, "demand").why


def test_partial_coverage_raises_and_never_lowers() -> None:
    state = State(0.0, {"serve": TierState(lower=(Mark(1, -1e6),))})
    assert decided(tier(0.5, 4, coverage=0.5), state=state).replicas == 4
    assert decided(tier(4.5, 4, coverage=0.5), state=state).replicas == 5
    assert "50% answered" in said(decided(tier(0.5, 4, coverage=0.5)), "need").why


def test_a_sum_over_those_that_answered_is_scaled_to_all() -> None:
    assert summed([2.0, Unknown("gone"), 4.0, math.nan]) == (12.0, 0.5)
    assert summed([2.0, 4.0]) == (6.0, 1.0)
    nothing, coverage = summed([Unknown("gone"), -1.0])
    assert isinstance(nothing, Unknown)
    assert coverage == 0.0


def test_limits_apply_to_a_held_tier_too() -> None:
    assert decided(tier(Unknown("lost"), 4), bounds(1, 3)).replicas == 3
    assert decided(tier(Unknown("lost"), 1), bounds(2, 3)).replicas == 2


# Feedback


def integrated(tail_scale: float, measured_s: float, now_s: float = 10.0, **differing: Any) -> float:
    need = tier(2.5, 3).need
    assert isinstance(need, Need)
    usual: dict[str, Any] = {"need": replace(need, law_tpot_s=0.03), "measured": Measured(tpot_s=measured_s)}
    state = State(0.0, {"serve": TierState(tail_scale=tail_scale)})
    observation = Observation({"serve": tier(2.5, 3, **(usual | differing))}, state)
    return decide(observation, Policy({"serve": bounds()}, SLO), now_s).state.tiers["serve"].tail_scale


def test_measured_latency_moves_the_tail_of_the_law_slowly_and_within_bounds() -> None:
    assert 1.0 < integrated(1.0, 0.04) < 1.01
    assert 0.99 < integrated(1.0, 0.02) < 1.0
    assert integrated(1.0, 0.0305) == 1.0  # chance
    assert integrated(1.0, 0.04, now_s=36_000.0) < 1.03  # one sample after a long gap is one sample
    assert integrated(2.0, 10.0) == 2.0
    assert integrated(0.6, 1e-6) == 0.6


def test_measured_latency_and_law_meet_without_overshoot() -> None:
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


def test_the_tail_is_left_alone_while_replicas_come_and_go_or_part_answered() -> None:
    assert integrated(1.0, 0.04, ready=2) == 1.0
    assert integrated(1.0, 0.04, coverage=0.5) == 1.0
    assert integrated(1.0, math.nan) == 1.0


def test_known_demand_is_not_second_guessed_by_lagging_signals() -> None:
    bad = Measured(tpot_s=0.5, ttft_s=5.0, waiting=100.0, kv_used=0.99, preemptions_per_s=3.0)
    assert decided(tier(2.5, 3, measured=bad)).replicas == 3


# Pending


def test_starting_replicas_are_credited_with_their_eta_and_nothing_is_ordered_twice() -> None:
    pods = (Starting("a", 0.0, "pull", 0.0), Starting("b", -15.0, "load", -5.0))
    found = decided(tier(3.5, 4, 2, starting=pods))
    assert found.replicas == 4
    assert len(found.etas_s) == 2
    assert found.etas_s[0] < found.etas_s[1]
    assert "2 ready, 2 starting, the next in" in said(found, "pending").why


def test_an_overdue_replica_is_reported_and_ordered_once_more_at_most_twice_in_all() -> None:
    late = (Starting("a", -1000.0), Starting("b", -900.0))
    found = decided(tier(3.5, 4, 2, starting=late))
    assert found.overdue == ("a", "b")
    assert found.replicas == 6
    assert "2 overdue for" in found.why
    every = (*late, Starting("c", -500.0), Starting("d", -500.0))
    assert decided(tier(3.5, 6, 2, starting=every)).replicas == 6
    assert decided(tier(3.5, 6, 4, starting=late)).overdue == ("a", "b")


def test_an_overdue_replica_of_a_held_tier_is_reported_only() -> None:
    found = decided(tier(Unknown("lost"), 4, 2, starting=(Starting("a", -1000.0), Starting("b", -900.0))))
    assert (found.replicas, found.overdue) == (4, ("a", "b"))


def test_the_replacement_of_an_overdue_replica_goes_once_enough_are_ready() -> None:
    late = (Starting("a", -1000.0),)
    state = State(0.0, {"serve": TierState(lower=(Mark(4, -1000.0),))})
    assert decided(tier(3.5, 5, 4, starting=late), state=state).replicas == 4


# Joint


def test_no_tier_goes_to_zero_while_the_other_serves() -> None:
    away = quiet(1e4)
    serving = pair(tier(0.0, 1), tier(1.5, 2), pause=away)
    assert counts(serving) == (1, 2)
    assert "at least 1, since the other tier serves" in said(serving.tiers["prefill"], "joint").why
    assert counts(pair(tier(0.0, 0), tier(0.5, 1), pause=quiet(1.0))) == (1, 1)
    assert counts(pair(tier(0.0, 1), tier(0.5, 1), pause=away)) == (0, 0)
    dear = tier(0.5, 1, need=replace(needed(coming(0.5), 1), request_gpu_s=1e3))
    assert counts(pair(tier(0.0, 1), dear, pause=away)) == (1, 1), "a cold return would cost the other one dearly"


def test_a_tier_with_a_minimum_keeps_the_other_one_up() -> None:
    observation = Observation({"prefill": tier(0.0, 1), "decode": tier(0.0, 1)}, pause=quiet(1e4))
    assert counts(decide(observation, Policy({"prefill": bounds(1), "decode": bounds(0)}, SLO), 0.0)) == (1, 1)


def test_a_held_tier_keeps_the_other_one_up() -> None:
    assert counts(pair(tier(0.0, 1), tier(Unknown("lost"), 2), pause=Unknown("lost"))) == (1, 2)


def test_both_tiers_come_back_from_zero_sized_by_what_waits() -> None:
    back = pair(tier(0.1, 0, backlog_gpu_s=150.0), tier(0.1, 0, backlog_gpu_s=30.0))
    assert counts(back) == (3, 1)
    lone = pair(tier(Unknown("no sample yet"), 0, backlog_gpu_s=0.2), tier(Unknown("no sample yet"), 0))
    assert counts(lone) == (1, 1)


def test_the_ratio_is_kept_by_raising_the_smaller_tier() -> None:
    assert counts(pair(tier(0.9, 1), tier(3.8, 4), prefill_per_decode=(0.5, 2.0))) == (2, 4)
    found = pair(tier(3.8, 4), tier(0.9, 1), prefill_per_decode=(0.5, 2.0))
    assert counts(found) == (4, 2)
    assert "at most 2 prefill replicas" in found.tiers["decode"].why


def test_the_tier_nearest_to_its_line_is_named() -> None:
    found = pair(tier(1.8, 2), tier(3.9, 8))
    assert found.binding == "prefill"
    assert "90% of its load line is used; prefill binds" in said(found.tiers["prefill"], "joint").why


# Direction


def test_up_is_at_once_and_all_the_way() -> None:
    assert decided(tier(12.5, 1), bounds(1, 20)).replicas == 13


@pytest.mark.parametrize(("odds", "after_s"), [(NEVER, 0.0), (OFTEN, 54.0)])  # 60 s times 0.895, in ticks of 2 s
def test_down_comes_after_the_start_up_time_times_the_chance_of_return(odds: Odds, after_s: float) -> None:
    state, went_s = State(), math.nan
    for now_s in range(0, 120, 2):
        seen = tier(coming(1.9, odds), 4, need=needed(coming(1.8), 4))
        found = decide(Observation({"serve": seen}, state), Policy({"serve": bounds()}, SLO, miss_cost=0.0), now_s)
        state = found.state
        if found.tiers["serve"].replicas == 2:
            went_s = now_s
            break
    assert went_s == after_s


def test_a_need_that_returns_starts_the_hold_time_anew() -> None:
    state = State()
    for now_s in range(0, 200, 5):
        work = 3.5 if now_s % 20 == 0 else 1.9
        seen = tier(coming(work, OFTEN), 4)
        found = decide(Observation({"serve": seen}, state), Policy({"serve": bounds()}, SLO, miss_cost=0.0), now_s)
        state = found.state
        assert found.tiers["serve"].replicas == 4


@pytest.mark.parametrize("work", [0.0, 0.001, 0.9])
@pytest.mark.parametrize(("miss_cost", "after_s"), [(0.0, HORIZON_S), (30.0, HORIZON_S + 30 * REQUEST_GPU_S)])
def test_the_last_replica_is_kept_for_as_long_as_a_cold_return_costs(
    work: float, miss_cost: float, after_s: float
) -> None:
    """However slowly the forecast fades: by the prior, ski rental."""
    stays, goes = (
        decided(tier(work, 1), bounds(0), pause=quiet(after_s + late_s), miss_cost=miss_cost) for late_s in (-0.1, 0.1)
    )
    assert (stays.replicas, goes.replicas) == (1, 0)
    assert "the last one stays: no request for" in said(stays, "need").why
    assert f"none stays: no request for {after_s:.0f} s, one within 60 s has a chance of" in goes.why


@pytest.mark.parametrize("stopped_s", [0, 5, 30])
def test_a_fleet_whose_arrivals_stop_dead_is_held_until_they_are_unlikely_to_return(stopped_s: int) -> None:
    state, went_s = State(), math.inf
    for now_s in range(120):
        seen = tier(coming(0.0, NEVER, changed_s_ago=float(now_s + stopped_s)), 4)
        found = decide(Observation({"serve": seen}, state), Policy({"serve": bounds(1)}, SLO), now_s)
        state = found.state
        if found.tiers["serve"].replicas < 4:
            went_s = now_s
            break
    # After t: t + stopped_s is how long nothing came, and t >= L * L / (L + t + stopped_s).
    assert went_s == math.ceil((-(HORIZON_S + stopped_s) + math.hypot(HORIZON_S + stopped_s, 2 * HORIZON_S)) / 2)
    assert went_s > 0.4 * HORIZON_S


# Limits


def test_maximum_and_minimum_are_named_where_they_stand_in_the_way() -> None:
    high = decided(tier(7.5, 6), bounds(1, 6))
    assert (high.replicas, high.limits) == (6, (Limit.MAX,))
    assert "8 wanted, maxReplicas is 6" in said(high, "limits").why
    low = decided(tier(0.5, 2), bounds(2, 6))
    assert (low.replicas, low.limits) == (2, (Limit.MIN,))
    assert decided(tier(2.5, 3)).limits == ()


def test_rate_limits_hold_within_any_stretch_of_their_time() -> None:
    policy = Policy({"serve": bounds(1, 30, up=RateLimit(2, 60.0), down=RateLimit(1, 60.0))}, SLO)
    state, replicas, history = State(), 1, []
    for now_s in range(0, 600, 10):
        work = 9.5 if now_s < 300 else 0.5
        found = decide(Observation({"serve": tier(work, replicas)}, state), policy, float(now_s))
        state, replicas = found.state, found.tiers["serve"].replicas
        history.append(replicas)
    for at in range(len(history) - 6):
        assert history[at + 5] - history[at] <= 2
        assert history[at] - history[at + 5] <= 1
    assert max(history) == 10
    assert len(state.tiers["serve"].ordered) < 10


def test_each_rate_limit_looks_back_over_its_own_time() -> None:
    policy = Policy({"serve": bounds(1, 30, up=RateLimit(2, 60.0), down=RateLimit(1, 600.0))}, SLO)
    state, replicas, history = State(), 1, []
    for now_s in range(0, 240, 10):
        found = decide(Observation({"serve": tier(9.5, replicas)}, state), policy, float(now_s))
        state, replicas = found.state, found.tiers["serve"].replicas
        history.append(replicas)
    assert [history[at] for at in (0, 5, 7, 14, 21)] == [3, 3, 5, 7, 9]


def test_a_rate_limit_takes_nothing_away_from_what_somebody_else_ordered() -> None:
    state = State(0.0, {"serve": TierState(ordered=(Mark(1, -100.0), Mark(10, -5.0)))})
    assert decided(tier(11.5, 10), bounds(1, 30, up=RateLimit(2, 60.0)), state=state).replicas == 10


def test_a_window_of_the_schedule_is_ready_when_it_begins_and_its_maximum_counts_within_it() -> None:
    policy = bounds(1, 10, schedule=(Window(1000.0, 2000.0, min_replicas=4), Window(3000.0, 4000.0, max_replicas=2)))
    seen = tier(0.5, 1)
    assert [decided(seen, policy, at).replicas for at in (900.0, 941.0, 1999.0, 2000.0)] == [1, 4, 4, 1]
    busy = tier(4.5, 5)
    assert [decided(busy, policy, at).replicas for at in (2999.0, 3000.0, 4000.0)] == [5, 2, 5]
    assert "by the schedule" in decided(busy, policy, 3000.0).why


def test_the_gpu_budget_takes_from_the_tier_left_with_most_and_never_below_the_minimum() -> None:
    found = pair(tier(3.5, 4), tier(7.5, 8), granted=9)
    assert counts(found) == (3, 6)
    assert Limit.BUDGET in found.tiers["decode"].limits
    assert "grants 9 GPUs" in found.tiers["decode"].why
    assert counts(pair(tier(3.5, 4), tier(7.5, 8), granted=0, least=1)) == (1, 1)
    assert counts(pair(tier(3.5, 4), tier(7.5, 8), granted=2)) == (1, 1)
    assert counts(pair(tier(3.5, 4), tier(7.5, 8), granted=1)) == (0, 0)  # one tier alone serves nobody


def test_pods_that_fit_on_no_node_begin_a_back_off_that_doubles_and_ends_with_them() -> None:
    refused = (Starting("a", 0.0, refused="0/3 nodes are available: insufficient nvidia.com/gpu"),)
    state, ordered, raised = State(), 2, []
    for now_s in range(0, 400, 5):
        seen = tier(19.5, ordered, 1, starting=refused)
        found = decide(Observation({"serve": seen}, state), Policy({"serve": bounds(1, 30)}, SLO), float(now_s))
        state = found.state
        assert Limit.UNSCHEDULABLE in found.tiers["serve"].limits
        if found.tiers["serve"].replicas > ordered:
            raised.append(now_s)
    assert raised == [30, 90, 210]
    assert "insufficient nvidia.com/gpu" in said(found.tiers["serve"], "pending").why
    free = decide(Observation({"serve": tier(19.5, 2)}, state), Policy({"serve": bounds(1, 30)}, SLO), 400.0)
    assert free.tiers["serve"].replicas == 20
    assert free.state.tiers["serve"].backoff.tries == 0


# Mode


@pytest.mark.parametrize("rest", [{"mode": Mode.RECOMMEND}, {"mode": Mode.OFF}, {"paused": True}])
def test_whatever_is_not_auto_keeps_the_count_and_tells_what_it_would_be(rest: dict[str, Any]) -> None:
    found = decided(tier(4.2, 3), **rest)
    assert (found.replicas, found.recommended) == (3, 5)
    assert "3 stay, 5 recommended" in found.why
    assert "3 would give p95 TPOT 71 ms" in found.why


# State


@st.composite
def services(draw: st.DrawFn) -> tuple[Observation, Policy, float]:
    tiers, states = {}, {}
    for name in ("prefill", "decode"):
        replicas = draw(st.integers(0, 12))
        ready = draw(st.integers(0, replicas))
        starting = tuple(
            Starting(f"p{i}", draw(st.floats(0, 1000)), draw(st.sampled_from([None, "pull", "load"])), None,
                     draw(st.sampled_from([None, None, "no room"])))
            for i in range(replicas - ready)
        )  # fmt: skip
        demand: Demand | Unknown = Unknown("lost")
        if draw(st.booleans()):
            demand = coming(draw(st.floats(0, 15)), draw(st.sampled_from([NEVER, OFTEN])), age_s=draw(st.floats(0, 60)))
        tiers[name] = tier(demand, replicas, ready, starting=starting, backlog_gpu_s=draw(st.floats(0, 100)),
                           coverage=draw(st.sampled_from([0.5, 1.0])))  # fmt: skip
        marks = draw(st.lists(st.integers(0, 12), unique=True, max_size=4))
        lower = tuple(Mark(mark, draw(st.floats(0, 1000))) for mark in sorted(marks)[::-1])
        again, trials = sorted((draw(st.floats(0, 30)), draw(st.floats(0, 30))))
        states[name] = TierState(lower, returns=Returns((), draw(st.integers(0, 12)), trials, again))
    up = draw(st.sampled_from([None, RateLimit(2, 60.0)]))
    least = draw(st.integers(0, 2))
    policy = Policy({name: bounds(least, 10, up=up, warm_replicas=draw(st.integers(0, 1))) for name in tiers}, SLO)
    kinds: list[Pause | Unknown] = [BUSY, quiet(5.0), quiet(1e4), Unknown("silent")]
    pause = draw(st.sampled_from(kinds))
    return Observation(tiers, State(900.0, states), draw(st.sampled_from([None, 6])), pause), policy, 1000.0


@given(services())
def test_a_decision_is_the_same_after_a_restart_and_when_it_is_asked_for_twice(
    service: tuple[Observation, Policy, float],
) -> None:
    observation, policy, now_s = service
    first = decide(observation, policy, now_s)
    stored = from_dict(json.loads(json.dumps(to_dict(observation.state))))
    assert decide(replace(observation, state=stored), policy, now_s) == first
    again = decide(replace(observation, state=first.state), policy, now_s)
    assert counts(again) == counts(first)
    assert from_dict(json.loads(json.dumps(to_dict(first.state)))) == first.state


@given(services())
def test_every_decision_is_within_its_limits_and_tells_all_eight_steps(
    service: tuple[Observation, Policy, float],
) -> None:
    observation, policy, now_s = service
    found = decide(observation, policy, now_s)
    for name, one in found.tiers.items():
        assert policy.tiers[name].min_replicas <= one.replicas <= policy.tiers[name].max_replicas
        assert [step.name for step in one.steps] == STEPS
        assert all(step.why for step in one.steps)
    free = observation.gpus_granted is None and policy.tiers["decode"].up is None
    if free and not any(pod.refused for seen in observation.tiers.values() for pod in seen.starting):
        assert (found.tiers["prefill"].replicas == 0) == (found.tiers["decode"].replicas == 0)


def test_a_state_is_about_a_kilobyte() -> None:
    marks = tuple(Mark(20 - i, 1_795_000_000.0 + i) for i in range(8))
    full = TierState(marks, marks, 1.234567, returns=Returns(marks[:4], 20, 100 / 7, 100 / 9))
    assert len(json.dumps(to_dict(State(1_795_000_000.0, {"prefill": full, "decode": full})))) < 1500


GOOD: dict[str, Any] = to_dict(State(1.0, {"serve": TierState((Mark(2, 1.0),))}))


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
def test_a_foreign_state_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="scaling state"):
        from_dict(bad)


def test_values_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="min_replicas"):
        TierPolicy(3, 2)
    with pytest.raises(ValueError, match="warm_replicas"):
        TierPolicy(1, 2, warm_replicas=-1)
    with pytest.raises(ValueError, match="rate limit"):
        RateLimit(0, 60.0)
    with pytest.raises(ValueError, match="prefill_per_decode"):
        Policy({}, prefill_per_decode=(2.0, 1.0))
    with pytest.raises(ValueError, match="miss_cost"):
        Policy({}, miss_cost=math.nan)
    with pytest.raises(ValueError, match="counts"):
        tier(1.0, -1)
    with pytest.raises(ValueError, match="coverage"):
        tier(1.0, 1, coverage=0.0)
    with pytest.raises(ValueError, match="time"):
        decide(Observation(), Policy({}), math.nan)


# Sizing many

CHAT = from_samples([400.0, 1000.0, 2500.0], [0.0, 0.0, 0.0], [100.0, 200.0, 400.0])
SMALL = StepModel(4.742e-3, -1.3e-3, 2.265e-5, 1.035e-9, 1.816e-5, 3.048e-8)
ROOMY = EngineLimits(1024, 919_824, 8192)
SERVE = Tier(Role.SERVE, SMALL, CHAT, ROOMY, SLO)
PREFILL = Tier(Role.PREFILL, SMALL, CHAT, ROOMY, Slo(0.95, 0.5))
DECODE = Tier(Role.DECODE, SMALL, CHAT, ROOMY, Slo(0.95, 0.5, 0.0, 0.025), KvTransfer(32, 128))


def lined(kind: Tier, replicas: int = 1) -> Line:
    found = line(kind, replicas)
    assert isinstance(found, Line)
    return found


def ask(kind: Tier, rate: float, replicas: int, **differing: Any) -> Ask:
    made = lined(kind)
    usual: dict[str, Any] = {"ready": replicas}
    return Ask(made, coming(rate * made.request_gpu_s).forecast, replicas, **(usual | differing))


def one(asked: Ask) -> Need:
    (found,) = needs([asked])
    assert isinstance(found, Need)
    return found


def test_the_needs_of_many_tiers_are_those_of_each_alone() -> None:
    asks = [ask(kind, rate, 3) for kind in (SERVE, PREFILL, DECODE) for rate in (0.0, 5.0, 70.0, 300.0)]
    assert needs(asks) == [one(asked) for asked in asks]
    assert needs([]) == []
    for asked, kind in zip(asks, [SERVE] * 4 + [PREFILL] * 4 + [DECODE] * 4, strict=True):
        alone = size(kind, asked.forecast.work / asked.line.request_gpu_s)
        assert isinstance(alone, Sizing)
        assert one(asked).replicas == alone.replicas


def test_a_line_knows_its_work_its_load_line_and_what_binds() -> None:
    made = lined(SERVE, 4)
    assert made.request_gpu_s == pytest.approx(profile(SERVE).work_s[0])
    assert made.replica_work == pytest.approx(slo_rate(profile(SERVE), 4)[0] / 4 * made.request_gpu_s)
    assert made.constraint is Constraint.TPOT
    assert lined(PREFILL).constraint is Constraint.TTFT


def test_what_the_present_fleet_would_give_is_the_law_of_its_load() -> None:
    knee = float(slo_rate(profile(SERVE), 2)[0])
    fine, tight, over = (one(ask(SERVE, share * knee, 2)) for share in (0.5, 1.05, 1.5))
    assert fine.tpot_s is not None
    assert tight.tpot_s is not None
    assert fine.tpot_s < 0.05 < tight.tpot_s
    assert fine.attained > 0.95 > tight.attained > over.attained
    assert over.tpot_s == math.inf
    assert fine.law_tpot_s == fine.tpot_s  # all of it level, all ready
    rising = ask(SERVE, 0.5 * knee, 2, ready=1)
    rising = replace(rising, forecast=replace(rising.forecast, level=0.2 * rising.forecast.work))
    now = one(rising)
    assert now.law_tpot_s is not None
    assert now.tpot_s == fine.tpot_s > now.law_tpot_s
    assert one(ask(PREFILL, 10.0, 2)).tpot_s is None
    assert one(ask(SERVE, 10.0, 0, ready=0)).attained == 0.0


def test_a_step_down_asks_for_the_margin_and_for_the_doubt() -> None:
    knee = float(slo_rate(profile(SERVE), 2)[0])
    near = one(ask(SERVE, 0.97 * knee, 3))
    assert (near.replicas, near.release) == (2, 3)
    clear = ask(SERVE, 0.9 * knee, 3)
    assert (one(clear).replicas, one(clear).release) == (2, 2)
    doubtful = replace(clear, forecast=replace(clear.forecast, error=0.05 * clear.forecast.work))
    assert (one(doubtful).replicas, one(doubtful).release) == (2, 3)


def test_just_after_a_leap_the_margin_is_the_doubt_of_the_level_alone() -> None:
    knee = float(slo_rate(profile(SERVE), 2)[0])
    settled = ask(SERVE, 0.97 * knee, 3)
    assert (one(settled).replicas, one(settled).release) == (2, 3)
    fresh = replace(settled, forecast=replace(settled.forecast, memory=0.05, doubt=0.02 * settled.forecast.work))
    assert (one(fresh).replicas, one(fresh).release) == (2, 2)
    doubtful = replace(fresh, forecast=replace(fresh.forecast, doubt=0.06 * fresh.forecast.work))
    assert one(doubtful).release == 3


@pytest.mark.parametrize("memory", [0.02, 0.05, 0.1, 0.3, 1.0])
def test_chance_takes_a_step_down_back_no_oftener_than_the_promise_may_be_missed(memory: float) -> None:
    """White noise of density 1 about an unknown level, whose discounted mean is watched for two memories."""
    rng, paths, covered, at, work = np.random.default_rng(1), 8000, memory, 0.0, np.array(1.0)
    error = math.sqrt(1.0 / covered)
    doubt, level = 1.645 * error, rng.normal(0.0, error if memory < 1.0 else error / math.sqrt(2.0), paths)
    most = doubt + float(work * (margin_of(work, np.array(doubt), np.array(0.0), np.array(memory)) - 1.0))
    gpu_s, back = np.zeros(paths), np.zeros(paths, dtype=bool)
    for now in memory * 0.01 * 1.05 ** np.arange(250):
        if now > 2.0:
            break
        keep, at = math.exp(at - now), now
        gpu_s = keep * gpu_s + level * (1.0 - keep) + rng.normal(0.0, math.sqrt(0.5 * (1.0 - keep**2)), paths)
        covered = keep * covered + 1.0 - keep
        back |= gpu_s / covered + 1.645 / math.sqrt(covered) > most
    assert back.mean() <= 0.05


def test_a_load_that_stands_for_hours_does_not_wander_back_over_its_margin() -> None:
    """White noise about a level of 100, whose discounted mean has a whole memory, watched for a dozen more."""

    def margin(memory: float) -> float:
        return float(margin_of(*(np.array(part) for part in (100.0, 0.0, error, memory))))

    rng, paths, error = np.random.default_rng(2), 4000, 5.0
    at = rng.normal(0.0, error / math.sqrt(2.0), paths)
    most, keep, back = at + 100.0 * (margin(1.0) - 1.0), math.exp(-0.05), np.zeros(paths, dtype=bool)
    for _ in range(240):
        at = keep * at + rng.normal(0.0, error * math.sqrt(0.5 * (1.0 - keep**2)), paths)
        back |= at > most
    assert 0.0 < back.mean() < 0.1
    assert margin(0.1) < 1.0 + 0.5 * (margin(1.0) - 1.0), "soon after a leap less is asked for"
    assert margin(0.001) > 1.03, "but at least what is not yet known of the level, however little the doubt is held to"


def test_work_that_waits_counts_where_nothing_is_ready() -> None:
    waiting = 5.0 * HORIZON_S * lined(SERVE).replica_work
    assert one(ask(SERVE, 1.0, 0, ready=0, backlog_gpu_s=waiting)).replicas >= 5
    assert one(ask(SERVE, 1.0, 1, backlog_gpu_s=waiting)).replicas == 1


def test_headroom_is_kept_and_told() -> None:
    knee = float(slo_rate(profile(SERVE), 2)[0])
    found = one(ask(SERVE, 0.9 * knee, 2, headroom=0.2))
    assert (found.replicas, found.headroom) == (3, 0.2)


def test_those_told_to_come_back_are_sized_for_beside_the_forecast() -> None:
    made = lined(SERVE)
    asked = ask(SERVE, 10.0, 2)
    asked = replace(asked, returning_gpu_s=5.0 * made.request_gpu_s * asked.forecast.horizon_s)
    assert one(asked).rate_per_s == pytest.approx(15.0), "cleared by when a new replica could be there, not sooner"


def test_an_infeasible_promise_is_sized_for_the_nearest_feasible_one() -> None:
    hopeless = lined(replace(SERVE, slo=Slo(0.95, 0.5, 0.0, 0.004)))
    assert hopeless.infeasible is not None
    assert hopeless.infeasible.feasible is not None
    assert hopeless.replica_work > 0.0
    cramped = replace(SERVE, limits=EngineLimits(1024, 100, 8192))
    assert isinstance(line(cramped), Infeasible)


def test_from_a_real_tier_to_a_decision() -> None:
    knee = lined(SERVE, 3)
    rate = 2.5 * knee.replica_work / knee.request_gpu_s
    demand = coming(rate * knee.request_gpu_s)
    seen = TierObservation(1, 1, LEDGER, demand, one(Ask(knee, demand.forecast, 1, 1)))
    found = decided(seen)
    assert found.replicas == 3
    assert "TPOT binds" in found.why
    assert "1 could not keep up with it" in found.why
