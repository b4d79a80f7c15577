"""GPUs that a cluster has: pods beyond them are pending, as the operator sees them, and cost nothing."""

from __future__ import annotations

from random import Random

import pytest

from plimsoll.core.autoscaling.scaling_decision import ScalingLimit, TierDecision
from plimsoll.core.types import Role
from plimsoll.sim.attempt import AttemptOutcome, TraceRequest
from plimsoll.sim.errors import BadInput
from plimsoll.sim.fleet import FleetTier, GpuPool
from plimsoll.sim.policies.base import Observation, StaticPolicy
from tests.sim import sim_harness

EVENLY = [TraceRequest(float(n), 100, 2) for n in range(100)]


def tier(gpus: int, each: int = 1) -> FleetTier:
    hardware = sim_harness.make_plant(start_s=20.0, gpus={Role.SERVE: each})
    return FleetTier(Role.SERVE, hardware, Random(1), GpuPool(gpus))


def test_tier_without_free_gpu_keeps_pod_pending_with_reason() -> None:
    of = tier(3, each=2)
    of.start_initial(1)
    made, _ = of.scale(2, 10.0)
    assert not of.schedule(made[0], 10.0)
    assert of.counts() == (2, 1, 1, 0)
    [snapshot] = of.snapshot(500.0, 1000.0).starting
    assert snapshot.unschedulable_reason is not None
    assert "nvidia.com/gpu" in snapshot.unschedulable_reason
    assert (snapshot.phase, snapshot.created_s) == ("schedule", 1010.0)
    assert of.replica_seconds(500.0) == 500.0


def test_tier_pending_pod_starts_when_gpu_is_freed() -> None:
    of = tier(1)
    [old] = of.start_initial(1)
    [new], _ = of.scale(2, 10.0)
    assert not of.schedule(new, 10.0)
    of.end(old, 40.0)
    assert of.schedule(new, 40.0)
    assert new.ready_s == pytest.approx(60.0)
    assert sum(seconds for _, seconds in new.startup_phases) == pytest.approx(50.0)
    [snapshot] = of.snapshot(40.0, 0.0).starting
    assert snapshot.unschedulable_reason is None
    assert of.replica_seconds(100.0) == pytest.approx(40.0 + 60.0)


def test_tier_paid_time_stops_at_the_given_time() -> None:
    of = tier(3)
    [first] = of.start_initial(1)
    of.scale(0, 100.0)
    of.end(first, 700.0)
    assert [of.replica_seconds(until_s) for until_s in (50.0, 600.0, 700.0, 900.0)] == [50.0, 600.0, 700.0, 700.0]
    [late], _ = of.scale(1, 800.0)
    assert of.schedule(late, 800.0)
    of.end(late, 810.0)
    assert [of.replica_seconds(until_s) for until_s in (750.0, 805.0, 900.0)] == [700.0, 705.0, 710.0]


def test_tier_removed_pending_pod_frees_no_gpu() -> None:
    cards = GpuPool(1)
    of = FleetTier(Role.SERVE, sim_harness.make_plant(), Random(1), cards)
    of.start_initial(1)
    of.scale(2, 10.0)
    of.scale(1, 20.0)
    assert cards.free == 0
    assert not of.pending
    assert of.replica_seconds(30.0) == 30.0


def test_simulate_too_few_gpus_at_start_is_rejected() -> None:
    with pytest.raises(BadInput, match="--max-gpus: too few for the 2 serve replicas"):
        sim_harness.simulate(
            EVENLY, StaticPolicy({Role.SERVE: 2}, runs_operator=False), initial={Role.SERVE: 2}, max_gpus=1
        )


class ScriptedPolicy(StaticPolicy):
    """Orders so many, gives some back later."""

    def desired_replicas(self, observation: Observation) -> dict[Role, int]:
        return {Role.PREFILL: 1 if observation.now_s < 50.0 else 2, Role.DECODE: 3 if observation.now_s < 50.0 else 1}


def test_tiers_share_gpus_oldest_pending_pod_first() -> None:
    both = {Role.PREFILL: 1, Role.DECODE: 1}
    policy = ScriptedPolicy(both, runs_operator=False)
    done = sim_harness.simulate(
        EVENLY, policy, sim_harness.pd_manifest(), sim_harness.make_plant(start_s=10.0), initial=both, max_gpus=3
    )
    up = {role: [(at_s, ready) for at_s, one, _, ready, *_ in done.world.log.replicas if one is role] for role in both}
    assert max(ready for _, ready in up[Role.DECODE]) == 2  # the third one found no GPU
    second = next(at_s for at_s, ready in up[Role.PREFILL] if ready == 2)
    freed = next(at_s for at_s, one, *_, draining in done.world.log.replicas if at_s > 50.0 and not draining)
    assert second >= max(freed, 50.0) + 10.0 - 1e-6
    assert sum(one.replica_seconds(100.0) for one in done.world.tiers.values()) <= 3 * 100.0
    assert {attempt.outcome for attempt in done.attempts} == {AttemptOutcome.OK}


def test_operator_sees_unschedulable_pods() -> None:
    rush = [TraceRequest(n / 10, 1500, 300) for n in range(1500)]
    of = sim_harness.serve_manifest(tiers={"serve": {"minReplicas": 1, "maxReplicas": 8}})
    done = sim_harness.simulate(rush, of=of, hardware=sim_harness.make_plant(scale=4.0), max_gpus=2)
    assert max(ready for _, _, _, ready, *_ in done.world.log.replicas) == 2
    decisions = [why for _, _, _, why in done.world.log.changes if isinstance(why, TierDecision)]
    assert any(ScalingLimit.UNSCHEDULABLE in one.limits for one in decisions)
    assert any("Insufficient nvidia.com/gpu" in step.reason for one in decisions for step in one.steps)
