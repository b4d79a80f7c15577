"""KEDA on latency against its SLO: `keda-ttft`, the policy of llm-d's guide to SLO-aware autoscaling.

Problem: queue and concurrency do not show a latency SLO. Latency does, but it rises steeply once replicas saturate, and
it is measured only on ready replicas.

Idea, as in the guide: saturation is the larger ratio of the 90th percentiles of TTFT and TPOT of the last minute to
their targets, cut at 2, averaged over 45 s. Above 0.55 the replicas grow in proportion, times the ready share, because
starting replicas will take their part; below 0.40 they shrink; in between they stay. Kubernetes' autoscaler applies the
count: doubling or 4 more per minute after 30 s, one less per two minutes after 180 s.

Differences from the guide: it prefers a learned prediction of both latencies, with the measured ones as fallback; here
they are measured. They are the engines' own, in vLLM's buckets, so gateway queueing does not count. Scrape, rules and
autoscaler are in phase, which favours the policy. For prefill and decode tiers the guide plans TTFT for the one and
TPOT for the other; so it is here.

https://github.com/llm-d/llm-d/blob/main/guides/workload-autoscaling/README.slo-aware.md
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from plimsoll.core import histogram
from plimsoll.core.ports import BucketCounts, EngineReading
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.units import format_number
from plimsoll.sim.policies.base import Observation, PolicyContext, SimulatedPolicy
from plimsoll.sim.policies.hpa import SYNC_S, Hpa, HpaBehavior, HpaRateLimit, propose_from_total
from plimsoll.sim.policies.options import PolicyOptions
from plimsoll.sim.policies.peer import PeerPolicy, PeriodicTimer, scalers

SCRAPE_S: Final = 5.0

LatencyHistogram = Callable[[EngineReading], BucketCounts | None]


@dataclass(frozen=True, slots=True)
class KedaRules:
    """Parameters of the policy. up_threshold, down_threshold: saturations. quantile: of the latencies. cap: highest
    saturation of a sample. rate_window_s, mean_window_s: windows of the rates and of the mean.
    """

    up_threshold: float = 0.55
    down_threshold: float = 0.40
    quantile: float = 0.9
    cap: float = 2.0
    rate_window_s: float = 60.0
    mean_window_s: float = 45.0


def hpa_behavior(up_s: float = 30.0, down_s: float = 180.0) -> HpaBehavior:
    """Return the HPA behavior of the guide."""
    return HpaBehavior(
        up_s,
        down_s,
        (HpaRateLimit(100.0, 60.0), HpaRateLimit(4.0, 60.0, percent=False)),
        (HpaRateLimit(1.0, 120.0, percent=False),),
    )


def desired_count(rules: KedaRules, saturation: float, replicas: int, ready: int) -> int:
    """Return the guide's formula, before any bounds."""
    if saturation > rules.up_threshold:
        credit = ready / replicas if 0 < ready < replicas else 1.0
        return replicas + math.ceil(replicas * (saturation * credit / rules.up_threshold - 1.0))
    if saturation < rules.down_threshold:
        return replicas - math.floor(replicas * (1.0 - saturation / rules.down_threshold))
    return replicas


class SaturationSignal:
    """The recorded saturation of latencies, each with its target in seconds."""

    def __init__(self, rules: KedaRules, targets: Sequence[tuple[LatencyHistogram, float]]) -> None:
        self._rules, self._targets = rules, targets
        self._scraped: deque[tuple[float, Mapping[str, EngineReading]]] = deque()
        self._samples: deque[tuple[float, float]] = deque()

    def add_scrape(self, now_s: float, engines: Sequence[EngineReading]) -> None:
        self._scraped.append((now_s, {engine.pod: engine for engine in engines}))
        while self._scraped[0][0] < now_s - self._rules.rate_window_s:
            self._scraped.popleft()

    def record(self, now_s: float) -> float:
        """Record a sample. Returns the mean of the window."""
        rules = self._rules
        raw = max(self._quantile(latency) / target for latency, target in self._targets)
        self._samples.append((now_s, min(raw, rules.cap)))
        while self._samples[0][0] <= now_s - rules.mean_window_s:
            self._samples.popleft()
        return sum(sample for _, sample in self._samples) / len(self._samples)

    def _quantile(self, latency: LatencyHistogram) -> float:
        """Return the quantile of a latency, s; 0 without values."""
        first: dict[str, BucketCounts] = {}
        last: dict[str, BucketCounts] = {}
        for _, engines in self._scraped:
            for pod, engine in engines.items():
                buckets = latency(engine)
                if buckets is not None:
                    first.setdefault(pod, buckets)
                    last[pod] = buckets
        merged = histogram.merge(histogram.difference(last[pod], first[pod]) for pod in last)
        return 0.0 if merged is None else histogram.quantile(merged, self._rules.quantile) or 0.0


