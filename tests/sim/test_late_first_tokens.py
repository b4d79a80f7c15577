"""A host that adds to each first token: what shows it before a standby replica is ready is not forgotten."""

from __future__ import annotations

from dataclasses import replace

from plimsoll.core.autoscaling.scaling_decision import TierDecision
from plimsoll.sim import profile
from tests.sim.sim_harness import PoissonLoad, make_plant, serve_manifest, simulate


def test_standby_replica_stays_while_first_tokens_are_late() -> None:
    """It is ordered in the first minute, before late first tokens correct the model, and is not ordered twice."""
    slow_host = replace(profile.load("h200-8b-hot"), frontend=0.107)
    of = serve_manifest(slo={"ttft": "200ms", "tpot": "50ms"}, tiers={"serve": {"minReplicas": 1, "maxReplicas": 8}})
    requests = PoissonLoad(4000, 10.0, output=220.0).requests_drawn()
    run = simulate(requests, of=of, hardware=make_plant(slow_host, start_s=60.0))
    ordered = [
        one.replicas
        for at_s, _, _, one in run.world.log.changes
        if isinstance(one, TierDecision) and at_s < requests[-1].at_s
    ]
    assert ordered[0] == 2
    assert min(ordered) == 2
