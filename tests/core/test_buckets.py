"""Histograms: differences, sums over sources, percentiles; exact values first, then what sources can do to them."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core import buckets
from plimsoll.core.buckets import LATENCY_EDGES_S
from plimsoll.core.ports import Buckets

INF = math.inf
EDGES = (1.0, 2.0, 4.0, INF)


def held(*counts: float, edges: tuple[float, ...] = EDGES, total: float = 0.0) -> Buckets:
    return Buckets(edges, counts, total)


histograms = st.builds(
    lambda gaps, counts: Buckets(
        (*(sum(gaps[: i + 1]) for i in range(len(gaps))), INF), tuple(map(float, counts[: len(gaps) + 1])), 0.0
    ),
    st.lists(st.integers(1, 8), min_size=1, max_size=6),
    st.lists(st.integers(0, 1000), min_size=7, max_size=7),
)


# ---------------------------------------------------------------- edges


def test_latency_edges_are_eight_an_octave_from_a_millisecond_to_a_thousand_seconds() -> None:
    finite = LATENCY_EDGES_S[:-1]
    assert finite[0] == 0.001
    assert finite[-2] < 1000.0 <= finite[-1]
    assert LATENCY_EDGES_S[-1] == INF
    assert all(math.isclose(high / low, 2 ** (1 / 8)) for low, high in pairwise(finite))
    assert len(LATENCY_EDGES_S) == 162


def test_last_edge_is_met_where_octaves_meet_it() -> None:
    assert buckets.log_edges(1.0, 8.0, 2) == pytest.approx((1.0, 2**0.5, 2.0, 2**1.5, 4.0, 2**2.5, 8.0, INF))


@pytest.mark.parametrize(("value", "index"), [(0.0, 0), (0.5, 0), (1.0, 0), (1.1, 1), (2.0, 1), (4.0, 2), (9.0, 3)])
def test_a_value_on_an_edge_lies_below_it(value: float, index: int) -> None:
    assert buckets.index(EDGES, value) == index


def test_sparse_counts() -> None:
    assert buckets.from_sparse(EDGES, {1: 3, 3: 1}, 9.5) == held(0.0, 3, 0.0, 1, total=9.5)
    assert buckets.count(buckets.from_sparse(EDGES, {}, 0.0)) == 0.0
    with pytest.raises(IndexError):
        buckets.from_sparse(EDGES, {4: 1}, 1.0)


# ---------------------------------------------------------------- difference


def test_what_came_in_between() -> None:
    assert buckets.difference(held(3, 5, 2, 1, total=20.0), held(1, 5, 0, 1, total=12.5)) == held(2, 0, 2, 0, total=7.5)


def test_without_an_earlier_reading_all_is_new() -> None:
    assert buckets.difference(held(1, 0, 0, 0), None) == held(1, 0, 0, 0)


def test_nothing_came() -> None:
    b = held(3, 5, 2, 1, total=20.0)
    assert buckets.difference(b, b) == held(0, 0, 0, 0)


@pytest.mark.parametrize(
    "old",
    [
        held(4, 0, 0, 0, total=1.0),  # one count fell
        held(0, 0, 0, 9, total=1.0),  # the infinite one fell, though others grew
        held(3, 5, 2, 1, total=21.0),  # the same counts by chance, of smaller values
        held(1, 1, edges=(1.0, INF), total=1.0),  # another program with other edges
    ],
)
def test_a_source_that_started_anew_has_all_its_counts_since(old: Buckets) -> None:
    new = held(3, 5, 2, 1, total=20.0)
    assert buckets.difference(new, old) == new


@given(histograms, st.lists(st.integers(0, 100), min_size=7, max_size=7))
def test_difference_undoes_a_sum(old: Buckets, came: list[int]) -> None:
    part = Buckets(old.edges, tuple(map(float, came[: len(old.edges)])), 3.0)
    together = buckets.merged([old, part])
    assert together is not None
    assert buckets.difference(together, old) == part


# ---------------------------------------------------------------- merged


def test_nothing_merged_is_unknown_and_one_is_itself() -> None:
    assert buckets.merged([]) is None
    assert buckets.merged(iter([held(1, 2, 3, 4, total=5.0)])) == held(1, 2, 3, 4, total=5.0)


def test_same_edges_are_added() -> None:
    parts = [held(1, 2, 3, 4, total=5.0), held(1, 0, 0, 1, total=2.0), held(0, 0, 0, 0)]
    assert buckets.merged(parts) == held(2, 2, 3, 5, total=7.0)


def test_other_edges_are_cut_at_all_of_them() -> None:
    coarse = held(4, 8, 1, edges=(2.0, 10.0, INF), total=3.0)
    fine = held(1, 1, 1, 1, edges=(1.0, 2.0, 4.0, INF), total=4.0)
    assert buckets.merged([coarse, fine]) == held(
        2 + 1, 2 + 1, 2 + 1, 6 + 0, 1 + 1, edges=(1.0, 2.0, 4.0, 10.0, INF), total=7.0
    )


def test_what_has_no_finite_edge_is_above_all() -> None:
    assert buckets.merged([held(2, edges=(INF,)), held(1, 0, 0, 0)]) == held(1, 0, 0, 2)


@given(histograms, histograms)
def test_merging_loses_none(a: Buckets, b: Buckets) -> None:
    both = buckets.merged([a, b])
    assert both is not None
    assert buckets.count(both) == pytest.approx(buckets.count(a) + buckets.count(b))
    assert min(both.counts) >= 0.0
    for edge in both.edges:
        below = [(buckets.share_below(part, edge) or 0.0) * buckets.count(part) for part in (a, b, both)]
        assert below[2] == pytest.approx(below[0] + below[1])


@given(histograms, histograms, st.floats(0.0, 1.0))
def test_more_edges_alone_change_no_percentile_below_the_infinite_bucket(a: Buckets, b: Buckets, share: float) -> None:
    cut = buckets.merged([a, Buckets(b.edges, (0.0,) * len(b.edges), 0.0)])
    assert cut is not None
    if buckets.quantile(a, 1.0) is not None and a.counts[-1] == 0.0:
        low, high = (buckets.quantile(a, max(0.0, min(1.0, share + nudge))) for nudge in (-1e-9, 1e-9))
        found = buckets.quantile(cut, share)
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
def test_quantiles(counts: tuple[float, ...], share: float, value: float) -> None:
    assert buckets.quantile(held(*counts), share) == pytest.approx(value)


@pytest.mark.parametrize("b", [held(0, 0, 0, 0), held(0, edges=(INF,)), held(3, edges=(INF,))])
def test_what_holds_nothing_or_has_no_finite_edge_has_no_percentile(b: Buckets) -> None:
    assert buckets.quantile(b, 0.5) is None


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan, INF])
def test_shares_outside_are_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        buckets.quantile(held(1, 0, 0, 0), share)


def test_a_first_edge_of_zero_is_a_point() -> None:
    b = held(5, 5, 0, edges=(0.0, 2.0, INF))
    assert buckets.quantile(b, 0.5) == 0.0
    assert buckets.quantile(b, 0.75) == 1.0
    assert buckets.share_below(b, 0.0) == 0.5
    assert buckets.share_below(b, -1.0) == 0.0


@given(st.lists(st.floats(0.001, 1000.0), min_size=1, max_size=200), st.floats(0.0, 1.0))
def test_a_percentile_of_latencies_is_off_by_less_than_a_bucket(values: list[float], share: float) -> None:
    counts: dict[int, int] = {}
    for value in values:
        i = buckets.index(LATENCY_EDGES_S, value)
        counts[i] = counts.get(i, 0) + 1
    found = buckets.quantile(buckets.from_sparse(LATENCY_EDGES_S, counts, sum(values)), share)
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
def test_shares(value: float, share: float) -> None:
    assert buckets.share_below(held(2, 4, 2, 2), value) == pytest.approx(share)


def test_all_lie_below_infinity() -> None:
    assert buckets.share_below(held(2, 4, 2, 2), INF) == 1.0


def test_the_share_of_nothing_is_unknown() -> None:
    assert buckets.share_below(held(0, 0, 0, 0), 1.0) is None


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        buckets.share_below(held(1, 0, 0, 0), math.nan)


@given(histograms, st.floats(0.0, 1.0))
def test_a_share_is_the_inverse_of_a_quantile(b: Buckets, share: float) -> None:
    value = buckets.quantile(b, share)
    if value is None or value >= b.edges[-2]:
        return
    found = buckets.share_below(b, value)
    assert found is not None
    assert found == pytest.approx(share, abs=1e-9)
