"""What is remembered of one tier's demand: a value of bounded size that takes samples.

Problem: samples come when they come, or not at all, and a missing one is not a zero.

Idea: a frozen value made of the parts that `level`, `noise`, `growth` and `season` look after. A sample is a mean over
the time since the last call, a minute at most; an `Unknown` one only says that this time was not seen.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from plimsoll.core.forecast import current, growth, level, noise, season

LONGEST_S: Final = 60.0  # a sample says nothing of time before that
FIRST_S: Final = 1.0  # what the very first sample is taken to be a mean over
CLOCK_S: Final = 60.0  # a clock set back by more is believed
SMOOTH_S: Final = 60.0  # of what only explains

# Columns of what is packed: each name is that of the first.
AT, SEEN, CHANGED, MEAN, LINES, TESTS = 0, 1, 2, 3, 5, 21
NOISE, MINUTE, BIN, EXPLAINED, GRAIN, NOW = 33, 48, 51, 54, 56, 57
COLUMNS: Final = 61
_DOUBLES: Final = [struct.Struct(f"{n}d") for n in range(COLUMNS + 1)]
PACKED: Final = _DOUBLES[COLUMNS]
_LINE, _CUSUM, _GRAIN = (0, 0, 0, 1, 1, 0, 0, 0), (0, 0, 1), (2, 1, 0, 1, 0)
# The power of work in each column: what becomes of it where the same load is told in another unit.
_POWERS: Final = (
    *(0, 0, 0), *(0, 1), *_LINE, *_LINE, *_CUSUM, *_CUSUM, *_CUSUM, *_CUSUM, *_GRAIN, *_GRAIN, *(1, 0), *(2, 1, 0),
    *(0, 1, 0), *(0, 1, 0), *(0, 0), 1, *(1, 1, 1, 0),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that is not known, and why. Never to be read as 0."""

    why: str


@dataclass(frozen=True, slots=True)
class Explained:
    """What came along with the work, smoothed over a minute; None if never told. Nothing is computed from it."""

    rate_per_s: float | None = None
    tokens_per_s: float | None = None


class State(NamedTuple):
    """Everything remembered. What moves with every sample is packed, so that a fleet's states are one array at no cost.

    packed: the columns named below as doubles, NaN for None. past, shape: growth and season without what runs.
    """

    packed: bytes = b""
    past: growth.Growth = growth.Growth()
    shape: season.Season = season.Season()

    @classmethod
    def of(
        cls,
        times: tuple[float | None, float | None, float | None],
        mean: level.Mean,
        lines: level.Lines,
        tests: level.Tests,
        heard: noise.Noise,
        grown: growth.Growth,
        seasons: season.Season,
        explained: Explained,
        grain_gpu_s: float,
        now: level.Estimate,
    ) -> State:
        """The state of these parts. times: at_s, seen_s and changed_s."""
        packed = PACKED.pack(
            *(math.nan if time is None else time for time in times),
            *mean,
            *lines[0],
            *lines[1],
            *tests[0],
            *tests[1],
            *tests[2],
            *tests[3],
            *heard.tick,
            *heard.block,
            *heard[2:4],
            *heard.held,
            *grown[:3],
            *seasons[:3],
            math.nan if explained.rate_per_s is None else explained.rate_per_s,
            math.nan if explained.tokens_per_s is None else explained.tokens_per_s,
            grain_gpu_s,
            *now,
        )
        return cls(packed, grown.ended, seasons.ended)

    def figures(self, first: int, n: int) -> tuple[float, ...]:
        """So many columns."""
        return _DOUBLES[n].unpack_from(self.packed or NOTHING, 8 * first)

    @property
    def at_s(self) -> float | None:
        """When the last known sample came, seconds since the epoch; None: there was none."""
        return _or_none(*self.figures(AT, 1))

    @property
    def seen_s(self) -> float | None:
        """When the last call was."""
        return _or_none(*self.figures(SEEN, 1))

    @property
    def changed_s(self) -> float | None:
        """When the level last leapt."""
        return _or_none(*self.figures(CHANGED, 1))

    @property
    def mean(self) -> level.Mean:
        return level.Mean(*self.figures(MEAN, 2))

    @property
    def lines(self) -> level.Lines:
        return level.Line(*self.figures(LINES, 8)), level.Line(*self.figures(LINES + 8, 8))

    @property
    def tests(self) -> level.Tests:
        found = self.figures(TESTS, 12)
        first, second, third, fourth = (level.Cusum(*found[i : i + 3]) for i in range(0, 12, 3))
        return first, second, third, fourth

    @property
    def noise(self) -> noise.Noise:
        found = self.figures(NOISE, 15)
        tick, block, held = noise.Grain(*found[:5]), noise.Grain(*found[5:10]), noise.Sums(*found[12:])
        return noise.Noise(tick, block, found[10], found[11], held)

    @property
    def growth(self) -> growth.Growth:
        minute, gpu_s, covered_s = self.figures(MINUTE, 3)
        return self.past._replace(minute=int(minute), gpu_s=gpu_s, covered_s=covered_s)

    @property
    def season(self) -> season.Season:
        index, gpu_s, covered_s = self.figures(BIN, 3)
        return self.shape._replace(bin=int(index), gpu_s=gpu_s, covered_s=covered_s)

    @property
    def explained(self) -> Explained:
        rate, tokens = self.figures(EXPLAINED, 2)
        return Explained(_or_none(rate), _or_none(tokens))

    @property
    def grain_gpu_s(self) -> float:
        """What follows from the noise."""
        return self.figures(GRAIN, 1)[0]

    @property
    def now(self) -> level.Estimate:
        """What follows from mean, lines and noise."""
        return level.Estimate(*self.figures(NOW, 4))


