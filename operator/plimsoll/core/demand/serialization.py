"""Serialization of a `DemandState`, so that a restart can restore it.

Problem: what was learned over weeks must survive the process. A stored state may be of another version, or damaged.

Idea: numbers and lists with a version, None for a gap, so that JSON holds them exactly. Reading checks every number and
rejects an invalid state as a whole.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from itertools import dropwhile
from typing import Any, Final

from plimsoll.core.demand import growth_stats, level_model, noise_model, seasonality
from plimsoll.core.demand.demand_state import Annotations, DemandState

VERSION: Final = 1


def to_dict(state: DemandState) -> dict[str, Any]:
    """The state as numbers, None, lists and a version: valid JSON without NaN."""
    return {
        "version": VERSION,
        "times": [state.last_sample_s, state.last_call_s, state.level_shift_s],
        "mean": _plain(state.level_mean),
        "lines": _plain(state.trend_lines),
        "tests": _plain(state.tests),
        "noise": _plain(state.noise),
        "growth": _plain_growth(state.growth),
        "season": [
            *_plain(state.season[:4]),
            _plain_profile(state.closed_season.day),
            _plain_profile(state.closed_season.week),
        ],
        "annotations": [state.annotations.rate_per_s, state.annotations.tokens_per_s],
    }


def _plain_growth(stats: growth_stats.GrowthStats) -> Any:
    """The first six parts of the growth, from which the rest is derived. Gaps at the start of the past hour are
    dropped.
    """
    minute, gpu_s, covered_s, minutes, windows, exceeded, *_ = stats
    known_minutes = dropwhile(lambda one: all(map(math.isnan, one)), growth_stats.MINUTE_RECORD.iter_unpack(minutes))
    return _plain((minute, gpu_s, covered_s, tuple(known_minutes), windows, exceeded))


def _plain_profile(profile: seasonality.SeasonalProfile) -> Any:
    """All parts of a profile; without bins if no half hour was observed."""
    return _plain((tuple(memoryview(profile.bins).cast("d")) if profile.bins_seen else (), *profile[1:]))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return None if value != value else value


def from_dict(stored: Mapping[str, Any]) -> DemandState:
    """Restore the state from `to_dict`. Raises ValueError for anything else, other versions included."""
    if not isinstance(stored, Mapping) or stored.get("version") != VERSION:
        raise ValueError(f"not a forecast's state of version {VERSION}: {str(stored)[:80]}")
    try:
        last_sample_s, last_call_s, level_shift_s = (
            None if time is None else _parse_number(time) for time in stored["times"]
        )
        if last_sample_s is not None and (last_call_s is None or last_sample_s > last_call_s):
            raise ValueError(f"a sample of {last_sample_s} that was not seen until {last_call_s}")
        rate, tokens = (None if value is None else _parse_number(value) for value in stored["annotations"])
        slow, fast = (level_model.TrendLine(*_parse_amounts(line, 8)) for line in stored["lines"])
        level_mean, trend_lines, noise_sums = (
            level_model.LevelMean(*_parse_amounts(stored["mean"], 2)),
            (slow, fast),
            _parse_noise(stored["noise"]),
        )
        dispersion_gpu_s = noise_model.dispersion_gpu_s(noise_sums)
        return DemandState.from_parts(
            (last_sample_s, last_call_s, level_shift_s),
            level_mean,
            trend_lines,
            _parse_tests(stored["tests"]),
            noise_sums,
            _parse_growth(stored["growth"]),
            _parse_season(stored["season"]),
            Annotations(rate, tokens),
            dispersion_gpu_s,
            level_model.estimate_level(level_mean, trend_lines, dispersion_gpu_s),
        )
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"not a forecast's state: {error}") from error


def _parse_tests(stored: Any) -> level_model.CusumStates:
    """Parse the tests; a test that did not exist when the state was stored starts empty."""
    missing = [level_model.Cusum()] if len(stored) == 3 else []
    first, second, third, fourth = (*(level_model.Cusum(*_parse_amounts(test, 3)) for test in stored), *missing)
    return first, second, third, fourth


def _parse_noise(stored: Any) -> noise_model.NoiseSums:
    """Parse the noise; states stored before pending differences existed have none."""
    tick, block, gpu_s, covered_s, pending = (*stored, noise_model.DifferenceSums()) if len(stored) == 4 else stored
    sums = noise_model.DispersionSums(*_parse_amounts(tick, 5)), noise_model.DispersionSums(*_parse_amounts(block, 5))
    return noise_model.NoiseSums(
        *sums, _parse_amount(gpu_s), _parse_amount(covered_s), noise_model.DifferenceSums(*_parse_amounts(pending, 3))
    )


def _parse_growth(stored: Any) -> growth_stats.GrowthStats:
    minute, gpu_s, covered_s, minutes, windows, exceeded = stored
    empty = growth_stats.GrowthStats()
    if len(minutes) > growth_stats.MINUTES_RETAINED or len(exceeded) != len(empty.exceeded):
        raise ValueError("more minutes or horizons than are kept")
    packed_minutes = b"".join(growth_stats.MINUTE_RECORD.pack(*_parse_numbers(one, 3, gaps=True)) for one in minutes)
    return growth_stats.rebuild(
        int(_parse_number(minute)),
        _parse_amount(gpu_s),
        _parse_amount(covered_s),
        empty.minutes[len(packed_minutes) :] + packed_minutes,
        _parse_amounts(windows, len(empty.windows)),
        tuple(_parse_amounts(row, len(empty.exceeded[0])) for row in exceeded),
    )


def _parse_season(stored: Any) -> seasonality.SeasonState:
    index, gpu_s, covered_s, previous, day, week = stored
    return seasonality.SeasonState(
        int(_parse_number(index)),
        _parse_amount(gpu_s),
        _parse_amount(covered_s),
        math.nan if previous is None else _parse_amount(previous),
        _parse_profile(day, seasonality.BINS_PER_DAY),
        _parse_profile(week, seasonality.BINS_PER_WEEK),
    )


def _parse_profile(stored: Any, period: int) -> seasonality.SeasonalProfile:
    bins, bins_seen, *errors = stored
    bin_values = _parse_amounts(bins, period, gaps=True) if bins else (math.nan,) * period
    return seasonality.SeasonalProfile(
        struct.pack(f"{period}d", *bin_values), int(_parse_number(bins_seen)), *_parse_amounts(errors, 2)
    )


def _parse_amounts(values: Any, length: int, gaps: bool = False) -> tuple[float, ...]:
    return tuple(value if math.isnan(value) else _parse_amount(value) for value in _parse_numbers(values, length, gaps))


def _parse_amount(value: Any) -> float:
    number = _parse_number(value)
    if number < 0.0:
        raise ValueError(f"{value!r} where only 0 and more can be")
    return number


def _parse_numbers(values: Any, length: int, gaps: bool = False) -> tuple[float, ...]:
    if not isinstance(values, list | tuple) or len(values) != length:
        raise ValueError(f"{length} numbers expected, not {str(values)[:80]}")
    return tuple(math.nan if gaps and value is None else _parse_number(value) for value in values)


def _parse_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} where a finite number is expected")
    return float(value)
