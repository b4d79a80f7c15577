"""What is learned of pauses between requests, and the bet on the next one, against theory and brute force."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core.forecast import Pause, Pauses, pauses

START_S = 10.0


def after_idle_periods(lengths: list[float], seed: Pauses | None = None) -> tuple[Pauses, float]:
    """Pauses of these lengths, each ended by one request, and then one that has just begun."""
    found, now_s = seed or Pauses(), 0.0
    for length in lengths:
        found = pauses.hear(found, now_s, True, 0.0, START_S)
        now_s += length
        found = pauses.hear(found, now_s, False, 1.0, START_S)
    return pauses.hear(found, now_s, True, 0.0, START_S), now_s


def waiting_time_s(found: Pauses, now_s: float, cold_s: float) -> int:
    """For how long waiting is worth its time, without a break."""
    left = range(1, 20_000)
    return next(age for age in left if pauses.lasting(found, now_s + age).best(cold_s).saves_s(cold_s) <= 1e-9)


@pytest.mark.parametrize("cold_s", [10.0, 25.0, 137.0, 4000.0])
def test_idle_prior_waits_as_long_as_cold_start_costs(cold_s: float) -> None:
    """Ski rental: whatever comes, no more than twice what who knows the future pays."""
    assert waiting_time_s(*after_idle_periods([]), cold_s) == pytest.approx(cold_s, abs=1.0)


def test_idle_prior_ends_within_its_age_with_even_chance() -> None:
    now = pauses.lasting(*after_idle_periods([]))._replace(away_s=60.0)
    assert now.chance(60.0) == pytest.approx(0.5)
    assert now.chance(180.0) == pytest.approx(0.75)


@pytest.mark.parametrize(("cold_s", "waits"), [(20.0, False), (60.0, False), (170.0, True), (400.0, True)])
def test_idle_poisson_waits_if_mean_is_below_cold_start(cold_s: float, waits: bool) -> None:
    """Poisson arrivals forget: either no pause is worth waiting out, or all of them."""
    draw = random.Random(3)
    found, now_s = after_idle_periods([draw.expovariate(1 / 100.0) for _ in range(400)])
    ages = (5, 20, 60, 120)
    worth = [pauses.lasting(found, now_s + age).best(cold_s).saves_s(cold_s) > 0.0 for age in ages]
    assert worth == [waits] * len(ages)


def test_idle_regular_caller_is_awaited_until_late() -> None:
    found, now_s = after_idle_periods([60.0] * 20)
    worth = {age: pauses.lasting(found, now_s + age).best(100.0).saves_s(100.0) for age in (1, 20, 50, 300)}
    assert min(worth[1], worth[20], worth[50]) > 30.0
    assert worth[300] == 0.0
    assert pauses.lasting(found, now_s + 45.0).chance(20.0) > 0.8 > 0.2 > pauses.lasting(found, now_s).chance(30.0)


def test_idle_stats_old_pattern_is_forgotten() -> None:
    found, now_s = after_idle_periods([60.0] * 20)
    changed, later_s = after_idle_periods([2000.0] * 60, found)
    before, now = (pauses.lasting(p, at_s + 45.0).chance(20.0) for p, at_s in ((found, now_s), (changed, later_s)))
    assert now < 0.3 < before


def test_idle_burst_counts_requests_during_startup() -> None:
    found, now_s = Pauses(), 0.0
    for _ in range(20):
        found = pauses.hear(found, now_s, True, 0.0, START_S)
        now_s += 100.0
        for _ in range(30):
            found = pauses.hear(found, now_s, False, 2.0, START_S)
            now_s += 1.0
    assert pauses.lasting(found, now_s).burst == pytest.approx(2.0 * START_S, rel=0.15)
    assert pauses.lasting(Pauses(), 0.0).burst == 1.0


@given(st.lists(st.floats(1.0, 1e5), max_size=30), st.floats(0.0, 1e5), st.floats(0.1, 1e5))
def test_idle_optimal_wait_is_best_of_all(lengths: list[float], away_s: float, cold_s: float) -> None:
    found = pauses.lasting(after_idle_periods(lengths)[0], 0.0)._replace(away_s=away_s)
    best = found.best(cold_s)
    assert 0.0 <= best.chance <= 1.0
    assert 0.0 <= best.takes_s <= best.within_s + 1e-6
    age_s = max(away_s, 1.0)
    for within_s in (0.01 * age_s, 0.3 * age_s, age_s, 10.0 * age_s, cold_s):
        saved = found._until(age_s + within_s).saves_s(cold_s)
        assert saved <= best.saves_s(cold_s) + 1e-6 * cold_s


@given(st.lists(st.floats(1.0, 1e5), max_size=30), st.floats(0.0, 1e5), st.floats(0.0, 1e4), st.floats(0.0, 1e4))
def test_idle_return_chance_is_monotone_in_time(
    lengths: list[float], away_s: float, less_s: float, more_s: float
) -> None:
    found: Pause = pauses.lasting(after_idle_periods(lengths)[0], 0.0)._replace(away_s=away_s)
    assert 0.0 <= found.chance(less_s) <= found.chance(less_s + more_s) + 1e-12 <= 1.0 + 1e-12


def test_idle_period_with_missing_samples_is_not_learned() -> None:
    found = pauses.hear(Pauses(), 0.0, True, 0.0, START_S)
    found = pauses.hear(found, 100.0, None, 0.0, START_S)
    found = pauses.hear(found, 200.0, True, 0.0, START_S)
    assert pauses.lasting(found, 230.0).away_s == 30.0
    found = pauses.hear(pauses.hear(found, 230.0, None, 0.0, START_S), 240.0, False, 1.0, START_S)
    assert found.reached == Pauses().reached
    assert pauses.lasting(found, 240.0).active


def test_idle_clock_set_back_restarts_period() -> None:
    found = pauses.hear(Pauses(), 1000.0, True, 0.0, START_S)
    found = pauses.hear(found, 400.0, True, 0.0, START_S)
    assert pauses.lasting(found, 405.0).away_s == 5.0


def test_idle_stats_round_trip_drops_current_period() -> None:
    found, now_s = after_idle_periods([60.0, 5.0, 700.0])
    again = pauses.from_dict(json.loads(json.dumps(pauses.to_dict(found))))
    assert again.since_s is None
    old, new = (pauses.lasting(p, now_s)._replace(active=False, away_s=30.0) for p in (found, again))
    assert new.chance(60.0) == pytest.approx(old.chance(60.0), abs=1e-3)


GOOD = pauses.to_dict(Pauses())


@pytest.mark.parametrize(
    "bad",
    [
        None,
        {},
        GOOD | {"version": 2},
        GOOD | {"reached": [0.0]},
        GOOD | {"reached": ["x"] * 30},
        GOOD | {"ended": [1.0] * 30},
        GOOD | {"bursts": math.nan},
        GOOD | {"requests": -1.0},
        GOOD | {"requests": True},
    ],
)
def test_from_dict_invalid_idle_stats_raises(bad: Any) -> None:
    with pytest.raises(ValueError, match="no pauses"):
        pauses.from_dict(bad)