NOTHING: Final = State.of(
    (None, None, None),
    level.Mean(),
    level.NO_LINES,
    level.NO_TESTS,
    noise.Noise(),
    growth.Growth(),
    season.Season(),
    Explained(),
    0.0,
    level.Estimate(),
).packed


def _or_none(value: float) -> float | None:
    return None if value != value else value


def observe(
    state: State,
    now_s: float,
    work: float | Unknown,
    *,
    rate_per_s: float | None = None,
    tokens_per_s: float | None = None,
) -> State:
    """The state with one more sample.

    work: GPU-seconds per second, the mean since the last call. Unknown, NaN, infinite and negative work is a gap.
    A time not after the last call's changes nothing, unless the clock was set back by more than a minute: then the
    sample is a gap, and what follows counts again. Raises ValueError for a time that is no finite number.
    """
    if not math.isfinite(now_s):
        raise ValueError(f"a sample's time is a finite number of seconds, not {now_s}")
    passed_s = FIRST_S if state.seen_s is None else now_s - state.seen_s
    if passed_s < -CLOCK_S:
        return _set_back(state, now_s)
    if passed_s <= 0.0:
        return state
    if isinstance(work, Unknown) or not 0.0 <= work < math.inf:
        return state._replace(packed=_seen(state.packed or NOTHING, now_s))
    explained = state.explained
    if rate_per_s is not None or tokens_per_s is not None:
        rate = _smooth(explained.rate_per_s, rate_per_s, passed_s)
        explained = Explained(rate, _smooth(explained.tokens_per_s, tokens_per_s, passed_s))
    return _add(state, now_s, float(work), min(passed_s, LONGEST_S), explained)


def rescaled(state: State, factor: float) -> State:
    """The state of the same arrivals if each had been `factor` times the work (> 0): what is known now of a request's
    work holds for those that came before as well, else its change would pass for a slow change of the load."""
    columns = PACKED.unpack(state.packed or NOTHING)
    packed = PACKED.pack(*(value * factor**power for value, power in zip(columns, _POWERS, strict=True)))
    past, shape = state.past, state.shape
    day, week = (
        of._replace(bins=_times(of.bins, factor), error=of.error * factor**2, base=of.base * factor**2)
        for of in (shape.day, shape.week)
    )
    return State(
        packed,
        past._replace(minutes=_times(past.minutes, factor), lowest=past.lowest * factor, highest=past.highest * factor),
        shape._replace(previous=shape.previous * factor, day=day, week=week),
    )


def _times(doubles: bytes, factor: float) -> bytes:
    return (np.frombuffer(doubles) * factor).tobytes()


def _seen(packed: bytes, now_s: float) -> bytes:
    return packed[: 8 * SEEN] + struct.pack("d", now_s) + packed[8 * SEEN + 8 :]


def _set_back(state: State, now_s: float) -> State:
    changed_s = state.changed_s
    times = None if state.at_s is None else now_s, now_s, None if changed_s is None else min(changed_s, now_s)
    return State.of(
        times,
        state.mean,
        state.lines,
        state.tests,
        state.noise,
        growth.drawn_up(-1, 0.0, 0.0, growth.NO_MINUTES, state.past.windows, state.past.exceeded),
        state.shape._replace(previous=math.nan),
        state.explained,
        state.grain_gpu_s,
        state.now,
    )


def _add(state: State, now_s: float, work: float, span_s: float, explained: Explained) -> State:
    at_s, grain, before = state.at_s, state.grain_gpu_s, state.now
    passed_s = span_s if at_s is None else now_s - at_s
    old = current.Current(state.mean, state.lines, state.tests, state.noise, grain, before)
    found, leapt = current.add(old, work, span_s, passed_s)
    return State.of(
        (now_s, now_s, now_s if leapt else state.changed_s),
        found.mean,
        found.lines,
        found.tests,
        found.noise,
        growth.add(state.growth, now_s, work, span_s, before, grain),
        season.add(state.season, now_s, work, span_s),
        explained,
        found.grain_gpu_s,
        found.now,
    )


def _smooth(old: float | None, new: float | None, passed_s: float) -> float | None:
    if new is None or not 0.0 <= new < math.inf:
        return old
    if old is None:
        return new
    return new + math.exp(-passed_s / SMOOTH_S) * (old - new)
