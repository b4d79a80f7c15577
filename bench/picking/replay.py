"""Mooncake's requests through the gate in virtual time, on engines that step as measured and keep what they computed.

The engines are those of the admission tests. Ideal is one endless cache that all engines share and that has a prompt's
blocks as soon as it has come. Least work alone is the same gate for requests whose blocks it is not told.
"""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plimsoll.core.admission import ClassPolicy, Gate, Limits, Outlook, limits
from plimsoll.core.admission.fleet import BLOCK_TOKENS
from plimsoll.core.knee import Tier
from plimsoll.core.latency import EngineLimits, StepModel
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.slo import Slo
from plimsoll.core.workload import from_samples
from tests.core.admission_lab import Engine, GatePolicy, Job, PrefixCache, run

DATA = Path(__file__).parent / "data"
TRACE_BLOCK_TOKENS = 512
MODEL = StepModel(4.742e-3, -1.3e-3, 2.265e-5, 1.035e-9, 1.816e-5, 3.048e-8)  # an 8B on an H200, power-capped
CLASSES = (ClassPolicy("chat", 0, Slo(0.95, 10.0, 0.1, None)),)  # loose: a request that is refused has no first token
DRAIN_S = 300.0  # after the last request


@dataclass(frozen=True)
class Asked:
    """One request of the trace. blocks: hashes of its whole blocks of 128 tokens."""

    arrived_s: float
    prompt: int
    output: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Replay:
    """What became of a trace. hits: tokens from caches over those of the ideal. p50_s, p95_s: of TTFT. lost: shed."""

    hits: float
    p50_s: float
    p95_s: float
    lost: int


def trace(name: str, most: int | None = None, speed: float = 1.0) -> list[Asked]:
    """The first requests of `synthetic` or `arxiv`, `speed` times as fast."""
    with gzip.open(DATA / f"{name}.csv.gz", "rt") as lines:
        rows = list(csv.DictReader(lines))[:most]
    return [
        Asked(float(row["arrival_s"]) / speed, tokens, int(row["output_tokens"]), tuple(_hashes(row["blocks"], tokens)))
        for row in rows
        for tokens in [int(row["prompt_tokens"])]
    ]


def _hashes(runs: str, tokens: int) -> Iterator[int]:
    """Hashes of the whole blocks of 128 tokens in the trace's blocks of 512, made to look as random as hashes are."""
    parts = TRACE_BLOCK_TOKENS // BLOCK_TOKENS
    spans = (run.partition("-") for run in runs.split())
    numbers = (k for low, _, high in spans for k in range(int(low), int(high or low) + 1))
    for index, number in enumerate(numbers):
        whole = min(parts, tokens // BLOCK_TOKENS - index * parts)
        for part in range(whole):
            yield _mix(number * parts + part)


def _mix(number: int) -> int:
    """SplitMix64's finaliser (Steele et al. 2014)."""
    mask = (1 << 64) - 1
    z = (number + 1) * 0x9E3779B97F4A7C15 & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return z ^ z >> 31


def ideal(asked: list[Asked], capacity: float = math.inf) -> list[int]:
    """Tokens of each prompt that one cache of so many blocks, shared by all, would save."""
    cache, saved = PrefixCache(), []
    for each in asked:
        saved.append(min(BLOCK_TOKENS * cache.hits(each.blocks), max(each.prompt - 1, 0)))
        cache.use(each.blocks, capacity)
    return saved


def model(asked: list[Asked], engine: EngineLimits) -> Limits:
    """What the operator would have learned of this traffic."""
    mix = from_samples([a.prompt for a in asked], ideal(asked), [max(a.output, 1) for a in asked])
    return limits(Tier(Role.SERVE, MODEL, mix, engine, CLASSES[0].slo), CLASSES)


def _tick(gate: Gate, now: float) -> None:
    gate.tick(now, Outlook())


class Gateways:
    """Several gates that do not talk, requests spread over them by chance."""

    def __init__(self, gates: list[GatePolicy]) -> None:
        self._gates = gates
        self._of: dict[str, GatePolicy] = {}
        self._rng = np.random.default_rng(3)

    def offer(self, job: Job, now: float) -> list[tuple[Job, int]]:
        gate = self._of[job.id] = self._gates[self._rng.integers(len(self._gates))]
        return gate.offer(job, now)

    def done(self, job: Job, now: float) -> list[tuple[Job, int]]:
        return self._of.pop(job.id).done(job, now)

    def wake(self, now: float) -> list[tuple[Job, int]]:
        return [each for gate in self._gates for each in gate.wake(now)]

    def wake_s(self) -> float:
        return min(gate.wake_s() for gate in self._gates)

    def ready(self, engines: int, now: float) -> list[tuple[Job, int]]:
        return [each for gate in self._gates for each in gate.ready(engines, now)]

    def tick(self, now: float) -> None:
        for gate in self._gates:
            gate.tick(now)


def replay(asked: list[Asked], engines: int, kv_tokens: int, gateways: int = 1, told: bool = True) -> Replay:
    """Play the requests. kv_tokens: what one engine can hold. told: gates know blocks, else they go by least work."""
    engine = EngineLimits(1024, kv_tokens, 8192)
    numbers = model(asked, engine)
    gates = [GatePolicy(Gate(CLASSES, numbers, {}), _tick, 1 / gateways, told) for _ in range(gateways)]
    fleet = [Engine(MODEL, engine, cache=PrefixCache()) for _ in range(engines)]
    jobs = [Job(f"j{k}", a.arrived_s, a.prompt, a.output, "chat", blocks=a.blocks) for k, a in enumerate(asked)]
    run(Gateways(gates), fleet, jobs, asked[-1].arrived_s + DRAIN_S)
    ttft_s = [job.first_s - job.arrived_s for job in jobs if job.first_s is not None]
    hits = sum(job.hit for job in jobs) / sum(ideal(asked))
    return Replay(hits, float(np.median(ttft_s)), float(np.quantile(ttft_s, 0.95)), len(jobs) - len(ttft_s))
