"""A past from a store of metrics gives the shape of the day, and leaves what is seen now as it is."""

from __future__ import annotations

import math

import pytest

from plimsoll.core.forecast import Forecast, State
from plimsoll.core.forecast.past import replay, with_past
from plimsoll.core.forecast.predict import forecast as forecast_demand
from plimsoll.core.forecast.state import observe

DAY_S = 86400.0
START_S = 20_000 * DAY_S  # a midnight
COST = 0.1  # GPU-seconds a request


def rate(at_s: float) -> float:
    """Three times as much at noon as at midnight."""
    return 10.0 * (2.0 - math.cos(2.0 * math.pi * at_s / DAY_S))


def minutes(days: float) -> list[tuple[float, float]]:
    return [(at_s, rate(at_s)) for at_s in (START_S + 60.0 * n for n in range(round(days * 1440)))]


def seconds(at_s: float, n: int) -> State:
    """A forecast that has watched for so many seconds."""
    state = State()
    for second in range(n):
        state = observe(state, at_s + second, COST * rate(at_s))
    return state


def known(state: State, now_s: float) -> Forecast:
    found = forecast_demand(state, now_s, 1800.0, 0.9)
    assert isinstance(found, Forecast)
    return found


def test_the_rise_of_the_morning_is_known_on_the_first_day() -> None:
    now_s = START_S + 3 * DAY_S + 6 * 3600.0
    own = seconds(now_s, 60)
    seeded = with_past(own, replay(minutes(3.25), COST))
    without, with_it = known(own, now_s + 60.0), known(seeded, now_s + 60.0)
    rises = COST * (rate(now_s + 1800.0) - rate(now_s))
    assert without.season == 0.0
    assert with_it.season == pytest.approx(rises, rel=0.2)
    assert with_it.history > without.history


def test_what_is_seen_now_stays_and_goes_on() -> None:
    now_s = START_S + 3 * DAY_S
    own = seconds(now_s, 60)
    seeded = with_past(own, replay(minutes(3.0), COST))
    assert (seeded.now, seeded.noise, seeded.at_s) == (own.now, own.noise, own.at_s)
    on = observe(seeded, now_s + 60.0, COST * rate(now_s))
    assert known(on, now_s + 61.0).level == pytest.approx(known(own, now_s + 61.0).level)


def test_no_past_changes_nothing_that_matters() -> None:
    own = seconds(START_S, 600)
    assert known(with_past(own, State()), START_S + 600.0).season == 0.0
    assert known(with_past(own, State()), START_S + 600.0).level == known(own, START_S + 600.0).level
