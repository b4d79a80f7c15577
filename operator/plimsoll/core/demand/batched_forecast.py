"""Forecasts of a whole fleet in one pass, without the parts that only explain.

Problem: a full forecast with all its parts and its growth distribution is too expensive for every tier at every tick.
Mostly the result is that no replica count changes.

Idea: the arithmetic of `forecasting.forecast` over arrays, identical to the last bit, for the parts that decide. Values
that depend only on closed minutes and half hours are cached until the next one closes: the growth distribution, the
growth factor and the skill of the seasonality.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from plimsoll.core.demand import growth_stats, level_model, seasonality, uncertainty
from plimsoll.core.demand.batched_observe import Floats, map_distinct, pack_states
from plimsoll.core.demand.demand_state import COL_DISPERSION, COL_ESTIMATE, COL_MEAN, COL_SAMPLE, DemandState
from plimsoll.core.demand.forecasting import MAX_SAMPLE_AGE_S, ZERO_CONFIDENCE
from plimsoll.core.demand.standby_value import GrowthDistribution, growth_distribution

_NO_GROWTH: Final = growth_stats.GrowthStats()


class BatchedForecast(NamedTuple):
    """One array entry per tier, as the fields of `Forecast` of the same names. work is NaN where nothing recent is
    known.
    """

    work: Floats
    level: Floats
    uncertainty: Floats
    memory_fill: Floats
    level_error: Floats
    baseline: Floats
    age_s: Floats


class GrowthCache:
    """Cached growth results of one tier between two passes. The distribution is for the horizon of the last pass."""

    __slots__ = (
        "_distribution_history",
        "_factor",
        "_factor_history",
        "_factor_key",
        "_horizon_s",
        "growth_distribution",
    )

    def __init__(self) -> None:
        self._distribution_history, self._horizon_s = _NO_GROWTH, -1.0
        self._factor_history, self._factor_key, self._factor = _NO_GROWTH, (-1.0, -1.0), 1.0
        self.growth_distribution: GrowthDistribution | None = None

    def distribution(self, state: DemandState, horizon_s: float) -> GrowthDistribution:
        """Cached `standby_value.growth_distribution`."""
        if (
            self.growth_distribution is None
            or self._distribution_history is not state.closed_growth
            or self._horizon_s != horizon_s
        ):
            self._distribution_history, self._horizon_s, self.growth_distribution = (
                state.closed_growth,
                horizon_s,
                growth_distribution(state, horizon_s),
            )
        return self.growth_distribution

    def growth_factor(self, state: DemandState, reach_s: float, quantile: float) -> float:
        """Cached `growth_stats.quantile_growth_factor`."""
        reach = (reach_s, quantile)
        if self._factor_history is not state.closed_growth or self._factor_key != reach:
            self._factor_history, self._factor_key = state.closed_growth, reach
            self._factor = growth_stats.quantile_growth_factor(state.closed_growth, reach_s, quantile)
        return self._factor


def forecast_all(
    states: Sequence[DemandState],
    now_s: float,
    horizons_s: Sequence[float],
    quantiles: Sequence[float],
    caches: Sequence[GrowthCache],
    slo_shares: Sequence[float],
    miss_costs: Floats,
) -> BatchedForecast:
    """`forecasting.forecast` for each tier; the arguments are those of that function, per tier.

    caches: the same `GrowthCache` of a tier in every pass.
    """
    columns = pack_states(states)
    at_s, level_, slope, error = (
        columns[:, COL_SAMPLE],
        columns[:, COL_ESTIMATE],
        columns[:, COL_ESTIMATE + 1],
        columns[:, COL_ESTIMATE + 2],
    )
    age_s = np.maximum(0.0, now_s - at_s)
    reach_s = np.array(horizons_s) + age_s
    known = age_s <= MAX_SAMPLE_AGE_S  # False for NaN
    reaches = np.where(known, reach_s, 0.0)
    factor = np.array(
        [
            slo_deviates.growth_factor(state, reach, quantile)
            for slo_deviates, state, reach, quantile in zip(caches, states, reaches.tolist(), quantiles, strict=True)
        ]
    )
    quantile = np.array(quantiles)
    deviates = map_distinct(uncertainty.quantile_deviate, quantile)
    zero_log = map_distinct(lambda share: -math.log(max(share, ZERO_CONFIDENCE)), quantile)
    damped = map_distinct(lambda reach: -math.expm1(-reach / level_model.DAMPING_S), reaches)
    trend = np.maximum(0.0, slope) * level_model.DAMPING_S * damped
    shape = np.maximum(0.0, level_ * _seasonal_growth(states, at_s, reach_s) - trend)
    predicted = level_ + trend + shape
    lowest, highest = np.array([(state.closed_growth.lowest, state.closed_growth.highest) for state in states]).T
    bounded = np.maximum(predicted, np.maximum(highest, factor * np.minimum(level_, lowest)))
    burst = np.minimum(predicted * (factor - 1.0), bounded - predicted)
    slo_deviates = map_distinct(uncertainty.quantile_deviate, np.array(slo_shares))
    level_uncertainty = uncertainty.counted_uncertainty(level_, error, deviates, slo_deviates, miss_costs)
    silent = level_ * reach_s <= zero_log * columns[:, COL_DISPERSION]
    work = np.where(silent, 0.0, predicted + burst + level_uncertainty)
    active_level = np.where(silent, 0.0, level_)
    baseline = np.minimum(active_level, lowest)
    memory_fill = np.minimum(1.0, columns[:, COL_MEAN] / level_model.LEVEL_MEMORY_S)
    work, level_uncertainty, error = (
        np.where(active_level > 0.0, part, 0.0) for part in (work, level_uncertainty, error)
    )
    return BatchedForecast(
        np.where(known, work, np.nan), active_level, level_uncertainty, memory_fill, error, baseline, age_s
    )


def _seasonal_growth(states: Sequence[DemandState], at_s: Floats, reach_s: Floats) -> Floats:
    seasonal_growth = np.zeros(len(states))
    for place, state in enumerate(states):
        if state.closed_season.day.bins_seen >= seasonality.MIN_PERIODS * seasonality.BINS_PER_DAY:
            seasonal_growth[place] = seasonality.predicted_growth(
                state.closed_season, float(at_s[place]), float(reach_s[place])
            )
    return seasonal_growth
