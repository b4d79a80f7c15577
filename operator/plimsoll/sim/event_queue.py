"""Event queue of a run, ordered by time, then by kind, then by insertion."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

Handler = Callable[..., None]  # called with the time, seconds after the run's start, and the scheduled arguments

# Ranks of the kinds of events.
(
    RANK_ENGINE,
    RANK_KV,
    RANK_SUBMIT,
    RANK_READY,
    RANK_ARRIVAL,
    RANK_WAKE,
    RANK_DRAIN,
    RANK_SCRAPE,
    RANK_POLL,
    RANK_KILL,
    RANK_TICK,
    RANK_FIRST_TOKEN,
) = range(12)


class EventQueue:
    """Events of one run."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, int, Handler, tuple[Any, ...]]] = []
        self._serial = 0

    @property
    def next_s(self) -> float:
        """Time of the next event; infinite without one."""
        return self._events[0][0] if self._events else math.inf

    def schedule(self, at_s: float, rank: int, handler: Handler, *arguments: Any) -> None:
        """Schedule a call. rank: of the kind of event; of events at the same time, the lower rank runs first."""
        self._serial += 1
        heapq.heappush(self._events, (at_s, rank, self._serial, handler, arguments))

    def step(self) -> None:
        """Run the next event."""
        now_s, _, _, handler, arguments = heapq.heappop(self._events)
        handler(now_s, *arguments)
