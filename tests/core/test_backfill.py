"""A past from a store of metrics gives the shape of the day, and leaves what is seen now as it is."""

from __future__ import annotations

import math

import pytest

from plimsoll.core.demand.backfill import replay_history, with_history
from plimsoll.core.demand.demand_state import DemandState, observe
from plimsoll.core.demand.forecasting import Forecast
from plimsoll.core.demand.forecasting import forecast as forecast_demand

DAY_S = 86400.0
START_S = 20_000 * DAY_S  # a midnight
COST = 0.1  # GPU-seconds a request


def rate(at_s: float) -> float:
    """Three times as much at noon as at midnight."""
    return 10.0 * (2.0 - math.cos(2.0 * math.pi * at_s / DAY_S))


def minutes(days: float) -> list[tuple[float, float]]:
    return [(at_s, rate(at_s)) for at_s in (START_S + 60.0 * n for n in range(round(days * 1440)))]


def seconds(at_s: float, n: int) -> DemandState:
    """A forecast that has watched for so many seconds."""
    state = DemandState()
    for second in range(n):
        state = observe(state, at_s + second, COST * rate(at_s))
    return state


def known_forecast(state: DemandState, now_s: float) -> Forecast:
    found = forecast_demand(state, now_s, 1800.0, 0.9)
    assert isinstance(found, Forecast)
    return found


def test_backfill_gives_daily_season_on_first_day() -> None:
    now_s = START_S + 3 * DAY_S + 6 * 3600.0
    own = seconds(now_s, 60)
    seeded = with_history(own, replay_history(minutes(3.25), COST))
    without, with_it = known_forecast(own, now_s + 60.0), known_forecast(seeded, now_s + 60.0)
    rises = COST * (rate(now_s + 1800.0) - rate(now_s))
    assert without.season == 0.0
    assert with_it.season == pytest.approx(rises, rel=0.2)
    assert with_it.own_history_share > without.own_history_share


def test_backfill_keeps_current_level_and_noise() -> None:
    now_s = START_S + 3 * DAY_S
    own = seconds(now_s, 60)
    seeded = with_history(own, replay_history(minutes(3.0), COST))
    assert (seeded.estimate, seeded.noise, seeded.last_sample_s) == (own.estimate, own.noise, own.last_sample_s)
    on = observe(seeded, now_s + 60.0, COST * rate(now_s))
    assert known_forecast(on, now_s + 61.0).level == pytest.approx(known_forecast(own, now_s + 61.0).level)


def test_backfill_empty_history_keeps_forecast() -> None:
    own = seconds(START_S, 600)
    assert known_forecast(with_history(own, DemandState()), START_S + 600.0).season == 0.0
    assert (
        known_forecast(with_history(own, DemandState()), START_S + 600.0).level
        == known_forecast(own, START_S + 600.0).level
    )
