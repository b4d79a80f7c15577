"""How much of a level's doubt is sized for: against the integral it stands for, and at its edges."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from plimsoll.core.demand.uncertainty import MAX_LEVEL_SHARE, counted_uncertainty, quantile_deviate, tier_miss_cost

NORMAL = NormalDist()


def uncertainty_margin(level: float, error: float, quantile: float, miss_cost: float) -> float:
    return counted_uncertainty(level, error, quantile_deviate(quantile), miss_cost)


def expected_served(error: float, above: float) -> float:
    """E[(X - above)+] of a normal X about 0, by the trapezoid."""
    at = np.linspace(above, above + 12 * error, 200_001)
    density = np.exp(-0.5 * (at / error) ** 2) / (error * math.sqrt(2 * math.pi))
    return float(np.trapezoid((at - above) * density, at))


@pytest.mark.parametrize("miss_cost", [5.0, 25.0, 100.0])
@pytest.mark.parametrize("error", [0.15, 0.5, 2.0])
def test_uncertainty_margin_pays_for_a_replica(error: float, miss_cost: float) -> None:
    found = uncertainty_margin(1000.0, error, 0.999, miss_cost)
    if 0.0 < found < quantile_deviate(0.999) * error * (1 - 1e-9):
        assert miss_cost * expected_served(error, found) == pytest.approx(1.0, rel=1e-3)
    elif found:
        assert miss_cost * expected_served(error, found) >= 1.0, "the quantile is the most"
    else:
        assert miss_cost * expected_served(error, 0.0) <= 1.0


def test_uncertainty_small_error_is_zero_large_is_quantile() -> None:
    assert uncertainty_margin(2.7, 0.02, 0.95, 25.0) == 0.0
    assert uncertainty_margin(1e6, 1e4, 0.95, 25.0) == pytest.approx(1.6449e4, rel=1e-4)
    assert uncertainty_margin(2.7, 1.5, 0.95, 25.0) == pytest.approx(MAX_LEVEL_SHARE * 2.7)
    assert uncertainty_margin(2.7, 0.0, 0.95, 25.0) == uncertainty_margin(0.0, 0.0, 0.95, 25.0) == 0.0
    assert uncertainty_margin(2.7, 0.2, 0.95, 0.0) == 0.0, "a miss that costs nothing"
    assert uncertainty_margin(100.0, 0.02, 0.95, math.inf) == pytest.approx(0.02 * quantile_deviate(0.95)), (
        "one without a price"
    )
    assert uncertainty_margin(2.7, 0.0, 0.95, math.inf) == 0.0


def test_miss_costs_are_split_over_all_tiers() -> None:
    request_gpu_s = {"prefill": 0.03, "decode": 0.06}
    assert [tier_miss_cost(25.0, request_gpu_s, tier) for tier in request_gpu_s] == pytest.approx([75.0, 37.5])
    assert tier_miss_cost(10.0, {"prefill": 0.05, "decode": 0.05}, "decode") == pytest.approx(20.0)
