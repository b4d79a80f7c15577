"""A forecast's state in plain form, to be kept where a restart finds it.

Problem: what was learned in weeks must survive the process, and what lies there may be another version's, or damaged.

Idea: numbers and lists under a version, None for a gap, so that JSON can hold them exactly; what is read is checked
number by number, and anything else is refused as a whole.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from itertools import dropwhile
from typing import Any, Final

from plimsoll.core.forecast import growth, level, noise, season
from plimsoll.core.forecast.state import Explained, State

VERSION: Final = 1


def to_dict(state: State) -> dict[str, Any]:
    """The state as numbers, None, lists and a version: what JSON can hold, without NaN."""
    return {
        "version": VERSION,
        "times": [state.at_s, state.seen_s, state.changed_s],
        "mean": _plain(state.mean),
        "lines": _plain(state.lines),
        "tests": _plain(state.tests),
        "noise": _plain(state.noise),
        "growth": _grown(state.growth),
        "season": [*_plain(state.season[:4]), _bins(state.shape.day), _bins(state.shape.week)],
        "explained": [state.explained.rate_per_s, state.explained.tokens_per_s],
    }


def _grown(grown: growth.Growth) -> Any:
    """Its first six parts, from which the rest follows; a gap at the beginning of the past hour is no minute."""
    minute, gpu_s, covered_s, minutes, windows, exceeded, *_ = grown
    known = dropwhile(lambda one: all(map(math.isnan, one)), growth.MINUTE.iter_unpack(minutes))
    return _plain((minute, gpu_s, covered_s, tuple(known), windows, exceeded))


def _bins(shape: season.Shape) -> Any:
    """All parts of a shape; of one of which no half hour was seen there are no bins."""
    return _plain((tuple(memoryview(shape.bins).cast("d")) if shape.seen else (), *shape[1:]))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return None if value != value else value


def from_dict(stored: Mapping[str, Any]) -> State:
    """The state that `to_dict` gave. Raises ValueError for anything else, other versions included."""
    if not isinstance(stored, Mapping) or stored.get("version") != VERSION:
        raise ValueError(f"not a forecast's state of version {VERSION}: {str(stored)[:80]}")
    try:
        at_s, seen_s, changed_s = (None if time is None else _number(time) for time in stored["times"])
        if at_s is not None and (seen_s is None or at_s > seen_s):
            raise ValueError(f"a sample of {at_s} that was not seen until {seen_s}")
        rate, tokens = (None if value is None else _number(value) for value in stored["explained"])
        slow, fast = (level.Line(*_amounts(line, 8)) for line in stored["lines"])
        mean, lines, heard = level.Mean(*_amounts(stored["mean"], 2)), (slow, fast), _noise(stored["noise"])
        grain_gpu_s = noise.grain_gpu_s(heard)
        return State.of(
            (at_s, seen_s, changed_s),
            mean,
            lines,
            _tests(stored["tests"]),
            heard,
            _growth(stored["growth"]),
            _season(stored["season"]),
            Explained(rate, tokens),
            grain_gpu_s,
            level.estimate(mean, lines, grain_gpu_s),
        )
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"not a forecast's state: {error}") from error


def _tests(stored: Any) -> level.Tests:
    """One that was not yet run when this was stored begins."""
    resting = [level.Cusum()] if len(stored) == 3 else []
    first, second, third, fourth = (*(level.Cusum(*_amounts(test, 3)) for test in stored), *resting)
    return first, second, third, fourth


def _noise(stored: Any) -> noise.Noise:
    """Before differences were held, none was."""
    tick, block, gpu_s, covered_s, held = (*stored, noise.Sums()) if len(stored) == 4 else stored
    grains = noise.Grain(*_amounts(tick, 5)), noise.Grain(*_amounts(block, 5))
    return noise.Noise(*grains, _amount(gpu_s), _amount(covered_s), noise.Sums(*_amounts(held, 3)))


def _growth(stored: Any) -> growth.Growth:
    minute, gpu_s, covered_s, minutes, windows, exceeded = stored
    kept = growth.Growth()
    if len(minutes) > growth.KEPT or len(exceeded) != len(kept.exceeded):
        raise ValueError("more minutes or horizons than are kept")
    known = b"".join(growth.MINUTE.pack(*_numbers(one, 3, gaps=True)) for one in minutes)
    return growth.drawn_up(
        int(_number(minute)),
        _amount(gpu_s),
        _amount(covered_s),
        kept.minutes[len(known) :] + known,
        _amounts(windows, len(kept.windows)),
        tuple(_amounts(row, len(kept.exceeded[0])) for row in exceeded),
    )


def _season(stored: Any) -> season.Season:
    index, gpu_s, covered_s, previous, day, week = stored
    return season.Season(
        int(_number(index)),
        _amount(gpu_s),
        _amount(covered_s),
        math.nan if previous is None else _amount(previous),
        _shape(day, season.DAY),
        _shape(week, season.WEEK),
    )


def _shape(stored: Any, period: int) -> season.Shape:
    bins, seen, *errors = stored
    known = _amounts(bins, period, gaps=True) if bins else (math.nan,) * period
    return season.Shape(struct.pack(f"{period}d", *known), int(_number(seen)), *_amounts(errors, 2))


def _amounts(values: Any, length: int, gaps: bool = False) -> tuple[float, ...]:
    return tuple(value if math.isnan(value) else _amount(value) for value in _numbers(values, length, gaps))


def _amount(value: Any) -> float:
    found = _number(value)
    if found < 0.0:
        raise ValueError(f"{value!r} where only 0 and more can be")
    return found


def _numbers(values: Any, length: int, gaps: bool = False) -> tuple[float, ...]:
    if not isinstance(values, list | tuple) or len(values) != length:
        raise ValueError(f"{length} numbers expected, not {str(values)[:80]}")
    return tuple(math.nan if gaps and value is None else _number(value) for value in values)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} where a finite number is expected")
    return float(value)
