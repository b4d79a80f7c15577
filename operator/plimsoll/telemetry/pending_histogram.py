"""A Prometheus histogram that gets its values when `/metrics` is read.

Problem: to observe one value costs more than what is observed.

Idea: count values by bucket in a list, and add the counts to the histogram before it is read. The library has no public
way to add counts, so this module alone knows how it stores them.
"""

from __future__ import annotations

from bisect import bisect_left

from prometheus_client import Histogram


class PendingHistogram:
    """The values for one child of a histogram since the last `flush`."""

    __slots__ = ("_bounds", "_child", "_counts", "_sum")

    def __init__(self, child: Histogram) -> None:
        self._child = child
        self._bounds = child._upper_bounds
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def flush(self) -> None:
        """Add the values to the histogram."""
        for bucket, count in zip(self._child._buckets, self._counts, strict=True):
            if count:
                bucket.inc(count)
        self._child._sum.inc(self._sum)
        self._counts, self._sum = [0] * len(self._bounds), 0.0
