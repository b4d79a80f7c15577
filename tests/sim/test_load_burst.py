"""A burst that is over before any replica could start: what the autoscaler orders, and how it takes it back."""

from __future__ import annotations

from dataclasses import replace

from plimsoll.core.autoscaling.scaling_decision import TierDecision
from plimsoll.core.types import Role
from plimsoll.sim import profile
from plimsoll.sim.attempt import TraceRequest
from plimsoll.sim.load_phases import reversals
from tests.sim.sim_harness import PoissonLoad, make_plant, serve_manifest, simulate

BURST_S = 180.0


def later(load: PoissonLoad, by_s: float) -> list[TraceRequest]:
    return [replace(one, at_s=one.at_s + by_s) for one in load.requests_drawn()]


def test_burst_of_four_seconds_reverses_once() -> None:
    burst = later(PoissonLoad(40, 10.0, seed=2), BURST_S)  # four replicas would carry its rate
    requests = sorted(PoissonLoad(300, 1.0).requests_drawn() + burst, key=lambda one: one.at_s)
    of = serve_manifest(tiers={"serve": {"minReplicas": 1, "maxReplicas": 12}})
    plant = make_plant(profile.load("h200-70b"), start_s=60.0)
    run = simulate(requests, of=of, hardware=plant, initial={Role.SERVE: 1})
    orders = [
        (at_s, one.replicas)
        for at_s, _, _, one in run.world.log.changes
        if at_s >= BURST_S and isinstance(one, TierDecision)
    ]
    assert 2 <= max(replicas for _, replicas in orders) <= 6  # with what the burst left in the queue
    assert max(reversals(orders, [0.0], 1e4)) <= 1
    assert orders[-1][1] == 1
