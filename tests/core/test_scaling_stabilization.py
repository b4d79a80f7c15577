"""How a count moves: up at once, down after a while, within limits and modes, and the same after a restart."""

from __future__ import annotations

import math
from typing import Any

import pytest

from plimsoll.core.autoscaling.decide import decide
from plimsoll.core.autoscaling.decision_state import (
    DecisionState,
    DownscaleRegret,
    TierDecisionState,
    TimedReplicas,
)
from plimsoll.core.autoscaling.observations import ServiceObservation
from plimsoll.core.autoscaling.scaling_decision import DecisionStep, ScalingLimit, TierDecision
from plimsoll.core.autoscaling.scaling_policy import (
    ReplicaRateLimit,
    ScalingPolicy,
    ScheduleWindow,
)
from plimsoll.core.autoscaling.startup_time import StartingPod
from plimsoll.core.demand.standby_value import GrowthDistribution
from tests.core.scaling_fixtures import (
    FREQUENT_GROWTH,
    HORIZON_S,
    NO_GROWTH,
    REQUEST_GPU_S,
    SLO,
    decide_one,
    idle_status,
    make_forecast,
    observed_tier,
    replica_bounds,
    sizing_for,
    step_message,
)

# Replicas that start


def _starting_tier(work: float, replicas: int, ready: int, created_s: float, **more: Any) -> Any:
    pods = tuple(StartingPod(f"pod-{n}", created_s, "load", created_s, **more) for n in range(replicas - ready))
    return observed_tier(make_forecast(work, NO_GROWTH), replicas, ready, starting=pods)


def _down_after_s(created_s: float, **more: Any) -> float:
    """Seconds until a replica that has been starting since `created_s` goes, if 1 of 2 is enough from 30 s on."""
    state: DecisionState | None = None
    for tick in range(200):
        now_s = 30.0 + tick
        observed = ServiceObservation({"serve": _starting_tier(0.5, 2, 1, created_s, **more)}, state or DecisionState())
        found = decide(observed, ScalingPolicy({"serve": replica_bounds(1, 4)}, SLO, miss_cost=0.0), now_s)
        if found.tiers["serve"].replicas == 1:
            return now_s - 30.0
        state = found.state
    raise AssertionError("it stays")


def test_starting_replica_stays_as_long_as_it_had_started() -> None:
    assert _down_after_s(created_s=30.0) == 0.0
    assert _down_after_s(created_s=10.0) == 20.0


def test_starting_replica_stays_at_most_one_startup() -> None:
    assert _down_after_s(created_s=30.0 - 10.0 * HORIZON_S) == HORIZON_S


def test_unschedulable_replica_has_no_start_to_waste() -> None:
    assert _down_after_s(created_s=10.0, unschedulable_reason="Insufficient nvidia.com/gpu") == 0.0


# Direction


def test_scale_up_is_immediate_and_complete() -> None:
    assert decide_one(observed_tier(12.5, 1), replica_bounds(1, 20)).replicas == 13


@pytest.mark.parametrize(
    ("odds", "after_s"), [(NO_GROWTH, 0.0), (FREQUENT_GROWTH, 54.0)]
)  # 60 s times 0.895, in ticks of 2 s
def test_scale_down_waits_startup_time_by_return_chance(odds: GrowthDistribution, after_s: float) -> None:
    state, went_s = DecisionState(), math.nan
    for now_s in range(0, 120, 2):
        observed = observed_tier(make_forecast(1.9, odds), 4, sizing=sizing_for(make_forecast(1.8), 4))
        found = decide(
            ServiceObservation({"serve": observed}, state),
            ScalingPolicy({"serve": replica_bounds()}, SLO, miss_cost=0.0),
            now_s,
        )
        state = found.state
        if found.tiers["serve"].replicas == 2:
            went_s = now_s
            break
    assert went_s == after_s


def test_scale_down_reason_names_window_and_cause() -> None:
    """In the one line of Event, status and `explain`, though the need is what moved the count."""
    old = DecisionState(0.0, {"serve": TierDecisionState(downscale_candidates=(TimedReplicas(2, 40.0),))})
    found = decide_one(observed_tier(make_forecast(1.9, FREQUENT_GROWTH), 4), now_s=100.0, state=old, miss_cost=0.0)
    assert (found.previous_replicas, found.replicas) == (4, 2)
    assert found.summary == (
        "forecast 19 req/s in 60 s needs 2 (SLO capacity 10 req/s each, limited by TPOT); "
        "2 enough for 60 s, stabilization window 54 s: start-up 60 s, 89% chance that the load returns within it;"
        " 1 would meet the SLO for 60.0% of the requests, target 95%"
    )


def test_retained_replica_reason_names_remaining_window() -> None:
    old = DecisionState(0.0, {"serve": TierDecisionState(downscale_candidates=(TimedReplicas(2, 40.0),))})
    found = decide_one(observed_tier(make_forecast(1.9, FREQUENT_GROWTH), 4), now_s=60.0, state=old, miss_cost=0.0)
    assert (found.previous_replicas, found.replicas) == (4, 4)
    # three are less likely to be outgrown than two, so that the third is held for less
    assert (
        "3 would be enough; scale down in 11 s, stabilization window 31 s:"
        " start-up 60 s, 51% chance that the load returns within it"
    ) in found.summary


