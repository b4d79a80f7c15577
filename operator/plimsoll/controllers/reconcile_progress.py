"""Whether the leader reconciles: the age of its work, and the lists that it still waits for.

Problem: a leader that cannot list one kind, or whose reconciles never end, looks healthy: it renews its lease, and its
server answers. Nothing is scaled or repaired meanwhile.

Idea: two figures, as metrics and in the probes. Work that has been due for minutes without any reconcile that ended is
a fault of the process, so it is not live: a restart helps. A kind that cannot be listed is most often a missing right,
so the process is not ready and says which: a restart would not help. A slow API server is neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple, Protocol

from plimsoll.core.units import format_seconds
from plimsoll.telemetry import operator_metrics

MAX_STALLED_S: Final = 600.0  # far more than the longest call of the API server
MAX_UNSYNCED_S: Final = 120.0  # a list of 10,000 pods takes seconds


class ReconcileProblems(NamedTuple):
    """Why a leader reconciles nothing, "" if it does. A standby has no problem."""

    stalled: str = ""
    unsynced: str = ""


class Queue(Protocol):
    """The ages of the work queue."""

    @property
    def age_s(self) -> float: ...

    @property
    def stalled_s(self) -> float: ...


class ReconcileProgress:
    """The progress of one leader."""

    def __init__(
        self,
        queue: Queue,
        unsynced: Callable[[], Collection[str]],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """unsynced: returns what has not been listed yet."""
        self._queue = queue
        self._unsynced = unsynced
        self._monotonic = monotonic
        self._began_s = monotonic()

    def problems(self) -> ReconcileProblems:
        """Returns what keeps the leader from reconciling."""
        stalled = unsynced = ""
        if (stalled_s := self._queue.stalled_s) > MAX_STALLED_S:
            stalled = f"services have been due for {format_seconds(stalled_s)}, and no reconcile has ended"
        if (missing := self._unsynced()) and self._monotonic() - self._began_s > MAX_UNSYNCED_S:
            unsynced = f"nothing is reconciled: not listed yet: {', '.join(sorted(missing))}; the log says why"
        return ReconcileProblems(stalled, unsynced)

    @contextmanager
    def exported(self) -> Iterator[None]:
        """Show the figures as metrics meanwhile."""
        gauges = operator_metrics.OPERATOR_QUEUE_AGE, operator_metrics.OPERATOR_UNSYNCED
        gauges[0].set_function(lambda: self._queue.age_s)
        gauges[1].set_function(lambda: float(len(self._unsynced())))
        try:
            yield
        finally:
            for gauge in gauges:
                gauge.set_function(float)
