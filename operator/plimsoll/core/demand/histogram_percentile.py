"""Percentiles of coarse histograms, and the share within a target, with the help of the mean.

Problem: engines export latencies in buckets far wider than the differences that matter. All times per token below 10 ms
share one bucket, and those from 25 to 50 ms another. With values spread evenly inside a bucket, a 95th percentile is
off by up to a half.

Idea: latencies under steady load are nearly log-normal, so their logarithm is linear in the normal quantile of the
share. Between two edges that both divide the values, interpolate on this line. Where one edge has all values on one
side, use the line through the other edge with the known mean. The result never contradicts the bucket counts. A share
is read off the same line as a percentile, so the two agree.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import accumulate
from statistics import NormalDist
from typing import Final

from plimsoll.core.histogram import quantile, share_below
from plimsoll.core.ports import BucketCounts

_NORMAL: Final = NormalDist()


def percentile(histogram: BucketCounts, share: float) -> float | None:
    """The value that a `share` (0 to 1) of all does not exceed: `histogram.quantile`, interpolated log-normally in a
    bucket.
    """
    uniform = quantile(histogram, share)
    if uniform is None:
        return None
    cumulative = list(accumulate(histogram.counts))
    size = cumulative[-1]
    index = max(bisect_left(cumulative, share * size), bisect_right(cumulative, 0.0))
    lower, upper = (
        (histogram.edges[index - 1], cumulative[index - 1] / size) if index else (0.0, 0.0),
        (histogram.edges[index], cumulative[index] / size),
    )
    if math.isinf(upper[0]) or lower[0] < 0.0:
        return uniform
    interpolated = _interpolate_value(lower, upper, histogram.value_sum / size, _probit(share, size), size)
    return uniform if math.isnan(interpolated) else min(max(interpolated, lower[0]), upper[0])


def share_within(histogram: BucketCounts, value: float) -> float | None:
    """Share of all that does not exceed `value`: `histogram.share_below`, interpolated log-normally in a bucket.

    It is the share whose `percentile` is that value. Raises ValueError for NaN.
    """
    uniform = share_below(histogram, value)
    index = bisect_left(histogram.edges, value)
    if uniform is None or value <= 0.0 or value == histogram.edges[index]:
        return uniform
    cumulative = list(accumulate(histogram.counts))
    size = cumulative[-1]
    lower, upper = (
        (histogram.edges[index - 1], cumulative[index - 1] / size) if index else (0.0, 0.0),
        (histogram.edges[index], cumulative[index] / size),
    )
    if math.isinf(upper[0]) or lower[0] < 0.0:
        return uniform
    interpolated = _interpolate_share(lower, upper, histogram.value_sum / size, value, size)
    if interpolated >= 1.0 - _tail_share(size):  # the range of `percentile`
        return upper[1]
    return uniform if math.isnan(interpolated) else min(max(interpolated, lower[1]), upper[1])


def _interpolate_value(
    lower: tuple[float, float], upper: tuple[float, float], mean: float, z: float, size: float
) -> float:
    """Value at a normal quantile; lower, upper: the bucket's edges, each with the share below it. NaN where no line
    fits.
    """
    lower_z, upper_z = _probit(lower[1], size), _probit(upper[1], size)
    if lower[1] <= 0.0:
        value = _lognormal_value(mean, upper[0], upper_z, z)
        other_value = _lognormal_value(mean, lower[0], lower_z, z) if upper[1] >= 1.0 else math.nan
        return other_value if other_value < value else value  # all in one bucket: each edge limits the spread
    if upper[1] >= 1.0:
        value = _lognormal_value(mean, lower[0], lower_z, z)
        if lower[0] <= value <= upper[0]:
            return value
    return lower[0] * (upper[0] / lower[0]) ** ((z - lower_z) / (upper_z - lower_z)) if upper_z > lower_z else math.nan


def _interpolate_share(
    lower: tuple[float, float], upper: tuple[float, float], mean: float, value: float, size: float
) -> float:
    """The share that does not exceed a value between these edges: the inverse of `_interpolate_value`."""
    lower_z, upper_z = _probit(lower[1], size), _probit(upper[1], size)
    if lower[1] <= 0.0:
        share = _lognormal_share(mean, upper[0], upper_z, value)
        other_share = _lognormal_share(mean, lower[0], lower_z, value) if upper[1] >= 1.0 else math.nan
        return other_share if other_share > share else share
    if upper[1] >= 1.0:
        share = _lognormal_share(mean, lower[0], lower_z, value)
        if not math.isnan(share):
            return share
    position = math.log(value / lower[0]) / math.log(upper[0] / lower[0])
    return _NORMAL.cdf(lower_z + position * (upper_z - lower_z)) if upper_z > lower_z else math.nan


def _lognormal_value(mean: float, edge: float, edge_z: float, z: float) -> float:
    """Value at the normal quantile z of the log-normal with this mean whose quantile edge_z is the edge."""
    sigma = _lognormal_sigma(mean, edge, edge_z)
    return mean * math.exp(sigma * z - sigma * sigma / 2.0)


def _lognormal_share(mean: float, edge: float, edge_z: float, value: float) -> float:
    """Share of the same log-normal that does not exceed a value."""
    sigma = _lognormal_sigma(mean, edge, edge_z)
    if math.isnan(sigma):
        return sigma
    if sigma == 0.0:  # all values equal the mean
        return float(value >= mean)
    return _NORMAL.cdf(math.log(value / mean) / sigma + sigma / 2.0)


def _lognormal_sigma(mean: float, edge: float, edge_z: float) -> float:
    """Log-deviation of the log-normal with this mean whose quantile edge_z is the edge; NaN where none exists.

    Its log-mean m and log-deviation s obey m + s edge_z = log edge and m + s^2 / 2 = log mean. The smaller s > 0 is
    used.
    """
    if not 0.0 < mean < math.inf or edge <= 0.0:
        return math.nan
    discriminant = edge_z * edge_z - 2.0 * math.log(edge / mean)
    if discriminant < 0.0:
        return math.nan
    sigma = edge_z + math.copysign(math.sqrt(discriminant), mean - edge)
    return sigma if sigma >= 0.0 else math.nan


def _probit(share: float, size: float) -> float:
    """Normal quantile. A share of 1 is reduced by half a value, because the next value might exceed all."""
    tail = _tail_share(size)
    return _NORMAL.inv_cdf(min(max(share, tail), 1.0 - tail))


def _tail_share(size: float) -> float:
    return 0.5 / (size + 1.0)
