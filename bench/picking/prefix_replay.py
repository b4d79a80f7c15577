"""Replays Mooncake's requests through admission control in virtual time, on engines with measured step times and
caches.

The engines are those of the admission tests. Ideal is one unlimited cache that all engines share and that has a
prompt's blocks as soon as it has arrived. Least work alone is the same admission control without the requests' block
hashes.
"""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plimsoll.core.admission.capacity_announcement import CapacityAnnouncement
from plimsoll.core.admission.controller import AdmissionController
from plimsoll.core.admission.cost_model import ClassPolicy, EngineCostModel, engine_cost_model
from plimsoll.core.capacity.tier_model import TierSpec
from plimsoll.core.engine_model.step_time import EngineLimits, StepModel
from plimsoll.core.slo import Slo
from plimsoll.core.types import KV_BLOCK_TOKENS, Role
from plimsoll.core.workload import from_samples
from tests.core.admission_engine import ClientRequest, PrefixCache, StepEngine
from tests.core.admission_simulator import ControllerPolicy, run

TRACE_FOLDER = Path(__file__).parent / "data"
TRACE_BLOCK_TOKENS = 512
MODEL = StepModel(4.742e-3, -1.3e-3, 2.265e-5, 1.035e-9, 1.816e-5, 3.048e-8)  # an 8B on an H200, power-capped
CLASSES = (ClassPolicy("chat", 0, Slo(0.95, 10.0, 0.1, None)),)  # loose: a request that is refused has no first token
DRAIN_S = 300.0  # after the last request


@dataclass(frozen=True)
class PrefixRequest:
    """One request of the trace. blocks: hashes of its whole blocks of 128 tokens."""

    arrived_s: float
    prompt: int
    output: int
    blocks: tuple[int, ...]
    kind: str = ""


@dataclass(frozen=True)
class ReplayResult:
    """Result of a trace. hits: cached tokens over those of the ideal cache. p50_s, p95_s: TTFT. unfinished: rejected
    requests. hits_by_kind: the same of each kind of request.
    """

    hits: float
    p50_s: float
    p95_s: float
    unfinished: int
    hits_by_kind: Mapping[str, float]


def load_trace(name: str, max_requests: int | None = None, speed: float = 1.0) -> list[PrefixRequest]:
    """The first requests of `synthetic` or `arxiv`, `speed` times as fast."""
    with gzip.open(TRACE_FOLDER / f"{name}.csv.gz", "rt") as lines:
        rows = list(csv.DictReader(lines))[:max_requests]
    return [
        PrefixRequest(
            float(row["arrival_s"]) / speed, tokens, int(row["output_tokens"]), tuple(_hashes(row["blocks"], tokens))
        )
        for row in rows
        for tokens in [int(row["prompt_tokens"])]
    ]


