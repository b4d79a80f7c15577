"""Serialization of a `DemandState`, so that a restart can restore it.

Problem: what was learned over weeks must survive the process. A stored state may be of another version, or damaged.

Idea: the document is a record that `codec` checks as a whole. Growth and profiles are stored without what can be
derived, and without gaps at their start.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from itertools import dropwhile
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

from plimsoll.core import codec
from plimsoll.core.codec import Amount, Length, Number
from plimsoll.core.demand import growth_stats, level_model, noise_model, seasonality
from plimsoll.core.demand.demand_state import Annotations, DemandState

_EMPTY_GROWTH: Final = growth_stats.GrowthStats()
_HORIZONS: Final = Length(len(_EMPTY_GROWTH.windows), len(_EMPTY_GROWTH.windows))
_FACTORS: Final = Length(len(_EMPTY_GROWTH.exceeded[0]), len(_EMPTY_GROWTH.exceeded[0]))
_Gap: TypeAlias = Annotated[float, Number(gaps=True)]
_AmountOrGap: TypeAlias = Annotated[float, Number(0.0, gaps=True)]


class _Growth(NamedTuple):
    """The parts of `GrowthStats` from which the rest is derived, without the gaps at the start of the past hour."""

    minute: int
    gpu_s: Amount
    covered_s: Amount
    minutes: Annotated[tuple[tuple[_Gap, _Gap, _Gap], ...], Length(0, growth_stats.MINUTES_RETAINED)]
    windows: Annotated[tuple[Amount, ...], _HORIZONS]
    exceeded: Annotated[tuple[Annotated[tuple[Amount, ...], _FACTORS], ...], _HORIZONS]


class _Profile(NamedTuple):
    """A `SeasonalProfile`, without bins if no half hour was observed."""

    bins: tuple[_AmountOrGap, ...]
    bins_seen: int
    profile_error: Amount
    no_profile_error: Amount


class _Season(NamedTuple):
    bin_index: int
    gpu_s: Amount
    covered_s: Amount
    previous: _AmountOrGap
    day: _Profile
    week: _Profile


@codec.stored_as("a forecast's state", version=1)
class _Stored(NamedTuple):
    """The document. times: last_sample_s, last_call_s and level_shift_s."""

    times: tuple[float | None, float | None, float | None]
    mean: level_model.LevelMean
    lines: level_model.TrendLines
    tests: level_model.CusumStates
    noise: noise_model.NoiseSums
    growth: _Growth
    season: _Season
    annotations: Annotations

    def validate(self) -> None:
        """Raise ValueError for a sample after the last call, and for a profile of another period."""
        last_sample_s, last_call_s, _ = self.times
        if last_sample_s is not None and (last_call_s is None or last_sample_s > last_call_s):
            raise ValueError(f"a sample of {last_sample_s} that was not seen until {last_call_s}")
        for profile, period in (
            (self.season.day, seasonality.BINS_PER_DAY),
            (self.season.week, seasonality.BINS_PER_WEEK),
        ):
            if len(profile.bins) not in (0, period):
                raise ValueError(f"{len(profile.bins)} bins, not {period}")


def to_dict(state: DemandState) -> dict[str, Any]:
    """The state as numbers, None, lists and a version: valid JSON without NaN."""
    season = state.season
    stored: dict[str, Any] = codec.encode(
        _Stored(
            (state.last_sample_s, state.last_call_s, state.level_shift_s),
            state.level_mean,
            state.trend_lines,
            state.tests,
            state.noise,
            _pack_growth(state.growth),
            _Season(*season[:4], _pack_profile(season.day), _pack_profile(season.week)),
            state.annotations,
        ),
    )
    return stored


def _pack_growth(stats: growth_stats.GrowthStats) -> _Growth:
    minute, gpu_s, covered_s, minutes, windows, exceeded, *_ = stats
    known_minutes = dropwhile(lambda one: all(map(math.isnan, one)), growth_stats.MINUTE_RECORD.iter_unpack(minutes))
    return _Growth(minute, gpu_s, covered_s, tuple(known_minutes), windows, exceeded)


def _pack_profile(profile: seasonality.SeasonalProfile) -> _Profile:
    return _Profile(tuple(memoryview(profile.bins).cast("d")) if profile.bins_seen else (), *profile[1:])


def from_dict(stored: object) -> DemandState:
    """Restore the state from `to_dict`. Raises ValueError for anything else, other versions included."""
    document = codec.decode(_Stored, _upgrade(stored))
    try:
        dispersion_gpu_s = noise_model.dispersion_gpu_s(document.noise)
        return DemandState.from_parts(
            document.times,
            document.mean,
            document.lines,
            document.tests,
            document.noise,
            _unpack_growth(document.growth),
            _unpack_season(document.season),
            document.annotations,
            dispersion_gpu_s,
            level_model.estimate_level(document.mean, document.lines, dispersion_gpu_s),
        )
    except (ValueError, ArithmeticError) as error:  # of numbers that are valid one by one
        raise ValueError(f"not a forecast's state: {error}") from error


def _upgrade(stored: object) -> object:
    """Add what older releases did not store: a fourth test, and the pending differences."""
    added = {}
    for key, length in (("tests", 3), ("noise", 4)):
        part = stored.get(key) if isinstance(stored, Mapping) else None
        if isinstance(part, list) and len(part) == length:
            added[key] = [*part, [0.0] * 3]
    return {**stored, **added} if isinstance(stored, Mapping) else stored


def _unpack_growth(stored: _Growth) -> growth_stats.GrowthStats:
    minutes = b"".join(growth_stats.MINUTE_RECORD.pack(*one) for one in stored.minutes)
    padded = _EMPTY_GROWTH.minutes[len(minutes) :] + minutes
    return growth_stats.rebuild(*stored[:3], padded, stored.windows, stored.exceeded)


def _unpack_season(stored: _Season) -> seasonality.SeasonState:
    day = _unpack_profile(stored.day, seasonality.BINS_PER_DAY)
    return seasonality.SeasonState(*stored[:4], day, _unpack_profile(stored.week, seasonality.BINS_PER_WEEK))


def _unpack_profile(stored: _Profile, period: int) -> seasonality.SeasonalProfile:
    bins = struct.pack(f"{period}d", *stored.bins) if stored.bins else seasonality.empty_bins(period)
    return seasonality.SeasonalProfile(bins, *stored[1:])
