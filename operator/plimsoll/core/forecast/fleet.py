"""`observe` for the tiers of a whole fleet in one pass over arrays.

Problem: a thousand services bring thousands of samples a second, and each costs a hundred small steps of arithmetic.

Idea: the packed part of all states is one array, a row for each column, and a step of arithmetic is taken for all tiers
at once, in the order in which `state.observe` takes it, so that the results are the same to the last bit. What is rare
(a leap, the first work, a clock set back) goes the way of one tier; so do minutes and half hours that end. They end at
the same second everywhere and each takes a twentieth of a millisecond, so a pass ends no more than it has time for: a
tier whose turn has not come adds to its minute for some seconds more, and its next ones run from then to then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from plimsoll.core.forecast import growth, level, noise, season
from plimsoll.core.forecast.state import (
    AT,
    BIN,
    CLOCK_S,
    COLUMNS,
    EXPLAINED,
    FIRST_S,
    GRAIN,
    LINES,
    LONGEST_S,
    MEAN,
    MINUTE,
    NOISE,
    NOTHING,
    NOW,
    SEEN,
    SMOOTH_S,
    TESTS,
    State,
    Unknown,
    observe,
)

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

FEW: Final = 16  # tiers, up to which one after the other is faster
ENDED_A_PASS: Final = 100  # tiers whose minute or half hour ends: fleets of as many end all of them on the second
TURNS: Final = 20  # passes that end all of a larger fleet, well within a minute of one a second
_BYTES: Final = 8 * COLUMNS


def packed(states: Sequence[State]) -> Floats:
    """What is packed in the states, read-only, shape (n, COLUMNS)."""
    return np.frombuffer(b"".join([state.packed or NOTHING for state in states])).reshape(len(states), COLUMNS)


def observe_all(states: Sequence[State], now_s: float, works: Sequence[float], rates: Sequence[float]) -> list[State]:
    """Each state with its sample of this moment, as `observe` makes it.

    Minutes and half hours of more than ENDED_A_PASS tiers end within TURNS passes, those that are over longest first.
    works: GPU-seconds per second, NaN where they are not known. rates: 1/s, told along; NaN where they are not known.
    Raises ValueError for a time that is no finite number.
    """
    if len(states) <= FEW:
        return [_one(state, now_s, work, rate) for state, work, rate in zip(states, works, rates, strict=True)]
    if not math.isfinite(now_s):
        raise ValueError(f"a sample's time is a finite number of seconds, not {now_s}")
    old = packed(states).T.copy()
    work = np.array(works, dtype=np.float64)
    passed_s = np.where(np.isnan(old[SEEN]), FIRST_S, now_s - old[SEEN])
    known = (work >= 0.0) & (work < math.inf)
    back, later = passed_s < -CLOCK_S, passed_s > 0.0
    first = np.isnan(old[AT]) | ((old[NOW] == 0.0) & (work > 0.0))
    with np.errstate(all="ignore"):  # of rows that go the way of one tier, or stay as they are
        new, suspicious = _added(old, now_s, work, np.minimum(passed_s, LONGEST_S))
        _explain(new, old, np.array(rates, dtype=np.float64), passed_s)
    apart = back | (later & known & (first | suspicious))
    gaps = later & ~known
    new[:, gaps] = old[:, gaps]
    new[SEEN, gaps] = now_s
    ended = _turn(old, new, later & known & ~apart)
    whole, found = new.T.tobytes(), list(states)
    for i in np.flatnonzero(later & ~apart).tolist():
        state = states[i]
        found[i] = State(whole[i * _BYTES : (i + 1) * _BYTES], state.past, state.shape)
    for i in np.flatnonzero(ended).tolist():
        found[i] = _closed(states[i], found[i], now_s, works[i], min(float(passed_s[i]), LONGEST_S))
    for i in np.flatnonzero(apart).tolist():
        found[i] = _one(states[i], now_s, works[i], rates[i])
    return found


def _one(state: State, now_s: float, work: float, rate: float) -> State:
    told = Unknown("not known") if math.isnan(work) else work
    return observe(state, now_s, told, rate_per_s=None if math.isnan(rate) else rate)


def _turn(old: Floats, new: Floats, some: Flags) -> Flags:
    """Those whose minute or half hour ends in this pass; of the others of `some` it goes on."""
    ended = some & (_is_over(old, new, MINUTE) | _is_over(old, new, BIN))
    most = max(ENDED_A_PASS, math.ceil(len(ended) / TURNS))
    over = np.flatnonzero(ended)
    late = over[np.argsort(old[MINUTE, over], kind="stable")][most:]
    new[MINUTE, late], new[BIN, late] = old[MINUTE, late], old[BIN, late]
    ended[late] = False
    return ended


def _is_over(old: Floats, new: Floats, index: int) -> Flags:
    return np.asarray((new[index] != old[index]) & (old[index] >= 0.0))


def _closed(old: State, new: State, now_s: float, work: float, span_s: float) -> State:
    """The new state with the minute and the half hour that ended with the sample."""
    grown = growth.add(old.growth, now_s, work, span_s, old.now, old.grain_gpu_s)
    figures, shape = np.frombuffer(new.packed).copy(), old.shape
    figures[MINUTE : MINUTE + 3] = grown[:3]
    if figures[BIN] != old.figures(BIN, 1)[0]:
        seasons = season.add(old.season, now_s, work, span_s)
        figures[BIN : BIN + 3], shape = seasons[:3], seasons.ended
    return State(figures.tobytes(), old.past if grown.minutes is old.past.minutes else grown.ended, shape)


def of_same(function: Callable[[float], float], values: Floats) -> Floats:
    """A function of numbers of which most are the same, by `math`, whose last bit is not always numpy's."""
    some, place = np.unique(values, return_inverse=True)
    return np.array([function(value) for value in some.tolist()])[place]


