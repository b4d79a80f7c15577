"""Engines and fleets small enough to know what must come out."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from plimsoll.api.v1alpha1 import InferenceService, parse
from plimsoll.core.types import Role
from plimsoll.sim import profile
from plimsoll.sim.attempt import Attempt, TraceRequest
from plimsoll.sim.engine.engine_metrics import EngineMetrics
from plimsoll.sim.engine.kv_cache import KvCache
from plimsoll.sim.engine.kv_link import KvLink
from plimsoll.sim.engine.sequence import EngineSequence
from plimsoll.sim.engine.simulated_engine import SimulatedEngine
from plimsoll.sim.engine.step_timing import StepTiming
from plimsoll.sim.plant import Plant
from plimsoll.sim.policies.base import PlimsollPolicy, SimulatedPolicy
from plimsoll.sim.profile import HardwareProfile
from plimsoll.sim.run_config import RunConfig
from plimsoll.sim.simulator import Simulator
from plimsoll.sim.startup import StartupDistribution
from plimsoll.sim.step_noise import draw_step_noise
from tests import builders

H200 = profile.load("h200-8b")
H200_CAPPED = profile.load("h200-70b-capped")

Lengths = tuple[float, int, int]  # arrival in seconds, tokens in and out


@dataclass(frozen=True)
class PoissonLoad:
    """Poisson arrivals with lognormal lengths of these means."""

    requests: int
    per_s: float
    prompt: float = 1200.0
    output: float = 220.0
    seed: int = 1

    def draw(self) -> list[Lengths]:
        random, now_s, found = Random(self.seed), 0.0, []
        for _ in range(self.requests):
            now_s += random.expovariate(self.per_s)
            prompt, output = random.lognormvariate(-0.18, 0.6), random.lognormvariate(-0.125, 0.5)
            found.append((now_s, max(1, int(self.prompt * prompt)), max(1, int(self.output * output))))
        return found

    def requests_drawn(self) -> list[TraceRequest]:
        return [TraceRequest(*lengths) for lengths in self.draw()]


def make_engine(
    own: HardwareProfile,
    *,
    can_skip: bool = True,
    noise: float = 0.0,
    chunk: int = 0,
    seed: int = 1,
    max_adapters: int = 0,
    adapter_load_s: float = 0.0,
) -> SimulatedEngine:
    return SimulatedEngine(
        own.max_num_seqs,
        own.budget,
        KvCache(own.kv_tokens // own.block_size, own.block_size, chunk),
        StepTiming(own, draw_step_noise(noise, Random(seed))),
        KvLink(own.layers, own.block_size, own.kv_bytes_per_token),
        EngineMetrics(own.max_model_len),
        can_skip,
        max_adapters=max_adapters,
        adapter_load_s=adapter_load_s,
    )


def make_sequences(lengths: Sequence[Lengths], *, remote: bool = False) -> list[EngineSequence]:
    return [EngineSequence(name, prompt, output, remote=remote) for name, (_, prompt, output) in enumerate(lengths)]


def run_sequences(one: SimulatedEngine, pending: Sequence[EngineSequence], at_s: Sequence[float]) -> None:
    """Adds the jobs at their moments, delivers KV when it is there, until nothing is left."""
    events = [(moment, 0, place) for place, moment in enumerate(at_s)]
    heapq.heapify(events)
    while events or one.next_event_s < math.inf:
        if events and events[0][0] < one.next_event_s:
            now_s, loaded, place = heapq.heappop(events)
            (one.on_kv_loaded if loaded else one.add)(pending[place], now_s)
        else:
            one.advance(one.next_event_s)
        for sequence, received_s in one.kv_fetches:
            heapq.heappush(events, (received_s, 1, sequence.id))
        one.kv_fetches.clear()


def run(one: SimulatedEngine, lengths: Sequence[Lengths], *, remote: bool = False) -> list[EngineSequence]:
    sequences = make_sequences(lengths, remote=remote)
    run_sequences(one, sequences, [at_s for at_s, _, _ in lengths])
    return sequences


def serve_manifest(**spec: Any) -> InferenceService:
    """One serve tier of 1 to 4 with a promise, unless the spec says otherwise."""
    usual: dict[str, Any] = {
        "tiers": {"serve": {"minReplicas": 1, "maxReplicas": 4}},
        "slo": {"ttft": "2s", "tpot": "50ms"},
    }
    return parse(builders.service(**{**usual, **spec}))


def pd_manifest() -> InferenceService:
    tiers = {"prefill": {"minReplicas": 1, "maxReplicas": 4}, "decode": {"minReplicas": 1, "maxReplicas": 4}}
    return serve_manifest(tiers=tiers, slo={"ttft": "3s", "tpot": "60ms"})


def make_plant(own: HardwareProfile = H200, start_s: float = 20.0, **differing: Any) -> Plant:
    return replace(Plant(own, StartupDistribution(start_s, start_s)), **differing)


@dataclass
class FinishedRun:
    """A run and its requests, as they ended."""

    world: Simulator
    attempts: list[Attempt]


def simulate(
    requests: Sequence[TraceRequest],
    policy: SimulatedPolicy | None = None,
    of: InferenceService | None = None,
    hardware: Plant | None = None,
    **setting: Any,
) -> FinishedRun:
    of = of or serve_manifest()
    usual: dict[str, Any] = {
        "initial": {Role(name): tier.replica_bounds[0] for name, tier in of.spec.sized_tiers.items()},
        "end_s": requests[-1].at_s,
    }
    visits: list[Attempt] = []
    world = Simulator(
        of, hardware or make_plant(), policy or PlimsollPolicy(), RunConfig(**{**usual, **setting}), visits.append
    )
    world.run(requests)
    return FinishedRun(world, visits)
