"""Phases of a load, in which it is statistically constant, and the reversals of a fleet within a phase.

Problem: a fleet that follows a load changes direction with it, and an unstable one does so by itself. A count of
changes of direction cannot distinguish the two.

Idea: a change of direction counts only within a phase. Offered work is summed in bins of `BIN_S`. A stretch is cut in
two if the means of both sides differ significantly: the largest difference over all cuts, in standard errors, is above
`MIN_STANDARD_ERRORS`, and the smaller mean is more than `MIN_RELATIVE_CHANGE` below the larger one. Each part is cut
again (binary segmentation: Scott and Knott, Biometrics 30, 1974). The bins' variance is the largest of three: that of a
compound Poisson process with these requests (the sum of squared work), and half the mean squared difference of
neighbours, of bins and of blocks of `BINS_PER_BLOCK` bins, which a slow trend hardly changes.

A reversal is a change of the desired replicas in the opposite direction to the previous change of the same phase.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

BIN_S: Final = 10.0
MIN_PHASE_BINS: Final = 30  # bins of a phase
BINS_PER_BLOCK: Final = 6  # bins
MIN_STANDARD_ERRORS: Final = 5.0  # standard errors
MIN_RELATIVE_CHANGE: Final = 0.1

Floats = NDArray[np.float64]


class OfferedWork:
    """Offered work, in bins of time."""

    def __init__(self) -> None:
        self._work: list[float] = []
        self._squares: list[float] = []

    def add(self, at_s: float, work: float) -> None:
        bin_index = int(at_s / BIN_S)
        if bin_index >= len(self._work):
            missing = bin_index + 1 - len(self._work)
            self._work += [0.0] * missing
            self._squares += [0.0] * missing
        self._work[bin_index] += work
        self._squares[bin_index] += work * work

    def phases(self) -> list[float]:
        """Return the begin of each phase, the first at 0."""
        return [bin_index * BIN_S for bin_index in change_points(np.array(self._work), np.array(self._squares))]


def change_points(work: Floats, squares: Floats) -> list[int]:
    """Return the indices at which phases begin, 0 included."""
    starts, segments = [0], [(0, len(work))]
    while segments:
        first, end = segments.pop()
        offset = _change_point(work[first:end], squares[first:end])
        if offset:
            starts.append(first + offset)
            segments += [(first, first + offset), (first + offset, end)]
    return sorted(starts)


def _change_point(work: Floats, squares: Floats) -> int:
    """Return the index of the change point of this stretch, 0 for none."""
    count = len(work)
    if count < 2 * MIN_PHASE_BINS:
        return 0
    blocks = work[: count - count % BINS_PER_BLOCK].reshape(-1, BINS_PER_BLOCK).sum(axis=1)
    variance = max(
        float(squares.mean()), float(np.square(np.diff(work)).mean()) / 2,
        float(np.square(np.diff(blocks)).mean()) / 2 / BINS_PER_BLOCK,
    )  # fmt: skip
    if variance <= 0.0:
        return 0
    left = np.arange(MIN_PHASE_BINS, count - MIN_PHASE_BINS + 1)
    sums = np.cumsum(work)
    before, after = sums[left - 1] / left, (sums[-1] - sums[left - 1]) / (count - left)
    errors = np.abs(before - after) / np.sqrt(variance * (1.0 / left + 1.0 / (count - left)))
    best = int(np.argmax(errors))
    low, high = sorted((float(before[best]), float(after[best])))
    return int(left[best]) if errors[best] > MIN_STANDARD_ERRORS and low < (1.0 - MIN_RELATIVE_CHANGE) * high else 0


def reversals(desired_counts: Iterable[tuple[float, int]], phases: Sequence[float], end_s: float) -> list[int]:
    """Return the number of changes of direction in each phase. desired_counts: times and replicas of a tier."""
    counts = [0] * len(phases)
    phase, direction, last = 0, 0, None
    for at_s, replicas in desired_counts:
        if at_s >= end_s:
            break
        while phase + 1 < len(phases) and at_s >= phases[phase + 1]:
            phase, direction = phase + 1, 0
        if last is not None and replicas != last:
            new_direction = 1 if replicas > last else -1
            counts[phase] += direction == -new_direction
            direction = new_direction
        last = replicas
    return counts
