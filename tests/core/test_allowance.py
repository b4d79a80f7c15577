"""How many refusals are no news."""

from __future__ import annotations

import math

import pytest

from plimsoll.core.autoscaler.allowance import allowed


def test_nobody_in_flight_leaves_chance_alone() -> None:
    assert allowed(0.05, 84.0, 0.0) == pytest.approx(4.2 + 3.0 * math.sqrt(84.0 * 0.05 * 0.95))


def test_it_nears_the_budget_as_more_come_and_widens_with_the_places() -> None:
    shares = [allowed(0.05, n, 60.0) / n for n in (50.0, 500.0, 5e3, 5e5)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == pytest.approx(0.05, rel=0.05)
    counts = [allowed(0.05, 500.0, n) for n in (0.0, 10.0, 100.0, 1000.0, 1e9)]
    assert counts == sorted(counts)
    assert math.isfinite(counts[-1])
    assert allowed(0.05, 0.0, 60.0) == 0.0
