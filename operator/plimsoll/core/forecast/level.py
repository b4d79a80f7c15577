"""Where demand stands now, and where it is going: level, slope, and the detector that makes the level jump.

Problem: a mean over a long time is quiet but late, one over a short time is early but restless; and the noise that
decides between them (few requests of very different sizes) changes with the load.

Idea: the mean since the last change (long, quiet) and two discounted straight lines, one for the hours' drift and one
for the minutes' ramp, each blended in by how far what it has seen is beyond chance if the longer ones are right; and
four CUSUM tests of the work, counted in grains of noise (`noise`), for a rate that has changed. A test that fires hands
over the stretch in which the change has been running, and level and lines begin anew from there.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

MEMORY_S: Final = 1800.0  # of the mean since the last change, so that a slow drift is not averaged away
LINES_S: Final = (900.0, 120.0)  # of the straight lines: half the mean's memory, and about one start-up
DAMPING_S: Final = LINES_S[1]  # a slope is believed for as long as the ramp's line remembers (Gardner, McKenzie 1985)
LEAST: Final = 0.5  # of a line's memory that must be covered for its slope to count
SURE: Final = 4.4  # of the distance below which a line is taken for chance: one in 16,000 goes beyond it
MOVING: Final = 2.45  # the same where the estimate rests on a line already, one in twenty: few loads drift straight on

# Log-likelihood of grains under a changed against the present rate (Lucas 1985, counted data CUSUM): per grain, and per
# grain expected. Up by a quarter, threefold up, down by a fifth, down to a third.
TESTS: Final = (
    (math.log(1.25), 0.25),
    (math.log(3.0), 2.0),
    (-math.log(1.25), -0.2),
    (-math.log(3.0), -2.0 / 3.0),
)
ONE_SAMPLE: Final = 1e-9  # of the ages' spread, below which they are one age
ALARM: Final = 15.0  # e^15 ticks between false alarms for true Poisson counts (Lorden 1971), less for uneven grains
BEGUN: Final = ALARM / 3.0  # a change is dated from here: lower, what came before it would be in its level
PROOF_S: Final = 4.0  # a sample of less time fires no test alone: one huge request is no change of the rate
SUSPICION: Final = 0.5 * ALARM  # from here on a difference is not taken for noise: it may be the change itself


class Mean(NamedTuple):
    """Work since the last change, forgetting with MEMORY_S."""

    covered_s: float = 0.0
    gpu_s: float = 0.0


class Line(NamedTuple):
    """Discounted sums of 1, age and age squared; of work and work times age; and the first three with squared weights.

    Ages in seconds before the last sample.
    """

    s0: float = 0.0
    s1: float = 0.0
    s2: float = 0.0
    y0: float = 0.0
    y1: float = 0.0
    z0: float = 0.0
    z1: float = 0.0
    z2: float = 0.0


class Cusum(NamedTuple):
    """One CUSUM: the statistic, and what came since it last was as low as chance often brings it."""

    statistic: float = 0.0
    covered_s: float = 0.0
    gpu_s: float = 0.0


class Estimate(NamedTuple):
    """Work per second now, its change per second, and the level's standard error (same unit as the level).

    line_s: seconds of flat load whose mean would be as sure as the line that most of it rests on; 0: on no line.
    """

    level: float = 0.0
    slope_per_s: float = 0.0
    error: float = 0.0
    line_s: float = 0.0


Tests = tuple[Cusum, Cusum, Cusum, Cusum]
Lines = tuple[Line, Line]
NO_LINES: Final[Lines] = (Line(), Line())
_RESTING: Final = Cusum()
NO_TESTS: Final[Tests] = (_RESTING, _RESTING, _RESTING, _RESTING)


def add_to_mean(mean: Mean, work: float, span_s: float, passed_s: float) -> Mean:
    """The mean with a sample of `span_s`, `passed_s` after the one before."""
    keep = math.exp(-passed_s / MEMORY_S)
    return Mean(keep * mean.covered_s + span_s, keep * mean.gpu_s + work * span_s)


def add_to_lines(lines: Lines, work: float, span_s: float, passed_s: float) -> Lines:
    """The lines with a sample of `span_s` that ends now, `passed_s` after the one before (Brown 1963, discounted)."""
    slow, fast = lines
    return (
        _add_to_line(slow, LINES_S[0], work, span_s, passed_s),
        _add_to_line(fast, LINES_S[1], work, span_s, passed_s),
    )


def _add_to_line(line: Line, memory_s: float, work: float, span_s: float, passed_s: float) -> Line:
    s0, s1, s2, y0, y1, z0, z1, z2 = line
    p, half = passed_s, 0.5 * span_s
    keep = math.exp(-p / memory_s)
    twice = keep * keep
    new = work * span_s
    return Line(
        keep * s0 + span_s,
        keep * (s1 + p * s0) + span_s * half,
        keep * (s2 + p * (2 * s1 + p * s0)) + span_s * half * half,
        keep * y0 + new,
        keep * (y1 + p * y0) + new * half,
        twice * z0 + span_s,
        twice * (z1 + p * z0) + span_s * half,
        twice * (z2 + p * (2 * z1 + p * z0)) + span_s * half * half,
    )


def leap_to(lines: Lines, covered_s: float, gpu_s: float) -> Lines:
    """The lines after a change that has been running for a while: those for which it was a leap know nothing else."""
    flat = _flat(covered_s, gpu_s)
    slow, fast = (flat if covered_s < LEAST * memory else line for line, memory in zip(lines, LINES_S, strict=True))
    return slow, fast


def _flat(covered_s: float, gpu_s: float) -> Line:
    half = 0.5 * covered_s
    s1, s2 = covered_s * half, covered_s**3 / 3
    return Line(covered_s, s1, s2, gpu_s, gpu_s * half, covered_s, s1, s2)


def run_tests(tests: Tests, work: float, span_s: float, expected: Estimate, mean: Mean, grain_gpu_s: float) -> Tests:
    """Each test with one more sample. grain_gpu_s > 0; expected, mean: before the sample.

    The present rate is taken a standard error towards the changed one, else a level only just found would give alarms.
    A change that has been running is held against the mean before it: by what it has done to the mean since, it would
    hide itself. Not against less time than it has been running, nor where a line says where the load is.
    """
    grains, unit = work * span_s / grain_gpu_s, span_s / grain_gpu_s
    most = ALARM * max(0.5, span_s / PROOF_S)
    run = []
    for (per_grain, per_expected), test in zip(TESTS, tests, strict=True):
        rate, error = expected.level, expected.error
        before_s = mean.covered_s - test.covered_s
        if 0.0 < test.covered_s <= before_s and expected.line_s == 0.0:
            rate = max(0.0, mean.gpu_s - test.gpu_s) / before_s
            error = math.sqrt(grain_gpu_s * rate / before_s)
        rate = rate + error if per_grain > 0 else max(0.0, rate - error)
        moved = grains * per_grain - per_expected * (rate * unit)
        statistic = test.statistic + (moved if moved < most else most)
        if statistic > BEGUN:
            run.append(Cusum(statistic, test.covered_s + span_s, test.gpu_s + work * span_s))
        else:
            run.append(Cusum(statistic) if statistic > 0.0 else _RESTING)
    return run[0], run[1], run[2], run[3]


def fired(tests: Tests, expected: Estimate, grain_gpu_s: float) -> Cusum | None:
    """The test that says that the rate has changed, by most; None if none does. expected: before the last sample.

    A leap down is to a standard error above what came since: it is found where that happens to be little, and what is
    given back by it would have to start again. No work at all is none.
    """
    worst = max(tests)
    if worst.statistic <= ALARM:
        return None
    if worst.gpu_s >= expected.level * worst.covered_s:
        return worst
    return worst._replace(gpu_s=worst.gpu_s + math.sqrt(grain_gpu_s * worst.gpu_s))


def estimate(mean: Mean, lines: Lines, grain_gpu_s: float) -> Estimate:
    """Level and slope now: the mean, drawn towards the slow line and then the fast one."""
    if mean.covered_s <= 0.0:
        return Estimate()
    flat = mean.gpu_s / mean.covered_s
    noise = grain_gpu_s * flat
    found = Estimate(flat, 0.0, math.sqrt(noise / mean.covered_s))
    for line, memory_s in zip(lines, LINES_S, strict=True):
        found = _drawn(found, line, memory_s, noise)
    return found


def _drawn(found: Estimate, line: Line, memory_s: float, noise: float) -> Estimate:
    """The estimate, drawn towards a line by how far what the line has seen is beyond chance under the estimate.

    The share is 1 - (SURE / d)^4, not below 0, where d is the Mahalanobis distance of the line's mean and slope from
    what the estimate says of them, with MOVING in place of SURE where that rests on a line already: the shrinking of a
    positive-part James-Stein estimator, which has a square, made steeper, so that a change that is real is soon
    believed.
    """
    s0, s1, s2, y0, y1, z0, z1, z2 = line
    spread = s0 * s2 - s1 * s1
    if s0 <= LEAST * memory_s or spread <= ONE_SAMPLE * s0 * s2:
        return found
    level, slope_before, error, line_s = found
    slope = (s1 * y0 - s0 * y1) / spread
    off, turned = y0 - s0 * level + s1 * slope_before, (slope - slope_before) * spread
    both, of_slope = s1 * z0 - s0 * z1, _weighted(line, s0, s1)
    certain = of_slope * off * off - 2 * both * off * turned + z0 * turned * turned
    sure = MOVING if line_s else SURE
    chance = sure * sure * noise * s0 * s0 * max(z0 * z2 - z1 * z1, ONE_SAMPLE * z0 * z2)
    if chance >= certain:
        return found
    chance /= certain
    share = 1.0 - chance * chance
    end = max(0.0, (s2 * y0 - s1 * y1) / spread)
    end_s = spread * spread / _weighted(line, s1, s2)
    return Estimate(
        level + share * (end - level),
        slope_before + share * (slope - slope_before),
        error + share * (math.sqrt(noise / end_s) - error),
        end_s if share > 0.5 else line_s,
    )


def follow(mean: Mean, found: Estimate) -> Mean:
    """The mean, begun anew where a line says more: load that drifts leaves its mean behind."""
    return Mean(found.line_s, found.level * found.line_s) if found.line_s else mean


def rise(slope_per_s: float, horizon_s: float) -> float:
    """The most that a damped slope adds to the level within the horizon; 0 for a falling one."""
    return max(0.0, slope_per_s) * DAMPING_S * -math.expm1(-horizon_s / DAMPING_S)


def _weighted(line: Line, first: float, second: float) -> float:
    """Sum of squared weights of an estimator sum w (second - first * age) x, up to its common factor."""
    found = second * second * line.z0 - 2 * first * second * line.z1 + first * first * line.z2
    return max(found, ONE_SAMPLE * first * first * line.z2)  # what cancels is not to become less than nothing
