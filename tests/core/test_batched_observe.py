"""Samples of a fleet in one pass leave the states that they leave one by one, to the last bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from plimsoll.core.demand import growth_stats
from plimsoll.core.demand.batched_observe import MAX_CLOSED_PER_PASS, MAX_CLOSING_PASSES, SEQUENTIAL_TIERS, observe_all
from plimsoll.core.demand.demand_state import DemandState, observe
from plimsoll.core.demand.serialization import to_dict
from plimsoll.core.types import Unavailable

TIERS = 3 * SEQUENTIAL_TIERS
NOTHING = Unavailable("silent")


def one_by_one(states: list[DemandState], now_s: float, works: list[float], rates: list[float]) -> list[DemandState]:
    return [
        observe(
            state,
            now_s,
            NOTHING if math.isnan(work) else work,
            rate_per_s=None if math.isnan(rate) else rate,
        )
        for state, work, rate in zip(states, works, rates, strict=True)
    ]


def sample_load(rng: np.random.Generator, means: NDArray[np.float64], second: int) -> tuple[list[float], list[float]]:
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
def test_observe_all_equals_single_observe(seed: int, tick_s: float) -> None:
    rng = np.random.default_rng(seed)
    means = rng.uniform(0.2, 40.0, TIERS)
    many, single, now_s = [DemandState()] * TIERS, [DemandState()] * TIERS, 1.8e9 + float(rng.uniform(0, 1800))
    for second in range(200):
        now_s += tick_s
        if second == 150:
            now_s -= 200.0  # a clock that is set back
        if second == 160:
            now_s -= tick_s  # and one that stands still
        works, rates = sample_load(rng, means, second)
        many, single = observe_all(many, now_s, works, rates), one_by_one(single, now_s, works, rates)
    assert [to_dict(state) for state in many] == [to_dict(state) for state in single]


def closed(before: list[DemandState], after: list[DemandState]) -> list[int]:
    """The tiers whose minute has ended in between."""
    return [
        n for n, (old, new) in enumerate(zip(before, after, strict=True)) if old.closed_growth is not new.closed_growth
    ]


def test_observe_all_staggers_minute_ends_over_passes() -> None:
    tiers = 3 * MAX_CLOSED_PER_PASS - 1
    rng = np.random.default_rng(5)
    start_s, works = 1.8e9, rng.uniform(0.5, 5.0, tiers).tolist()
    states = observe_all([DemandState()] * tiers, start_s, works, works)
    ended: list[dict[int, int]] = [{}]  # by minute, of each tier its second
    for second in range(1, 240):
        after = observe_all(states, start_s + second, works, works)
        if second % 60 == 0:
            ended.append({})
        turn = closed(states, after)
        assert len(turn) <= MAX_CLOSED_PER_PASS
        assert not any(n in ended[-1] for n in turn)
        ended[-1].update(dict.fromkeys(turn, second % 60))
        states = after
    assert ended[0] == {}
    assert ended[1] == ended[2] == ended[3]
    assert sorted(ended[1]) == list(range(tiers))
    assert sorted(set(ended[1].values())) == [0, 1, 2]
    for state, work in zip(states, works, strict=True):
        known = [
            minute
            for minute in growth_stats.MINUTE_RECORD.iter_unpack(state.closed_growth.minutes)
            if not math.isnan(minute[0])
        ]
        assert [minute[0] for minute in known] == [pytest.approx(work)] * 3


def test_observe_all_minute_end_passes_depend_on_fleet_size() -> None:
    for tiers, passes in (
        (MAX_CLOSED_PER_PASS, 1),
        (MAX_CLOSED_PER_PASS + 1, 2),
        (3 * MAX_CLOSING_PASSES * MAX_CLOSED_PER_PASS, MAX_CLOSING_PASSES),
    ):
        states, works = [DemandState()] * tiers, [1.0] * tiers
        for at_s in (0.0, 30.0, 59.0):
            states = observe_all(states, at_s, works, works)
        took = 0
        while any(state.growth.current_minute == 0 for state in states):
            states, took = observe_all(states, 60.0 + took, works, works), took + 1
        assert took == passes


def test_observe_all_half_hour_ends_with_staggered_minute() -> None:
    tiers = 2 * MAX_CLOSED_PER_PASS
    states, works = [DemandState()] * tiers, [2.0] * tiers
    for at_s in range(10, 1800, 10):
        states = observe_all(states, float(at_s), works, works)
    first = observe_all(states, 1800.0, works, works)
    second = observe_all(first, 1801.0, works, works)
    assert [sum(state.season.day.bins_seen for state in some) for some in (states, first, second)] == [
        0,
        tiers // 2,
        tiers,
    ]
    assert {state.season.bin_index for state in second} == {1}


def test_observe_all_merges_states_of_different_times() -> None:
    rng = np.random.default_rng(3)
    states, now_s = [DemandState()] * TIERS, 0.0
    for n in range(TIERS):
        for second in range(5 * n):
            states[n] = observe(states[n], float(second), float(rng.poisson(5.0)))
    now_s = 5.0 * TIERS
    works = rng.poisson(5.0, TIERS).astype(float).tolist()
    got, expected = observe_all(states, now_s, works, works), one_by_one(states, now_s, works, works)
    assert [to_dict(state) for state in got] == [to_dict(state) for state in expected]


@pytest.mark.parametrize("tiers", [0, 1, TIERS])
def test_observe_all_invalid_time_raises(tiers: int) -> None:
    if tiers:
        with pytest.raises(ValueError, match="finite"):
            observe_all([DemandState()] * tiers, math.nan, [1.0] * tiers, [1.0] * tiers)
    else:
        assert observe_all([], 0.0, [], []) == []
