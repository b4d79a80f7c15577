"""`observe` for all tiers of a fleet in one pass over arrays.

Problem: a thousand services bring thousands of samples per second, and each needs about a hundred small steps of
arithmetic.

Idea: the packed parts of all states form one array with a row per column. Each step is computed for all tiers at once,
in the order of `demand_state.observe`, so that results are identical to the last bit. Rare cases (a level shift, the
first work, a clock set back) are computed one tier at a time. So are minutes and half hours that close. They close at
the same second in all tiers and take 50 µs each, so one pass closes only a limited number. A tier whose turn has not
come adds to its current minute for some seconds more. Its later minutes keep that offset.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from plimsoll.core.demand import growth_stats, level_model, noise_model, seasonality
from plimsoll.core.demand.demand_state import (
    ANNOTATION_SMOOTHING_S,
    COL_ANNOTATIONS,
    COL_BIN,
    COL_CALL,
    COL_DISPERSION,
    COL_ESTIMATE,
    COL_MEAN,
    COL_MINUTE,
    COL_NOISE,
    COL_SAMPLE,
    COL_TESTS,
    COL_TREND_LINES,
    COLUMN_COUNT,
    EMPTY_ROW,
    FIRST_SAMPLE_SPAN_S,
    MAX_CLOCK_STEP_S,
    MAX_SAMPLE_SPAN_S,
    DemandState,
    observe,
)
from plimsoll.core.types import Unavailable
from plimsoll.core.units import MINUTE_S

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

SEQUENTIAL_TIERS: Final = 16  # up to this many tiers, one at a time is faster
MAX_CLOSED_PER_PASS: Final = (
    100  # tiers whose minute or half hour closes in one pass; a fleet of this size closes all at once
)
MAX_CLOSING_PASSES: Final = 20  # passes that close all tiers of a larger fleet, within a third of a minute
_ROW_BYTES: Final = 8 * COLUMN_COUNT


def pack_states(states: Sequence[DemandState]) -> Floats:
    """Packed parts of the states, read-only, shape (n, COLUMN_COUNT)."""
    return np.frombuffer(b"".join([state.packed or EMPTY_ROW for state in states])).reshape(len(states), COLUMN_COUNT)


def observe_all(
    states: Sequence[DemandState], now_s: float, works: Sequence[float], rates: Sequence[float]
) -> list[DemandState]:
    """Return each state with its sample at now_s, as `observe` would.

    Where more minutes and half hours close than one pass allows, they close within MAX_CLOSING_PASSES passes, oldest
    first. works: GPU-seconds per second, NaN where unknown. rates: requests/s, an annotation; NaN where unknown. Raises
    ValueError unless now_s is finite.
    """
    if len(states) <= SEQUENTIAL_TIERS:
        return [_observe_one(state, now_s, work, rate) for state, work, rate in zip(states, works, rates, strict=True)]
    if not math.isfinite(now_s):
        raise ValueError(f"a sample's time is a finite number of seconds, not {now_s}")
    old = pack_states(states).T.copy()
    work = np.array(works, dtype=np.float64)
    passed_s = np.where(np.isnan(old[COL_CALL]), FIRST_SAMPLE_SPAN_S, now_s - old[COL_CALL])
    known = (work >= 0.0) & (work < math.inf)
    set_back, advanced = passed_s < -MAX_CLOCK_STEP_S, passed_s > 0.0
    first_work = np.isnan(old[COL_SAMPLE]) | ((old[COL_ESTIMATE] == 0.0) & (work > 0.0))
    with np.errstate(all="ignore"):  # rows that `_observe_one` computes, or that do not change
        new, suspicious = _add_samples(old, now_s, work, np.minimum(passed_s, MAX_SAMPLE_SPAN_S))
        _update_annotations(new, old, np.array(rates, dtype=np.float64), passed_s)
    scalar_path = set_back | (advanced & known & (first_work | suspicious))
    missing = advanced & ~known
    new[:, missing] = old[:, missing]
    new[COL_CALL, missing] = now_s
    ended = _closing_tiers(old, new, advanced & known & ~scalar_path)
    row_bytes, result = new.T.tobytes(), list(states)
    for i in np.flatnonzero(advanced & ~scalar_path).tolist():
        state = states[i]
        result[i] = DemandState(
            row_bytes[i * _ROW_BYTES : (i + 1) * _ROW_BYTES], state.closed_growth, state.closed_season
        )
    for i in np.flatnonzero(ended).tolist():
        result[i] = _close_periods(states[i], result[i], now_s, works[i], min(float(passed_s[i]), MAX_SAMPLE_SPAN_S))
    for i in np.flatnonzero(scalar_path).tolist():
        result[i] = _observe_one(states[i], now_s, works[i], rates[i])
    return result


def _observe_one(state: DemandState, now_s: float, work: float, rate: float) -> DemandState:
    sample = Unavailable("not known") if math.isnan(work) else work
    return observe(state, now_s, sample, rate_per_s=None if math.isnan(rate) else rate)


def _closing_tiers(old: Floats, new: Floats, advancing: Flags) -> Flags:
    """Tiers whose minute or half hour closes in this pass."""
    ended = advancing & (_is_over(old, new, COL_MINUTE) | _is_over(old, new, COL_BIN))
    max_closed = max(MAX_CLOSED_PER_PASS, math.ceil(len(ended) / MAX_CLOSING_PASSES))
    over = np.flatnonzero(ended)
    postponed = over[np.argsort(old[COL_MINUTE, over], kind="stable")][max_closed:]
    new[COL_MINUTE, postponed], new[COL_BIN, postponed] = old[COL_MINUTE, postponed], old[COL_BIN, postponed]
    ended[postponed] = False
    return ended


def _is_over(old: Floats, new: Floats, index: int) -> Flags:
    return np.asarray((new[index] != old[index]) & (old[index] >= 0.0))


def _close_periods(old: DemandState, new: DemandState, now_s: float, work: float, span_s: float) -> DemandState:
    """Return the new state with the minute and the half hour closed that ended with the sample."""
    new_growth = growth_stats.add(old.growth, now_s, work, span_s, old.estimate, old.dispersion_gpu_s)
    columns, shape = np.frombuffer(new.packed).copy(), old.closed_season
    columns[COL_MINUTE : COL_MINUTE + 3] = new_growth[:3]
    if columns[COL_BIN] != old.columns(COL_BIN, 1)[0]:
        seasons = seasonality.add(old.season, now_s, work, span_s)
        columns[COL_BIN : COL_BIN + 3], shape = seasons[:3], seasons.without_current
    return DemandState(
        columns.tobytes(),
        old.closed_growth if new_growth.minutes is old.closed_growth.minutes else new_growth.without_current,
        shape,
    )


def map_distinct(function: Callable[[float], float], values: Floats) -> Floats:
    """Apply a `math` function to values of which most are equal. numpy's last bit can differ from `math`."""
    distinct, place = np.unique(values, return_inverse=True)
    return np.array([function(value) for value in distinct.tolist()])[place]


