"""Several gateways before one engine of nine slots: one of them owns the service, and its queue is the only one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from plimsoll.core.types import Role
from plimsoll.sim.attempt import AttemptOutcome
from plimsoll.sim.clients import RetryBehavior
from plimsoll.sim.policies.base import StaticPolicy
from tests.sim import sim_harness

SLOTS = 9
NINE_SLOTS = sim_harness.make_plant(replace(sim_harness.H200, max_num_seqs=SLOTS))
LOAD = sim_harness.PoissonLoad(400, 5.0, 2000, 245, seed=2).requests_drawn()


@cache
def run_behind(gateways: int, retry_behavior: RetryBehavior = RetryBehavior.NONE) -> sim_harness.FinishedRun:
    return sim_harness.simulate(
        LOAD,
        StaticPolicy({Role.SERVE: 1}, True),
        sim_harness.serve_manifest(slo={"ttft": "1s", "tpot": "20ms"}),
        NINE_SLOTS,
        gateways=gateways,
        retry_behavior=retry_behavior,
    )


def endings(done: sim_harness.FinishedRun) -> list[tuple[object, ...]]:
    return sorted((one.id, one.attempt, one.outcome, one.admitted_s, one.end_s) for one in done.attempts)


@pytest.mark.parametrize("gateways", [2, 3])
def test_several_gateways_admit_as_one(gateways: int) -> None:
    admission = run_behind(1).world.gateways[0].admission
    assert admission is not None
    assert admission.cost_model.batch == SLOTS
    assert Counter(one.outcome for one in run_behind(1).attempts)[AttemptOutcome.SHED] > 5, "it is at its capacity"
    assert endings(run_behind(gateways)) == endings(run_behind(1))


def test_several_gateways_know_retries_as_one() -> None:
    alone, shared = (run_behind(n, RetryBehavior.MIXED) for n in (1, 3))
    assert any(one.attempt > 1 and one.outcome is AttemptOutcome.OK for one in alone.attempts)
    assert endings(shared) == endings(alone)
    assert sum(one.reading().retried for one in shared.world.gateways) == alone.world.gateways[0].reading().retried


def test_several_gateways_count_what_they_decide_and_carry() -> None:
    owner, *others = [one.reading() for one in run_behind(3).world.gateways]
    alone = run_behind(1).world.gateways[0].reading()
    assert (owner.arrived, owner.rejected) == (alone.arrived, alone.rejected)
    assert all((one.arrived, one.rejected) == (0, {}) for one in others), "arrivals count where they were decided"
    succeeded = [one.succeeded for one in (owner, *others)]
    assert sum(succeeded) == alone.succeeded
    assert min(succeeded) > 0.25 * alone.succeeded, "ends count where they were carried"


def test_several_gateways_without_slo_pick_alone() -> None:
    done = sim_harness.simulate(
        LOAD, StaticPolicy({Role.SERVE: 2}, True), sim_harness.serve_manifest(slo=None), gateways=3
    )
    assert min(one.reading().arrived for one in done.world.gateways) > 0.25 * len(LOAD)