class _KedaTier:
    def __init__(self, role: Role, rules: KedaRules, saturation: SaturationSignal, hpa: Hpa) -> None:
        self._role, self._rules, self._saturation, self._hpa = role, rules, saturation, hpa
        self._scrape, self._sync = PeriodicTimer(SCRAPE_S), PeriodicTimer(SYNC_S)

    def desired_replicas(self, observation: Observation) -> int | None:
        if self._scrape.is_due(observation.now_s):
            self._saturation.add_scrape(observation.now_s, observation.engine_readings[self._role])
        if not self._sync.is_due(observation.now_s):
            return None
        current = observation.desired[self._role]
        count = desired_count(
            self._rules, self._saturation.record(observation.now_s), current, observation.ready.get(self._role, 0)
        )
        return self._hpa.sync(observation.now_s, current, propose_from_total(count, 1.0, current))


def make(options: PolicyOptions, context: PolicyContext) -> SimulatedPolicy:
    """Options up_at, down_at (saturations), share (of the percentile), up and down (windows, seconds), gated."""
    defaults, hpa_defaults = KedaRules(), hpa_behavior()
    rules = KedaRules(
        up_threshold=options.positive("up_at", defaults.up_threshold),
        down_threshold=options.positive("down_at", defaults.down_threshold),
        quantile=options.positive("share", defaults.quantile, maximum=1.0),
    )
    hpa_defaults = hpa_behavior(
        options.number("up", hpa_defaults.up_window_s, maximum=3600.0),
        options.number("down", hpa_defaults.down_window_s, maximum=3600.0),
    )
    gated = options.flag("gated", False)
    options.finish()
    if not rules.down_threshold <= rules.up_threshold < rules.cap:
        raise options.error(f"down_at is at most up_at, and up_at below {format_number(rules.cap)}")

    def tier(role: Role, bounds: tuple[int, int]) -> _KedaTier:
        targets = _targets(role, context.slo)
        if not targets:
            raise options.error(f"{role} has no latency to go by: the manifest's slo lacks it")
        return _KedaTier(role, rules, SaturationSignal(rules, targets), Hpa(hpa_defaults, bounds))

    return PeerPolicy(scalers(context.bounds, tier), gated)


def settings() -> Sequence[str]:
    bands = ((0.25, 0.15), (0.4, 0.25), (0.48, 0.34), (0.55, 0.4), (0.7, 0.5), (0.85, 0.6), (1.0, 0.7))
    return tuple(
        f"up_at={format_number(up)},down_at={format_number(down)},share={format_number(share)},down={down_s}"
        for up, down in bands
        for share in (0.9, 0.95)
        for down_s in (180, 60)
    )


def _targets(role: Role, slo: Slo | None) -> Sequence[tuple[LatencyHistogram, float]]:
    """Return the latencies of a tier with their targets. Of a TTFT target that grows with the prompt, the shortest
    prompt's.
    """
    targets: list[tuple[LatencyHistogram, float]] = []
    if slo is not None and slo.ttft_s is not None and role is not Role.DECODE:
        targets.append((lambda engine: engine.ttft_s, slo.ttft_s))
    if slo is not None and slo.tpot_s is not None and role is not Role.PREFILL:
        targets.append((lambda engine: engine.tpot_s, slo.tpot_s))
    return targets