def _decay(passed_s: Floats, memory_s: float) -> Floats:
    return map_distinct(lambda value: math.exp(-value / memory_s) if value > 0.0 else 0.0, passed_s)


def _add_samples(old: Floats, now_s: float, work: Floats, span_s: Floats) -> tuple[Floats, Flags]:
    """Return the columns after the sample, and which tiers are suspicious.

    As `demand_state._add_sample`, without level shifts, minutes and half hours.
    """
    new = old.copy()
    passed_s, amount = now_s - old[COL_SAMPLE], work * span_s
    new[COL_SAMPLE] = new[COL_CALL] = now_s
    statistic = _run_tests(new, old, amount, span_s)
    suspicious = statistic >= level_model.SUSPICION_STATISTIC
    keep = _decay(passed_s, level_model.LEVEL_MEMORY_S)
    on_line = old[COL_ESTIMATE + 3] != 0.0
    new[COL_MEAN] = keep * np.where(on_line, old[COL_ESTIMATE + 3], old[COL_MEAN]) + span_s
    new[COL_MEAN + 1] = keep * np.where(on_line, old[COL_ESTIMATE] * old[COL_ESTIMATE + 3], old[COL_MEAN + 1]) + amount
    for place, memory_s in enumerate(level_model.TREND_MEMORIES_S):
        _add_to_line(
            new[COL_TREND_LINES + 8 * place : COL_TREND_LINES + 8 * place + 8], memory_s, amount, span_s, passed_s
        )
    _update_noise(new, work, amount, span_s)
    for column, size_s in ((COL_MINUTE, MINUTE_S), (COL_BIN, seasonality.BIN_S)):
        new[column] = math.floor(now_s / size_s)
    new[COL_MINUTE + 1] += amount
    new[COL_MINUTE + 2] += np.minimum(span_s, MINUTE_S)
    new[COL_BIN + 1] += amount
    new[COL_BIN + 2] += span_s
    _estimate(new)
    return new, np.asarray(suspicious)


