"""Rate limits, bounds and back-off against each other, over long random sequences."""

from __future__ import annotations

import math
import random

import pytest

from plimsoll.core.autoscaling.decide import decide
from plimsoll.core.autoscaling.decision_state import DecisionState
from plimsoll.core.autoscaling.observations import ServiceObservation
from plimsoll.core.autoscaling.scaling_decision import ScalingDecision
from plimsoll.core.autoscaling.scaling_policy import ReplicaRateLimit, ScalingMode, ScalingPolicy, TierPolicy
from plimsoll.core.autoscaling.startup_time import StartingPod
from tests.core.scaling_fixtures import SLO, make_forecast, observed_tier, replica_bounds


def run(policy: TierPolicy, seed: int, ticks: int = 600, jumps: bool = False) -> list[tuple[float, int, int]]:
    """(now, replicas before, replicas decided) of a tier whose load leaps about; its replicas are there at once."""
    rng, state, count, now_s, found = random.Random(seed), DecisionState(), max(1, policy.min_replicas), 1e6, []
    work = 1.0
    for _ in range(ticks):
        now_s += rng.choice((0.0, 1.0, 5.0, 20.0)) + (rng.choice((-500.0, 1e5)) if jumps and rng.random() < 0.02 else 0)
        work = work if rng.random() < 0.7 else rng.uniform(0.0, 14.0)
        decision = decide(
            ServiceObservation({"serve": observed_tier(make_forecast(work), count)}, state),
            ScalingPolicy({"serve": policy}, SLO),
            now_s,
        )
        state = decision.state
        found.append((now_s, count, decision.tiers["serve"].replicas))
        count = decision.tiers["serve"].replicas
    return found


@pytest.mark.parametrize("seed", range(4))
def test_rate_limit_is_respected_in_every_window(seed: int) -> None:
    up, down = ReplicaRateLimit(2, 30.0), ReplicaRateLimit(1, 45.0)
    moves = run(TierPolicy(1, 16, scale_up_limit=up, scale_down_limit=down), seed)
    assert {after > before for _, before, after in moves if after != before} == {True, False}
    for at, (now_s, before, after) in enumerate(moves):
        in_force = [before] + [b for later_s, b, _ in moves[: at + 1] if later_s > now_s - up.per_s]
        if after > before:
            assert after <= min(in_force) + up.replicas
        in_force = [before] + [b for later_s, b, _ in moves[: at + 1] if later_s > now_s - down.per_s]
        if after < before:
            assert after >= max(in_force) - down.replicas


@pytest.mark.parametrize("seed", range(4))
def test_rate_limit_any_clock_keeps_bounds_and_expires(seed: int) -> None:
    moves = run(
        TierPolicy(2, 11, scale_up_limit=ReplicaRateLimit(1, 20.0), scale_down_limit=ReplicaRateLimit(1, 20.0)),
        seed,
        jumps=True,
    )
    assert all(2 <= after <= 11 and abs(after - before) <= 1 for _, before, after in moves)
    assert {2, 11} <= {after for _, _, after in moves}, "in 600 ticks it has been everywhere"


def test_replica_bounds_take_precedence_over_rate_limit() -> None:
    def replicas_for(policy: TierPolicy, work: float, count: int) -> int:
        observed = ServiceObservation({"serve": observed_tier(make_forecast(work), count)}, DecisionState())
        return decide(observed, ScalingPolicy({"serve": policy}, SLO), 0.0).tiers["serve"].replicas

    slow = ReplicaRateLimit(1, 3600.0)
    assert replicas_for(TierPolicy(6, 20, scale_up_limit=slow), 0.5, 1) == 6
    assert replicas_for(TierPolicy(1, 4, scale_down_limit=slow), 0.5, 9) == 4
    assert replicas_for(TierPolicy(3, 3), 50.0, 1) == 3
    assert replicas_for(TierPolicy(0, 0), 50.0, 9) == 0


def test_unschedulable_pods_back_off_and_are_removed() -> None:
    state, count, requested, desired = DecisionState(), 2, 0, 7.5
    policy = ScalingPolicy({"serve": replica_bounds(1, 100)}, SLO)

    def tick(now_s: float, work: float) -> ScalingDecision:
        waits = tuple(
            StartingPod(f"p{n}", now_s - 30.0, unschedulable_reason="no room") for n in range(max(0, count - 2))
        )
        return decide(
            ServiceObservation({"serve": observed_tier(work, count, min(2, count), starting=waits)}, state),
            policy,
            now_s,
        )

    for second in range(3600):
        decision = tick(float(second), desired + second / 100.0)
        state, before, count = decision.state, count, decision.tiers["serve"].replicas
        requested += count > before
        assert count >= before
    assert 2 <= requested <= 12, "of the doubling back-off, though more is wanted at every tick"
    for second in range(3600, 3900):
        decision = tick(float(second), 0.5)
        state, count = decision.state, decision.tiers["serve"].replicas
    assert count <= 2


@pytest.mark.parametrize("mode", [ScalingMode.AUTO, ScalingMode.RECOMMEND])
def test_paused_or_recommend_mode_ignores_limits(mode: ScalingMode) -> None:
    policy = ScalingPolicy(
        {"serve": TierPolicy(6, 20, scale_up_limit=ReplicaRateLimit(1, 10.0))},
        SLO,
        mode=mode,
        paused=mode is ScalingMode.AUTO,
    )
    observed = ServiceObservation({"serve": observed_tier(9.5, 2)}, DecisionState())
    assert decide(observed, policy, 0.0).tiers["serve"].replicas == 2


def test_invalid_bounds_and_rate_limits_raise() -> None:
    for least, most in ((2, 1), (-1, 3), (0, -1)):
        with pytest.raises(ValueError, match=r"[Rr]eplicas"):
            TierPolicy(least, most)
    for replicas, per_s in ((0, 10.0), (1, 0.0), (1, math.nan), (1, math.inf), (-1, 10.0)):
        with pytest.raises(ValueError, match=r"."):
            ReplicaRateLimit(replicas, per_s)
