"""KEDA on latency against its promise: `keda-ttft`, the law of llm-d's guide to autoscaling by objectives.

Problem: queue and concurrency say nothing of a promise in seconds; latency does, but it leaps once the knee is passed,
and it is measured on those replicas alone that are ready.

Idea, as the guide has it: saturation is the worse of the 90th percentiles of TTFT and TPOT of the last minute, each
over its promise, cut at 2, meaned over 45 s. Above 0.55 the replicas grow in proportion, times the share of them that
is ready, since those that start will take their part; below 0.40 they shrink; in between they stay. Kubernetes'
autoscaler applies the count: doubling or 4 more a minute after 30 s of agreement, one less in two minutes after 180 s.

Where this differs from the guide: it prefers a learned prediction of both latencies and falls back to those measured;
here they are the measured ones. They are the engines' own, in vLLM's buckets, so what a gate holds back does not count.
Scrape, rules and autoscaler are in phase, which is kinder. For prefill and decode tiers the guide names TTFT for the
one and TPOT for the other as its future; so it is here.

https://github.com/llm-d/llm-d/blob/main/guides/workload-autoscaling/README.slo-aware.md
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from plimsoll.core import buckets
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.ports import Buckets, EngineReading
from plimsoll.core.slo import Slo
from plimsoll.sim.policies.base import Look, Policy, Scene
from plimsoll.sim.policies.hpa import SYNC_S, Behaviour, Hpa, Limit, by_total
from plimsoll.sim.policies.options import Options
from plimsoll.sim.policies.peer import Peer, Timer, scalers

SCRAPE_S: Final = 5.0

Latency = Callable[[EngineReading], Buckets | None]


@dataclass(frozen=True, slots=True)
class Law:
    """up_at, down_at: saturations. share: of the percentile. cap: of a sample. over_s: of rates. mean_s: of samples."""

    up_at: float = 0.55
    down_at: float = 0.40
    share: float = 0.9
    cap: float = 2.0
    over_s: float = 60.0
    mean_s: float = 45.0


def behaviour(up_s: float = 30.0, down_s: float = 180.0) -> Behaviour:
    """How the guide has Kubernetes apply it."""
    return Behaviour(
        up_s, down_s, (Limit(100.0, 60.0), Limit(4.0, 60.0, percent=False)), (Limit(1.0, 120.0, percent=False),)
    )


def desired(law: Law, saturation: float, replicas: int, ready: int) -> int:
    """The guide's formula, before any bounds."""
    if saturation > law.up_at:
        credit = ready / replicas if 0 < ready < replicas else 1.0
        return replicas + math.ceil(replicas * (saturation * credit / law.up_at - 1.0))
    if saturation < law.down_at:
        return replicas - math.floor(replicas * (1.0 - saturation / law.down_at))
    return replicas


class Saturation:
    """The recorded signal: of latencies, each with its target in seconds."""

    def __init__(self, law: Law, targets: Sequence[tuple[Latency, float]]) -> None:
        self._law, self._targets = law, targets
        self._scraped: deque[tuple[float, Mapping[str, EngineReading]]] = deque()
        self._samples: deque[tuple[float, float]] = deque()

    def scraped(self, now_s: float, engines: Sequence[EngineReading]) -> None:
        self._scraped.append((now_s, {engine.pod: engine for engine in engines}))
        while self._scraped[0][0] < now_s - self._law.over_s:
            self._scraped.popleft()

    def recorded(self, now_s: float) -> float:
        """Records a sample, and the mean of those that count."""
        law = self._law
        raw = max(self._quantile(latency) / target for latency, target in self._targets)
        self._samples.append((now_s, min(raw, law.cap)))
        while self._samples[0][0] <= now_s - law.mean_s:
            self._samples.popleft()
        return sum(sample for _, sample in self._samples) / len(self._samples)

    def _quantile(self, latency: Latency) -> float:
        """Seconds; 0 where nothing was measured."""
        first: dict[str, Buckets] = {}
        last: dict[str, Buckets] = {}
        for _, engines in self._scraped:
            for pod, engine in engines.items():
                histogram = latency(engine)
                if histogram is not None:
                    first.setdefault(pod, histogram)
                    last[pod] = histogram
        whole = buckets.merged(buckets.difference(last[pod], first[pod]) for pod in last)
        return 0.0 if whole is None else buckets.quantile(whole, self._law.share) or 0.0


class _Tier:
    def __init__(self, role: Role, law: Law, saturation: Saturation, hpa: Hpa) -> None:
        self._role, self._law, self._saturation, self._hpa = role, law, saturation, hpa
        self._scrape, self._sync = Timer(SCRAPE_S), Timer(SYNC_S)

    def wanted(self, look: Look) -> int | None:
        if self._scrape.due(look.now_s):
            self._saturation.scraped(look.now_s, look.engines[self._role])
        if not self._sync.due(look.now_s):
            return None
        current = look.ordered[self._role]
        count = desired(self._law, self._saturation.recorded(look.now_s), current, look.ready.get(self._role, 0))
        return self._hpa.sync(look.now_s, current, by_total(count, 1.0, current))


def make(options: Options, scene: Scene) -> Policy:
    """Options up_at, down_at (saturations), share (of the percentile), up and down (windows, seconds), gated."""
    usual, rules = Law(), behaviour()
    law = Law(
        up_at=options.positive("up_at", usual.up_at),
        down_at=options.positive("down_at", usual.down_at),
        share=options.positive("share", usual.share, most=1.0),
    )
    rules = behaviour(options.number("up", rules.up_s, most=3600.0), options.number("down", rules.down_s, most=3600.0))
    gated = options.flag("gated", False)
    options.end()
    if not law.down_at <= law.up_at < law.cap:
        raise options.bad(f"down_at is at most up_at, and up_at below {law.cap:g}")

    def tier(role: Role, bounds: tuple[int, int]) -> _Tier:
        targets = _targets(role, scene.slo)
        if not targets:
            raise options.bad(f"{role} has no latency to go by: the manifest's slo lacks it")
        return _Tier(role, law, Saturation(law, targets), Hpa(rules, bounds))

    return Peer(scalers(scene.bounds, tier), gated)


def settings() -> Sequence[str]:
    bands = ((0.25, 0.15), (0.4, 0.25), (0.48, 0.34), (0.55, 0.4), (0.7, 0.5), (0.85, 0.6), (1.0, 0.7))
    return tuple(
        f"up_at={up:g},down_at={down:g},share={share:g},down={down_s}"
        for up, down in bands
        for share in (0.9, 0.95)
        for down_s in (180, 60)
    )


def _targets(role: Role, slo: Slo | None) -> Sequence[tuple[Latency, float]]:
    """What a tier answers for. Of a promise that grows with the prompt, what holds for the shortest ones."""
    found: list[tuple[Latency, float]] = []
    if slo is not None and slo.ttft_s is not None and role is not Role.DECODE:
        found.append((lambda engine: engine.ttft_s, slo.ttft_s))
    if slo is not None and slo.tpot_s is not None and role is not Role.PREFILL:
        found.append((lambda engine: engine.tpot_s, slo.tpot_s))
    return found