def _run_tests(new: Floats, old: Floats, amount: Floats, span_s: Floats) -> Floats:
    """Run the CUSUM tests; return the largest statistic of each tier."""
    has_dispersion = old[COL_DISPERSION] > 0.0
    dispersion = np.where(has_dispersion, old[COL_DISPERSION], 1.0)
    events, unit = amount / dispersion, span_s / dispersion
    max_change = level_model.CUSUM_ALARM * np.maximum(0.5, span_s / level_model.MIN_EVIDENCE_S)
    worst = np.zeros(len(dispersion))
    for place, (per_grain, per_expected) in enumerate(level_model.CUSUM_TESTS):
        statistic, covered_s, gpu_s = new[COL_TESTS + 3 * place : COL_TESTS + 3 * place + 3]
        before_s = old[COL_MEAN] - covered_s
        separate = (covered_s > 0.0) & (covered_s <= before_s) & (old[COL_ESTIMATE + 3] == 0.0)
        rate = np.where(separate, np.maximum(0.0, old[COL_MEAN + 1] - gpu_s) / before_s, old[COL_ESTIMATE])
        error = np.where(separate, np.sqrt(dispersion * rate / before_s), old[COL_ESTIMATE + 2])
        rate = rate + error if per_grain > 0 else np.maximum(0.0, rate - error)
        change = events * per_grain - per_expected * (rate * unit)
        statistics = np.where(has_dispersion, statistic + np.minimum(change, max_change), 0.0)
        running = statistics > level_model.CHANGE_START
        covered_s[:] = np.where(running, covered_s + span_s, 0.0)
        gpu_s[:] = np.where(running, gpu_s + amount, 0.0)
        statistic[:] = np.where(statistics > 0.0, statistics, 0.0)
        worst = np.maximum(worst, statistic)
    return worst


def _add_to_line(line: Floats, memory_s: float, new: Floats, span_s: Floats, p: Floats) -> None:
    s0, s1, s2, y0, y1, z0, z1, z2 = line.copy()
    half, keep = 0.5 * span_s, _decay(p, memory_s)
    twice = keep * keep
    line[0] = keep * s0 + span_s
    line[1] = keep * (s1 + p * s0) + span_s * half
    line[2] = keep * (s2 + p * (2 * s1 + p * s0)) + span_s * half * half
    line[3] = keep * y0 + new
    line[4] = keep * (y1 + p * y0) + new * half
    line[5] = twice * z0 + span_s
    line[6] = twice * (z1 + p * z0) + span_s * half
    line[7] = twice * (z2 + p * (2 * z1 + p * z0)) + span_s * half * half


def _update_noise(new: Floats, work: Floats, amount: Floats, span_s: Floats) -> None:
    """As `noise_model.update_noise` where nothing is suspicious. The first work of a tier without a level is computed
    elsewhere.
    """
    tick, block, running, pending = np.split(new[COL_NOISE : COL_NOISE + 15], (5, 10, 12))
    tick[:3] += pending
    pending[:] = 0.0
    _add_difference(tick, work, span_s, np.ones(len(work), dtype=np.bool_))
    gpu_s, covered_s = running[0] + amount, running[1] + span_s
    ended = covered_s >= noise_model.BLOCK_S
    _add_difference(block, gpu_s / covered_s, covered_s, ended)
    running[0], running[1] = np.where(ended, 0.0, gpu_s), np.where(ended, 0.0, covered_s)
    dispersion = tick[0] / tick[1]
    block_dispersion = block[0] / block[1] / (1.0 + 2.0 * np.sqrt(3.0 / block[2]))
    dispersion = np.where((block[1] > 0.0) & (block_dispersion > dispersion), block_dispersion, dispersion)
    new[COL_DISPERSION] = np.where(tick[1] > 0.0, dispersion, 0.0)


