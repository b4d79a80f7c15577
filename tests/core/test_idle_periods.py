"""What is learned of pauses between requests, and the bet on the next one, against theory and brute force."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core import codec
from plimsoll.core.demand import idle_periods
from plimsoll.core.demand.idle_periods import IdlePeriod, IdleStats

START_S = 10.0


def after_idle_periods(lengths: list[float], seed: IdleStats | None = None) -> tuple[IdleStats, float]:
    """Pauses of these lengths, each ended by one request, and then one that has just begun."""
    found, now_s = seed or IdleStats(), 0.0
    for length in lengths:
        found = idle_periods.update_idle(found, now_s, True, 0.0, START_S)
        now_s += length
        found = idle_periods.update_idle(found, now_s, False, 1.0, START_S)
    return idle_periods.update_idle(found, now_s, True, 0.0, START_S), now_s


def waiting_time_s(found: IdleStats, now_s: float, cold_s: float) -> int:
    """For how long waiting is worth its time, without a break."""
    left = range(1, 20_000)
    return next(
        age
        for age in left
        if idle_periods.current_idle(found, now_s + age).optimal_wait(cold_s).net_saving_s(cold_s) <= 1e-9
    )


@pytest.mark.parametrize("cold_s", [10.0, 25.0, 137.0, 4000.0])
def test_idle_prior_waits_as_long_as_cold_start_costs(cold_s: float) -> None:
    """Ski rental: whatever comes, no more than twice what who knows the future pays."""
    assert waiting_time_s(*after_idle_periods([]), cold_s) == pytest.approx(cold_s, abs=1.0)


def test_idle_prior_ends_within_its_age_with_even_chance() -> None:
    now = idle_periods.current_idle(*after_idle_periods([]))._replace(idle_s=60.0)
    assert now.arrival_probability(60.0) == pytest.approx(0.5)
    assert now.arrival_probability(180.0) == pytest.approx(0.75)


@pytest.mark.parametrize(("cold_s", "waits"), [(20.0, False), (60.0, False), (170.0, True), (400.0, True)])
def test_idle_poisson_waits_if_mean_is_below_cold_start(cold_s: float, waits: bool) -> None:
    """Poisson arrivals forget: either no pause is worth waiting out, or all of them."""
    draw = random.Random(3)
    found, now_s = after_idle_periods([draw.expovariate(1 / 100.0) for _ in range(400)])
    ages = (5, 20, 60, 120)
    worth = [
        idle_periods.current_idle(found, now_s + age).optimal_wait(cold_s).net_saving_s(cold_s) > 0.0 for age in ages
    ]
    assert worth == [waits] * len(ages)


def test_idle_regular_caller_is_awaited_until_late() -> None:
    found, now_s = after_idle_periods([60.0] * 20)
    worth = {
        age: idle_periods.current_idle(found, now_s + age).optimal_wait(100.0).net_saving_s(100.0)
        for age in (1, 20, 50, 300)
    }
    assert min(worth[1], worth[20], worth[50]) > 30.0
    assert worth[300] == 0.0
    assert (
        idle_periods.current_idle(found, now_s + 45.0).arrival_probability(20.0)
        > 0.8
        > 0.2
        > idle_periods.current_idle(found, now_s).arrival_probability(30.0)
    )


def test_idle_stats_old_pattern_is_forgotten() -> None:
    found, now_s = after_idle_periods([60.0] * 20)
    changed, later_s = after_idle_periods([2000.0] * 60, found)
    before, now = (
        idle_periods.current_idle(p, at_s + 45.0).arrival_probability(20.0)
        for p, at_s in ((found, now_s), (changed, later_s))
    )
    assert now < 0.3 < before


def test_idle_burst_counts_requests_during_startup() -> None:
    found, now_s = IdleStats(), 0.0
    for _ in range(20):
        found = idle_periods.update_idle(found, now_s, True, 0.0, START_S)
        now_s += 100.0
        for _ in range(30):
            found = idle_periods.update_idle(found, now_s, False, 2.0, START_S)
            now_s += 1.0
    assert idle_periods.current_idle(found, now_s).burst_size == pytest.approx(2.0 * START_S, rel=0.15)
    assert idle_periods.current_idle(IdleStats(), 0.0).burst_size == 1.0


@given(st.lists(st.floats(1.0, 1e5), max_size=30), st.floats(0.0, 1e5), st.floats(0.1, 1e5))
def test_idle_optimal_wait_is_best_of_all(lengths: list[float], away_s: float, cold_s: float) -> None:
    found = idle_periods.current_idle(after_idle_periods(lengths)[0], 0.0)._replace(idle_s=away_s)
    best = found.optimal_wait(cold_s)
    assert 0.0 <= best.arrival_probability <= 1.0
    assert 0.0 <= best.cost_s <= best.within_s + 1e-6
    age_s = max(away_s, 1.0)
    for within_s in (0.01 * age_s, 0.3 * age_s, age_s, 10.0 * age_s, cold_s):
        saved = found._wait_until(age_s + within_s).net_saving_s(cold_s)
        assert saved <= best.net_saving_s(cold_s) + 1e-6 * cold_s


@given(st.lists(st.floats(1.0, 1e5), max_size=30), st.floats(0.0, 1e5), st.floats(0.0, 1e4), st.floats(0.0, 1e4))
def test_idle_return_chance_is_monotone_in_time(
    lengths: list[float], away_s: float, less_s: float, more_s: float
) -> None:
    found: IdlePeriod = idle_periods.current_idle(after_idle_periods(lengths)[0], 0.0)._replace(idle_s=away_s)
    assert 0.0 <= found.arrival_probability(less_s) <= found.arrival_probability(less_s + more_s) + 1e-12 <= 1.0 + 1e-12


def test_idle_period_with_missing_samples_is_not_learned() -> None:
    found = idle_periods.update_idle(IdleStats(), 0.0, True, 0.0, START_S)
    found = idle_periods.update_idle(found, 100.0, None, 0.0, START_S)
    found = idle_periods.update_idle(found, 200.0, True, 0.0, START_S)
    assert idle_periods.current_idle(found, 230.0).idle_s == 30.0
    found = idle_periods.update_idle(
        idle_periods.update_idle(found, 230.0, None, 0.0, START_S), 240.0, False, 1.0, START_S
    )
    assert found.at_risk == IdleStats().at_risk
    assert idle_periods.current_idle(found, 240.0).active


def test_idle_clock_set_back_restarts_period() -> None:
    found = idle_periods.update_idle(IdleStats(), 1000.0, True, 0.0, START_S)
    found = idle_periods.update_idle(found, 400.0, True, 0.0, START_S)
    assert idle_periods.current_idle(found, 405.0).idle_s == 5.0


def test_idle_stats_round_trip_drops_current_period() -> None:
    found, now_s = after_idle_periods([60.0, 5.0, 700.0])
    again = codec.decode(IdleStats, json.loads(json.dumps(codec.encode(found))))
    assert again.idle_since_s is None
    old, new = (idle_periods.current_idle(p, now_s)._replace(active=False, idle_s=30.0) for p in (found, again))
    assert new.arrival_probability(60.0) == pytest.approx(old.arrival_probability(60.0), abs=1e-3)


GOOD = codec.encode(IdleStats())


@pytest.mark.parametrize(
    "bad",
    [
        None,
        {},
        GOOD | {"version": 2},
        GOOD | {"at_risk": [0.0]},
        GOOD | {"at_risk": ["x"] * 30},
        GOOD | {"ended": [1.0] * 30},
        GOOD | {"bursts": math.nan},
        GOOD | {"requests": -1.0},
        GOOD | {"requests": True},
    ],
)
def test_from_dict_invalid_idle_stats_raises(bad: Any) -> None:
    with pytest.raises(ValueError, match="not idle statistics"):
        codec.decode(IdleStats, bad)
