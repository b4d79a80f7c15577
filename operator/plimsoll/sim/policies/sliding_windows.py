"""Window functions as in Prometheus over engine and gateway metrics: maximum, mean and rate.

Samples are taken when the policy reads them. A pod's counters begin at 0 when it is first seen, and a removed pod is
dropped with its window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from plimsoll.core.ports import BucketCounts


class SlidingMax:
    """The largest value of the last `window_s`, by name."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._samples: dict[str, deque[tuple[float, float]]] = {}

    def add(self, now_s: float, name: str, value: float) -> float:
        """Add a sample. Returns the largest value of the window, this one included."""
        samples = self._samples.setdefault(name, deque())
        samples.append((now_s, value))
        while samples[0][0] < now_s - self._window_s:
            samples.popleft()
        return max(value for _, value in samples)

    def retain(self, names: Iterable[str]) -> None:
        """Drop all other names."""
        self._samples = {name: self._samples[name] for name in names if name in self._samples}


class CounterIncrease:
    """The increase of two related counters in the last `window_s`, by name."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._samples: dict[str, deque[tuple[float, float, float]]] = {}

    def add(self, now_s: float, name: str, count: float, total: float) -> tuple[float, float]:
        """Add a sample. Returns the increase of both over the window."""
        samples = self._samples.get(name)
        if samples is None:
            samples = self._samples[name] = deque([(now_s, 0.0, 0.0)])
        samples.append((now_s, count, total))
        while len(samples) > 2 and samples[1][0] <= now_s - self._window_s:
            samples.popleft()
        return count - samples[0][1], total - samples[0][2]

    def retain(self, names: Iterable[str]) -> None:
        """Drop all other names."""
        self._samples = {name: self._samples[name] for name in names if name in self._samples}


def mean_over_window(window: CounterIncrease, now_s: float, pod: str, histogram: BucketCounts | None) -> float:
    """Return the mean of a histogram's values within the window; 0 without values."""
    if histogram is None:
        return 0.0
    count, total = window.add(now_s, pod, sum(histogram.counts), histogram.value_sum)
    return total / count if count > 0.0 else 0.0
