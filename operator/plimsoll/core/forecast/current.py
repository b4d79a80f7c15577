"""Where one stream of work stands: level, tests for a change and noise, a sample at a time.

Problem: the operator forecasts from it, and a gateway needs no more of it than the level, many times a second over all
its services.

Idea: what `level` and `noise` do with a sample is one step of one small value, without a clock and without a past.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from plimsoll.core.forecast import level, noise


class Current(NamedTuple):
    """grain_gpu_s follows from the noise, and now from mean, lines and noise."""

    mean: level.Mean = level.Mean()
    lines: level.Lines = level.NO_LINES
    tests: level.Tests = level.NO_TESTS
    noise: noise.Noise = noise.Noise()
    grain_gpu_s: float = 0.0
    now: level.Estimate = level.Estimate()


NOTHING: Final = Current()


def add(current: Current, work: float, span_s: float, passed_s: float) -> tuple[Current, bool]:
    """With one more sample, and whether the level has leapt by it.

    work: GPU-seconds per second, at least 0, the mean over `span_s` > 0. passed_s: since the sample before.
    """
    mean, lines, tests, heard, grain, before = current
    tests = level.run_tests(tests, work, span_s, before, mean, grain) if grain > 0.0 else level.NO_TESTS
    suspicious = max(tests).statistic >= level.SUSPICION
    mean = level.add_to_mean(level.follow(mean, before), work, span_s, passed_s)
    lines = level.add_to_lines(lines, work, span_s, passed_s)
    leap = level.fired(tests, before, grain)
    leapt = leap is not None
    if leap is None and before.level == 0.0 and work > 0.0:
        leap = level.Cusum(math.inf, span_s, work * span_s)  # from nothing, any work is a change
    if leap is not None:
        mean, tests = level.Mean(leap.covered_s, leap.gpu_s), level.NO_TESTS
        lines = level.leap_to(lines, leap.covered_s, leap.gpu_s)
    heard = noise.learn(heard, work, span_s, suspicious, leapt)
    grain = noise.grain_gpu_s(heard)
    return Current(mean, lines, tests, heard, grain, level.estimate(mean, lines, grain)), leap is not None