def test_retained_replica_reason_names_miss_cost() -> None:
    known = DownscaleRegret(trials=3.0, needed_again=2.0)
    old = DecisionState(
        0.0, {"serve": TierDecisionState(downscale_candidates=(TimedReplicas(2, 40.0),), downscale_regret=known)}
    )
    for miss_cost, reported in ((0.5, ", SLO misses then worth 15 s"), (9.0, "; at most 2 start-ups")):
        found = decide_one(observed_tier(make_forecast(1.9, NO_GROWTH), 4), now_s=60.0, state=old, miss_cost=miss_cost)
        assert reported in found.summary
    assert (
        "SLO misses"
        not in decide_one(observed_tier(make_forecast(1.9, NO_GROWTH), 4), now_s=60.0, state=old, miss_cost=0.0).summary
    )


def test_retained_standby_replica_is_explained() -> None:
    """More than is needed, less than is worth giving back: of what no step moves, the step of the need tells."""
    just = 1.0 / (
        0.8 * FREQUENT_GROWTH.between(1.0 / 0.8, 2.0 / 0.8)
    )  # miss cost at which a second one is worth its price
    found = decide_one(observed_tier(make_forecast(0.8, FREQUENT_GROWTH), 2), miss_cost=0.9 * just)
    assert found.replicas == 2
    assert step_message(found, "sizing").reason.endswith("; 1 more kept as standby")
    assert (
        "kept"
        not in step_message(
            decide_one(observed_tier(make_forecast(0.8, FREQUENT_GROWTH), 1), miss_cost=0.9 * just), "sizing"
        ).reason
    )


def test_returning_need_restarts_stabilization_window() -> None:
    state = DecisionState()
    for now_s in range(0, 200, 5):
        work = 3.5 if now_s % 20 == 0 else 1.9
        observed = observed_tier(make_forecast(work, FREQUENT_GROWTH), 4)
        found = decide(
            ServiceObservation({"serve": observed}, state),
            ScalingPolicy({"serve": replica_bounds()}, SLO, miss_cost=0.0),
            now_s,
        )
        state = found.state
        assert found.tiers["serve"].replicas == 4


@pytest.mark.parametrize("work", [0.0, 0.001, 0.9])
@pytest.mark.parametrize(("miss_cost", "after_s"), [(0.0, HORIZON_S), (30.0, HORIZON_S + 30 * REQUEST_GPU_S)])
def test_last_replica_stays_for_cold_start_cost(work: float, miss_cost: float, after_s: float) -> None:
    """However slowly the forecast fades: by the prior, ski rental."""
    stays, goes = (
        decide_one(observed_tier(work, 1), replica_bounds(0), pause=idle_status(after_s + late_s), miss_cost=miss_cost)
        for late_s in (-0.1, 0.1)
    )
    assert (stays.replicas, goes.replicas) == (1, 0)
    assert "the last replica stays: no request for" in step_message(stays, "sizing").reason
    assert f"scale to zero: no request for {after_s:.0f} s;" in goes.summary
    assert goes.summary.endswith("an idle replica would cost more than the cold start that it may save")


@pytest.mark.parametrize("stopped_s", [0, 5, 30])
def test_stopped_arrivals_hold_fleet_until_return_is_unlikely(stopped_s: int) -> None:
    state, went_s = DecisionState(), math.inf
    for now_s in range(120):
        observed = observed_tier(make_forecast(0.0, NO_GROWTH, level_shift_age_s=float(now_s + stopped_s)), 4)
        found = decide(
            ServiceObservation({"serve": observed}, state), ScalingPolicy({"serve": replica_bounds(1)}, SLO), now_s
        )
        state = found.state
        if found.tiers["serve"].replicas < 4:
            went_s = now_s
            break
    # After t: t + stopped_s is how long nothing came, and t >= L * L / (L + t + stopped_s).
    assert went_s == math.ceil((-(HORIZON_S + stopped_s) + math.hypot(HORIZON_S + stopped_s, 2 * HORIZON_S)) / 2)
    assert went_s > 0.4 * HORIZON_S


# Limits


def test_min_and_max_replicas_are_reported_when_binding() -> None:
    high = decide_one(observed_tier(7.5, 6), replica_bounds(1, 6))
    assert (high.replicas, high.limits) == (6, (ScalingLimit.MAX,))
    assert "8 needed, maxReplicas is 6" in step_message(high, "limits").reason
    low = decide_one(observed_tier(0.5, 2), replica_bounds(2, 6))
    assert (low.replicas, low.limits) == (2, (ScalingLimit.MIN,))
    assert decide_one(observed_tier(2.5, 3)).limits == ()


