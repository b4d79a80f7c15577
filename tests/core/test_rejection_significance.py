"""What is refused by chance, against a group of places that is filled request by request."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from plimsoll.core.autoscaling.rejection_significance import insignificant_rejections
from plimsoll.core.capacity.peakedness import overflow_peakedness
from plimsoll.core.stats import shrink

BUDGET = 0.05


def overflowing(places: int, gaps: np.ndarray, stays: np.ndarray, window: float) -> np.ndarray:
    """How many were refused in each window of time."""
    busy: list[float] = []
    now, lost = 0.0, []
    for gap, stay in zip(gaps, stays, strict=True):
        now += gap
        while busy and busy[0] <= now:
            heapq.heappop(busy)
        if len(busy) < places:
            heapq.heappush(busy, now + stay)
        else:
            lost.append(now)
    return np.histogram(lost, np.arange(0.0, now, window))[0]


@pytest.mark.parametrize("cv2", [1.0, 4.0])
def test_insignificant_rejections_cover_loss_at_capacity(cv2: float) -> None:
    """Windows of one and a half stays, with as many places as refuse the whole budget for ever."""
    rng, stays_n, load = np.random.default_rng(5), 200_000, 60.0
    shape = 1.0 / cv2
    gaps, stays = rng.gamma(shape, 1.0 / shape / load, stays_n), rng.exponential(1.0, stays_n)
    some = 40_000
    places = next(n for n in range(40, 200) if overflowing(n, gaps[:some], stays[:some], 1.5).sum() < BUDGET * some)
    refused = overflowing(places, gaps, stays, 1.5)
    assert refused.sum() / stays_n == pytest.approx(BUDGET, abs=0.015)
    most = insignificant_rejections(BUDGET, 1.5 * load, (1.0 - BUDGET) * load, cv2)
    assert np.mean(refused > most) < 0.03
    alone = insignificant_rejections(BUDGET, 1.5 * load, 0.0)
    assert np.mean(refused > alone) > 0.05, "as if each were refused by himself"
    assert most < 1.5 * load, "yet a fleet of half the size is told from chance within a window or two"


def test_overflow_peakedness_matches_overflow_formula() -> None:
    """Ten erlangs over 13 places overflow by 0.084 and a peakedness of 1.9 or so; with nobody in flight it is 1."""
    assert overflow_peakedness(BUDGET, 0) == 1.0
    load = 10.0 / 0.95
    lost = 1.0
    for places in range(1, 100):
        lost = load * lost / (places + load * lost)
        if lost <= BUDGET:
            break
    over = load * lost
    assert overflow_peakedness(BUDGET, 10) == pytest.approx(1.0 - over + load / (places + 1.0 + over - load))
    assert 1.5 < overflow_peakedness(BUDGET, 10) < 2.5


def test_insignificant_share_decreases_with_requests() -> None:
    shares = [insignificant_rejections(BUDGET, n, 50.0) / n for n in (50.0, 200.0, 1000.0, 1e5)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == pytest.approx(BUDGET, rel=0.15)
    assert insignificant_rejections(BUDGET, 0.0, 50.0) == 0.0
    assert insignificant_rejections(BUDGET, 100.0, 1e9) == pytest.approx(
        insignificant_rejections(BUDGET, 100.0, 1e4)
    ), "bounded"


def test_shrink_counts_full_amount_from_half_above_limit() -> None:
    found = [shrink(amount, 10.0) for amount in (0.0, 10.0, 12.0, 15.0, 40.0)]
    assert found == pytest.approx([0.0, 0.0, 6.0, 15.0, 40.0])
    assert shrink(3.0, 0.0) == 3.0
