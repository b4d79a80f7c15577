"""What an instrumented scheduler would tell of its newest step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plimsoll.sim.engine import Engine
from plimsoll.sim.iteration import NONE, NOTHING, Iteration, Queued, queued
from plimsoll.sim.job import Job
from tests.sim import lab

NO_THROTTLING = replace(lab.H200, hot=None)
SMALL_ENGINE = replace(NO_THROTTLING, max_num_seqs=4, budget=512, kv_tokens=4_096)


def filled(one: Engine, lengths: list[lab.Lengths]) -> Engine:
    for job, (at_s, _, _) in zip(lab.jobs(lengths), lengths, strict=True):
        one.add(job, at_s)
    return one


def test_iteration_idle_engine_reports_no_work() -> None:
    one = lab.engine(NO_THROTTLING)
    assert one.iteration("a", 1.0) == Iteration("a", 0.0, NOTHING, NONE)
    lab.run(one, [(2.0, 100, 5)])
    assert one.iteration("a", 60.0) == Iteration("a", 0.0, NOTHING, NONE)


def test_iteration_two_prefill_chunks_then_decode() -> None:
    one, c = filled(lab.engine(replace(NO_THROTTLING, budget=1_000)), [(0.0, 1_500, 50)]), NO_THROTTLING.coefficients
    first_s = c.base + c.anypre + 1_000 * c.pretok + c.preattn * 1_000**2 / 2
    second_s = c.base + c.anypre + 500 * c.pretok + c.preattn * 500 * 1_250
    step_s = c.base + c.dec + c.ctx * 1_500
    assert one.iteration("a", 0.5 * first_s).did == NOTHING  # none is complete
    at = one.iteration("a", first_s + 0.5 * second_s)
    assert (at.did.prefills, at.did.tokens, at.did.cached, at.did.decodes) == (1, 1_000, 0, 0)
    assert at.took_s == pytest.approx(first_s)
    at = one.iteration("a", first_s + second_s + 0.5 * step_s)
    assert (at.did.prefills, at.did.tokens, at.did.cached) == (1, 500, 1_000)
    assert at.took_s == pytest.approx(second_s)
    at = one.iteration("a", first_s + second_s + 2.5 * step_s)
    assert (at.did.prefills, at.did.tokens, at.did.decodes, at.did.context) == (0, 0, 1, 1_501)
    assert at.took_s == pytest.approx(step_s + c.ctx)


def test_iteration_skipping_steps_reports_like_single_stepping() -> None:
    lengths = lab.Load(60, 12.0, prompt=300.0, output=60.0).draw()
    moments = [0.05 * number + 0.013 for number in range(200)]
    told = []
    for leap in (True, False):
        one, found, waiting = lab.engine(SMALL_ENGINE, leap=leap), [], lab.jobs(lengths)
        for moment in moments:
            while waiting and lengths[waiting[0].name][0] <= moment:
                job = waiting.pop(0)
                one.add(job, lengths[job.name][0])
            found.append(one.iteration("a", moment))
        told.append(found)
    for leapt, stepped in zip(*told, strict=True):
        assert (leapt.did, leapt.queued) == (stepped.did, stepped.queued)
        assert leapt.took_s == pytest.approx(stepped.took_s)
    assert any(one.queued.prefills for one in told[0])
    assert any(one.did.decodes == 4 for one in told[0])


def test_queued_work_is_split_into_prefill_and_decode() -> None:
    fresh = Job(1, 700, 10)
    preempted = Job(2, 400, 10, made=3)
    arrived = Job(3, 900, 10, remote=True, moved=900, computed=899)
    coming = Job(4, 1_000, 10, remote=True, computed=200, moved=800)
    assert queued([fresh, preempted, arrived], [coming]) == Queued(1, 700, 3, 899 + 1_000)
