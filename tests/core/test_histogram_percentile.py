"""Percentiles, and shares within a target, out of an engine's buckets: near the truth, and never against the counts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from plimsoll.core import histogram
from plimsoll.core.demand.histogram_percentile import percentile, share_within
from plimsoll.core.ports import BucketCounts

SHARE = 0.95
TPOT_EDGES_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, math.inf)


def lognormal(median_s: float, deviation: float, n: int, edges: tuple[float, ...]) -> tuple[BucketCounts, np.ndarray]:
    values = median_s * np.exp(deviation * np.random.default_rng(7).standard_normal(n))
    counts = np.bincount(np.searchsorted(np.array(edges), values), minlength=len(edges))
    return BucketCounts(edges, tuple(map(float, counts)), float(values.sum())), values


@pytest.mark.parametrize("median_s", [0.006, 0.009, 0.012, 0.02, 0.03, 0.06])
def test_percentile_of_lognormal_is_within_15_percent(median_s: float) -> None:
    b, values = lognormal(median_s, 0.25, 400, TPOT_EDGES_S)
    truth = float(np.quantile(values, SHARE))
    # Evenly spread inside buckets the worst of these is 45 % off.
    assert percentile(b, SHARE) == pytest.approx(truth, rel=0.15)


@pytest.mark.parametrize("median_s", [0.006, 0.009, 0.012, 0.02, 0.03, 0.06])
@pytest.mark.parametrize("target", [0.8, 1.0, 1.2, 1.5])  # medians
def test_share_within_lognormal_is_within_5_points(median_s: float, target: float) -> None:
    b, values = lognormal(median_s, 0.25, 400, TPOT_EDGES_S)
    truth = float((values <= target * median_s).mean())
    # Evenly spread inside buckets the worst of these is 34 points off.
    assert share_within(b, target * median_s) == pytest.approx(truth, abs=0.05)


def test_share_within_on_edge_is_exact_inside_is_between() -> None:
    b = BucketCounts(TPOT_EDGES_S, (0.0, 30.0, 60.0, 10.0, 0.0, 0.0, 0.0, 0.0, 0.0), 3.2)
    assert (share_within(b, 0.025), share_within(b, 0.05), share_within(b, 0.075)) == (0.3, 0.9, 1.0)
    assert (share_within(b, 0.01), share_within(b, 0.0), share_within(b, -1.0)) == (0.0, 0.0, 0.0)
    inside = [share_within(b, 0.025 + 0.001 * step) or 0.0 for step in range(26)]
    assert inside == sorted(inside)
    assert (inside[0], inside[-1]) == (0.3, 0.9)
    assert share_within(BucketCounts(TPOT_EDGES_S, (0.0,) * 9, 0.0), 0.05) is None
    with pytest.raises(ValueError, match="NaN"):
        share_within(b, math.nan)


def test_share_within_is_consistent_with_percentile() -> None:
    rng = np.random.default_rng(5)
    for _ in range(300):
        b, _ = lognormal(float(rng.uniform(0.005, 0.15)), float(rng.uniform(0.05, 0.3)), 400, TPOT_EDGES_S)
        target_s = float(rng.uniform(0.006, 0.29))
        placed, share = percentile(b, SHARE), share_within(b, target_s)
        assert placed is not None
        assert share is not None
        assert (placed <= target_s) == (share >= SHARE) or share == pytest.approx(SHARE, abs=1e-6)


@pytest.mark.parametrize("total", [0.0, 1e-9, 1e9])
def test_share_within_invalid_sum_stays_in_bucket_bounds(total: float) -> None:
    b = BucketCounts(TPOT_EDGES_S, (0.0, 30.0, 60.0, 10.0, 0.0, 0.0, 0.0, 0.0, 0.0), total)
    assert 0.3 <= (share_within(b, 0.04) or 0.0) <= 0.9
    alone = BucketCounts(TPOT_EDGES_S, (0.0, 0.0, 5.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), total)
    assert 0.0 <= (share_within(alone, 0.04) or 0.0) <= 1.0


def test_percentile_stays_within_bucket() -> None:
    rng = np.random.default_rng(3)
    for _ in range(300):
        counts = tuple(map(float, rng.integers(0, 4, len(TPOT_EDGES_S))))
        b = BucketCounts(TPOT_EDGES_S, counts, float(rng.uniform(0.0, 2.0)))
        placed, even = percentile(b, SHARE), histogram.quantile(b, SHARE)
        assert (placed is None) == (even is None)
        if placed is not None and even is not None:
            assert math.isfinite(placed)
            assert histogram.bucket_index(TPOT_EDGES_S, placed) in {
                histogram.bucket_index(TPOT_EDGES_S, even) + i for i in (-1, 0)
            }
