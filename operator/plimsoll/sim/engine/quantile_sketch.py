"""Percentiles of durations in bounded memory."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate
from typing import Final

_RATIO: Final = 1.005
_LOG_RATIO: Final = math.log(_RATIO)
_MIN_S: Final = 1e-5


class QuantileSketch:
    """Histogram with logarithmic buckets: percentiles are accurate to 0.25 %. Durations below 10 us share a bucket."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def observe(self, seconds: float, count: int = 1) -> None:
        bucket = int(math.log(max(seconds, _MIN_S) / _MIN_S) / _LOG_RATIO)
        self._counts[bucket] = self._counts.get(bucket, 0) + count

    def merge(self, other: QuantileSketch) -> None:
        for bucket, count in other._counts.items():
            self._counts[bucket] = self._counts.get(bucket, 0) + count

    def quantile_s(self, share: float) -> float | None:
        """Return the quantile by nearest rank; None without values."""
        buckets = sorted(self._counts)
        cumulative = list(accumulate(self._counts[bucket] for bucket in buckets))
        if not cumulative:
            return None
        bucket = buckets[bisect_left(cumulative, max(1, math.ceil(share * cumulative[-1])))]
        return float(_MIN_S * _RATIO ** (bucket + 0.5))
