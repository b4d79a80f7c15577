"""A fleet's forecasts in one pass are those of its tiers one by one, to the last bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from plimsoll.core.forecast import Forecast, Odds, State, Unknown, forecast, is_worth, observe, odds, to_dict
from plimsoll.core.forecast.fleet import FEW, observe_all
from plimsoll.core.forecast.outlook import Chances, outlook
from plimsoll.core.forecast.table import Table
from plimsoll.core.jumps import FACTORS

TIERS = 3 * FEW
NOTHING = Unknown("silent")


def one_by_one(states: list[State], now_s: float, works: list[float], rates: list[float]) -> list[State]:
    return [
        observe(
            state,
            now_s,
            NOTHING if math.isnan(work) else work,
            rate_per_s=None if math.isnan(rate) else rate,
        )
        for state, work, rate in zip(states, works, rates, strict=True)
    ]


def sampled(rng: np.random.Generator, means: NDArray[np.float64], second: int) -> tuple[list[float], list[float]]:
    """Steady, silent, leaping, from nothing and to nothing, with gaps and nonsense."""
    rates = rng.poisson(means).astype(float)
    kinds = np.arange(TIERS) % 8
    rates[kinds == 1] = 0.0
    rates[(kinds == 2) & (second % 120 > 60)] *= 8.0
    if second < 40:
        rates[kinds == 3] = 0.0
    if second > 90:
        rates[kinds == 4] = 0.0
    works = rates * 0.05
    works[(kinds == 5) & (rng.random(TIERS) < 0.3)] = math.nan
    works[(kinds == 6) & (rng.random(TIERS) < 0.1)] = -1.0
    works[(kinds == 7) & (rng.random(TIERS) < 0.1)] = math.inf
    rates[rng.random(TIERS) < 0.1] = math.nan
    return works.tolist(), rates.tolist()


@given(st.integers(0, 2**32 - 1), st.sampled_from([1.0, 0.7, 17.0, 61.0]))
@settings(max_examples=3)
def test_one_pass_is_the_same_as_one_by_one(seed: int, tick_s: float) -> None:
    rng = np.random.default_rng(seed)
    means = rng.uniform(0.2, 40.0, TIERS)
    many, single, now_s = [State()] * TIERS, [State()] * TIERS, 1.8e9 + float(rng.uniform(0, 1800))
    for second in range(200):
        now_s += tick_s
        if second == 150:
            now_s -= 200.0  # a clock that is set back
        if second == 160:
            now_s -= tick_s  # and one that stands still
        works, rates = sampled(rng, means, second)
        many, single = observe_all(many, now_s, works, rates), one_by_one(single, now_s, works, rates)
    assert [to_dict(state) for state in many] == [to_dict(state) for state in single]


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=2)
def test_the_outlook_says_what_the_forecasts_say(seed: int) -> None:
    rng = np.random.default_rng(seed)
    means, chances = rng.uniform(0.2, 40.0, TIERS), [Chances() for _ in range(TIERS)]
    horizons, quantiles = rng.choice([5.0, 90.0, 1000.0], TIERS).tolist(), rng.choice([0.6, 0.95], TIERS).tolist()
    states, now_s = [State()] * TIERS, 1.8e9
    for second in range(300):
        now_s += 0.9 if second < 290 else 100.0
        states = observe_all(states, now_s, *sampled(rng, means, second))
        asked_s = now_s + second % 3
        found = outlook(states, asked_s, horizons, quantiles, chances)
        for n in range(second % 7, TIERS, 7):
            expected = forecast(states[n], asked_s, horizons[n], quantiles[n])
            if isinstance(expected, Forecast):
                assert [column[n] for column in found] == [getattr(expected, name) for name in found._fields]
                assert chances[n].at(states[n], horizons[n]) == odds(states[n], horizons[n])
            else:
                assert math.isnan(found.work[n])


growths = st.one_of(st.sampled_from((0.0, 1.0, *FACTORS, 40.0, math.inf)), st.floats(0.0, 12.0))
chances_of = st.builds(
    lambda shares, horizon_s: Odds(horizon_s, FACTORS, tuple(sorted(shares, reverse=True)), 0.0),
    st.lists(st.floats(0.0, 1.0), min_size=len(FACTORS), max_size=len(FACTORS)),
    st.sampled_from([60.0, 90.0]),
)


@given(st.lists(st.tuples(chances_of, growths), min_size=1, max_size=20))
def test_a_table_of_odds_says_what_each_says(asked: list[tuple[Odds, float]]) -> None:
    every = list(reversed(range(len(asked))))  # rows may be asked in any order
    table = Table([one for one, _ in asked])
    chance, integral = table.past(np.array(every), np.array([asked[n][1] for n in every]))
    expected = [asked[n][0].past(asked[n][1]) for n in every]
    assert list(zip(chance.tolist(), integral.tolist(), strict=True)) == expected


@given(
    st.lists(
        st.tuples(chances_of, st.floats(0.0, 9.0), st.floats(0.1, 3.0), st.integers(0, 9)), min_size=1, max_size=9
    ),
    st.floats(0.0, 60.0),
)
def test_a_table_knows_what_is_worth_its_price(asked: list[tuple[Odds, float, float, int]], miss_cost: float) -> None:
    table = Table([one for one, _, _, _ in asked])
    work, replica_work, replicas = (np.array([float(one[place]) for one in asked]) for place in (1, 2, 3))
    found = table.is_worth(np.arange(len(asked)), work, replica_work, replicas, np.full(len(asked), miss_cost))
    assert found.tolist() == [is_worth(*one, miss_cost) for one in asked]


def test_states_that_came_apart_in_time_are_brought_together() -> None:
    rng = np.random.default_rng(3)
    states, now_s = [State()] * TIERS, 0.0
    for n in range(TIERS):
        for second in range(5 * n):
            states[n] = observe(states[n], float(second), float(rng.poisson(5.0)))
    now_s = 5.0 * TIERS
    works = rng.poisson(5.0, TIERS).astype(float).tolist()
    got, expected = observe_all(states, now_s, works, works), one_by_one(states, now_s, works, works)
    assert [to_dict(state) for state in got] == [to_dict(state) for state in expected]


@pytest.mark.parametrize("tiers", [0, 1, TIERS])
def test_a_time_that_is_none_is_refused(tiers: int) -> None:
    if tiers:
        with pytest.raises(ValueError, match="finite"):
            observe_all([State()] * tiers, math.nan, [1.0] * tiers, [1.0] * tiers)
    else:
        assert observe_all([], 0.0, [], []) == []
