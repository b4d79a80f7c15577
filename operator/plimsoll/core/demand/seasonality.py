"""Seasonality: the profile of the day and of the week, from the second period on.

Problem: load that rises every working day at nine can be predicted, but a profile learned from noise predicts rises
that do not come.

Idea: half hours. Each half hour of the day, and of the week, has a discounted mean of its work. When a half hour
closes, the growth that the profile predicted is compared with "no change". The squared error that the profile would
have saved is its skill, and only that share of the prediction counts. A profile without skill counts nothing.
"""

from __future__ import annotations

import math
import struct
from typing import Final, NamedTuple

BIN_S: Final = 1800.0
BINS_PER_DAY: Final = 48
BINS_PER_WEEK: Final = 7 * BINS_PER_DAY
MIN_PERIODS: Final = 2  # whole periods observed before a profile is used
_NEWEST_WEIGHT: Final = 0.3  # weight of the newest day or week in its half hour
_DECAY: Final = 1.0 - 1.0 / BINS_PER_WEEK
_MIN_COVERAGE: Final = 0.5
_MAX_HORIZON_S: Final = 86400.0
_DOUBLE: Final = struct.Struct("d")


def empty_bins(period: int) -> bytes:
    """`period` bins without data."""
    return _DOUBLE.pack(math.nan) * period


class SeasonalProfile(NamedTuple):
    """Mean work per bin (as doubles, NaN: no data), number of bins with data, and squared errors with and without the
    profile.

    Its size is constant, so learning a week does not grow it.
    """

    bins: bytes
    bins_seen: int = 0
    profile_error: float = 0.0
    no_profile_error: float = 0.0


class SeasonState(NamedTuple):
    """The current half hour (index since the epoch), the mean of the one before it (NaN: a gap), and both profiles."""

    bin_index: int = -1
    gpu_s: float = 0.0
    covered_s: float = 0.0
    previous: float = math.nan
    day: SeasonalProfile = SeasonalProfile(empty_bins(BINS_PER_DAY))
    week: SeasonalProfile = SeasonalProfile(empty_bins(BINS_PER_WEEK))

    @property
    def without_current(self) -> SeasonState:
        """The state without the current half hour."""
        return self._replace(bin_index=-1, gpu_s=0.0, covered_s=0.0)


def add(state: SeasonState, at_s: float, work: float, span_s: float) -> SeasonState:
    """Add a sample to the half hour in which it ends."""
    now = math.floor(at_s / BIN_S)
    if state.bin_index >= 0 and now != state.bin_index:
        state = _close(state, now)
    _, gpu_s, covered_s, previous, day, week = state
    return SeasonState(now, gpu_s + work * span_s, covered_s + span_s, previous, day, week)


def _close(state: SeasonState, now: int) -> SeasonState:
    if state.covered_s < _MIN_COVERAGE * BIN_S:
        return state._replace(gpu_s=0.0, covered_s=0.0, previous=math.nan)
    work = state.gpu_s / state.covered_s
    day = _update_profile(state.day, BINS_PER_DAY, state.bin_index, work, state.previous)
    week = _update_profile(state.week, BINS_PER_WEEK, state.bin_index, work, state.previous)
    previous = work if now == state.bin_index + 1 else math.nan
    return SeasonState(now, 0.0, 0.0, previous, day, week)


def _update_profile(profile: SeasonalProfile, period: int, index: int, work: float, previous: float) -> SeasonalProfile:
    bins, place = profile.bins, index % period
    bin_mean, previous_mean = _bin_value(bins, place), _bin_value(bins, (index - 1) % period)
    profile_error, no_profile_error = _DECAY * profile.profile_error, _DECAY * profile.no_profile_error
    if previous_mean > 0.0 and bin_mean == bin_mean and previous == previous:
        profile_error += (work - previous * bin_mean / previous_mean) ** 2
        no_profile_error += (work - previous) ** 2
    mean = work if bin_mean != bin_mean else bin_mean + _NEWEST_WEIGHT * (work - bin_mean)
    return SeasonalProfile(
        bins[: 8 * place] + _DOUBLE.pack(mean) + bins[8 * place + 8 :],
        profile.bins_seen + 1,
        profile_error,
        no_profile_error,
    )


def predicted_growth(state: SeasonState, now_s: float, horizon_s: float) -> float:
    """Largest growth within the horizon by the profile with more skill, as a share of the level, at least 0."""
    of_day, of_week = _skill(state.day, BINS_PER_DAY), _skill(state.week, BINS_PER_WEEK)
    skill, profile, period = (
        (of_day, state.day, BINS_PER_DAY) if of_day >= of_week else (of_week, state.week, BINS_PER_WEEK)
    )
    if skill <= 0.0:
        return 0.0
    start = _profile_value(profile, period, now_s)
    if not start > 0.0:
        return 0.0
    end_s = now_s + min(horizon_s, _MAX_HORIZON_S)
    first, last = math.floor(now_s / BIN_S + 0.5), math.floor(end_s / BIN_S - 0.5)
    corners = [BIN_S * (index + 0.5) for index in range(first, last + 1)]  # a polygon is largest at a corner or an end
    largest = max(
        (value for at in (*corners, end_s) if (value := _profile_value(profile, period, at)) == value), default=start
    )
    return skill * max(0.0, largest / start - 1.0)


def _skill(profile: SeasonalProfile, period: int) -> float:
    if profile.bins_seen < MIN_PERIODS * period or profile.no_profile_error <= 0.0:
        return 0.0
    return max(0.0, 1.0 - profile.profile_error / profile.no_profile_error)


def _profile_value(profile: SeasonalProfile, period: int, at_s: float) -> float:
    """The profile at a time, linear between the middles of half hours; NaN next to a bin without data."""
    place = at_s / BIN_S - 0.5
    index = math.floor(place)
    part = place - index
    return (1.0 - part) * _bin_value(profile.bins, index % period) + part * _bin_value(
        profile.bins, (index + 1) % period
    )


def _bin_value(bins: bytes, place: int) -> float:
    value: float = _DOUBLE.unpack_from(bins, 8 * place)[0]
    return value
