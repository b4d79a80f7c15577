"""A percentile out of coarse buckets, and the share that keeps a target, with the help of the mean.

Problem: engines export latencies in buckets that are far wider than what matters: all times per token below 10 ms are
one bucket, those from 25 to 50 ms another. Taken as evenly spread inside, a 95th percentile is off by up to a half.

Idea: latencies under a steady load are near log-normal, so their logarithm is linear in the normal quantile of the
share: a straight line between two edges that both divide what is there, and where one of them has everything on one
side, the line through the other with the known mean. What buckets say for sure is never contradicted. A share is read
off the same line as a percentile, so that the two agree.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import accumulate
from statistics import NormalDist
from typing import Final

from plimsoll.core.buckets import quantile, share_below
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


def share_within(b: Buckets, value: float) -> float | None:
    """Share of all that do not exceed `value`, as `buckets.share_below` has it, but for inside a bucket.

    There it is the share whose `percentile` is that value. Raises ValueError for NaN.
    """
    even = share_below(b, value)
    i = bisect_left(b.edges, value)
    if even is None or value <= 0.0 or value == b.edges[i]:
        return even
    below = list(accumulate(b.counts))
    size = below[-1]
    low, high = (b.edges[i - 1], below[i - 1] / size) if i else (0.0, 0.0), (b.edges[i], below[i] / size)
    if math.isinf(high[0]) or low[0] < 0.0:
        return even
    reached = _reached(low, high, b.total / size, value, size)
    if reached >= 1.0 - _edge(size):  # as far as a percentile goes
        return high[1]
    return even if math.isnan(reached) else min(max(reached, low[1]), high[1])


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


def _reached(low: tuple[float, float], high: tuple[float, float], mean: float, value: float, size: float) -> float:
    """The share that does not exceed a value between these edges: `_placed` the other way round."""
    below, above = _probit(low[1], size), _probit(high[1], size)
    if low[1] <= 0.0:
        reached = _reached_by_mean(mean, high[0], above, value)
        narrower = _reached_by_mean(mean, low[0], below, value) if high[1] >= 1.0 else math.nan
        return narrower if narrower > reached else reached
    if high[1] >= 1.0:
        reached = _reached_by_mean(mean, low[0], below, value)
        if not math.isnan(reached):
            return reached
    between = math.log(value / low[0]) / math.log(high[0] / low[0])
    return _NORMAL.cdf(below + between * (above - below)) if above > below else math.nan


def _by_mean(mean: float, edge: float, reached: float, wanted: float) -> float:
    """At the normal quantile `wanted`, the log-normal of this mean whose quantile `reached` is the edge."""
    deviation = _deviation(mean, edge, reached)
    return mean * math.exp(deviation * wanted - deviation * deviation / 2.0)


def _reached_by_mean(mean: float, edge: float, reached: float, value: float) -> float:
    """The share of the same log-normal that does not exceed a value."""
    deviation = _deviation(mean, edge, reached)
    if math.isnan(deviation):
        return deviation
    if deviation == 0.0:  # all are the mean
        return float(value >= mean)
    return _NORMAL.cdf(math.log(value / mean) / deviation + deviation / 2.0)


def _deviation(mean: float, edge: float, reached: float) -> float:
    """Of the logarithms of a log-normal with this mean whose quantile `reached` is the edge; NaN where there is none.

    Its log-mean m and deviation s obey m + s reached = log edge and m + s^2 / 2 = log mean; the smaller s > 0 is meant.
    """
    if not 0.0 < mean < math.inf or edge <= 0.0:
        return math.nan
    inside = reached * reached - 2.0 * math.log(edge / mean)
    if inside < 0.0:
        return math.nan
    deviation = reached + math.copysign(math.sqrt(inside), mean - edge)
    return deviation if deviation >= 0.0 else math.nan


def _probit(share: float, size: float) -> float:
    """Normal quantile; a share that all have reached is one that the next might not (by half a value)."""
    edge = _edge(size)
    return _NORMAL.inv_cdf(min(max(share, edge), 1.0 - edge))


def _edge(size: float) -> float:
    return 0.5 / (size + 1.0)
