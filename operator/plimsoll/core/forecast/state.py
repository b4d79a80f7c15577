"""What is remembered of one tier's demand: a value of bounded size that takes samples.

Problem: samples come when they come, or not at all, and a missing one is not a zero.

Idea: a frozen value made of the parts that `level`, `noise`, `growth` and `season` look after. A sample is a mean over
the time since the last call, a minute at most; an `Unknown` one only says that this time was not seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from plimsoll.core.forecast import growth, level, noise, season

_LONGEST_S: Final = 60.0  # a sample says nothing of time before that
_FIRST_S: Final = 1.0  # what the very first sample is taken to be a mean over
_CLOCK_S: Final = 60.0  # a clock set back by more is believed
_SMOOTH_S: Final = 60.0  # of what only explains


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
    """Everything remembered. at_s: of the last known sample; seen_s: of the last call; changed_s: of the last change.

    Times in seconds since the epoch (only the phase of day and week matters); None: there was none. grain_gpu_s, now:
    what follows from noise, mean and lines.
    """

    at_s: float | None = None
    seen_s: float | None = None
    changed_s: float | None = None
    mean: level.Mean = level.Mean()
    lines: level.Lines = level.NO_LINES
    tests: level.Tests = level.NO_TESTS
    noise: noise.Noise = noise.Noise()
    growth: growth.Growth = growth.Growth()
    season: season.Season = season.Season()
    explained: Explained = Explained()
    grain_gpu_s: float = 0.0
    now: level.Estimate = level.Estimate()


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
    passed_s = _FIRST_S if state.seen_s is None else now_s - state.seen_s
    if passed_s < -_CLOCK_S:
        return _set_back(state, now_s)
    if passed_s <= 0.0:
        return state
    if isinstance(work, Unknown) or not 0.0 <= work < math.inf:
        return state._replace(seen_s=now_s)
    explained = state.explained
    if rate_per_s is not None or tokens_per_s is not None:
        rate = _smooth(explained.rate_per_s, rate_per_s, passed_s)
        explained = Explained(rate, _smooth(explained.tokens_per_s, tokens_per_s, passed_s))
    return _add(state, now_s, float(work), min(passed_s, _LONGEST_S), explained)


def _set_back(state: State, now_s: float) -> State:
    return state._replace(
        at_s=None if state.at_s is None else now_s,
        seen_s=now_s,
        changed_s=None if state.changed_s is None else min(state.changed_s, now_s),
        growth=growth.drawn_up(-1, 0.0, 0.0, (), state.growth.windows, state.growth.exceeded),
        season=state.season._replace(bin=-1, gpu_s=0.0, covered_s=0.0, previous=math.nan),
    )


def _add(state: State, now_s: float, work: float, span_s: float, explained: Explained) -> State:
    grain, before = state.grain_gpu_s, state.now
    tests = level.run_tests(state.tests, work, span_s, before, grain) if grain > 0.0 else level.NO_TESTS
    suspicious = max(tests).statistic > level.SUSPICION
    passed_s = span_s if state.at_s is None else now_s - state.at_s
    mean = level.add_to_mean(level.follow(state.mean, before), work, span_s, passed_s)
    lines = level.add_to_lines(state.lines, work, span_s, passed_s)
    changed_s = state.changed_s
    leap = level.fired(tests) if suspicious else None
    if leap is None and before.level == 0.0 and work > 0.0:
        leap = level.Cusum(math.inf, span_s, work * span_s)  # from nothing, any work is a change
    if leap is not None:
        mean, tests, changed_s = level.Mean(leap.covered_s, leap.gpu_s), level.NO_TESTS, now_s
        lines = level.leap_to(lines, leap.covered_s, leap.gpu_s)
    heard = noise.learn(state.noise, work, span_s, suspicious)
    grain_after = noise.grain_gpu_s(heard)
    return State(
        now_s,
        now_s,
        changed_s,
        mean,
        lines,
        tests,
        heard,
        growth.add(state.growth, now_s, work, span_s, before, grain),
        season.add(state.season, now_s, work, span_s),
        explained,
        grain_after,
        level.estimate(mean, lines, grain_after),
    )


def _smooth(old: float | None, new: float | None, passed_s: float) -> float | None:
    if new is None or not 0.0 <= new < math.inf:
        return old
    if old is None:
        return new
    return new + math.exp(-passed_s / _SMOOTH_S) * (old - new)
