"""What is to happen, in the order in which it does: by time, then by kind, then as it was entered."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

Act = Callable[..., None]  # told the moment, seconds after the run's start, and what was entered with it


class Agenda:
    """Events of one run."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, int, Act, tuple[Any, ...]]] = []
        self._serial = 0

    @property
    def next_s(self) -> float:
        """When something happens next; infinite where nothing does."""
        return self._events[0][0] if self._events else math.inf

    def at(self, at_s: float, rank: int, act: Act, *about: Any) -> None:
        """rank: of its kind; less comes first of what happens at one moment."""
        self._serial += 1
        heapq.heappush(self._events, (at_s, rank, self._serial, act, about))

    def turn(self) -> None:
        """Lets the next one happen."""
        now_s, _, _, act, about = heapq.heappop(self._events)
        act(now_s, *about)
