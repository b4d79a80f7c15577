"""How a count moves: up at once, down after a while, within limits and modes, and the same after a restart."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core.forecast import Odds, Pause, Unknown
from plimsoll.core.lifecycle import Starting
from plimsoll.core.scaling import (
    Demand,
    Limit,
    Mark,
    Mode,
    Observation,
    Policy,
    RateLimit,
    Returns,
    State,
    TierPolicy,
    TierState,
    Window,
    decide,
    from_dict,
    to_dict,
)
from tests.core.scaling_lab import (
    BUSY,
    HORIZON_S,
    NEVER,
    OFTEN,
    REQUEST_GPU_S,
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

# Direction


def test_scale_up_is_immediate_and_complete() -> None:
    assert decided(tier(12.5, 1), bounds(1, 20)).replicas == 13


@pytest.mark.parametrize(("odds", "after_s"), [(NEVER, 0.0), (OFTEN, 54.0)])  # 60 s times 0.895, in ticks of 2 s
def test_scale_down_waits_startup_time_by_return_chance(odds: Odds, after_s: float) -> None:
    state, went_s = State(), math.nan
    for now_s in range(0, 120, 2):
        seen = tier(coming(1.9, odds), 4, need=needed(coming(1.8), 4))
        found = decide(Observation({"serve": seen}, state), Policy({"serve": bounds()}, SLO, miss_cost=0.0), now_s)
        state = found.state
        if found.tiers["serve"].replicas == 2:
            went_s = now_s
            break
    assert went_s == after_s


def test_scale_down_reason_names_window_and_cause() -> None:
    """In the one line of Event, status and `explain`, though the need is what moved the count."""
    old = State(0.0, {"serve": TierState(lower=(Mark(2, 40.0),))})
    found = decided(tier(coming(1.9, OFTEN), 4), now_s=100.0, state=old, miss_cost=0.0)
    assert (found.before, found.replicas) == (4, 2)
    assert found.why == (
        "forecast 19 req/s in 60 s needs 2 (knee 10 req/s each, TPOT binds); at most 2 needed for 60 s, the rest kept"
        " for 54 s: a start takes 60 s, and more are needed within it with a chance of 89%;"
        " 1 would keep 60.0% in promise, target 95%"
    )


def test_kept_replica_reason_names_remaining_window() -> None:
    old = State(0.0, {"serve": TierState(lower=(Mark(2, 40.0),))})
    found = decided(tier(coming(1.9, OFTEN), 4), now_s=60.0, state=old, miss_cost=0.0)
    assert (found.before, found.replicas) == (4, 4)
    # three are less likely to be outgrown than two, so that the third is held for less
    assert (
        "3 would be enough; down in 11 s of 31 s unless the need returns:"
        " a start takes 60 s, and more are needed within it with a chance of 51%"
    ) in found.why


def test_kept_replica_reason_names_miss_cost() -> None:
    known = Returns(trials=3.0, again=2.0)
    old = State(0.0, {"serve": TierState(lower=(Mark(2, 40.0),), returns=known)})
    for miss_cost, told in ((0.5, ", and what is missed then is worth 15 s more"), (9.0, "; 2 starts at most")):
        found = decided(tier(coming(1.9, NEVER), 4), now_s=60.0, state=old, miss_cost=miss_cost)
        assert told in found.why
    assert "missed then" not in decided(tier(coming(1.9, NEVER), 4), now_s=60.0, state=old, miss_cost=0.0).why


def test_kept_standby_replica_is_explained() -> None:
    """More than is needed, less than is worth giving back: of what no step moves, the step of the need tells."""
    just = 1.0 / (0.8 * OFTEN.between(1.0 / 0.8, 2.0 / 0.8))  # miss cost at which a second one is worth its price
    found = decided(tier(coming(0.8, OFTEN), 2), miss_cost=0.9 * just)
    assert found.replicas == 2
    assert said(found, "need").why.endswith("; 1 more kept against a leap")
    assert "kept" not in said(decided(tier(coming(0.8, OFTEN), 1), miss_cost=0.9 * just), "need").why


def test_returning_need_restarts_stabilization_window() -> None:
    state = State()
    for now_s in range(0, 200, 5):
        work = 3.5 if now_s % 20 == 0 else 1.9
        seen = tier(coming(work, OFTEN), 4)
        found = decide(Observation({"serve": seen}, state), Policy({"serve": bounds()}, SLO, miss_cost=0.0), now_s)
        state = found.state
        assert found.tiers["serve"].replicas == 4


@pytest.mark.parametrize("work", [0.0, 0.001, 0.9])
@pytest.mark.parametrize(("miss_cost", "after_s"), [(0.0, HORIZON_S), (30.0, HORIZON_S + 30 * REQUEST_GPU_S)])
def test_last_replica_stays_for_cold_start_cost(work: float, miss_cost: float, after_s: float) -> None:
    """However slowly the forecast fades: by the prior, ski rental."""
    stays, goes = (
        decided(tier(work, 1), bounds(0), pause=quiet(after_s + late_s), miss_cost=miss_cost) for late_s in (-0.1, 0.1)
    )
    assert (stays.replicas, goes.replicas) == (1, 0)
    assert "the last one stays: no request for" in said(stays, "need").why
    assert f"none stays: no request for {after_s:.0f} s, one within 60 s has a chance of" in goes.why
    assert goes.why.endswith("; at once, since the pause was waited for")


@pytest.mark.parametrize("stopped_s", [0, 5, 30])
def test_stopped_arrivals_hold_fleet_until_return_is_unlikely(stopped_s: int) -> None:
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


def test_min_and_max_replicas_are_reported_when_binding() -> None:
    high = decided(tier(7.5, 6), bounds(1, 6))
    assert (high.replicas, high.limits) == (6, (Limit.MAX,))
    assert "8 wanted, maxReplicas is 6" in said(high, "limits").why
    low = decided(tier(0.5, 2), bounds(2, 6))
    assert (low.replicas, low.limits) == (2, (Limit.MIN,))
    assert decided(tier(2.5, 3)).limits == ()


def test_rate_limit_holds_in_every_window() -> None:
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


def test_rate_limits_use_their_own_windows() -> None:
    policy = Policy({"serve": bounds(1, 30, up=RateLimit(2, 60.0), down=RateLimit(1, 600.0))}, SLO)
    state, replicas, history = State(), 1, []
    for now_s in range(0, 240, 10):
        found = decide(Observation({"serve": tier(9.5, replicas)}, state), policy, float(now_s))
        state, replicas = found.state, found.tiers["serve"].replicas
        history.append(replicas)
    assert [history[at] for at in (0, 5, 7, 14, 21)] == [3, 3, 5, 7, 9]


def test_rate_limit_does_not_undo_external_scale_up() -> None:
    state = State(0.0, {"serve": TierState(ordered=(Mark(1, -100.0), Mark(10, -5.0)))})
    assert decided(tier(11.5, 10), bounds(1, 30, up=RateLimit(2, 60.0)), state=state).replicas == 10


def test_schedule_window_is_ready_at_start_and_limits_within() -> None:
    policy = bounds(1, 10, schedule=(Window(1000.0, 2000.0, min_replicas=4), Window(3000.0, 4000.0, max_replicas=2)))
    seen = tier(0.5, 1)
    assert [decided(seen, policy, at).replicas for at in (900.0, 941.0, 1999.0, 2000.0)] == [1, 4, 4, 1]
    busy = tier(4.5, 5)
    assert [decided(busy, policy, at).replicas for at in (2999.0, 3000.0, 4000.0)] == [5, 2, 5]
    assert "by the schedule" in decided(busy, policy, 3000.0).why


def test_gpu_budget_reduces_largest_tier_to_minimum_at_most() -> None:
    found = pair(tier(3.5, 4), tier(7.5, 8), granted=9)
    assert counts(found) == (3, 6)
    assert Limit.BUDGET in found.tiers["decode"].limits
    assert "grants 9 GPUs" in found.tiers["decode"].why
    assert counts(pair(tier(3.5, 4), tier(7.5, 8), granted=0, least=1)) == (1, 1)
    assert counts(pair(tier(3.5, 4), tier(7.5, 8), granted=2)) == (1, 1)
    assert counts(pair(tier(3.5, 4), tier(7.5, 8), granted=1)) == (0, 0)  # one tier alone serves nobody


def test_unschedulable_pods_back_off_until_gone() -> None:
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
def test_non_auto_mode_keeps_replicas_and_recommends(rest: dict[str, Any]) -> None:
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
def test_decide_after_restart_or_repeat_is_equal(
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
def test_decide_any_input_is_within_limits_and_explained(
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


def test_decision_state_is_about_a_kilobyte() -> None:
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
def test_load_decision_state_invalid_state_raises(bad: Any) -> None:
    with pytest.raises(ValueError, match="scaling state"):
        from_dict(bad)


def test_scaling_policy_invalid_values_raise() -> None:
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
