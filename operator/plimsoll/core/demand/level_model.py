"""Level and trend of demand, and the change-point detector that makes the level shift.

Problem: a mean over a long time is quiet but late; a mean over a short time is early but noisy. The noise that decides
between them (few requests of very different sizes) changes with the load.

Idea: the mean since the last change (long, quiet), and two discounted straight lines, one for drift over hours and one
for ramps over minutes. Each line counts by how far its data exceed random variation under the longer ones. Four CUSUM
tests of the work, counted in units of the dispersion (`noise_model`), detect a changed rate. A test that fires returns
the stretch in which the change has been running. Level and lines restart from there.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from plimsoll.core.codec import Amount

LEVEL_MEMORY_S: Final = 1800.0  # of the mean since the last change; short enough to follow a slow drift
TREND_MEMORIES_S: Final = (
    900.0,
    120.0,
)  # time constants of the lines: half the mean's memory, and about one start-up time
DAMPING_S: Final = TREND_MEMORIES_S[
    1
]  # a slope is extrapolated over the memory of the ramp's line (Gardner, McKenzie 1985)
MIN_TREND_COVERAGE: Final = 0.5  # share of a line's memory that must be covered for its slope to count
TREND_THRESHOLD: Final = 4.4  # distance below which a line counts as chance; one in 16,000 exceeds it
TREND_THRESHOLD_MOVING: Final = (
    2.45  # the same where the estimate already rests on a line: one in twenty, since few loads drift in a straight line
)

# Log-likelihood of events under a changed against the present rate (Lucas 1985, counted data CUSUM): per event, and per
# expected event. Up by a quarter, threefold up, down by a fifth, down to a third.
CUSUM_TESTS: Final = (
    (math.log(1.25), 0.25),
    (math.log(3.0), 2.0),
    (-math.log(1.25), -0.2),
    (-math.log(3.0), -2.0 / 3.0),
)
MIN_AGE_SPREAD: Final = 1e-9  # spread of ages below which they count as one age
CUSUM_ALARM: Final = 15.0  # e^15 ticks between false alarms for Poisson counts (Lorden 1971), fewer for uneven events
CHANGE_START: Final = CUSUM_ALARM / 3.0  # a change begins here; lower, its level would include work from before it
MIN_EVIDENCE_S: Final = 4.0  # a shorter sample alone fires no test: one huge request does not change the rate
SUSPICION_STATISTIC: Final = (
    0.5 * CUSUM_ALARM
)  # from here on, a difference is not counted as noise: it may be the change itself


class LevelMean(NamedTuple):
    """Work since the last change, discounted with LEVEL_MEMORY_S."""

    covered_s: Amount = 0.0
    gpu_s: Amount = 0.0


class TrendLine(NamedTuple):
    """Discounted sums of a straight-line fit; ages in seconds before the last sample.

    s0, s1, s2: sums of 1, age and age squared. y0, y1: sums of work and of work times age. z0, z1, z2: as s0 to s2,
    with squared weights.
    """

    s0: Amount = 0.0
    s1: Amount = 0.0
    s2: Amount = 0.0
    y0: Amount = 0.0
    y1: Amount = 0.0
    z0: Amount = 0.0
    z1: Amount = 0.0
    z2: Amount = 0.0


class Cusum(NamedTuple):
    """One CUSUM test: the statistic, and the time and work since it was last at a value that chance often reaches."""

    statistic: Amount = 0.0
    covered_s: Amount = 0.0
    gpu_s: Amount = 0.0


class LevelEstimate(NamedTuple):
    """Work per second now, its change per second, and the level's standard error in the unit of the level.

    trend_support_s: seconds of constant load whose mean would be as accurate as the line that dominates the estimate; 0
    where no line does.
    """

    level: float = 0.0
    slope_per_s: float = 0.0
    error: float = 0.0
    trend_support_s: float = 0.0


CusumStates = tuple[Cusum, Cusum, Cusum, Cusum]
TrendLines = tuple[TrendLine, TrendLine]
NO_TREND_LINES: Final[TrendLines] = (TrendLine(), TrendLine())
_ZERO_CUSUM: Final = Cusum()
NO_TESTS: Final[CusumStates] = (_ZERO_CUSUM, _ZERO_CUSUM, _ZERO_CUSUM, _ZERO_CUSUM)


def add_to_mean(mean: LevelMean, work: float, span_s: float, passed_s: float) -> LevelMean:
    """Add a sample of `span_s`, `passed_s` after the sample before, to the mean."""
    keep = math.exp(-passed_s / LEVEL_MEMORY_S)
    return LevelMean(keep * mean.covered_s + span_s, keep * mean.gpu_s + work * span_s)


def add_to_lines(lines: TrendLines, work: float, span_s: float, passed_s: float) -> TrendLines:
    """Add a sample of `span_s` that ends now, `passed_s` after the one before, to the lines (Brown 1963)."""
    slow, fast = lines
    return (
        _add_to_line(slow, TREND_MEMORIES_S[0], work, span_s, passed_s),
        _add_to_line(fast, TREND_MEMORIES_S[1], work, span_s, passed_s),
    )


def _add_to_line(line: TrendLine, memory_s: float, work: float, span_s: float, passed_s: float) -> TrendLine:
    s0, s1, s2, y0, y1, z0, z1, z2 = line
    p, half = passed_s, 0.5 * span_s
    keep = math.exp(-p / memory_s)
    twice = keep * keep
    new = work * span_s
    return TrendLine(
        keep * s0 + span_s,
        keep * (s1 + p * s0) + span_s * half,
        keep * (s2 + p * (2 * s1 + p * s0)) + span_s * half * half,
        keep * y0 + new,
        keep * (y1 + p * y0) + new * half,
        twice * z0 + span_s,
        twice * (z1 + p * z0) + span_s * half,
        twice * (z2 + p * (2 * z1 + p * z0)) + span_s * half * half,
    )


def reset_lines(lines: TrendLines, covered_s: float, gpu_s: float) -> TrendLines:
    """Restart the lines after a change. Lines for which it was a level shift keep only the data since then."""
    flat = _flat(covered_s, gpu_s)
    slow, fast = (
        flat if covered_s < MIN_TREND_COVERAGE * memory else line
        for line, memory in zip(lines, TREND_MEMORIES_S, strict=True)
    )
    return slow, fast


def _flat(covered_s: float, gpu_s: float) -> TrendLine:
    half = 0.5 * covered_s
    s1, s2 = covered_s * half, covered_s**3 / 3
    return TrendLine(covered_s, s1, s2, gpu_s, gpu_s * half, covered_s, s1, s2)


def run_tests(
    tests: CusumStates, work: float, span_s: float, expected: LevelEstimate, mean: LevelMean, dispersion_gpu_s: float
) -> CusumStates:
    """Return each test with one more sample. dispersion_gpu_s > 0; expected, mean: before the sample.

    The present rate is moved one standard error towards the changed rate, because a level with little data would give
    false alarms. A running change is compared with the mean before it, because it would otherwise hide in the mean that
    it has moved. This does not apply where that mean covers less time than the change, or where a line gives the level.
    """
    events, unit = work * span_s / dispersion_gpu_s, span_s / dispersion_gpu_s
    max_change = CUSUM_ALARM * max(0.5, span_s / MIN_EVIDENCE_S)
    updated = []
    for (per_grain, per_expected), test in zip(CUSUM_TESTS, tests, strict=True):
        rate, error = expected.level, expected.error
        before_s = mean.covered_s - test.covered_s
        if 0.0 < test.covered_s <= before_s and expected.trend_support_s == 0.0:
            rate = max(0.0, mean.gpu_s - test.gpu_s) / before_s
            error = math.sqrt(dispersion_gpu_s * rate / before_s)
        rate = rate + error if per_grain > 0 else max(0.0, rate - error)
        change = events * per_grain - per_expected * (rate * unit)
        statistic = test.statistic + (change if change < max_change else max_change)
        if statistic > CHANGE_START:
            updated.append(Cusum(statistic, test.covered_s + span_s, test.gpu_s + work * span_s))
        else:
            updated.append(Cusum(statistic) if statistic > 0.0 else _ZERO_CUSUM)
    return updated[0], updated[1], updated[2], updated[3]


def detect_shift(tests: CusumStates, expected: LevelEstimate, dispersion_gpu_s: float) -> Cusum | None:
    """Return the test that indicates a changed rate most clearly; None if none does. expected: before the last sample.

    A shift down goes to one standard error above the work since. Such a shift is detected where the work happens to be
    low, and removed capacity would have to start again. No work at all is not a shift.
    """
    worst = max(tests)
    if worst.statistic <= CUSUM_ALARM:
        return None
    if worst.gpu_s >= expected.level * worst.covered_s:
        return worst
    return worst._replace(gpu_s=worst.gpu_s + math.sqrt(dispersion_gpu_s * worst.gpu_s))


def estimate_level(mean: LevelMean, lines: TrendLines, dispersion_gpu_s: float) -> LevelEstimate:
    """Level and slope now: the mean, drawn towards the slow line and then towards the fast one."""
    if mean.covered_s <= 0.0:
        return LevelEstimate()
    flat = mean.gpu_s / mean.covered_s
    noise = dispersion_gpu_s * flat
    blended = LevelEstimate(flat, 0.0, math.sqrt(noise / mean.covered_s))
    for line, memory_s in zip(lines, TREND_MEMORIES_S, strict=True):
        blended = _blend(blended, line, memory_s, noise)
    return blended


def _blend(current: LevelEstimate, line: TrendLine, memory_s: float, noise: float) -> LevelEstimate:
    """Draw the estimate towards a line, by how far the line's data exceed random variation under the estimate.

    The share is 1 - (TREND_THRESHOLD / d)^4, at least 0. d is the Mahalanobis distance of the line's mean and slope
    from the estimate. A lower threshold applies where the estimate already rests on a line. This is the shrinkage of a
    positive-part James-Stein estimator, with the power 4 in place of 2, so that a real change counts soon.
    """
    s0, s1, s2, y0, y1, z0, z1, z2 = line
    spread = s0 * s2 - s1 * s1
    if s0 <= MIN_TREND_COVERAGE * memory_s or spread <= MIN_AGE_SPREAD * s0 * s2:
        return current
    level, slope_before, error, trend_support_s = current
    slope = (s1 * y0 - s0 * y1) / spread
    off, turned = y0 - s0 * level + s1 * slope_before, (slope - slope_before) * spread
    both, of_slope = s1 * z0 - s0 * z1, _weighted(line, s0, s1)
    signal = of_slope * off * off - 2 * both * off * turned + z0 * turned * turned
    threshold = TREND_THRESHOLD_MOVING if trend_support_s else TREND_THRESHOLD
    noise_share = threshold * threshold * noise * s0 * s0 * max(z0 * z2 - z1 * z1, MIN_AGE_SPREAD * z0 * z2)
    if noise_share >= signal:
        return current
    noise_share /= signal
    share = 1.0 - noise_share * noise_share
    end = max(0.0, (s2 * y0 - s1 * y1) / spread)
    end_s = spread * spread / _weighted(line, s1, s2)
    return LevelEstimate(
        level + share * (end - level),
        slope_before + share * (slope - slope_before),
        error + share * (math.sqrt(noise / end_s) - error),
        end_s if share > 0.5 else trend_support_s,
    )


def rebase_mean(mean: LevelMean, level_estimate: LevelEstimate) -> LevelMean:
    """Restart the mean where a line dominates the estimate, because the mean lags a drifting load."""
    return (
        LevelMean(level_estimate.trend_support_s, level_estimate.level * level_estimate.trend_support_s)
        if level_estimate.trend_support_s
        else mean
    )


def damped_rise(slope_per_s: float, horizon_s: float) -> float:
    """Largest increase that a damped slope adds to the level within the horizon; 0 for a falling slope."""
    return max(0.0, slope_per_s) * DAMPING_S * -math.expm1(-horizon_s / DAMPING_S)


def _weighted(line: TrendLine, first: float, second: float) -> float:
    """Sum of squared weights of an estimator sum w (second - first * age) x, up to its common factor."""
    weighted_sum = second * second * line.z0 - 2 * first * second * line.z1 + first * first * line.z2
    return max(weighted_sum, MIN_AGE_SPREAD * first * first * line.z2)  # rounding must not make the difference negative
