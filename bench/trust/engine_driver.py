"""Drives engines of the plant with recorded arrivals: one aggregated engine, or one prefill and one decode engine.

Problem: the recorded systems had none of this project's gateways, so the whole simulated fleet would add delays that
they did not have.

Idea: the plant's own engines, front end and fabric, with the recorded times of arrival and the recorded choice of
engine.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from plimsoll.core.types import Role
from plimsoll.sim.engine.sequence import EngineSequence
from plimsoll.sim.engine.simulated_engine import SimulatedEngine
from plimsoll.sim.plant import Plant
from plimsoll.sim.profile import HardwareProfile
from plimsoll.sim.startup import StartupDistribution


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request of a record: seconds after its start, tokens in and out, names of the prompt's blocks."""

    at_s: float
    prompt: int
    output: int
    block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """Times of the first and last token, s after the request was sent. remote_prefill_s: when the prefill engine
    completed it.
    """

    first_s: float
    last_s: float
    remote_prefill_s: float = 0.0

    def tpot_s(self, output: int) -> float:
        return (self.last_s - self.first_s) / max(1, output - 1)


def mean_plant(profile: HardwareProfile, chunk: int = 0) -> Plant:
    """The mean machine of a profile, without noise; chunk: prompt tokens that one name stands for."""
    return replace(Plant(profile, StartupDistribution(0.0, 0.0)), spread=0.0, noise=0.0, hash_block_tokens=chunk)


class EventLoop:
    """Virtual time for a few engines. after: called with an engine when something happened there."""

    def __init__(self, engines: Sequence[SimulatedEngine], after: Callable[[SimulatedEngine, float], None]) -> None:
        self._engines, self._after = engines, after
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._serial = 0

    def schedule(self, at_s: float, action: Callable[[float], None]) -> None:
        self._serial += 1
        heapq.heappush(self._events, (at_s, self._serial, action))

    def run(self) -> None:
        while True:
            next_s = self._events[0][0] if self._events else math.inf
            events = min(self._engines, key=lambda one: one.next_event_s)
            if events.next_event_s <= next_s:
                if events.next_event_s == math.inf:
                    return
                now_s = events.next_event_s
                events.advance(now_s)
                self._after(events, now_s)
            else:
                _, _, action = heapq.heappop(self._events)
                action(next_s)


def replay_one_engine(
    plant_settings: Plant, requests: Sequence[RecordedRequest], engine: SimulatedEngine | None = None
) -> list[ReplayedRequest]:
    """What one engine that does all makes of them."""
    engine_used = engine or plant_settings.engine(Role.SERVE, Random(0))
    sequences = [
        EngineSequence(index, request.prompt, request.output, request.block_ids)
        for index, request in enumerate(requests)
    ]
    loop = EventLoop([engine_used], lambda _, __: None)
    for sequence, request in zip(sequences, requests, strict=True):
        loop.schedule(
            request.at_s + plant_settings.frontend_s(request.prompt),
            lambda now_s, sequence=sequence: engine_used.add(sequence, now_s),
        )  # type: ignore[misc]
    loop.run()
    return [_to_replayed(sequence, request) for sequence, request in zip(sequences, requests, strict=True)]


def replay_pair(plant_settings: Plant, requests: Sequence[RecordedRequest]) -> list[ReplayedRequest]:
    """What an engine that reads and one that writes make of them; the wire is the plant's."""
    prefill_engine, decode_engine = (
        plant_settings.engine(Role.PREFILL, Random(0)),
        plant_settings.engine(Role.DECODE, Random(0)),
    )
    return replay_remote_prefill(plant_settings, requests, prefill_engine, decode_engine)


def replay_remote_prefill(
    own: Plant,
    requests: Sequence[RecordedRequest],
    prefill_engine: SimulatedEngine,
    decode_engine: SimulatedEngine,
    remote_from: int = 0,
) -> list[ReplayedRequest]:
    """As the simulated fleet sends them: to the one, back, and to the other, which fetches the KV.

    Prompts of fewer tokens than remote_from go to the other alone, which reads them itself.
    """
    prefill_sequences = [
        EngineSequence(index, request.prompt, 1, keeps_kv=True) for index, request in enumerate(requests)
    ]
    decode_sequences = [
        EngineSequence(index, request.prompt, request.output, remote=request.prompt >= remote_from)
        for index, request in enumerate(requests)
    ]
    prefill_done_s = [0.0] * len(requests)

    def on_engine_step(engine: SimulatedEngine, now_s: float) -> None:
        for sequence, kv_received_s in engine.kv_fetches:
            loop.schedule(kv_received_s, lambda when_s, sequence=sequence: on_kv_received(sequence, when_s))  # type: ignore[misc]
        engine.kv_fetches.clear()
        if engine is prefill_engine:
            for sequence in engine.finished_sequences:
                prefill_done_s[sequence.id] = now_s + own.remote_prefill_http_s - requests[sequence.id].at_s
                decode_sequence = decode_sequences[sequence.id]
                loop.schedule(
                    now_s + own.remote_prefill_http_s + own.frontend_s(sequence.prompt_tokens),
                    lambda when_s, decode_sequence=decode_sequence: submit(decode_engine, decode_sequence, when_s),  # type: ignore[misc]
                )
            engine.finished_sequences.clear()

    def submit(engine: SimulatedEngine, sequence: EngineSequence, now_s: float) -> None:
        engine.add(sequence, now_s)
        on_engine_step(engine, now_s)

    def on_kv_received(sequence: EngineSequence, now_s: float) -> None:
        decode_engine.on_kv_loaded(sequence, now_s)
        prefill_engine.on_kv_fetched(prefill_sequences[sequence.id], now_s)
        on_engine_step(decode_engine, now_s)
        on_engine_step(prefill_engine, now_s)

    loop = EventLoop([prefill_engine, decode_engine], on_engine_step)
    for prefill_sequence, sequence, request in zip(prefill_sequences, decode_sequences, requests, strict=True):
        engine, one, frontend_s = (
            (prefill_engine, prefill_sequence, own.remote_prefill_http_s)
            if sequence.remote
            else (decode_engine, sequence, 0.0)
        )
        loop.schedule(
            request.at_s + frontend_s + own.frontend_s(request.prompt),
            lambda now_s, engine=engine, one=one: submit(engine, one, now_s),  # type: ignore[misc]
        )
    loop.run()
    return [
        replace(_to_replayed(sequence, request), remote_prefill_s=prefill_done_s[sequence.id])
        for sequence, request in zip(decode_sequences, requests, strict=True)
    ]


def _to_replayed(sequence: EngineSequence, request: RecordedRequest) -> ReplayedRequest:
    assert sequence.first_token_s is not None
    assert sequence.last_token_s is not None
    return ReplayedRequest(sequence.first_token_s - request.at_s, sequence.last_token_s - request.at_s)
