"""What a refusal weighs, against groups of places and lines that are filled request by request."""

from __future__ import annotations

import math

import numpy as np
import pytest

from plimsoll.core.capacity import windowed_slo
from tests.core.fcfs_queue import simulate_waits

BUDGET, REQUESTS = 0.05, 500  # which allow for 25 misses a window
# Servers, patience in services, squared coefficients of variation of services and gaps, and the load of a server at
# which the budget was broken in one window of a hundred, found by bisection.
CASES = [
    (1, 10.0, 0.1, 1.0, 0.869), (3, 5.0, 0.1, 1.0, 0.915), (32, 0.1, 1.0, 1.0, 0.747), (32, 0.1, 2.0, 1.0, 0.734),
    (32, 0.3, 0.1, 1.0, 0.891), (65, 0.05, 1.0, 1.0, 0.802), (65, 0.3, 0.1, 1.0, 0.936), (130, 0.02, 1.0, 1.0, 0.842),
    (336, 0.1, 0.1, 1.0, 0.957), (24, 0.05, 0.3, 4.0, 0.43), (65, 0.05, 0.1, 4.0, 0.597), (65, 0.3, 0.3, 4.0, 0.742),
    (130, 0.05, 0.3, 2.0, 0.827),
]  # fmt: skip


def simulated_rejections(
    servers: int, patience: float, service_cv2: float, gap_cv2: float, load: float, seed: int
) -> np.ndarray:
    """Refusals in each window of a first-come queue that lets nobody in who would wait longer than `patience`."""
    found = simulate_waits(load, servers, gap_cv2, service_cv2, patience, 800 * REQUESTS, seed)
    return np.isnan(found[4 * REQUESTS :]).reshape(-1, REQUESTS).sum(axis=1)


def spread(servers: float, patience: float, budget: float = BUDGET) -> float:
    one = (np.array([value]) for value in (budget, servers, servers * patience))
    return float(windowed_slo.rejection_dispersion(*one)[0])


def weight_of(dispersion: float, steady: float = 0.0, rate: float = 0.0, budget: float = BUDGET) -> float:
    one = (np.array([value]) for value in (budget, steady, rate, dispersion))
    return float(windowed_slo.rejection_weight(*one)[0])


@pytest.mark.parametrize(("servers", "patience", "service_cv2", "gap_cv2", "load"), CASES)
def test_rejection_weight_keeps_most_windows_within_slo(
    servers: int, patience: float, service_cv2: float, gap_cv2: float, load: float
) -> None:
    lost = simulated_rejections(servers, patience, service_cv2, gap_cv2, load, 3)
    reported = spread(servers, patience)
    assert 0.6 * reported < lost.var() / lost.mean() < 1.4 * reported
    assert np.mean(lost > BUDGET * REQUESTS) < 0.03
    assert 0.5 * BUDGET < lost.mean() / REQUESTS * weight_of(reported) < 1.4 * BUDGET


def test_unweighted_rejections_violate_many_windows() -> None:
    lost = simulated_rejections(65, 0.05, 0.1, 1.0, 0.955, 3)
    assert lost.mean() / REQUESTS == pytest.approx(BUDGET, rel=0.1)
    assert np.mean(lost > BUDGET * REQUESTS) > 0.3


def test_rejection_weight_rises_with_dispersion() -> None:
    weights = [weight_of(dispersion) for dispersion in (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 1e3, 1e9)]
    assert weights == sorted(weights)
    assert 1.5 < weights[0] < 2.0, "25 of 500 by themselves: some windows have ten more than the mean"
    longer = [weight_of(8.0, rate=rate) for rate in (0.0, 1.0, 25.0 / 3.0, 36.0, 1e3, 1e6)]
    assert longer[0] == longer[1] == pytest.approx(longer[2]), "500 requests at least"
    assert longer == sorted(longer, reverse=True)
    assert 1.0 <= longer[-1] < 1.1
    assert weight_of(8.0, steady=0.02) > weight_of(8.0)
    assert math.isfinite(weight_of(8.0, steady=1.0))


def test_rejection_dispersion_rises_with_slots_and_patience() -> None:
    assert 1.0 <= spread(0.0, 0.0) < 1.5
    places = [spread(n, 0.0) for n in (1, 8, 64, 512, 4096, 1e6)]
    assert places == sorted(places)
    assert spread(1, 60.0) == pytest.approx(40.0)
    assert spread(64, 0.0, 0.01) != spread(64, 0.0, 0.05)
    mixed = windowed_slo.rejection_dispersion(np.array([0.01, 0.05]), np.array([64.0, 64.0]), np.zeros(2))
    assert mixed.tolist() == [spread(64, 0.0, 0.01), spread(64, 0.0, 0.05)]
