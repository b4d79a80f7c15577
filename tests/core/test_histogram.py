"""Histograms: differences, sums over sources, percentiles; exact values first, then what sources can do to them."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core import histogram
from plimsoll.core.histogram import LATENCY_EDGES_S
from plimsoll.core.ports import BucketCounts

INF = math.inf
EDGES = (1.0, 2.0, 4.0, INF)


def make_histogram(*counts: float, edges: tuple[float, ...] = EDGES, total: float = 0.0) -> BucketCounts:
    return BucketCounts(edges, counts, total)


histograms = st.builds(
    lambda gaps, counts: BucketCounts(
        (*(sum(gaps[: i + 1]) for i in range(len(gaps))), INF), tuple(map(float, counts[: len(gaps) + 1])), 0.0
    ),
    st.lists(st.integers(1, 8), min_size=1, max_size=6),
    st.lists(st.integers(0, 1000), min_size=7, max_size=7),
)


# ---------------------------------------------------------------- edges


def test_latency_edges_are_eight_per_octave() -> None:
    finite = LATENCY_EDGES_S[:-1]
    assert finite[0] == 0.001
    assert finite[-2] < 1000.0 <= finite[-1]
    assert LATENCY_EDGES_S[-1] == INF
    assert all(math.isclose(high / low, 2 ** (1 / 8)) for low, high in pairwise(finite))
    assert len(LATENCY_EDGES_S) == 162


def test_log_edges_ending_on_octave_include_last_edge() -> None:
    assert histogram.log_edges(1.0, 8.0, 2) == pytest.approx((1.0, 2**0.5, 2.0, 2**1.5, 4.0, 2**2.5, 8.0, INF))


@pytest.mark.parametrize(("value", "index"), [(0.0, 0), (0.5, 0), (1.0, 0), (1.1, 1), (2.0, 1), (4.0, 2), (9.0, 3)])
def test_bucket_index_of_value_on_edge_is_lower_bucket(value: float, index: int) -> None:
    assert histogram.bucket_index(EDGES, value) == index


def test_from_sparse_fills_missing_counts_with_zero() -> None:
    assert histogram.from_sparse(EDGES, {1: 3, 3: 1}, 9.5) == make_histogram(0.0, 3, 0.0, 1, total=9.5)
    assert histogram.total_count(histogram.from_sparse(EDGES, {}, 0.0)) == 0.0
    with pytest.raises(IndexError):
        histogram.from_sparse(EDGES, {4: 1}, 1.0)


# ---------------------------------------------------------------- difference


def test_difference_returns_counts_between_readings() -> None:
    assert histogram.difference(
        make_histogram(3, 5, 2, 1, total=20.0), make_histogram(1, 5, 0, 1, total=12.5)
    ) == make_histogram(2, 0, 2, 0, total=7.5)


def test_difference_without_previous_returns_all() -> None:
    assert histogram.difference(make_histogram(1, 0, 0, 0), None) == make_histogram(1, 0, 0, 0)


def test_difference_of_equal_readings_is_zero() -> None:
    b = make_histogram(3, 5, 2, 1, total=20.0)
    assert histogram.difference(b, b) == make_histogram(0, 0, 0, 0)


@pytest.mark.parametrize(
    "old",
    [
        make_histogram(4, 0, 0, 0, total=1.0),  # one count fell
        make_histogram(0, 0, 0, 9, total=1.0),  # the infinite one fell, though others grew
        make_histogram(3, 5, 2, 1, total=21.0),  # the same counts by chance, of smaller values
        make_histogram(1, 1, edges=(1.0, INF), total=1.0),  # another program with other edges
    ],
)
def test_difference_after_reset_returns_new_counts(old: BucketCounts) -> None:
    new = make_histogram(3, 5, 2, 1, total=20.0)
    assert histogram.difference(new, old) == new


@given(histograms, st.lists(st.integers(0, 100), min_size=7, max_size=7))
def test_difference_inverts_merge(old: BucketCounts, arrivals: list[int]) -> None:
    part = BucketCounts(old.edges, tuple(map(float, arrivals[: len(old.edges)])), 3.0)
    together = histogram.merge([old, part])
    assert together is not None
    assert histogram.difference(together, old) == part


# ---------------------------------------------------------------- merged


def test_merge_empty_is_none_and_single_is_identity() -> None:
    assert histogram.merge([]) is None
    assert histogram.merge(iter([make_histogram(1, 2, 3, 4, total=5.0)])) == make_histogram(1, 2, 3, 4, total=5.0)


def test_merge_same_edges_adds_counts() -> None:
    parts = [make_histogram(1, 2, 3, 4, total=5.0), make_histogram(1, 0, 0, 1, total=2.0), make_histogram(0, 0, 0, 0)]
    assert histogram.merge(parts) == make_histogram(2, 2, 3, 5, total=7.0)


def test_merge_different_edges_uses_union_of_edges() -> None:
    coarse = make_histogram(4, 8, 1, edges=(2.0, 10.0, INF), total=3.0)
    fine = make_histogram(1, 1, 1, 1, edges=(1.0, 2.0, 4.0, INF), total=4.0)
    assert histogram.merge([coarse, fine]) == make_histogram(
        2 + 1, 2 + 1, 2 + 1, 6 + 0, 1 + 1, edges=(1.0, 2.0, 4.0, 10.0, INF), total=7.0
    )


def test_merge_without_finite_edge_counts_as_infinite() -> None:
    assert histogram.merge([make_histogram(2, edges=(INF,)), make_histogram(1, 0, 0, 0)]) == make_histogram(1, 0, 0, 2)


@given(histograms, histograms)
def test_merge_preserves_count_and_share_below(a: BucketCounts, b: BucketCounts) -> None:
    both = histogram.merge([a, b])
    assert both is not None
    assert histogram.total_count(both) == pytest.approx(histogram.total_count(a) + histogram.total_count(b))
    assert min(both.counts) >= 0.0
    for edge in both.edges:
        below = [(histogram.share_below(part, edge) or 0.0) * histogram.total_count(part) for part in (a, b, both)]
        assert below[2] == pytest.approx(below[0] + below[1])


@given(histograms, histograms, st.floats(0.0, 1.0))
def test_merge_with_more_edges_keeps_quantiles(a: BucketCounts, b: BucketCounts, share: float) -> None:
    cut = histogram.merge([a, BucketCounts(b.edges, (0.0,) * len(b.edges), 0.0)])
    assert cut is not None
    if histogram.quantile(a, 1.0) is not None and a.counts[-1] == 0.0:
        low, high = (histogram.quantile(a, max(0.0, min(1.0, share + nudge))) for nudge in (-1e-9, 1e-9))
        found = histogram.quantile(cut, share)
        assert low is not None
        assert high is not None
        assert found is not None
        assert low - 1e-6 <= found <= high + 1e-6


# ---------------------------------------------------------------- quantile


@pytest.mark.parametrize(
    ("counts", "share", "value"),
    [
        ((10, 0, 0, 0), 0.5, 0.5),
        ((10, 0, 0, 0), 0.0, 0.0),
        ((10, 0, 0, 0), 1.0, 1.0),
        ((0, 4, 4, 0), 0.25, 1.5),
        ((0, 4, 4, 0), 0.5, 2.0),  # on the border between two
        ((0, 4, 4, 0), 0.75, 3.0),
        ((0, 4, 4, 0), 0.0, 1.0),  # the smallest lies in the first one that is not empty
        ((5, 0, 5, 0), 0.5, 1.0),  # an empty bucket between
        ((5, 0, 5, 0), 0.6, 2.4),
        ((0, 1, 0, 0), 0.5, 1.5),  # one count
        ((0, 1, 0, 0), 1.0, 2.0),
        ((9, 0, 0, 1), 0.95, 4.0),  # in the infinite bucket: what is known is its lower edge
        ((0, 0, 0, 1), 0.0, 4.0),
        ((0.5, 0.5, 0, 0), 0.75, 1.5),  # shares of a count, as a cut makes them
    ],
)
def test_quantile_returns_interpolated_value(counts: tuple[float, ...], share: float, value: float) -> None:
    assert histogram.quantile(make_histogram(*counts), share) == pytest.approx(value)


@pytest.mark.parametrize(
    "b", [make_histogram(0, 0, 0, 0), make_histogram(0, edges=(INF,)), make_histogram(3, edges=(INF,))]
)
def test_quantile_of_empty_or_unbounded_is_none(b: BucketCounts) -> None:
    assert histogram.quantile(b, 0.5) is None


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan, INF])
def test_quantile_share_out_of_range_raises(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        histogram.quantile(make_histogram(1, 0, 0, 0), share)


def test_quantile_with_zero_first_edge_is_a_point_mass() -> None:
    b = make_histogram(5, 5, 0, edges=(0.0, 2.0, INF))
    assert histogram.quantile(b, 0.5) == 0.0
    assert histogram.quantile(b, 0.75) == 1.0
    assert histogram.share_below(b, 0.0) == 0.5
    assert histogram.share_below(b, -1.0) == 0.0


@given(st.lists(st.floats(0.001, 1000.0), min_size=1, max_size=200), st.floats(0.0, 1.0))
def test_quantile_of_latencies_is_within_one_bucket(values: list[float], share: float) -> None:
    counts: dict[int, int] = {}
    for value in values:
        i = histogram.bucket_index(LATENCY_EDGES_S, value)
        counts[i] = counts.get(i, 0) + 1
    found = histogram.quantile(histogram.from_sparse(LATENCY_EDGES_S, counts, sum(values)), share)
    assert found is not None
    rank = share * len(values)
    ordered = sorted(values)
    low = ordered[max(0, math.ceil(rank - 1e-9) - 1)]
    high = ordered[min(len(values) - 1, math.floor(rank + 1e-9))]
    assert low / 2 ** (1 / 8) * (1 - 1e-9) - 0.001 <= found <= high * 2 ** (1 / 8) * (1 + 1e-9)


# ---------------------------------------------------------------- share_below


@pytest.mark.parametrize(
    ("value", "share"),
    [(-1.0, 0.0), (0.0, 0.0), (0.5, 0.1), (1.0, 0.2), (1.5, 0.4), (2.0, 0.6), (3.0, 0.7), (4.0, 0.8), (99.0, 0.8)],
)
def test_share_below_returns_interpolated_share(value: float, share: float) -> None:
    assert histogram.share_below(make_histogram(2, 4, 2, 2), value) == pytest.approx(share)


def test_share_below_infinity_is_one() -> None:
    assert histogram.share_below(make_histogram(2, 4, 2, 2), INF) == 1.0


def test_share_below_of_empty_is_none() -> None:
    assert histogram.share_below(make_histogram(0, 0, 0, 0), 1.0) is None


def test_share_below_nan_raises() -> None:
    with pytest.raises(ValueError, match="NaN"):
        histogram.share_below(make_histogram(1, 0, 0, 0), math.nan)


@given(histograms, st.floats(0.0, 1.0))
def test_share_below_inverts_quantile(b: BucketCounts, share: float) -> None:
    value = histogram.quantile(b, share)
    if value is None or value >= b.edges[-2]:
        return
    found = histogram.share_below(b, value)
    assert found is not None
    assert found == pytest.approx(share, abs=1e-9)
