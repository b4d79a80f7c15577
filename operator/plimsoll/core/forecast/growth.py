"""By which factor a service's own load has grown within a start-up, and how often.

Problem: percentiles of growth need a long memory, horizons overlap, and a burst of half an hour holds few of them; a
minute of few requests looks like growth by chance alone; and gaps are not zeros.

Idea: minutes. Each whole minute keeps its mean, and level and slope as then known; when it ends, the windows that end
with it are judged: did the largest minute exceed what was foreseen at the window's start by a factor, beyond what the
grains of work explain? Counts per horizon and factor are all that is kept for long. A minute with less than half its
time covered is a gap, and no window that touches it counts.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from plimsoll.core.forecast.level import Estimate, rise
from plimsoll.core.jumps import FACTORS, HORIZONS_S, WEIGHT_S

MINUTE_S: Final = 60.0
_MINUTES: Final = tuple(round(horizon / MINUTE_S) for horizon in HORIZONS_S)
DOUBLED: Final = FACTORS.index(2.0)
KEPT: Final = 60  # an hour, for `ordinary`; windows need the longest of _MINUTES and one more
_COVERED: Final = 0.5  # of a minute, below which it is a gap
_CHANCE: Final = 2.5  # standard deviations of a minute's noise that are not growth
_KEEP: Final = 1.0 - 1.0 / (7 * 24 * 60)  # a week of memory
_SURE: Final = 1.645  # one-sided 95 %


# A whole minute's mean work, and level and slope (a second) as known at its end; NaN for a gap.
MINUTE: Final = struct.Struct("3d")
GAP: Final = MINUTE.pack(math.nan, math.nan, math.nan)
NO_MINUTES: Final = KEPT * GAP
_NONE: Final = (0.0,) * len(FACTORS)


class Growth(NamedTuple):
    """The minute that runs, the last KEPT ones (each a MINUTE, oldest first), and counts per horizon and factor.

    lowest (level), highest (mean of a minute), sure: what `drawn_up` makes of the others once a minute, since forecasts
    are asked for more often.
    """

    minute: int = -1
    gpu_s: float = 0.0
    covered_s: float = 0.0
    minutes: bytes = NO_MINUTES
    windows: tuple[float, ...] = (0.0,) * len(HORIZONS_S)
    exceeded: tuple[tuple[float, ...], ...] = (_NONE,) * len(HORIZONS_S)
    lowest: float = math.inf
    sure: tuple[tuple[float, ...], ...] = (_NONE,) * len(HORIZONS_S)
    highest: float = -math.inf

    @property
    def ended(self) -> Growth:
        """Without the minute that runs."""
        return self._replace(minute=-1, gpu_s=0.0, covered_s=0.0)


def add(growth: Growth, at_s: float, work: float, span_s: float, before: Estimate, grain_gpu_s: float) -> Growth:
    """Growth with one more sample, counted in the minute that it ends in; estimate and grain are from before it."""
    minute = math.floor(at_s / MINUTE_S)
    gpu_s, covered_s = work * span_s, min(span_s, MINUTE_S)
    if minute == growth.minute or growth.minute < 0:
        _, sum_s, sum_covered_s, minutes, windows, exceeded, lowest, sure, highest = growth
        gpu_s, covered_s = sum_s + gpu_s, sum_covered_s + covered_s
        return Growth(minute, gpu_s, covered_s, minutes, windows, exceeded, lowest, sure, highest)
    return drawn_up(minute, gpu_s, covered_s, *_close(growth, minute, before, grain_gpu_s))


def drawn_up(
    minute: int,
    gpu_s: float,
    covered_s: float,
    minutes: bytes,
    windows: tuple[float, ...],
    exceeded: tuple[tuple[float, ...], ...],
) -> Growth:
    """Growth of these parts, with what follows from them: lowest and highest, and the shares that are sure.

    A share counts by the lower 95 % bound of its Poisson count (Wilson and Hilferty 1931), overlapping windows taken as
    one, over the windows seen plus the prior's for a doubling: one burst in half an hour says little.
    """
    lowest = _lowest(minutes)
    sure = tuple(
        _sure_row(row, length, length / (n + weights_s[DOUBLED] / MINUTE_S))
        for length, n, row, weights_s in zip(_MINUTES, windows, exceeded, WEIGHT_S, strict=True)
    )
    highest = max([work for work in _lately(minutes, KEPT)[::3] if work == work], default=-math.inf)
    return Growth(minute, gpu_s, covered_s, minutes, windows, exceeded, lowest, sure, highest)


def _close(
    growth: Growth, minute: int, before: Estimate, grain_gpu_s: float
) -> tuple[bytes, tuple[float, ...], tuple[tuple[float, ...], ...]]:
    """Minutes, windows and exceeded once the minute that ran is over and `minute` runs."""
    gaps = GAP * min(minute - growth.minute - 1, KEPT)
    if growth.covered_s < _COVERED * MINUTE_S:
        return (growth.minutes + GAP + gaps)[-len(NO_MINUTES) :], growth.windows, growth.exceeded
    ended = MINUTE.pack(growth.gpu_s / growth.covered_s, before.level, before.slope_per_s)
    minutes = growth.minutes[MINUTE.size :] + ended
    windows, exceeded = [], []
    for length, n, row in zip(_MINUTES, growth.windows, growth.exceeded, strict=True):
        found = _judge(minutes, length, grain_gpu_s)
        windows.append(_KEEP * n + (found is not None))
        reached = bisect_left(FACTORS, found) if found is not None else 0
        if reached or row[0]:
            row = tuple([_KEEP * count + (place < reached) for place, count in enumerate(row)])
        exceeded.append(row)
    return (minutes + gaps)[-len(NO_MINUTES) :], tuple(windows), tuple(exceeded)


def _judge(minutes: bytes, length: int, grain_gpu_s: float) -> float | None:
    """Growth in the window of `length` minutes that has just ended, chance taken off; None if there is no window."""
    _, level, slope, *window = _lately(minutes, length + 1)
    works = window[::3]
    if not level > 0.0 or math.isnan(sum(works)):
        return None
    foreseen = level + rise(slope, length * MINUTE_S)
    return (max(works) - _CHANCE * math.sqrt(grain_gpu_s * foreseen / MINUTE_S)) / foreseen


def ordinary(growth: Growth, level: float) -> float:
    """The lowest level of the past hour, that of now included: what load leaps from.

    While it stands above, the leap that spare was kept for has come.
    """
    return min(level, growth.lowest)


def reached(growth: Growth, level: float, factor: float) -> float:
    """How far load may leap that grows by a factor in its leaps: to what the past hour has reached, or to that times
    what it leaps from.

    What a trough grows by is mostly the way back to the peak, and says nothing of leaps from there.
    """
    return max(growth.highest, factor * ordinary(growth, level))


def _lowest(minutes: bytes) -> float:
    levels = _lately(minutes, KEPT)[1::3]
    return min([level for level in levels if level == level], default=math.inf)


def _lately(minutes: bytes, n: int) -> memoryview[float]:
    """The figures of so many of the last minutes, as many as there are."""
    return memoryview(minutes).cast("d")[-3 * n :]


def history_s(growth: Growth, horizon_s: float) -> float:
    """Seconds of windows that counts about this horizon rest on."""
    return MINUTE_S * interpolate(growth.windows, horizon_s)


def shares(growth: Growth, horizon_s: float) -> tuple[float, ...]:
    """Share of windows with growth above each of FACTORS; zeros without history."""
    rows = [
        tuple([count / max(n, 1.0) for count in row]) if row[0] else row  # counts never rise along the factors
        for n, row in zip(growth.windows, growth.exceeded, strict=True)
    ]
    return across(tuple(rows), horizon_s)


def sure_factor(growth: Growth, horizon_s: float, quantile: float) -> float:
    """The factor, 1 or more, that growth stays within with probability `quantile`, as far as own history is sure."""
    found = across(growth.sure, horizon_s)
    within = (1.0, *FACTORS)
    missed = 1.0 - quantile
    beyond = sum(share > missed for share in found)
    if beyond == 0:
        return 1.0
    if beyond == len(FACTORS):
        return within[-1]
    above, below = found[beyond - 1], found[beyond]
    part = (above - missed) / (above - below)
    return within[beyond] + part * (within[beyond + 1] - within[beyond])


def _sure_row(row: tuple[float, ...], length: int, scale: float) -> tuple[float, ...]:
    found = []
    for count in row:  # counts never rise along the factors, so after a 0 come only more
        least = _at_least(count / length) if count else 0.0
        if not least:
            break
        found.append(scale * least)
    return (*found, *_NONE[len(found) :])


def falling(shares: Sequence[float]) -> tuple[float, ...]:
    """Shares that never rise along the factors: what grows past one factor has grown past all before it."""
    return tuple(accumulate(reversed(shares), max))[::-1]


def _at_least(count: float) -> float:
    root = 1.0 - 1.0 / (9.0 * count) - _SURE / (3.0 * math.sqrt(count))
    return count * root * root * root if root > 0.0 else 0.0


def across(rows: tuple[tuple[float, ...], ...], horizon_s: float) -> tuple[float, ...]:
    """Shares at a horizon from those at HORIZONS_S, never falling with the horizon.

    Between two: linear. Below the first: leaps at uniform times, so 1 - (1 - p)^(L / first). Above the last: the last.
    """
    part = max(0.0, horizon_s) / HORIZONS_S[0]
    if part <= 1.0:
        return tuple([1.0 - (1.0 - share) ** part for share in rows[0]])
    place = bisect_right(HORIZONS_S, horizon_s)
    left = tuple(map(max, *rows[:place])) if place > 1 else rows[0]
    if place == len(HORIZONS_S):
        return left
    part = (horizon_s - HORIZONS_S[place - 1]) / (HORIZONS_S[place] - HORIZONS_S[place - 1])
    return tuple([a + part * max(0.0, b - a) for a, b in zip(left, rows[place], strict=True)])


def interpolate(values: tuple[float, ...], horizon_s: float) -> float:
    """The value at a horizon from those at HORIZONS_S, linear between, constant beyond."""
    place = bisect_right(HORIZONS_S, horizon_s)
    if place in (0, len(HORIZONS_S)):
        return values[max(0, place - 1)]
    part = (horizon_s - HORIZONS_S[place - 1]) / (HORIZONS_S[place] - HORIZONS_S[place - 1])
    return values[place - 1] + part * (values[place] - values[place - 1])
