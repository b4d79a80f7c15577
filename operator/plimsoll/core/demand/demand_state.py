"""Demand of one tier: a state of bounded size that samples update.

Problem: samples arrive at irregular times or not at all, and a missing sample is not a zero.

Idea: a frozen value built from the states of `level_model`, `noise_model`, `growth_stats` and `seasonality`. A sample
is a mean over the time since the last call, at most one minute. An `Unavailable` sample only records that this time was
not observed.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from plimsoll.core.demand import growth_stats, level_model, level_tracker, noise_model, seasonality
from plimsoll.core.types import Unavailable

MAX_SAMPLE_SPAN_S: Final = 60.0  # a sample covers at most this much time
FIRST_SAMPLE_SPAN_S: Final = 1.0  # the time that the very first sample covers
MAX_CLOCK_STEP_S: Final = 60.0  # a larger step back is taken for a corrected clock
ANNOTATION_SMOOTHING_S: Final = 60.0  # time constant of the annotations

# Columns of `DemandState.packed`: each constant is the index of the first column of a part.
COL_SAMPLE, COL_CALL, COL_SHIFT, COL_MEAN, COL_TREND_LINES, COL_TESTS = 0, 1, 2, 3, 5, 21
COL_NOISE, COL_MINUTE, COL_BIN, COL_ANNOTATIONS, COL_DISPERSION, COL_ESTIMATE = 33, 48, 51, 54, 56, 57
COLUMN_COUNT: Final = 61
_DOUBLES: Final = [struct.Struct(f"{n}d") for n in range(COLUMN_COUNT + 1)]
ROW_STRUCT: Final = _DOUBLES[COLUMN_COUNT]
_TREND_POWERS, _CUSUM_POWERS, _DISPERSION_POWERS = (0, 0, 0, 1, 1, 0, 0, 0), (0, 0, 1), (2, 1, 0, 1, 0)
# The power of work in each column. A change of the unit of work scales the column by the factor to this power.
_COLUMN_POWERS: Final = (
    *(0, 0, 0), *(0, 1), *_TREND_POWERS, *_TREND_POWERS,
    *_CUSUM_POWERS, *_CUSUM_POWERS, *_CUSUM_POWERS, *_CUSUM_POWERS,
    *_DISPERSION_POWERS, *_DISPERSION_POWERS, *(1, 0), *(2, 1, 0),
    *(0, 1, 0), *(0, 1, 0), *(0, 0), 1, *(1, 1, 1, 0),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Annotations:
    """Request rate and token rate that accompany the work, smoothed over a minute; None if never given. They only
    explain.
    """

    rate_per_s: float | None = None
    tokens_per_s: float | None = None


class DemandState(NamedTuple):
    """Demand history of one tier. The parts that change with every sample are packed, so that a fleet's states form one
    array.

    packed: the columns named above as doubles, NaN for None. closed_growth, closed_season: growth and season without
    the current minute and half hour.
    """

    packed: bytes = b""
    closed_growth: growth_stats.GrowthStats = growth_stats.GrowthStats()
    closed_season: seasonality.SeasonState = seasonality.SeasonState()

    @classmethod
    def from_parts(
        cls,
        times: tuple[float | None, float | None, float | None],
        level_mean: level_model.LevelMean,
        trend_lines: level_model.TrendLines,
        tests: level_model.CusumStates,
        noise_sums: noise_model.NoiseSums,
        growth_stats_: growth_stats.GrowthStats,
        season_state: seasonality.SeasonState,
        annotations: Annotations,
        dispersion_gpu_s: float,
        estimate: level_model.LevelEstimate,
    ) -> DemandState:
        """Build the state from its parts. times: last_sample_s, last_call_s and level_shift_s."""
        packed = ROW_STRUCT.pack(
            *(math.nan if time is None else time for time in times),
            *level_mean,
            *trend_lines[0],
            *trend_lines[1],
            *tests[0],
            *tests[1],
            *tests[2],
            *tests[3],
            *noise_sums.tick,
            *noise_sums.block,
            *noise_sums[2:4],
            *noise_sums.pending,
            *growth_stats_[:3],
            *season_state[:3],
            math.nan if annotations.rate_per_s is None else annotations.rate_per_s,
            math.nan if annotations.tokens_per_s is None else annotations.tokens_per_s,
            dispersion_gpu_s,
            *estimate,
        )
        return cls(packed, growth_stats_.without_current, season_state.without_current)

    def columns(self, first: int, n: int) -> tuple[float, ...]:
        """Return `n` columns from column `first` on."""
        return _DOUBLES[n].unpack_from(self.packed or EMPTY_ROW, 8 * first)

    @property
    def last_sample_s(self) -> float | None:
        """Time of the last known sample, seconds since the epoch; None without one."""
        return _or_none(*self.columns(COL_SAMPLE, 1))

    @property
    def last_call_s(self) -> float | None:
        """Time of the last call of `observe`, seconds since the epoch; None without one."""
        return _or_none(*self.columns(COL_CALL, 1))

    @property
    def level_shift_s(self) -> float | None:
        """Time of the last level shift, seconds since the epoch; None without one."""
        return _or_none(*self.columns(COL_SHIFT, 1))

    @property
    def level_mean(self) -> level_model.LevelMean:
        return level_model.LevelMean(*self.columns(COL_MEAN, 2))

    @property
    def trend_lines(self) -> level_model.TrendLines:
        return level_model.TrendLine(*self.columns(COL_TREND_LINES, 8)), level_model.TrendLine(
            *self.columns(COL_TREND_LINES + 8, 8)
        )

    @property
    def tests(self) -> level_model.CusumStates:
        columns = self.columns(COL_TESTS, 12)
        first, second, third, fourth = (level_model.Cusum(*columns[i : i + 3]) for i in range(0, 12, 3))
        return first, second, third, fourth

    @property
    def noise(self) -> noise_model.NoiseSums:
        columns = self.columns(COL_NOISE, 15)
        tick, block, pending = (
            noise_model.DispersionSums(*columns[:5]),
            noise_model.DispersionSums(*columns[5:10]),
            noise_model.DifferenceSums(*columns[12:]),
        )
        return noise_model.NoiseSums(tick, block, columns[10], columns[11], pending)

    @property
    def growth(self) -> growth_stats.GrowthStats:
        minute, gpu_s, covered_s = self.columns(COL_MINUTE, 3)
        return self.closed_growth._replace(current_minute=int(minute), gpu_s=gpu_s, covered_s=covered_s)

    @property
    def season(self) -> seasonality.SeasonState:
        index, gpu_s, covered_s = self.columns(COL_BIN, 3)
        return self.closed_season._replace(bin_index=int(index), gpu_s=gpu_s, covered_s=covered_s)

    @property
    def annotations(self) -> Annotations:
        rate, tokens = self.columns(COL_ANNOTATIONS, 2)
        return Annotations(_or_none(rate), _or_none(tokens))

    @property
    def dispersion_gpu_s(self) -> float:
        """Index of dispersion of the work, GPU-seconds; derived from the noise."""
        return self.columns(COL_DISPERSION, 1)[0]

    @property
    def estimate(self) -> level_model.LevelEstimate:
        """Level estimate; derived from mean, trend lines and noise."""
        return level_model.LevelEstimate(*self.columns(COL_ESTIMATE, 4))


EMPTY_ROW: Final = DemandState.from_parts(
    (None, None, None),
    level_model.LevelMean(),
    level_model.NO_TREND_LINES,
    level_model.NO_TESTS,
    noise_model.NoiseSums(),
    growth_stats.GrowthStats(),
    seasonality.SeasonState(),
    Annotations(),
    0.0,
    level_model.LevelEstimate(),
).packed


def _or_none(value: float) -> float | None:
    return None if value != value else value


def observe(
    state: DemandState,
    now_s: float,
    work: float | Unavailable,
    *,
    rate_per_s: float | None = None,
    tokens_per_s: float | None = None,
) -> DemandState:
    """Return the state with one more sample.

    work: GPU-seconds per second, the mean since the last call. Work that is `Unavailable`, NaN, infinite or negative is
    a gap. A call that is not later than the last one changes nothing, unless the clock was set back by more than
    MAX_CLOCK_STEP_S. In that case the sample is a gap, and later samples count again. Raises ValueError unless now_s is
    finite.
    """
    if not math.isfinite(now_s):
        raise ValueError(f"a sample's time is a finite number of seconds, not {now_s}")
    passed_s = FIRST_SAMPLE_SPAN_S if state.last_call_s is None else now_s - state.last_call_s
    if passed_s < -MAX_CLOCK_STEP_S:
        return _set_back(state, now_s)
    if passed_s <= 0.0:
        return state
    if isinstance(work, Unavailable) or not 0.0 <= work < math.inf:
        return state._replace(packed=_mark_call(state.packed or EMPTY_ROW, now_s))
    annotations = state.annotations
    if rate_per_s is not None or tokens_per_s is not None:
        rate = _smooth(annotations.rate_per_s, rate_per_s, passed_s)
        annotations = Annotations(rate, _smooth(annotations.tokens_per_s, tokens_per_s, passed_s))
    return _add_sample(state, now_s, float(work), min(passed_s, MAX_SAMPLE_SPAN_S), annotations)


def rescale(state: DemandState, factor: float) -> DemandState:
    """Return the state of the same arrivals if each had been `factor` (> 0) times the work.

    A new estimate of the work per request applies to earlier requests as well. Without rescaling, the change would look
    like a slow change of load.
    """
    columns = ROW_STRUCT.unpack(state.packed or EMPTY_ROW)
    packed = ROW_STRUCT.pack(*(value * factor**power for value, power in zip(columns, _COLUMN_POWERS, strict=True)))
    closed_growth, closed_season = state.closed_growth, state.closed_season
    day, week = (
        profile._replace(
            bins=_multiply(profile.bins, factor),
            profile_error=profile.profile_error * factor**2,
            no_profile_error=profile.no_profile_error * factor**2,
        )
        for profile in (closed_season.day, closed_season.week)
    )
    return DemandState(
        packed,
        closed_growth._replace(
            minutes=_multiply(closed_growth.minutes, factor),
            lowest=closed_growth.lowest * factor,
            highest=closed_growth.highest * factor,
        ),
        closed_season._replace(previous=closed_season.previous * factor, day=day, week=week),
    )


def _multiply(doubles: bytes, factor: float) -> bytes:
    return (np.frombuffer(doubles) * factor).tobytes()


def _mark_call(packed: bytes, now_s: float) -> bytes:
    return packed[: 8 * COL_CALL] + struct.pack("d", now_s) + packed[8 * COL_CALL + 8 :]


def _set_back(state: DemandState, now_s: float) -> DemandState:
    level_shift_s = state.level_shift_s
    times = (
        None if state.last_sample_s is None else now_s,
        now_s,
        None if level_shift_s is None else min(level_shift_s, now_s),
    )
    return DemandState.from_parts(
        times,
        state.level_mean,
        state.trend_lines,
        state.tests,
        state.noise,
        growth_stats.rebuild(
            -1, 0.0, 0.0, growth_stats.NO_MINUTES, state.closed_growth.windows, state.closed_growth.exceeded
        ),
        state.closed_season._replace(previous=math.nan),
        state.annotations,
        state.dispersion_gpu_s,
        state.estimate,
    )


def _add_sample(state: DemandState, now_s: float, work: float, span_s: float, annotations: Annotations) -> DemandState:
    at_s, dispersion_gpu_s, before = state.last_sample_s, state.dispersion_gpu_s, state.estimate
    passed_s = span_s if at_s is None else now_s - at_s
    previous = level_tracker.LevelTracker(
        state.level_mean, state.trend_lines, state.tests, state.noise, dispersion_gpu_s, before
    )
    tracker, shifted = level_tracker.add_sample(previous, work, span_s, passed_s)
    return DemandState.from_parts(
        (now_s, now_s, now_s if shifted else state.level_shift_s),
        tracker.level_mean,
        tracker.trend_lines,
        tracker.tests,
        tracker.noise,
        growth_stats.add(state.growth, now_s, work, span_s, before, dispersion_gpu_s),
        seasonality.add(state.season, now_s, work, span_s),
        annotations,
        tracker.dispersion_gpu_s,
        tracker.estimate,
    )


def _smooth(old: float | None, new: float | None, passed_s: float) -> float | None:
    if new is None or not 0.0 <= new < math.inf:
        return old
    if old is None:
        return new
    return new + math.exp(-passed_s / ANNOTATION_SMOOTHING_S) * (old - new)