def test_rate_limit_holds_in_every_window() -> None:
    policy = ScalingPolicy(
        {
            "serve": replica_bounds(
                1, 30, scale_up_limit=ReplicaRateLimit(2, 60.0), scale_down_limit=ReplicaRateLimit(1, 60.0)
            )
        },
        SLO,
    )
    state, replicas, history = DecisionState(), 1, []
    for now_s in range(0, 600, 10):
        work = 9.5 if now_s < 300 else 0.5
        found = decide(ServiceObservation({"serve": observed_tier(work, replicas)}, state), policy, float(now_s))
        state, replicas = found.state, found.tiers["serve"].replicas
        history.append(replicas)
    for at in range(len(history) - 6):
        assert history[at + 5] - history[at] <= 2
        assert history[at] - history[at + 5] <= 1
    assert max(history) == 10
    assert len(state.tiers["serve"].order_history) < 10


def test_rate_limits_use_their_own_windows() -> None:
    policy = ScalingPolicy(
        {
            "serve": replica_bounds(
                1, 30, scale_up_limit=ReplicaRateLimit(2, 60.0), scale_down_limit=ReplicaRateLimit(1, 600.0)
            )
        },
        SLO,
    )
    state, replicas, history = DecisionState(), 1, []
    for now_s in range(0, 240, 10):
        found = decide(ServiceObservation({"serve": observed_tier(9.5, replicas)}, state), policy, float(now_s))
        state, replicas = found.state, found.tiers["serve"].replicas
        history.append(replicas)
    assert [history[at] for at in (0, 5, 7, 14, 21)] == [3, 3, 5, 7, 9]


def test_rate_limit_does_not_undo_external_scale_up() -> None:
    state = DecisionState(
        0.0, {"serve": TierDecisionState(order_history=(TimedReplicas(1, -100.0), TimedReplicas(10, -5.0)))}
    )
    assert (
        decide_one(
            observed_tier(11.5, 10), replica_bounds(1, 30, scale_up_limit=ReplicaRateLimit(2, 60.0)), state=state
        ).replicas
        == 10
    )


def test_schedule_window_is_ready_at_start_and_limits_within() -> None:
    policy = replica_bounds(
        1, 10, schedule=(ScheduleWindow(1000.0, 2000.0, min_replicas=4), ScheduleWindow(3000.0, 4000.0, max_replicas=2))
    )
    observed = observed_tier(0.5, 1)
    assert [decide_one(observed, policy, at).replicas for at in (900.0, 941.0, 1999.0, 2000.0)] == [1, 4, 4, 1]
    busy = observed_tier(4.5, 5)
    assert [decide_one(busy, policy, at).replicas for at in (2999.0, 3000.0, 4000.0)] == [5, 2, 5]
    assert "by the schedule" in decide_one(busy, policy, 3000.0).summary


def test_unschedulable_pods_back_off_until_gone() -> None:
    refused = (StartingPod("a", 0.0, unschedulable_reason="0/3 nodes are available: insufficient nvidia.com/gpu"),)
    state, ordered, raised = DecisionState(), 2, []
    for now_s in range(0, 400, 5):
        observed = observed_tier(19.5, ordered, 1, starting=refused)
        found = decide(
            ServiceObservation({"serve": observed}, state),
            ScalingPolicy({"serve": replica_bounds(1, 30)}, SLO),
            float(now_s),
        )
        state = found.state
        assert ScalingLimit.UNSCHEDULABLE in found.tiers["serve"].limits
        if found.tiers["serve"].replicas > ordered:
            raised.append(now_s)
    assert raised == [30, 90, 210]
    assert "insufficient nvidia.com/gpu" in step_message(found.tiers["serve"], "pending").reason
    assert found.tiers["serve"].limit_notes[0].bound == "pods are unschedulable"
    rollout = decide(
        ServiceObservation({"serve": observed_tier(0.5, 1, 1, starting=refused)}, DecisionState()),
        ScalingPolicy({"serve": replica_bounds(1, 1)}, SLO),
        400.0,
    )
    assert rollout.tiers["serve"].limit_notes == (), "the replacement of a ready pod withholds no replica"
    free = decide(
        ServiceObservation({"serve": observed_tier(19.5, 2)}, state),
        ScalingPolicy({"serve": replica_bounds(1, 30)}, SLO),
        400.0,
    )
    assert free.tiers["serve"].replicas == 20
    assert free.state.tiers["serve"].scheduling_backoff.tries == 0


def test_scale_up_gives_only_the_reason_that_raised_the_count() -> None:
    steps = (
        DecisionStep("sizing", 0, "forecast needs 0"),
        DecisionStep("stabilization", 1, "0 would be enough; scale down in 3 s"),
        DecisionStep("limits", 2, "minReplicas is 2 by the schedule"),
    )
    decision = TierDecision(2, steps, previous_replicas=1)
    assert decision.summary == "minReplicas is 2 by the schedule"
    assert decision.brief_reasons == ("minReplicas is 2 by the schedule",)


def test_scale_up_gives_all_steps_between_old_and_new_count() -> None:
    steps = (
        DecisionStep("demand", 1, "forecast"),
        DecisionStep("sizing", 5, "needs 5"),
        DecisionStep("stabilization", 5, "up"),
        DecisionStep("limits", 3, "maxReplicas is 3"),
    )
    assert TierDecision(3, steps, previous_replicas=1).brief_reasons == ("needs 5", "maxReplicas is 3")
