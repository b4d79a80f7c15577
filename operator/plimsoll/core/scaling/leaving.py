"""Which replicas go when a tier shrinks: those that are not ready, then the emptiest, then the youngest.

Problem: Kubernetes takes the pods that are not ready and then the youngest, whatever runs on them, so that the busiest
engine is drained while an idle one stays.

Idea: one order of all replicas, made from what gateways and engines have told by now. What nobody tells of is not taken
for empty; where nobody tells of anything the order is Kubernetes' own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, NamedTuple

from plimsoll.core.ports import ServiceReading


class Load(NamedTuple):
    """Requests at one engine. sent: by the gateways' count, running: by its own; None where nobody told.

    Gateways count to the second; the engine is asked seldom, but knows of those that came past every gateway.
    """

    sent: float | None
    running: float | None

    @property
    def rank(self) -> tuple[float, float]:
        """Less is emptier."""
        counts = [math.inf if count is None else count for count in (self.sent, self.running)]
        return (counts[0], counts[1]) if self.sent is not None else (counts[1], counts[1])

    @property
    def words(self) -> str:
        count = self.running if self.sent is None else self.sent
        return "load not known" if count is None else f"{count:.0f} in flight"


UNTOLD: Final = Load(None, None)


class Candidate(NamedTuple):
    """A replica that is not leaving yet. since_s: from when its age counts, seconds by one clock for the whole tier."""

    name: str
    ready: bool
    since_s: float
    load: Load = UNTOLD


def load(readings: Iterable[ServiceReading], pod: str, running: float | None) -> Load:
    """What a service's gateways say of one pod, beside what its engine said. readings: of those that know the service.

    running: requests in the engine, waiting ones included.
    """
    sent = [reading.inflight.get(pod, 0) for reading in readings]
    return Load(float(sum(sent)) if sent else None, running)


def leaving(replicas: Iterable[Candidate], after: int) -> tuple[Candidate, ...]:
    """Those that go of a tier that is to keep `after`, in the order in which they go.

    Those that are not ready go whatever they hold, and among equals the youngest, which of ready ones has the least in
    its prefix cache. The answer does not depend on the order of `replicas`.
    """
    ranked = sorted(replicas, key=_rank)
    return tuple(ranked[: max(0, len(ranked) - after)])


def _rank(one: Candidate) -> tuple[bool, tuple[float, float], float, str]:
    return one.ready, one.load.rank if one.ready else (0.0, 0.0), -one.since_s, one.name
