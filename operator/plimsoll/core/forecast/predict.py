"""The upper quantile of the largest work within a start-up, with its parts.

Problem: a replica ordered now serves one start-up later, so what counts is the most that comes until then; and a figure
that nobody can take apart is not believed.

Idea: level + the larger of what trend and shape of the day foretell, times the factor by which own history has gone
beyond what was foretold, but no further than its leaps have reached, + what counts of the doubt about the level. Work
here is the rate of work: the sizing already takes account of chance within a minute, so that is not paid for twice. The
total never falls as quantile, horizon or load rise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from plimsoll.core.forecast import doubt as doubts
from plimsoll.core.forecast import growth, level, season
from plimsoll.core.forecast.spare import MISS_COST, history
from plimsoll.core.forecast.state import State, Unknown

STALE_S: Final = 600.0  # the longest horizon that growth is counted for; beyond it nothing known is recent
SURELY_NONE: Final = 0.99  # probability of no request at all in the horizon from which on the answer is 0


@dataclass(frozen=True, slots=True)
class Forecast:
    """Work in GPU-seconds per second: what to size for, and its parts, which sum to it.

    season: what the shape of day or week foretells beyond the trend. error: the level's standard error. age_s: of the
    last sample. history: as in `spare.history`. changed_s_ago: since the level last leapt. memory: how full the level's
    memory is, 0 just after a leap to 1, where it forgets as much as it learns. ordinary: the lowest level of the past
    hour, from which spare is reckoned. rate_per_s, tokens_per_s: as told along; None if not.
    """

    work: float
    level: float
    trend: float
    season: float
    burst: float
    doubt: float
    error: float
    horizon_s: float
    quantile: float
    age_s: float
    history: float
    memory: float
    ordinary: float
    changed_s_ago: float | None
    rate_per_s: float | None
    tokens_per_s: float | None

    @property
    def parts(self) -> tuple[tuple[str, float], ...]:
        """Name and amount of each part, in order."""
        names = ("level", "trend", "season", "burst", "doubt")
        return tuple((name, getattr(self, name)) for name in names)


def forecast(
    state: State,
    now_s: float,
    horizon_s: float,
    quantile: float,
    promised: float | None = None,
    miss_cost: float = MISS_COST,
) -> Forecast | Unknown:
    """The upper quantile of the largest work over [now, now + horizon], less doubt that no replica would pay for.

    horizon_s: 0 or more; time since the last sample is added to it. quantile: in (0, 1). promised: share of requests,
    the quantile itself for None; it and miss_cost as in `doubt.counted`. Unknown without a sample in the last STALE_S.
    Raises ValueError for arguments out of range.
    """
    if not 0.0 <= horizon_s < math.inf or not 0.0 < quantile < 1.0 or not math.isfinite(now_s):
        raise ValueError(f"no forecast for now {now_s}, a horizon of {horizon_s} s and the quantile {quantile}")
    at_s, changed_s, explained = state.at_s, state.changed_s, state.explained
    if at_s is None:
        return Unknown("no sample yet")
    age_s = max(0.0, now_s - at_s)
    if age_s > STALE_S:
        return Unknown(f"the last sample is {age_s:.0f} s old")
    reach_s = horizon_s + age_s
    parts = (0.0,) * 5 if _silent(state, reach_s, quantile) else _parts(state, reach_s, quantile, promised, miss_cost)
    level_, trend, shape, burst, doubt = parts
    return Forecast(
        level_ + trend + shape + burst + doubt,
        *parts,
        error=0.0 if level_ == 0.0 else state.now.error,
        horizon_s=horizon_s,
        quantile=quantile,
        age_s=age_s,
        history=history(state, horizon_s),
        memory=min(1.0, state.mean.covered_s / level.MEMORY_S),
        ordinary=growth.ordinary(state.past, level_),
        changed_s_ago=None if changed_s is None else max(0.0, now_s - changed_s),
        rate_per_s=explained.rate_per_s,
        tokens_per_s=explained.tokens_per_s,
    )


def _parts(
    state: State, reach_s: float, quantile: float, promised: float | None, miss_cost: float
) -> tuple[float, float, float, float, float]:
    """Level, trend, season, burst, doubt."""
    now, at_s = state.now, state.at_s
    assert at_s is not None  # else there is no level
    trend = level.rise(now.slope_per_s, reach_s)
    shape = max(0.0, now.level * season.growth(state.shape, at_s, reach_s) - trend)
    foretold, factor = now.level + trend + shape, growth.sure_factor(state.past, reach_s, quantile)
    reached = max(foretold, growth.reached(state.past, now.level, factor))
    burst = min(foretold * (factor - 1.0), reached - foretold)
    share = quantile if promised is None else promised
    known = (now.level, now.error, doubts.deviate(quantile), doubts.deviate(share), miss_cost)
    return now.level, trend, shape, burst, float(doubts.counted(*(np.array(one) for one in known)))


def _silent(state: State, reach_s: float, quantile: float) -> bool:
    """Whether the quantile of "any request at all in the horizon", Poisson in grains, is none."""
    return state.now.level * reach_s <= -math.log(max(quantile, SURELY_NONE)) * state.grain_gpu_s
