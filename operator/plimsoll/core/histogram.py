"""Histograms of counters: the increase between two readings, sums over sources, and percentiles.

Problem: percentiles cannot be added, and histograms only if their edges agree. A source that restarts counts from zero
again.

Idea: values are spread evenly within a bucket, everywhere here. A histogram cut at more edges then has the same
percentiles, so histograms of different edges are cut at all their edges and added. The bucket above the last finite
edge has no width: only that edge is known of its values.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from operator import add, lt, sub

from plimsoll.core.ports import BucketCounts


def log_edges(first: float, last: float, per_octave: int) -> tuple[float, ...]:
    """Edges first * 2^(i / per_octave), up to the first that is at least last, then infinity."""
    steps = math.ceil(per_octave * math.log2(last / first))
    return (*(first * 2 ** (i / per_octave) for i in range(steps + 1)), math.inf)


LATENCY_EDGES_S = log_edges(0.001, 1000.0, 8)  # 9 % apart: a percentile is off by less than half of that


def bucket_index(edges: tuple[float, ...], value: float) -> int:
    """Which bucket a value falls in; a value on an edge lies below it."""
    return bisect_left(edges, value)


def from_sparse(edges: tuple[float, ...], counts: Mapping[int, float], value_sum: float) -> BucketCounts:
    """Return a histogram from the counts of its non-empty buckets, by index. Raises IndexError for an unknown index."""
    dense = [0.0] * len(edges)
    for i, n in counts.items():
        dense[i] = n
    return BucketCounts(edges, tuple(dense), value_sum)


def total_count(histogram: BucketCounts) -> float:
    """Return the number of values."""
    return math.fsum(histogram.counts)


def difference(new: BucketCounts, old: BucketCounts | None) -> BucketCounts:
    """Return the increase since `old`, an earlier reading of the same source.

    A lower count or other edges mean that the source restarted: all its values are new.
    """
    if old is None or new.edges != old.edges or new.value_sum < old.value_sum or any(map(lt, new.counts, old.counts)):
        return new
    return BucketCounts(new.edges, tuple(map(sub, new.counts, old.counts)), new.value_sum - old.value_sum)


def merge(parts: Iterable[BucketCounts]) -> BucketCounts | None:
    """Return all parts as one histogram over all their edges; None without parts.

    Values above a part's last finite edge go above the last edge of all.
    """
    merged: BucketCounts | None = None
    for part in parts:
        merged = part if merged is None else _add(merged, part)
    return merged


def quantile(histogram: BucketCounts, share: float) -> float | None:
    """The value that `share` of all values do not exceed; None if it holds none.

    Where that lies above the last finite edge: that edge, a lower bound (None if there is no finite edge). Raises
    ValueError for a share outside 0 to 1.
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"a share must be within 0 and 1, not {share}")
    cumulative = list(accumulate(histogram.counts))
    if cumulative[-1] <= 0.0:
        return None
    rank = share * cumulative[-1]
    i = max(
        bisect_left(cumulative, rank), bisect_right(cumulative, 0.0)
    )  # the first one that is not empty, for a rank of 0
    if math.isinf(histogram.edges[i]):
        return histogram.edges[i - 1] if i else None
    low, high = _lower_edge(histogram.edges, i), histogram.edges[i]
    return high - (high - low) * (cumulative[i] - rank) / histogram.counts[i]


def share_below(histogram: BucketCounts, value: float) -> float | None:
    """Share of the values that do not exceed `value`; None if it holds none.

    What lies above the last finite edge exceeds all but infinity. Raises ValueError for NaN.
    """
    if math.isnan(value):
        raise ValueError("a value must be a number, not NaN")
    cumulative = list(accumulate(histogram.counts, initial=0.0))
    if cumulative[-1] <= 0.0:
        return None
    return _count_below(histogram.edges, cumulative, value) / cumulative[-1]


def _lower_edge(edges: tuple[float, ...], i: int) -> float:
    """Where bucket i begins. Times and tokens begin at 0; a first edge of 0 or less is a point."""
    return edges[i - 1] if i else min(0.0, edges[0])


def _count_below(edges: tuple[float, ...], cumulative: list[float], value: float) -> float:
    """Return how many values do not exceed `value`. cumulative: number of values below each edge, then of all."""
    i = bisect_left(edges, value)
    if value == edges[i]:
        return cumulative[i + 1]
    low, high = _lower_edge(edges, i), edges[i]
    if math.isinf(high) or value <= low:
        return cumulative[i]
    return cumulative[i] + (cumulative[i + 1] - cumulative[i]) * (value - low) / (high - low)


def _add(first: BucketCounts, second: BucketCounts) -> BucketCounts:
    if first.edges != second.edges:
        edges = tuple(sorted({*first.edges, *second.edges}))
        first, second = _rebucket(first, edges), _rebucket(second, edges)
    return BucketCounts(first.edges, tuple(map(add, first.counts, second.counts)), first.value_sum + second.value_sum)


def _rebucket(histogram: BucketCounts, edges: tuple[float, ...]) -> BucketCounts:
    """The same histogram with more edges."""
    cumulative = list(accumulate(histogram.counts, initial=0.0))
    at_edges = [0.0, *(_count_below(histogram.edges, cumulative, edge) for edge in edges)]
    return BucketCounts(edges, tuple(high - low for low, high in pairwise(at_edges)), histogram.value_sum)
