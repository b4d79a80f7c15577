"""Growth statistics: how often a service's own load grows by which factor within a start-up time.

Problem: percentiles of growth need a long memory, horizons overlap, and a burst of half an hour holds few of them. A
minute with few requests looks like growth by chance alone. Gaps are not zeros.

Idea: work in whole minutes. Each minute records its mean work and the level and slope at its end. When a minute closes,
the windows that end with it are assessed: did the largest minute exceed the prediction at the window's start by a
factor, beyond what the dispersion of work explains? Only counts per horizon and factor have a long memory. A minute
with less than half its time covered is a gap, and a window that touches a gap does not count.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from plimsoll.core.demand.growth_prior import GROWTH_FACTORS, GROWTH_HORIZONS_S, PRIOR_WEIGHT_S
from plimsoll.core.demand.level_model import LevelEstimate, damped_rise
from plimsoll.core.units import MINUTE_S

_HORIZON_MINUTES: Final = tuple(round(horizon / MINUTE_S) for horizon in GROWTH_HORIZONS_S)
DOUBLING_INDEX: Final = GROWTH_FACTORS.index(2.0)
MINUTES_RETAINED: Final = 60  # an hour, for `baseline`; windows need the longest of _MINUTES and one more
_MIN_COVERAGE: Final = 0.5  # share of a minute below which it is a gap
_NOISE_SDS: Final = 2.5  # standard deviations of a minute's noise that do not count as growth
_DECAY: Final = 1.0 - 1.0 / (7 * 24 * 60)  # a week of memory
_Z_95: Final = 1.645  # one-sided 95 %


# A minute's mean work, and the level and slope (per second) at its end; NaN for a gap.
MINUTE_RECORD: Final = struct.Struct("3d")
GAP_RECORD: Final = MINUTE_RECORD.pack(math.nan, math.nan, math.nan)
NO_MINUTES: Final = MINUTES_RETAINED * GAP_RECORD
_NO_COUNTS: Final = (0.0,) * len(GROWTH_FACTORS)


class GrowthStats(NamedTuple):
    """The current minute, the last MINUTES_RETAINED minutes (oldest first), and counts per horizon and factor.

    lowest (level), highest (mean of a minute), confident_shares: computed by `rebuild` once a minute, because forecasts
    read them more often.
    """

    current_minute: int = -1
    gpu_s: float = 0.0
    covered_s: float = 0.0
    minutes: bytes = NO_MINUTES
    windows: tuple[float, ...] = (0.0,) * len(GROWTH_HORIZONS_S)
    exceeded: tuple[tuple[float, ...], ...] = (_NO_COUNTS,) * len(GROWTH_HORIZONS_S)
    lowest: float = math.inf
    confident_shares: tuple[tuple[float, ...], ...] = (_NO_COUNTS,) * len(GROWTH_HORIZONS_S)
    highest: float = -math.inf

    @property
    def without_current(self) -> GrowthStats:
        """The statistics without the current minute."""
        return self._replace(current_minute=-1, gpu_s=0.0, covered_s=0.0)


def add(
    stats: GrowthStats, at_s: float, work: float, span_s: float, before: LevelEstimate, dispersion_gpu_s: float
) -> GrowthStats:
    """Add a sample to the minute in which it ends. `before` and dispersion_gpu_s are the estimates before it."""
    minute = math.floor(at_s / MINUTE_S)
    gpu_s, covered_s = work * span_s, min(span_s, MINUTE_S)
    if minute == stats.current_minute or stats.current_minute < 0:
        _, sum_s, sum_covered_s, minutes, windows, exceeded, lowest, confident_shares, highest = stats
        gpu_s, covered_s = sum_s + gpu_s, sum_covered_s + covered_s
        return GrowthStats(minute, gpu_s, covered_s, minutes, windows, exceeded, lowest, confident_shares, highest)
    return rebuild(minute, gpu_s, covered_s, *_close(stats, minute, before, dispersion_gpu_s))


def rebuild(
    minute: int,
    gpu_s: float,
    covered_s: float,
    minutes: bytes,
    windows: tuple[float, ...],
    exceeded: tuple[tuple[float, ...], ...],
) -> GrowthStats:
    """Build the statistics from these parts, with the derived lowest, highest and confident shares.

    A confident share is the lower 95 % bound of a Poisson count (Wilson and Hilferty 1931), with overlapping windows
    taken as one. It is divided by the observed windows plus the prior's weight for a doubling, because one burst in
    half an hour says little.
    """
    lowest = _lowest(minutes)
    confident_shares = tuple(
        _confident_row(row, length, length / (n + weights_s[DOUBLING_INDEX] / MINUTE_S))
        for length, n, row, weights_s in zip(_HORIZON_MINUTES, windows, exceeded, PRIOR_WEIGHT_S, strict=True)
    )
    highest = max([work for work in _recent(minutes, MINUTES_RETAINED)[::3] if work == work], default=-math.inf)
    return GrowthStats(minute, gpu_s, covered_s, minutes, windows, exceeded, lowest, confident_shares, highest)


def _close(
    stats: GrowthStats, minute: int, before: LevelEstimate, dispersion_gpu_s: float
) -> tuple[bytes, tuple[float, ...], tuple[tuple[float, ...], ...]]:
    """Minutes, windows and exceeded after the current minute closes and `minute` begins."""
    gaps = GAP_RECORD * min(minute - stats.current_minute - 1, MINUTES_RETAINED)
    if stats.covered_s < _MIN_COVERAGE * MINUTE_S:
        return (stats.minutes + GAP_RECORD + gaps)[-len(NO_MINUTES) :], stats.windows, stats.exceeded
    ended = MINUTE_RECORD.pack(stats.gpu_s / stats.covered_s, before.level, before.slope_per_s)
    minutes = stats.minutes[MINUTE_RECORD.size :] + ended
    windows, exceeded = [], []
    for length, n, row in zip(_HORIZON_MINUTES, stats.windows, stats.exceeded, strict=True):
        window_growth = _window_growth(minutes, length, dispersion_gpu_s)
        windows.append(_DECAY * n + (window_growth is not None))
        factors_exceeded = bisect_left(GROWTH_FACTORS, window_growth) if window_growth is not None else 0
        if factors_exceeded or row[0]:
            row = tuple([_DECAY * count + (place < factors_exceeded) for place, count in enumerate(row)])
        exceeded.append(row)
    return (minutes + gaps)[-len(NO_MINUTES) :], tuple(windows), tuple(exceeded)


def _window_growth(minutes: bytes, length: int, dispersion_gpu_s: float) -> float | None:
    """Growth in the window of `length` minutes that has just ended, less random variation; None without a window."""
    _, level, slope, *window = _recent(minutes, length + 1)
    works = window[::3]
    if not level > 0.0 or math.isnan(sum(works)):
        return None
    predicted = level + damped_rise(slope, length * MINUTE_S)
    return (max(works) - _NOISE_SDS * math.sqrt(dispersion_gpu_s * predicted / MINUTE_S)) / predicted


def baseline(stats: GrowthStats, level: float) -> float:
    """The lowest level of the past hour, including the present one: the level that load grows from.

    While the present level is above it, the growth that standby replicas were kept for has happened.
    """
    return min(level, stats.lowest)


def growth_bound(stats: GrowthStats, level: float, factor: float) -> float:
    """The highest work that growth by `factor` may reach: the past hour's maximum, or `factor` times the baseline.

    Growth from a trough is mostly the return to the peak, and says nothing about growth beyond the peak.
    """
    return max(stats.highest, factor * baseline(stats, level))


def _lowest(minutes: bytes) -> float:
    levels = _recent(minutes, MINUTES_RETAINED)[1::3]
    return min([level for level in levels if level == level], default=math.inf)


def _recent(minutes: bytes, n: int) -> memoryview[float]:
    """The figures of the last `n` minutes, or of as many as exist."""
    return memoryview(minutes).cast("d")[-3 * n :]


def history_length_s(stats: GrowthStats, horizon_s: float) -> float:
    """Seconds of windows behind the counts for this horizon."""
    return MINUTE_S * interpolate(stats.windows, horizon_s)


def exceedance_shares(stats: GrowthStats, horizon_s: float) -> tuple[float, ...]:
    """Share of windows with growth above each of GROWTH_FACTORS; zeros without history."""
    rows = [
        tuple([count / max(n, 1.0) for count in row]) if row[0] else row  # counts never rise along the factors
        for n, row in zip(stats.windows, stats.exceeded, strict=True)
    ]
    return shares_at_horizon(tuple(rows), horizon_s)


def quantile_growth_factor(stats: GrowthStats, horizon_s: float, quantile: float) -> float:
    """The factor, 1 or more, that growth stays within with probability `quantile`, by the confident shares of own
    history.
    """
    confident_shares = shares_at_horizon(stats.confident_shares, horizon_s)
    within = (1.0, *GROWTH_FACTORS)
    missed = 1.0 - quantile
    factor_index = sum(share > missed for share in confident_shares)
    if factor_index == 0:
        return 1.0
    if factor_index == len(GROWTH_FACTORS):
        return within[-1]
    above, below = confident_shares[factor_index - 1], confident_shares[factor_index]
    part = (above - missed) / (above - below)
    return within[factor_index] + part * (within[factor_index + 1] - within[factor_index])


def _confident_row(row: tuple[float, ...], length: int, scale: float) -> tuple[float, ...]:
    confident = []
    for count in row:  # counts never rise along the factors, so after a 0 come only more
        lower_bound = _poisson_lower_bound(count / length) if count else 0.0
        if not lower_bound:
            break
        confident.append(scale * lower_bound)
    return (*confident, *_NO_COUNTS[len(confident) :])


def make_nonincreasing(shares: Sequence[float]) -> tuple[float, ...]:
    """Make shares nonincreasing along the factors: growth past one factor is growth past all smaller ones."""
    return tuple(accumulate(reversed(shares), max))[::-1]


def _poisson_lower_bound(count: float) -> float:
    root = 1.0 - 1.0 / (9.0 * count) - _Z_95 / (3.0 * math.sqrt(count))
    return count * root * root * root if root > 0.0 else 0.0


def shares_at_horizon(rows: tuple[tuple[float, ...], ...], horizon_s: float) -> tuple[float, ...]:
    """Return the shares at a horizon, interpolated from those at GROWTH_HORIZONS_S, never falling with the horizon.

    Between two horizons the interpolation is linear. Below the first, level shifts are at uniform times, so the share
    is 1 - (1 - p)^(L / first). Above the last, the share of the last applies.
    """
    part = max(0.0, horizon_s) / GROWTH_HORIZONS_S[0]
    if part <= 1.0:
        return tuple([1.0 - (1.0 - share) ** part for share in rows[0]])
    place = bisect_right(GROWTH_HORIZONS_S, horizon_s)
    left = tuple(map(max, *rows[:place])) if place > 1 else rows[0]
    if place == len(GROWTH_HORIZONS_S):
        return left
    part = (horizon_s - GROWTH_HORIZONS_S[place - 1]) / (GROWTH_HORIZONS_S[place] - GROWTH_HORIZONS_S[place - 1])
    return tuple([a + part * max(0.0, b - a) for a, b in zip(left, rows[place], strict=True)])


def interpolate(values: tuple[float, ...], horizon_s: float) -> float:
    """The value at a horizon from those at GROWTH_HORIZONS_S, linear between them and constant beyond."""
    place = bisect_right(GROWTH_HORIZONS_S, horizon_s)
    if place in (0, len(GROWTH_HORIZONS_S)):
        return values[max(0, place - 1)]
    part = (horizon_s - GROWTH_HORIZONS_S[place - 1]) / (GROWTH_HORIZONS_S[place] - GROWTH_HORIZONS_S[place - 1])
    return values[place - 1] + part * (values[place] - values[place - 1])