def _kept(passed_s: Floats, memory_s: float) -> Floats:
    return of_same(lambda value: math.exp(-value / memory_s) if value > 0.0 else 0.0, passed_s)


def _added(old: Floats, now_s: float, work: Floats, span_s: Floats) -> tuple[Floats, Flags]:
    """Columns after the sample, and which are suspicious: as `state._add`, but for leaps, minutes and half hours."""
    new = old.copy()
    passed_s, amount = now_s - old[AT], work * span_s
    new[AT] = new[SEEN] = now_s
    statistic = _run_tests(new, old, amount, span_s)
    suspicious = statistic >= level.SUSPICION
    keep = _kept(passed_s, level.MEMORY_S)
    on_line = old[NOW + 3] != 0.0
    new[MEAN] = keep * np.where(on_line, old[NOW + 3], old[MEAN]) + span_s
    new[MEAN + 1] = keep * np.where(on_line, old[NOW] * old[NOW + 3], old[MEAN + 1]) + amount
    for place, memory_s in enumerate(level.LINES_S):
        _add_to_line(new[LINES + 8 * place : LINES + 8 * place + 8], memory_s, amount, span_s, passed_s)
    _learn_noise(new, work, amount, span_s)
    for column, size_s in ((MINUTE, growth.MINUTE_S), (BIN, season.BIN_S)):
        new[column] = math.floor(now_s / size_s)
    new[MINUTE + 1] += amount
    new[MINUTE + 2] += np.minimum(span_s, growth.MINUTE_S)
    new[BIN + 1] += amount
    new[BIN + 2] += span_s
    _estimate(new)
    return new, np.asarray(suspicious)


def _run_tests(new: Floats, old: Floats, amount: Floats, span_s: Floats) -> Floats:
    """The largest statistic."""
    some = old[GRAIN] > 0.0
    grain = np.where(some, old[GRAIN], 1.0)
    grains, unit = amount / grain, span_s / grain
    most = level.ALARM * np.maximum(0.5, span_s / level.PROOF_S)
    worst = np.zeros(len(grain))
    for place, (per_grain, per_expected) in enumerate(level.TESTS):
        statistic, covered_s, gpu_s = new[TESTS + 3 * place : TESTS + 3 * place + 3]
        before_s = old[MEAN] - covered_s
        apart = (covered_s > 0.0) & (covered_s <= before_s) & (old[NOW + 3] == 0.0)
        rate = np.where(apart, np.maximum(0.0, old[MEAN + 1] - gpu_s) / before_s, old[NOW])
        error = np.where(apart, np.sqrt(grain * rate / before_s), old[NOW + 2])
        rate = rate + error if per_grain > 0 else np.maximum(0.0, rate - error)
        moved = grains * per_grain - per_expected * (rate * unit)
        reached = np.where(some, statistic + np.minimum(moved, most), 0.0)
        begun = reached > level.BEGUN
        covered_s[:] = np.where(begun, covered_s + span_s, 0.0)
        gpu_s[:] = np.where(begun, gpu_s + amount, 0.0)
        statistic[:] = np.where(reached > 0.0, reached, 0.0)
        worst = np.maximum(worst, statistic)
    return worst


def _add_to_line(line: Floats, memory_s: float, new: Floats, span_s: Floats, p: Floats) -> None:
    s0, s1, s2, y0, y1, z0, z1, z2 = line.copy()
    half, keep = 0.5 * span_s, _kept(p, memory_s)
    twice = keep * keep
    line[0] = keep * s0 + span_s
    line[1] = keep * (s1 + p * s0) + span_s * half
    line[2] = keep * (s2 + p * (2 * s1 + p * s0)) + span_s * half * half
    line[3] = keep * y0 + new
    line[4] = keep * (y1 + p * y0) + new * half
    line[5] = twice * z0 + span_s
    line[6] = twice * (z1 + p * z0) + span_s * half
    line[7] = twice * (z2 + p * (2 * z1 + p * z0)) + span_s * half * half


