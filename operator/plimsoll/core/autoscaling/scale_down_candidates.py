"""Selection of the replicas to remove at scale-down: not ready first, then least loaded, then youngest.

Problem: Kubernetes removes pods that are not ready and then the youngest, whatever their load. It may drain the busiest
engine while an idle one stays.

Idea: an order of all replicas by the load that gateways and engines report. A replica without a report does not count
as idle. Without any reports, the order is that of Kubernetes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, NamedTuple

from plimsoll.core.ports import ServiceReading


class ReplicaLoad(NamedTuple):
    """Requests at one engine. dispatched: counted by the gateways; running: reported by the engine; None if unknown.

    Gateway counts are current. The engine's count is older, but includes requests that bypass the gateways.
    """

    dispatched: float | None
    running: float | None

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


def replica_load(readings: Iterable[ServiceReading], pod: str, running: float | None) -> ReplicaLoad:
    """Return the load of one pod. readings: those of the gateways that know the service.

    running: running and waiting requests that the engine reports.
    """
    dispatched = [reading.inflight.get(pod, 0) for reading in readings]
    return ReplicaLoad(float(sum(dispatched)) if dispatched else None, running)


def select_for_removal(replicas: Iterable[ScaleDownCandidate], target: int) -> tuple[ScaleDownCandidate, ...]:
    """Return the replicas to remove, in order, so that `target` remain.

    Replicas that are not ready go first. Among equals the youngest goes, because it has the least in its prefix cache.
    The result does not depend on the order of `replicas`.
    """
    ranked = sorted(replicas, key=_removal_rank)
    return tuple(ranked[: max(0, len(ranked) - target)])


def _removal_rank(candidate: ScaleDownCandidate) -> tuple[bool, tuple[float, float], float, str]:
    return candidate.ready, candidate.load.rank if candidate.ready else (0.0, 0.0), -candidate.since_s, candidate.name
