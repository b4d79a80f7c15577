"""What counts of the forecasts of a whole fleet, in one pass: for whoever only asks whether something must move.

Problem: a forecast that says all its parts, and its odds, are dear to make for every tier at every tick; mostly the
answer is that all may stay as it is.

Idea: the arithmetic of `predict.forecast` over arrays, to the last bit, and of its parts only those that decide. What
depends on minutes and half hours that have ended (odds, sure growth, the season's skill) is kept until one ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from plimsoll.core.forecast import doubt as doubts
from plimsoll.core.forecast import growth, level, season
from plimsoll.core.forecast.fleet import Floats, of_same, packed
from plimsoll.core.forecast.predict import STALE_S, SURELY_NONE
from plimsoll.core.forecast.spare import Odds, odds
from plimsoll.core.forecast.state import AT, GRAIN, MEAN, NOW, State

_NOTHING: Final = growth.Growth()


class Outlook(NamedTuple):
    """By tier: as the fields of Forecast with these names. work is NaN where nothing recent is known."""

    work: Floats
    level: Floats
    doubt: Floats
    memory: Floats
    error: Floats
    ordinary: Floats
    age_s: Floats


class Chances:
    """What is kept of one tier between two passes. odds: for the horizon of the last pass."""

    __slots__ = ("_factor", "_horizon_s", "_of", "_past", "_reach", "odds")

    def __init__(self) -> None:
        self._past, self._horizon_s = _NOTHING, -1.0
        self._of, self._reach, self._factor = _NOTHING, (-1.0, -1.0), 1.0
        self.odds: Odds | None = None

    def at(self, state: State, horizon_s: float) -> Odds:
        """As `odds`."""
        if self.odds is None or self._past is not state.past or self._horizon_s != horizon_s:
            self._past, self._horizon_s, self.odds = state.past, horizon_s, odds(state, horizon_s)
        return self.odds

    def within(self, state: State, reach_s: float, quantile: float) -> float:
        """As `growth.sure_factor`."""
        reach = (reach_s, quantile)
        if self._of is not state.past or self._reach != reach:
            self._of, self._reach = state.past, reach
            self._factor = growth.sure_factor(state.past, reach_s, quantile)
        return self._factor


def outlook(
    states: Sequence[State],
    now_s: float,
    horizons_s: Sequence[float],
    quantiles: Sequence[float],
    chances: Sequence[Chances],
    promised: Sequence[float],
    miss_costs: Floats,
) -> Outlook:
    """For each tier what `forecast` says; arguments as there, and one `Chances` of each tier for ever."""
    seen = packed(states)
    at_s, level_, slope, error = seen[:, AT], seen[:, NOW], seen[:, NOW + 1], seen[:, NOW + 2]
    age_s = np.maximum(0.0, now_s - at_s)
    reach_s = np.array(horizons_s) + age_s
    known = age_s <= STALE_S  # NaN is not
    reaches = np.where(known, reach_s, 0.0)
    factor = np.array(
        [
            kept.within(state, reach, quantile)
            for kept, state, reach, quantile in zip(chances, states, reaches.tolist(), quantiles, strict=True)
        ]
    )
    quantile = np.array(quantiles)
    deviates = of_same(doubts.deviate, quantile)
    none = of_same(lambda share: -math.log(max(share, SURELY_NONE)), quantile)
    damped = of_same(lambda reach: -math.expm1(-reach / level.DAMPING_S), reaches)
    trend = np.maximum(0.0, slope) * level.DAMPING_S * damped
    shape = np.maximum(0.0, level_ * _seasons(states, at_s, reach_s) - trend)
    foretold = level_ + trend + shape
    lowest, highest = np.array([(state.past.lowest, state.past.highest) for state in states]).T
    reached = np.maximum(foretold, np.maximum(highest, factor * np.minimum(level_, lowest)))
    burst = np.minimum(foretold * (factor - 1.0), reached - foretold)
    kept = of_same(doubts.deviate, np.array(promised))
    doubt = doubts.counted(level_, error, deviates, kept, miss_costs)
    silent = level_ * reach_s <= none * seen[:, GRAIN]
    work = np.where(silent, 0.0, foretold + burst + doubt)
    some = np.where(silent, 0.0, level_)
    ordinary = np.minimum(some, lowest)
    memory = np.minimum(1.0, seen[:, MEAN] / level.MEMORY_S)
    work, doubt, error = (np.where(some > 0.0, part, 0.0) for part in (work, doubt, error))
    return Outlook(np.where(known, work, np.nan), some, doubt, memory, error, ordinary, age_s)


def _seasons(states: Sequence[State], at_s: Floats, reach_s: Floats) -> Floats:
    found = np.zeros(len(states))
    for place, state in enumerate(states):
        if state.shape.day.seen >= season.PERIODS * season.DAY:
            found[place] = season.growth(state.shape, float(at_s[place]), float(reach_s[place]))
    return found