def _learn_noise(new: Floats, work: Floats, amount: Floats, span_s: Floats) -> None:
    """As `noise.learn` where nothing is suspicious; a tier without a level has its first work elsewhere."""
    tick, block, running, held = np.split(new[NOISE : NOISE + 15], (5, 10, 12))
    tick[:3] += held
    held[:] = 0.0
    _differ(tick, work, span_s, np.ones(len(work), dtype=np.bool_))
    gpu_s, covered_s = running[0] + amount, running[1] + span_s
    ended = covered_s >= noise.BLOCK_S
    _differ(block, gpu_s / covered_s, covered_s, ended)
    running[0], running[1] = np.where(ended, 0.0, gpu_s), np.where(ended, 0.0, covered_s)
    found = tick[0] / tick[1]
    seen = block[0] / block[1] / (1.0 + 2.0 * np.sqrt(3.0 / block[2]))
    found = np.where((block[1] > 0.0) & (seen > found), seen, found)
    new[GRAIN] = np.where(tick[1] > 0.0, found, 0.0)


def _differ(grain: Floats, work: Floats, span_s: Floats, some: Flags) -> None:
    spread, seen_level, seen, last_work, last_span_s = grain.copy()
    counted = some & (last_span_s != 0.0)
    keep = 1.0 - 1.0 / noise.MEMORY
    difference = work - last_work
    grain[0] = np.where(counted, keep * spread + difference * difference / (1.0 / span_s + 1.0 / last_span_s), spread)
    grain[1] = np.where(counted, keep * seen_level + 0.5 * (work + last_work), seen_level)
    grain[2] = np.where(counted, keep * seen + 1.0, seen)
    grain[3] = np.where(some, work, last_work)
    grain[4] = np.where(some, span_s, last_span_s)


def _estimate(new: Floats) -> None:
    """As `level.estimate`."""
    covered_s = new[MEAN]
    flat = new[MEAN + 1] / covered_s
    scatter = new[GRAIN] * flat
    found = np.stack((flat, np.zeros(len(flat)), np.sqrt(scatter / covered_s), np.zeros(len(flat))))
    for place, memory_s in enumerate(level.LINES_S):
        found = _drawn(found, new[LINES + 8 * place : LINES + 8 * place + 8], memory_s, scatter)
    new[NOW : NOW + 4] = np.where(covered_s > 0.0, found, 0.0)


def _drawn(found: Floats, line: Floats, memory_s: float, scatter: Floats) -> Floats:
    s0, s1, s2, y0, y1, z0, z1, z2 = line
    spread = s0 * s2 - s1 * s1
    some = (s0 > level.LEAST * memory_s) & (spread > level.ONE_SAMPLE * s0 * s2)
    slope = (s1 * y0 - s0 * y1) / spread
    off, turned = y0 - s0 * found[0] + s1 * found[1], (slope - found[1]) * spread
    both, of_slope = s1 * z0 - s0 * z1, _weighted(line, s0, s1)
    certain = of_slope * off * off - 2 * both * off * turned + z0 * turned * turned
    least = np.maximum(z0 * z2 - z1 * z1, level.ONE_SAMPLE * z0 * z2)
    sure = np.where(found[3] > 0.0, level.MOVING, level.SURE)
    chance = sure * sure * scatter * s0 * s0 * least
    some &= chance < certain
    chance = chance / certain
    share = 1.0 - chance * chance
    end = np.maximum(0.0, (s2 * y0 - s1 * y1) / spread)
    end_s = spread * spread / _weighted(line, s1, s2)
    drawn = np.stack(
        (
            found[0] + share * (end - found[0]),
            found[1] + share * (slope - found[1]),
            found[2] + share * (np.sqrt(scatter / end_s) - found[2]),
            np.where(share > 0.5, end_s, found[3]),
        )
    )
    return np.where(some, drawn, found)


def _weighted(line: Floats, first: Floats, second: Floats) -> Floats:
    found = second * second * line[5] - 2 * first * second * line[6] + first * first * line[7]
    return np.asarray(np.maximum(found, level.ONE_SAMPLE * first * first * line[7]))


def _explain(new: Floats, old: Floats, rate: Floats, passed_s: Floats) -> None:
    known, before = (rate >= 0.0) & (rate < math.inf), old[EXPLAINED]
    smooth = np.where(np.isnan(before), rate, rate + _kept(passed_s, SMOOTH_S) * (before - rate))
    new[EXPLAINED] = np.where(known, smooth, before)
