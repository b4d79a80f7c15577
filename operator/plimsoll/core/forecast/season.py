"""The shape of the day and of the week, once there are two of them.

Problem: load that rises every working day at nine is known ahead, but a shape learned from noise invents rises.

Idea: half hours. Each half hour of the day, and of the week, keeps a discounted mean of its work. As a half hour ends,
the growth that the shape foretold is judged against "no change"; what the shape would have saved in squared error is
its skill, and only that share of it is believed (a shape without skill counts nothing).
"""

from __future__ import annotations

import math
import struct
from typing import Final, NamedTuple

BIN_S: Final = 1800.0
DAY: Final = 48
WEEK: Final = 7 * DAY
PERIODS: Final = 2  # whole periods seen before a shape is used
_NEW: Final = 0.3  # weight of the newest day or week in its half hour
_KEEP: Final = 1.0 - 1.0 / WEEK
_COVERED: Final = 0.5
_FARTHEST_S: Final = 86400.0
_DOUBLE: Final = struct.Struct("d")


def unseen(period: int) -> bytes:
    """So many bins of which none is known."""
    return _DOUBLE.pack(math.nan) * period


class Shape(NamedTuple):
    """Mean work per bin (as doubles, NaN: not seen), bins seen, and squared errors with and without the shape.

    It has its whole size from the start: nothing grows as a week is learned.
    """

    bins: bytes
    seen: int = 0
    error: float = 0.0
    base: float = 0.0


class Season(NamedTuple):
    """The half hour that runs (index since the epoch), the one before it (NaN: a gap), and both shapes."""

    bin: int = -1
    gpu_s: float = 0.0
    covered_s: float = 0.0
    previous: float = math.nan
    day: Shape = Shape(unseen(DAY))
    week: Shape = Shape(unseen(WEEK))

    @property
    def ended(self) -> Season:
        """Without the half hour that runs."""
        return self._replace(bin=-1, gpu_s=0.0, covered_s=0.0)


def add(season: Season, at_s: float, work: float, span_s: float) -> Season:
    """The season with one more sample, which counts in the half hour that it ends in."""
    now = math.floor(at_s / BIN_S)
    if season.bin >= 0 and now != season.bin:
        season = _close(season, now)
    _, gpu_s, covered_s, previous, day, week = season
    return Season(now, gpu_s + work * span_s, covered_s + span_s, previous, day, week)


def _close(season: Season, now: int) -> Season:
    if season.covered_s < _COVERED * BIN_S:
        return season._replace(gpu_s=0.0, covered_s=0.0, previous=math.nan)
    work = season.gpu_s / season.covered_s
    day = _learn(season.day, DAY, season.bin, work, season.previous)
    week = _learn(season.week, WEEK, season.bin, work, season.previous)
    previous = work if now == season.bin + 1 else math.nan
    return Season(now, 0.0, 0.0, previous, day, week)


def _learn(shape: Shape, period: int, index: int, work: float, previous: float) -> Shape:
    bins, place = shape.bins, index % period
    here, before = _bin(bins, place), _bin(bins, (index - 1) % period)
    error, base = _KEEP * shape.error, _KEEP * shape.base
    if before > 0.0 and here == here and previous == previous:
        error += (work - previous * here / before) ** 2
        base += (work - previous) ** 2
    mean = work if here != here else here + _NEW * (work - here)
    return Shape(bins[: 8 * place] + _DOUBLE.pack(mean) + bins[8 * place + 8 :], shape.seen + 1, error, base)


def growth(season: Season, now_s: float, horizon_s: float) -> float:
    """Largest growth that the better of the two shapes foretells within the horizon, as a share of the level; >= 0."""
    of_day, of_week = _skill(season.day, DAY), _skill(season.week, WEEK)
    skill, shape, period = (of_day, season.day, DAY) if of_day >= of_week else (of_week, season.week, WEEK)
    if skill <= 0.0:
        return 0.0
    start = _value(shape, period, now_s)
    if not start > 0.0:
        return 0.0
    end_s = now_s + min(horizon_s, _FARTHEST_S)
    first, last = math.floor(now_s / BIN_S + 0.5), math.floor(end_s / BIN_S - 0.5)
    turns = [BIN_S * (index + 0.5) for index in range(first, last + 1)]  # a polygon is largest at a corner or an end
    largest = max((value for at in (*turns, end_s) if (value := _value(shape, period, at)) == value), default=start)
    return skill * max(0.0, largest / start - 1.0)


def _skill(shape: Shape, period: int) -> float:
    if shape.seen < PERIODS * period or shape.base <= 0.0:
        return 0.0
    return max(0.0, 1.0 - shape.error / shape.base)


def _value(shape: Shape, period: int, at_s: float) -> float:
    """The shape at a time, linear between the middles of half hours; NaN next to one not seen."""
    place = at_s / BIN_S - 0.5
    index = math.floor(place)
    part = place - index
    return (1.0 - part) * _bin(shape.bins, index % period) + part * _bin(shape.bins, (index + 1) % period)


def _bin(bins: bytes, place: int) -> float:
    value: float = _DOUBLE.unpack_from(bins, 8 * place)[0]
    return value
