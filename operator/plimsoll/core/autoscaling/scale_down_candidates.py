"""Selection of the replicas to remove at scale-down: not ready, then least loaded, then the least useful cache.

Problem: Kubernetes removes pods that are not ready and then the youngest, whatever their load. It may drain the busiest
engine while an idle one stays.

Idea: an order of all replicas by the load that gateways and engines report. A replica without a report does not count
as idle. Among equal loads, the prefix cache that has saved the fewest prompt tokens in the last minutes is worth the
least. Without any reports, the order is that of Kubernetes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, NamedTuple

from plimsoll.core.ports import EngineReading, ServiceReading

CACHE_HITS_TIME_S: Final = 300.0  # time constant: conversations that pause for longer find little of their cache


class CacheHits:
    """Prompt tokens that an engine's prefix cache has saved: a sum that decays by e in CACHE_HITS_TIME_S."""

    __slots__ = ("_at_s", "_counter", "tokens")

    def __init__(self) -> None:
        self.tokens = 0.0
        self._counter: float | None = None
        self._at_s = -math.inf

    def observe(self, reading: EngineReading) -> None:
        """Add what the counter has grown by since the last reading. An engine that restarts has an empty cache."""
        counter = reading.cached_prompt_tokens
        if counter is None or reading.at_s < self._at_s:
            return
        if self._counter is None or counter < self._counter:
            self.tokens = 0.0
        else:
            decay = math.exp((self._at_s - reading.at_s) / CACHE_HITS_TIME_S)
            self.tokens = decay * self.tokens + counter - self._counter
        self._counter, self._at_s = counter, reading.at_s


class ReplicaLoad(NamedTuple):
    """Requests at one engine. dispatched: counted by the gateways; running: reported by the engine; None if unknown.

    Gateway counts are current. The engine's count is older, but includes requests that bypass the gateways.
    cached_tokens: those of `CacheHits`.
    """

    dispatched: float | None
    running: float | None
    cached_tokens: float = 0.0

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key; a lower rank means less load."""
        counts = [math.inf if count is None else count for count in (self.dispatched, self.running)]
        return (counts[0], counts[1]) if self.dispatched is not None else (counts[1], counts[1])

    @property
    def description(self) -> str:
        count = self.running if self.dispatched is None else self.dispatched
        return "load unknown" if count is None else f"{count:.0f} in flight"


UNKNOWN_LOAD: Final = ReplicaLoad(None, None)


class ScaleDownCandidate(NamedTuple):
    """A replica that is not terminating. since_s: start of its age, seconds on a clock that the tier shares."""

    name: str
    ready: bool
    since_s: float
    load: ReplicaLoad = UNKNOWN_LOAD


def replica_load(
    readings: Iterable[ServiceReading], pod: str, running: float | None, cached_tokens: float = 0.0
) -> ReplicaLoad:
    """Return the load of one pod. readings: those of the gateways that know the service.

    running: running and waiting requests that the engine reports.
    """
    dispatched = [reading.inflight.get(pod, 0) for reading in readings]
    return ReplicaLoad(float(sum(dispatched)) if dispatched else None, running, cached_tokens)


def select_for_removal(replicas: Iterable[ScaleDownCandidate], target: int) -> tuple[ScaleDownCandidate, ...]:
    """Return the replicas to remove, in order, so that `target` remain.

    Replicas that are not ready go first. Among equally loaded ones the least useful prefix cache goes, and among equals
    the youngest. The result does not depend on the order of `replicas`.
    """
    ranked = sorted(replicas, key=_removal_rank)
    return tuple(ranked[: max(0, len(ranked) - target)])


def _removal_rank(candidate: ScaleDownCandidate) -> tuple[bool, tuple[float, float], float, float, str]:
    load = candidate.load
    rank, cached_tokens = (load.rank, load.cached_tokens) if candidate.ready else ((0.0, 0.0), 0.0)
    return candidate.ready, rank, cached_tokens, -candidate.since_s, candidate.name
