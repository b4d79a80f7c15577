"""Engines of the plant, driven with recorded arrivals: one that does all, or one that reads and one that writes.

Problem: what was recorded had no gateway of ours, so that the whole simulated fleet would add what was not there.
Idea: the plant's own engines, front end and wire, with the recorded times of arrival and the recorded choice of engine.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from plimsoll.core.picking.endpoint import Role
from plimsoll.sim.engine import Engine
from plimsoll.sim.job import Job
from plimsoll.sim.plant import Plant
from plimsoll.sim.profile import Profile
from plimsoll.sim.startup import StartUp


@dataclass(frozen=True, slots=True)
class Sent:
    """A request of a record: seconds after its start, tokens in and out, names of the prompt's blocks."""

    at_s: float
    prompt: int
    output: int
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Got:
    """Its first and last token, seconds after it was sent; leg_s: when the prefill engine was done with it."""

    first_s: float
    last_s: float
    leg_s: float = 0.0

    def tpot_s(self, output: int) -> float:
        return (self.last_s - self.first_s) / max(1, output - 1)


def plant(profile: Profile, chunk: int = 0) -> Plant:
    """The mean machine of a profile, without noise; chunk: prompt tokens that one name stands for."""
    return replace(Plant(profile, StartUp(0.0, 0.0)), spread=0.0, noise=0.0, chunk=chunk)


class Loop:
    """Virtual time for a few engines. after: called with an engine when something happened there."""

    def __init__(self, engines: Sequence[Engine], after: Callable[[Engine, float], None]) -> None:
        self._engines, self._after = engines, after
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._serial = 0

    def at(self, at_s: float, act: Callable[[float], None]) -> None:
        self._serial += 1
        heapq.heappush(self._events, (at_s, self._serial, act))

    def run(self) -> None:
        while True:
            next_s = self._events[0][0] if self._events else math.inf
            first = min(self._engines, key=lambda one: one.due_s)
            if first.due_s <= next_s:
                if first.due_s == math.inf:
                    return
                now_s = first.due_s
                first.advance(now_s)
                self._after(first, now_s)
            else:
                _, _, act = heapq.heappop(self._events)
                act(next_s)


def alone(own: Plant, sent: Sequence[Sent], engine: Engine | None = None) -> list[Got]:
    """What one engine that does all makes of them."""
    one = engine or own.engine(Role.SERVE, Random(0))
    jobs = [Job(place, each.prompt, each.output, each.ids) for place, each in enumerate(sent)]
    loop = Loop([one], lambda _, __: None)
    for job, each in zip(jobs, sent, strict=True):
        loop.at(each.at_s + own.frontend_s(each.prompt), lambda now_s, job=job: one.add(job, now_s))  # type: ignore[misc]
    loop.run()
    return [_got(job, each) for job, each in zip(jobs, sent, strict=True)]


def pair(own: Plant, sent: Sequence[Sent]) -> list[Got]:
    """What an engine that reads and one that writes make of them; the wire is the plant's."""
    reader, writer = own.engine(Role.PREFILL, Random(0)), own.engine(Role.DECODE, Random(0))
    return legs(own, sent, reader, writer)


def legs(own: Plant, sent: Sequence[Sent], reader: Engine, writer: Engine, remote_from: int = 0) -> list[Got]:
    """As the simulated fleet sends them: to the one, back, and to the other, which fetches the KV.

    Prompts of fewer tokens than remote_from go to the other alone, which reads them itself.
    """
    first = [Job(place, each.prompt, 1, produce=True) for place, each in enumerate(sent)]
    second = [
        Job(place, each.prompt, each.output, remote=each.prompt >= remote_from) for place, each in enumerate(sent)
    ]
    done_s = [0.0] * len(sent)

    def after(engine: Engine, now_s: float) -> None:
        for job, there_s in engine.sent:
            loop.at(there_s, lambda when_s, job=job: there(job, when_s))  # type: ignore[misc]
        engine.sent.clear()
        if engine is reader:
            for job in engine.ends:
                done_s[job.name] = now_s + own.leg_s - sent[job.name].at_s
                other = second[job.name]
                loop.at(
                    now_s + own.leg_s + own.frontend_s(job.prompt),
                    lambda when_s, other=other: put(writer, other, when_s),  # type: ignore[misc]
                )
            engine.ends.clear()

    def put(engine: Engine, job: Job, now_s: float) -> None:
        engine.add(job, now_s)
        after(engine, now_s)

    def there(job: Job, now_s: float) -> None:
        writer.loaded(job, now_s)
        reader.fetched(first[job.name], now_s)
        after(writer, now_s)
        after(reader, now_s)

    loop = Loop([reader, writer], after)
    for leg, job, each in zip(first, second, sent, strict=True):
        engine, one, way_s = (reader, leg, own.leg_s) if job.remote else (writer, job, 0.0)
        loop.at(
            each.at_s + way_s + own.frontend_s(each.prompt),
            lambda now_s, engine=engine, one=one: put(engine, one, now_s),  # type: ignore[misc]
        )
    loop.run()
    return [replace(_got(job, each), leg_s=done_s[job.name]) for job, each in zip(second, sent, strict=True)]


def _got(job: Job, each: Sent) -> Got:
    assert job.first_s is not None
    assert job.last_s is not None
    return Got(job.first_s - each.at_s, job.last_s - each.at_s)
