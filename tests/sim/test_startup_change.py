"""Starts that change while a service runs: what the autoscaler orders until it knows."""

from __future__ import annotations

from dataclasses import replace

from bench.scoreboard.listed_starts import ListedStarts
from plimsoll.core.autoscaling.scaling_decision import TierDecision
from plimsoll.core.types import Role
from plimsoll.sim import profile
from plimsoll.sim.load_phases import reversals
from tests.sim.sim_harness import FinishedRun, PoissonLoad, make_plant, serve_manifest, simulate

STEP_S = 60.0


def step_run(known_s: float, then_s: float) -> FinishedRun:
    """From 1 to 6 requests/s, after three starts of known_s. Each start from then on takes then_s."""
    before, after = PoissonLoad(60, 1.0), PoissonLoad(1200, 6.0, seed=2)
    requests = [one for one in before.requests_drawn() if one.at_s < STEP_S]
    requests += [replace(one, at_s=one.at_s + STEP_S) for one in after.requests_drawn()]
    starts = ListedStarts(samples_s=(known_s, known_s, known_s, then_s))
    of = serve_manifest(tiers={"serve": {"minReplicas": 1, "maxReplicas": 16}})
    plant = make_plant(profile.load("h200-70b"), startup=starts)
    return simulate(requests, of=of, hardware=plant, initial={Role.SERVE: 3}, observes_initial_startups=True)


def test_slower_starts_have_one_replacement() -> None:
    run = step_run(30.0, 150.0)
    decisions = [(at_s, one) for at_s, _, _, one in run.world.log.changes if at_s >= STEP_S]
    orders = [(at_s, one.replicas) for at_s, one in decisions if isinstance(one, TierDecision)]
    needed = max(replicas for at_s, replicas in orders if at_s < STEP_S + 60.0)  # before any start is overdue
    assert any(len(one.overdue) >= 3 for _, one in decisions if isinstance(one, TierDecision))
    assert max(replicas for _, replicas in orders) <= needed + 2  # what the backlog adds, and one replacement
    assert max(reversals(orders, [0.0], 1e4)) <= 1
