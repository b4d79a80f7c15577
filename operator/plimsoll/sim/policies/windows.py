"""What a Prometheus would make of engines' and gateways' figures: the largest, the mean and the rate of a window.

Samples are taken when the policy looks; a pod's counters begin at 0 when it is first seen, and a pod that is gone is
forgotten with its window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from plimsoll.core.ports import Buckets


class Largest:
    """The largest value of the last `window_s`, by name."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._seen: dict[str, deque[tuple[float, float]]] = {}

    def add(self, now_s: float, name: str, value: float) -> float:
        """Takes a sample; returns the largest of the window, this one included."""
        seen = self._seen.setdefault(name, deque())
        seen.append((now_s, value))
        while seen[0][0] < now_s - self._window_s:
            seen.popleft()
        return max(value for _, value in seen)

    def keep(self, names: Iterable[str]) -> None:
        """The others are gone."""
        self._seen = {name: self._seen[name] for name in names if name in self._seen}


class Increase:
    """How much two counters that belong together grew in the last `window_s`, by name."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._seen: dict[str, deque[tuple[float, float, float]]] = {}

    def add(self, now_s: float, name: str, count: float, total: float) -> tuple[float, float]:
        """Takes a sample; returns the growth of both over the window."""
        seen = self._seen.get(name)
        if seen is None:
            seen = self._seen[name] = deque([(now_s, 0.0, 0.0)])
        seen.append((now_s, count, total))
        while len(seen) > 2 and seen[1][0] <= now_s - self._window_s:
            seen.popleft()
        return count - seen[0][1], total - seen[0][2]

    def keep(self, names: Iterable[str]) -> None:
        """The others are gone."""
        self._seen = {name: self._seen[name] for name in names if name in self._seen}


def mean(window: Increase, now_s: float, pod: str, told: Buckets | None) -> float:
    """Of a histogram's values within the window; 0 where there were none."""
    if told is None:
        return 0.0
    count, total = window.add(now_s, pod, sum(told.counts), told.total)
    return total / count if count > 0.0 else 0.0
