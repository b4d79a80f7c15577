"""A percentile out of coarse buckets, with the help of the mean.

Problem: engines export latencies in buckets that are far wider than what matters: all times per token below 10 ms are
one bucket, those from 25 to 50 ms another. Taken as evenly spread inside, a 95th percentile is off by up to a half.

Idea: latencies under a steady load are near log-normal, so their logarithm is linear in the normal quantile of the
share: a straight line between two edges that both divide what is there, and where one of them has everything on one
side, the line through the other with the known mean. What buckets say for sure is never contradicted.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import accumulate
from statistics import NormalDist
from typing import Final

from plimsoll.core.buckets import quantile
from plimsoll.core.ports import Buckets

_NORMAL: Final = NormalDist()


def percentile(b: Buckets, share: float) -> float | None:
    """The value that `share` (0 to 1) of all do not exceed, as `buckets.quantile` has it, but for inside a bucket."""
    even = quantile(b, share)
    if even is None:
        return None
    below = list(accumulate(b.counts))
    size = below[-1]
    i = max(bisect_left(below, share * size), bisect_right(below, 0.0))
    low, high = (b.edges[i - 1], below[i - 1] / size) if i else (0.0, 0.0), (b.edges[i], below[i] / size)
    if math.isinf(high[0]) or low[0] < 0.0:
        return even
    placed = _placed(low, high, b.total / size, _probit(share, size), size)
    return even if math.isnan(placed) else min(max(placed, low[0]), high[0])


def _placed(low: tuple[float, float], high: tuple[float, float], mean: float, wanted: float, size: float) -> float:
    """At a normal quantile; low, high: the bucket's edges, each with the share below it. NaN where nothing fits."""
    below, above = _probit(low[1], size), _probit(high[1], size)
    if low[1] <= 0.0:
        placed = _by_mean(mean, high[0], above, wanted)
        narrower = _by_mean(mean, low[0], below, wanted) if high[1] >= 1.0 else math.nan
        return narrower if narrower < placed else placed  # all in one bucket: neither edge lets them spread further
    if high[1] >= 1.0:
        placed = _by_mean(mean, low[0], below, wanted)
        if low[0] <= placed <= high[0]:
            return placed
    return low[0] * (high[0] / low[0]) ** ((wanted - below) / (above - below)) if above > below else math.nan


def _by_mean(mean: float, edge: float, reached: float, wanted: float) -> float:
    """At the normal quantile `wanted`, the log-normal of this mean whose quantile `reached` is the edge.

    Its log-mean m and deviation s obey m + s reached = log edge and m + s^2 / 2 = log mean; the smaller s > 0 is meant.
    """
    if not 0.0 < mean < math.inf or edge <= 0.0:
        return math.nan
    inside = reached * reached - 2.0 * math.log(edge / mean)
    if inside < 0.0:
        return math.nan
    deviation = reached + math.copysign(math.sqrt(inside), mean - edge)
    return mean * math.exp(deviation * wanted - deviation * deviation / 2.0) if deviation >= 0.0 else math.nan


def _probit(share: float, size: float) -> float:
    """Normal quantile; a share that all have reached is one that the next might not (by half a value)."""
    edge = 0.5 / (size + 1.0)
    return _NORMAL.inv_cdf(min(max(share, edge), 1.0 - edge))