def _add_difference(sums: Floats, work: Floats, span_s: Floats, selected: Flags) -> None:
    spread, seen_level, samples, last_work, last_span_s = sums.copy()
    has_previous = selected & (last_span_s != 0.0)
    keep = 1.0 - 1.0 / noise_model.DIFFERENCE_MEMORY
    difference = work - last_work
    sums[0] = np.where(
        has_previous, keep * spread + difference * difference / (1.0 / span_s + 1.0 / last_span_s), spread
    )
    sums[1] = np.where(has_previous, keep * seen_level + 0.5 * (work + last_work), seen_level)
    sums[2] = np.where(has_previous, keep * samples + 1.0, samples)
    sums[3] = np.where(selected, work, last_work)
    sums[4] = np.where(selected, span_s, last_span_s)


def _estimate(new: Floats) -> None:
    """As `level_model.estimate_level`."""
    covered_s = new[COL_MEAN]
    flat = new[COL_MEAN + 1] / covered_s
    scatter = new[COL_DISPERSION] * flat
    estimate = np.stack((flat, np.zeros(len(flat)), np.sqrt(scatter / covered_s), np.zeros(len(flat))))
    for place, memory_s in enumerate(level_model.TREND_MEMORIES_S):
        estimate = _blend(
            estimate, new[COL_TREND_LINES + 8 * place : COL_TREND_LINES + 8 * place + 8], memory_s, scatter
        )
    new[COL_ESTIMATE : COL_ESTIMATE + 4] = np.where(covered_s > 0.0, estimate, 0.0)


def _blend(estimate: Floats, line: Floats, memory_s: float, scatter: Floats) -> Floats:
    s0, s1, s2, y0, y1, z0, z1, z2 = line
    spread = s0 * s2 - s1 * s1
    significant = (s0 > level_model.MIN_TREND_COVERAGE * memory_s) & (spread > level_model.MIN_AGE_SPREAD * s0 * s2)
    slope = (s1 * y0 - s0 * y1) / spread
    off, turned = y0 - s0 * estimate[0] + s1 * estimate[1], (slope - estimate[1]) * spread
    both, of_slope = s1 * z0 - s0 * z1, _weighted(line, s0, s1)
    signal = of_slope * off * off - 2 * both * off * turned + z0 * turned * turned
    least = np.maximum(z0 * z2 - z1 * z1, level_model.MIN_AGE_SPREAD * z0 * z2)
    threshold = np.where(estimate[3] > 0.0, level_model.TREND_THRESHOLD_MOVING, level_model.TREND_THRESHOLD)
    noise_share = threshold * threshold * scatter * s0 * s0 * least
    significant &= noise_share < signal
    noise_share = noise_share / signal
    share = 1.0 - noise_share * noise_share
    end = np.maximum(0.0, (s2 * y0 - s1 * y1) / spread)
    end_s = spread * spread / _weighted(line, s1, s2)
    blended = np.stack(
        (
            estimate[0] + share * (end - estimate[0]),
            estimate[1] + share * (slope - estimate[1]),
            estimate[2] + share * (np.sqrt(scatter / end_s) - estimate[2]),
            np.where(share > 0.5, end_s, estimate[3]),
        )
    )
    return np.where(significant, blended, estimate)


def _weighted(line: Floats, first: Floats, second: Floats) -> Floats:
    weighted_sum = second * second * line[5] - 2 * first * second * line[6] + first * first * line[7]
    return np.asarray(np.maximum(weighted_sum, level_model.MIN_AGE_SPREAD * first * first * line[7]))


def _update_annotations(new: Floats, old: Floats, rate: Floats, passed_s: Floats) -> None:
    known, before = (rate >= 0.0) & (rate < math.inf), old[COL_ANNOTATIONS]
    smooth = np.where(np.isnan(before), rate, rate + _decay(passed_s, ANNOTATION_SMOOTHING_S) * (before - rate))
    new[COL_ANNOTATIONS] = np.where(known, smooth, before)
