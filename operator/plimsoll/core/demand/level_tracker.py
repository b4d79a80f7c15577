"""Level of one stream of work: level estimate, change-point tests and noise, updated by each sample.

Problem: the operator forecasts from the level. A gateway needs only the level, many times per second for all its
services.

Idea: the updates of `level_model` and `noise_model` form one step of one small value, without clock or history.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from plimsoll.core.demand import level_model, noise_model


class LevelTracker(NamedTuple):
    """State of the tracker. dispersion_gpu_s is derived from the noise, and estimate from mean, lines and noise."""

    level_mean: level_model.LevelMean = level_model.LevelMean()
    trend_lines: level_model.TrendLines = level_model.NO_TREND_LINES
    tests: level_model.CusumStates = level_model.NO_TESTS
    noise: noise_model.NoiseSums = noise_model.NoiseSums()
    dispersion_gpu_s: float = 0.0
    estimate: level_model.LevelEstimate = level_model.LevelEstimate()


EMPTY_TRACKER: Final = LevelTracker()


def add_sample(tracker: LevelTracker, work: float, span_s: float, passed_s: float) -> tuple[LevelTracker, bool]:
    """Return the tracker with one more sample, and whether it caused a level shift.

    work: GPU-seconds per second, at least 0, the mean over `span_s` > 0. passed_s: seconds since the sample before.
    """
    mean, lines, tests, noise_sums, dispersion_gpu_s, before = tracker
    tests = (
        level_model.run_tests(tests, work, span_s, before, mean, dispersion_gpu_s)
        if dispersion_gpu_s > 0.0
        else level_model.NO_TESTS
    )
    suspicious = max(tests).statistic >= level_model.SUSPICION_STATISTIC
    mean = level_model.add_to_mean(level_model.rebase_mean(mean, before), work, span_s, passed_s)
    lines = level_model.add_to_lines(lines, work, span_s, passed_s)
    shift = level_model.detect_shift(tests, before, dispersion_gpu_s)
    shifted = shift is not None
    if shift is None and before.level == 0.0 and work > 0.0:
        shift = level_model.Cusum(math.inf, span_s, work * span_s)  # from a level of 0, any work is a change
    if shift is not None:
        mean, tests = level_model.LevelMean(shift.covered_s, shift.gpu_s), level_model.NO_TESTS
        lines = level_model.reset_lines(lines, shift.covered_s, shift.gpu_s)
    noise_sums = noise_model.update_noise(noise_sums, work, span_s, suspicious, shifted)
    dispersion_gpu_s = noise_model.dispersion_gpu_s(noise_sums)
    return LevelTracker(
        mean, lines, tests, noise_sums, dispersion_gpu_s, level_model.estimate_level(mean, lines, dispersion_gpu_s)
    ), shift is not None