def _hashes(runs: str, tokens: int) -> Iterator[int]:
    """Hashes of the whole blocks of 128 tokens in the trace's blocks of 512, made to look as random as hashes are."""
    parts = TRACE_BLOCK_TOKENS // KV_BLOCK_TOKENS
    spans = (run.partition("-") for run in runs.split())
    numbers = (k for low, _, high in spans for k in range(int(low), int(high or low) + 1))
    for index, number in enumerate(numbers):
        whole = min(parts, tokens // KV_BLOCK_TOKENS - index * parts)
        for part in range(whole):
            yield _mix(number * parts + part)


def block_hashes(segments: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Hashes of the whole blocks of 128 tokens of a prompt made of segments: what each is, and its tokens.

    A hash covers all tokens up to the end of its block.
    """
    hashes, state, filled = [], 0, 0
    for key, tokens in segments:
        state = _mix(state ^ _mix(key))
        for block in range((filled + tokens) // KV_BLOCK_TOKENS):
            hashes.append(_mix(state + block))
        state, filled = _mix(state + filled + tokens), (filled + tokens) % KV_BLOCK_TOKENS
    return tuple(hashes)


def _mix(number: int) -> int:
    """SplitMix64's finaliser (Steele et al. 2014)."""
    mask = (1 << 64) - 1
    z = (number + 1) * 0x9E3779B97F4A7C15 & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return z ^ z >> 31


def ideal_cached_tokens(requests: list[PrefixRequest], capacity: float = math.inf) -> list[int]:
    """Tokens of each prompt that one cache of so many blocks, shared by all, would save."""
    cache, cached_tokens = PrefixCache(), []
    for request in requests:
        cached_tokens.append(min(KV_BLOCK_TOKENS * cache.hits(request.blocks), max(request.prompt - 1, 0)))
        cache.use(request.blocks, capacity)
    return cached_tokens


def cost_model(requests: list[PrefixRequest], engine: EngineLimits) -> EngineCostModel:
    """What the operator would have learned of this traffic."""
    mix = from_samples(
        [request.prompt for request in requests],
        ideal_cached_tokens(requests),
        [max(request.output, 1) for request in requests],
    )
    return engine_cost_model(TierSpec(Role.SERVE, MODEL, mix, engine, CLASSES[0].slo), CLASSES)


def _tick(gate: AdmissionController, now: float) -> None:
    gate.tick(now, CapacityAnnouncement())


class GatewaySet:
    """Several gates that do not talk, requests spread over them by chance."""

    def __init__(self, gates: list[ControllerPolicy]) -> None:
        self._gates = gates
        self._of: dict[str, ControllerPolicy] = {}
        self._rng = np.random.default_rng(3)

    def offer(self, job: ClientRequest, now: float) -> list[tuple[ClientRequest, int]]:
        gate = self._of[job.id] = self._gates[self._rng.integers(len(self._gates))]
        return gate.offer(job, now)

    def done(self, job: ClientRequest, now: float) -> list[tuple[ClientRequest, int]]:
        return self._of.pop(job.id).done(job, now)

    def wake(self, now: float) -> list[tuple[ClientRequest, int]]:
        return [released for gate in self._gates for released in gate.wake(now)]

    def wake_s(self) -> float:
        return min(gate.wake_s() for gate in self._gates)

    def ready(self, engines: int, now: float) -> list[tuple[ClientRequest, int]]:
        return [released for gate in self._gates for released in gate.ready(engines, now)]

    def tick(self, now: float) -> None:
        for gate in self._gates:
            gate.tick(now)


def replay(
    requests: list[PrefixRequest], engines: int, kv_tokens: int, gateways: int = 1, prefix_aware: bool = True
) -> ReplayResult:
    """Replay the requests. kv_tokens: KV cache of one engine. prefix_aware: gateways know the prefix blocks; otherwise
    they choose the engine with the least work.
    """
    engine = EngineLimits(1024, kv_tokens, 8192)
    numbers = cost_model(requests, engine)
    controllers = [
        ControllerPolicy(AdmissionController(CLASSES, numbers, {}), _tick, 1 / gateways, prefix_aware)
        for _ in range(gateways)
    ]
    fleet = [StepEngine(MODEL, engine, cache=PrefixCache()) for _ in range(engines)]
    jobs = [
        ClientRequest(f"j{index}", request.arrived_s, request.prompt, request.output, "chat", blocks=request.blocks)
        for index, request in enumerate(requests)
    ]
    run(GatewaySet(controllers), fleet, jobs, requests[-1].arrived_s + DRAIN_S)
    ttft_s = [job.first_s - job.arrived_s for job in jobs if job.first_s is not None]
    taken: dict[str, list[int]] = {}
    for request, job, ideal in zip(requests, jobs, ideal_cached_tokens(requests), strict=True):
        taken.setdefault(request.kind, [0, 0])
        taken[request.kind][0] += job.cached_tokens
        taken[request.kind][1] += ideal
    hits = sum(cached for cached, _ in taken.values()) / sum(ideal for _, ideal in taken.values())
    by_kind = {kind: cached / ideal for kind, (cached, ideal) in taken.items() if ideal}
    p50_s, p95_s = (float(np.quantile(ttft_s, q)) for q in (0.5, 0.95))
    return ReplayResult(hits, p50_s, p95_s, len(jobs) - len(ttft_s), by_kind)
