"""Histogram of inter-token latencies: by the second of the trace at which the stream was requested, and by length.

Problem: a run has hundreds of thousands of them, and the reader decides which count after a warm-up.

Idea: logarithmic buckets, so that any quantile is 1 % off at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

_BUCKET_RATIO: Final = 1.02
_MIN_ITL_S: Final = 1e-5  # shorter ones are alike


def count_itl(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Of rows with `at_s` and all their `gaps_s`; keys are text, as JSON has them."""
    histogram: dict[str, dict[str, int]] = {}
    for row in rows:
        counts = histogram.setdefault(str(int(row["at_s"])), {})
        for itl_s in row["gaps_s"]:
            bucket = str(round(math.log(max(itl_s, _MIN_ITL_S) / _MIN_ITL_S) / math.log(_BUCKET_RATIO)))
            counts[bucket] = counts.get(bucket, 0) + 1
    return histogram


def quantile_s(counts: Mapping[str, Mapping[str, int]], share: float, from_s: float, until_s: float) -> float | None:
    """Of the streams asked for from one whole second to before another; None of nothing."""
    buckets: dict[int, int] = {}
    for second, lengths in counts.items():
        if from_s <= int(second) < until_s:
            for bucket, times in lengths.items():
                buckets[int(bucket)] = buckets.get(int(bucket), 0) + times
    remaining = share * sum(buckets.values())
    for bucket in sorted(buckets):
        remaining -= buckets[bucket]
        if remaining <= 0:
            return _MIN_ITL_S * _BUCKET_RATIO**bucket
    return None
