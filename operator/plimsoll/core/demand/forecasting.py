"""Demand forecast: the upper quantile of the largest work within a start-up time, with its parts.

Problem: a replica that starts now serves one start-up time later, so the largest work until then counts. A user must be
able to see what the figure consists of.

Idea: the forecast is the sum of five parts. Level. Trend, and the seasonal growth beyond the trend. Burst: the
prediction times the factor by which own growth exceeded predictions, up to the bound of past level shifts. Uncertainty:
the error of the level, only while rejected clients have reservations, or requests queue at engines without a gateway:
these come on top of the level. Work is a rate here. The sizing already covers random variation within a minute, so the
forecast does not add it again. The sum never falls as quantile, horizon or load rise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

from plimsoll.core.demand import growth_stats, level_model, seasonality
from plimsoll.core.demand.demand_state import DemandState
from plimsoll.core.demand.standby_value import own_history_share
from plimsoll.core.types import Unavailable

MAX_SAMPLE_AGE_S: Final = 600.0  # the longest horizon of the growth statistics; an older sample is not recent
MAX_LEVEL_SHARE: Final = 0.1  # of the level; a level that is seconds old is known better before a new replica is ready
ZERO_CONFIDENCE: Final = 0.99  # from this probability of no request in the horizon on, the forecast is 0


@dataclass(frozen=True, slots=True)
class Forecast:
    """Work to size for, in GPU-seconds per second, and its parts, which sum to it.

    season: seasonal growth beyond the trend. level_error: standard error of the level. age_s: age of the last sample.
    own_history_share: as `standby_value.own_history_share`. memory_fill: fill of the level's memory, from 0 just after
    a level shift to 1, where it forgets as fast as it learns. baseline: the lowest level of the past hour, from which
    standby replicas are computed. level_shift_age_s: time since the last level shift; None without one. rate_per_s,
    tokens_per_s: annotations, None if not given.
    """

    work: float
    level: float
    trend: float
    season: float
    burst: float
    uncertainty: float
    level_error: float
    horizon_s: float
    quantile: float
    age_s: float
    own_history_share: float
    memory_fill: float
    baseline: float
    level_shift_age_s: float | None
    rate_per_s: float | None
    tokens_per_s: float | None

    @property
    def parts(self) -> tuple[tuple[str, float], ...]:
        """Name and amount of each part, in order."""
        names = ("level", "trend", "season", "burst", "uncertainty")
        return tuple((name, getattr(self, name)) for name in names)


def forecast(
    state: DemandState,
    now_s: float,
    horizon_s: float,
    quantile: float,
    retries_due: bool = False,
) -> Forecast | Unavailable:
    """Upper quantile of the largest work over [now, now + horizon].

    horizon_s: 0 or more; the age of the last sample is added. quantile: in (0, 1). retries_due: rejected clients have
    reservations, or requests queue at engines without a gateway, so the level's error counts. Returns `Unavailable`
    without a sample in the last MAX_SAMPLE_AGE_S. Raises ValueError for arguments out of range.
    """
    if not 0.0 <= horizon_s < math.inf or not 0.0 < quantile < 1.0 or not math.isfinite(now_s):
        raise ValueError(f"no forecast for now {now_s}, a horizon of {horizon_s} s and the quantile {quantile}")
    at_s, level_shift_s, annotations = state.last_sample_s, state.level_shift_s, state.annotations
    if at_s is None:
        return Unavailable("no sample yet")
    age_s = max(0.0, now_s - at_s)
    if age_s > MAX_SAMPLE_AGE_S:
        return Unavailable(f"the last sample is {age_s:.0f} s old")
    reach_s = horizon_s + age_s
    parts = (
        (0.0,) * 5 if _expects_no_request(state, reach_s, quantile) else _parts(state, reach_s, quantile, retries_due)
    )
    level_, trend, shape, burst, level_uncertainty = parts
    return Forecast(
        level_ + trend + shape + burst + level_uncertainty,
        *parts,
        level_error=0.0 if level_ == 0.0 else state.estimate.error,
        horizon_s=horizon_s,
        quantile=quantile,
        age_s=age_s,
        own_history_share=own_history_share(state, horizon_s),
        memory_fill=min(1.0, state.level_mean.covered_s / level_model.LEVEL_MEMORY_S),
        baseline=growth_stats.baseline(state.closed_growth, level_),
        level_shift_age_s=None if level_shift_s is None else max(0.0, now_s - level_shift_s),
        rate_per_s=annotations.rate_per_s,
        tokens_per_s=annotations.tokens_per_s,
    )


def _parts(
    state: DemandState, reach_s: float, quantile: float, retries_due: bool
) -> tuple[float, float, float, float, float]:
    """Level, trend, season, burst and uncertainty."""
    estimate, at_s = state.estimate, state.last_sample_s
    assert at_s is not None  # else there is no level
    trend = level_model.damped_rise(estimate.slope_per_s, reach_s)
    shape = max(0.0, estimate.level * seasonality.predicted_growth(state.closed_season, at_s, reach_s) - trend)
    predicted, factor = (
        estimate.level + trend + shape,
        growth_stats.quantile_growth_factor(state.closed_growth, reach_s, quantile),
    )
    bounded = max(predicted, growth_stats.growth_bound(state.closed_growth, estimate.level, factor))
    burst = min(predicted * (factor - 1.0), bounded - predicted)
    return estimate.level, trend, shape, burst, _level_uncertainty(estimate, quantile) if retries_due else 0.0


def _level_uncertainty(estimate: level_model.LevelEstimate, quantile: float) -> float:
    """How far the quantile of the level lies above it."""
    return min(MAX_LEVEL_SHARE * estimate.level, max(0.0, NormalDist().inv_cdf(quantile)) * estimate.error)


def _expects_no_request(state: DemandState, reach_s: float, quantile: float) -> bool:
    """Whether, at this quantile, no request arrives in the horizon: Poisson events of dispersion_gpu_s each."""
    return state.estimate.level * reach_s <= -math.log(max(quantile, ZERO_CONFIDENCE)) * state.dispersion_gpu_s
