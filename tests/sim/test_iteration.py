"""What an instrumented scheduler would tell of its newest step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plimsoll.sim.engine.iteration import NO_QUEUED_WORK, NO_WORK, Iteration, QueuedWork, queued_work
from plimsoll.sim.engine.sequence import EngineSequence
from plimsoll.sim.engine.simulated_engine import SimulatedEngine
from tests.sim import sim_harness

NO_THROTTLING = replace(sim_harness.H200, hot=None)
SMALL_ENGINE = replace(NO_THROTTLING, max_num_seqs=4, budget=512, kv_tokens=4_096)


def filled(one: SimulatedEngine, lengths: list[sim_harness.Lengths]) -> SimulatedEngine:
    for job, (at_s, _, _) in zip(sim_harness.make_sequences(lengths), lengths, strict=True):
        one.add(job, at_s)
    return one


def test_iteration_idle_engine_reports_no_work() -> None:
    one = sim_harness.make_engine(NO_THROTTLING)
    assert one.iteration("a", 1.0) == Iteration("a", 0.0, NO_WORK, NO_QUEUED_WORK)
    sim_harness.run(one, [(2.0, 100, 5)])
    assert one.iteration("a", 60.0) == Iteration("a", 0.0, NO_WORK, NO_QUEUED_WORK)


def test_iteration_two_prefill_chunks_then_decode() -> None:
    one, c = (
        filled(sim_harness.make_engine(replace(NO_THROTTLING, budget=1_000)), [(0.0, 1_500, 50)]),
        NO_THROTTLING.coefficients,
    )
    first_s = c.base + c.anypre + 1_000 * c.pretok + c.preattn * 1_000**2 / 2
    second_s = c.base + c.anypre + 500 * c.pretok + c.preattn * 500 * 1_250
    step_s = c.base + c.dec + c.ctx * 1_500
    assert one.iteration("a", 0.5 * first_s).work == NO_WORK  # none is complete
    at = one.iteration("a", first_s + 0.5 * second_s)
    assert (at.work.prefills, at.work.tokens, at.work.cached, at.work.decodes) == (1, 1_000, 0, 0)
    assert at.duration_s == pytest.approx(first_s)
    at = one.iteration("a", first_s + second_s + 0.5 * step_s)
    assert (at.work.prefills, at.work.tokens, at.work.cached) == (1, 500, 1_000)
    assert at.duration_s == pytest.approx(second_s)
    at = one.iteration("a", first_s + second_s + 2.5 * step_s)
    assert (at.work.prefills, at.work.tokens, at.work.decodes, at.work.context) == (0, 0, 1, 1_501)
    assert at.duration_s == pytest.approx(step_s + c.ctx)


def test_iteration_skipping_steps_reports_like_single_stepping() -> None:
    lengths = sim_harness.PoissonLoad(60, 12.0, prompt=300.0, output=60.0).draw()
    moments = [0.05 * number + 0.013 for number in range(200)]
    reported = []
    for leap in (True, False):
        one, found, waiting = (
            sim_harness.make_engine(SMALL_ENGINE, can_skip=leap),
            [],
            sim_harness.make_sequences(lengths),
        )
        for moment in moments:
            while waiting and lengths[waiting[0].id][0] <= moment:
                job = waiting.pop(0)
                one.add(job, lengths[job.id][0])
            found.append(one.iteration("a", moment))
        reported.append(found)
    for changed, stepped in zip(*reported, strict=True):
        assert (changed.work, changed.queued) == (stepped.work, stepped.queued)
        assert changed.duration_s == pytest.approx(stepped.duration_s)
    assert any(one.queued.prefills for one in reported[0])
    assert any(one.work.decodes == 4 for one in reported[0])


def test_queued_work_is_split_into_prefill_and_decode() -> None:
    fresh = EngineSequence(1, 700, 10)
    preempted = EngineSequence(2, 400, 10, scheduled_output=3)
    arrived = EngineSequence(3, 900, 10, remote=True, transferred_tokens=900, computed_tokens=899)
    coming = EngineSequence(4, 1_000, 10, remote=True, computed_tokens=200, transferred_tokens=800)
    assert queued_work([fresh, preempted, arrived], [coming]) == QueuedWork(1, 700, 3, 899 + 1_000)
