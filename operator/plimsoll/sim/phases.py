"""Phases of a load: stretches over which it is statistically constant; and how often a fleet turned round within one.

Problem: a fleet that follows a load goes up and down with it, one that hunts does so by itself, and a count of changes
of direction cannot tell the two apart.

Idea: changes of direction count where the load gave no reason for them. Work that was offered is summed in bins of
`BIN_S`. A stretch is cut in two where the means of both sides differ by more than chance: the largest difference over
all cuts, in standard errors, is above `SURE`, and the smaller mean is more than `MOVED` below the larger one; each part
is cut again (binary segmentation: Scott and Knott, Biometrics 30, 1974). The bins' variance is the largest of three: of
a compound Poisson process with these requests (the sum of squared work), and half the mean square of the difference of
neighbours, of bins and of blocks of `BLOCK` bins, which a slow trend hardly moves.

A reversal is a change of the wanted replicas that goes the other way than the last change in the same phase did.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

BIN_S: Final = 10.0
LEAST: Final = 30  # bins of a phase
BLOCK: Final = 6  # bins
SURE: Final = 5.0  # standard errors
MOVED: Final = 0.1

Floats = NDArray[np.float64]


class Offered:
    """Work that was offered, in bins of time."""

    def __init__(self) -> None:
        self._work: list[float] = []
        self._squares: list[float] = []

    def add(self, at_s: float, work: float) -> None:
        place = int(at_s / BIN_S)
        if place >= len(self._work):
            more = place + 1 - len(self._work)
            self._work += [0.0] * more
            self._squares += [0.0] * more
        self._work[place] += work
        self._squares[place] += work * work

    def phases(self) -> list[float]:
        """When each phase begins, the first at 0."""
        return [place * BIN_S for place in cuts(np.array(self._work), np.array(self._squares))]


def cuts(work: Floats, squares: Floats) -> list[int]:
    """Places at which a phase begins, 0 included."""
    found, todo = [0], [(0, len(work))]
    while todo:
        first, end = todo.pop()
        place = _cut(work[first:end], squares[first:end])
        if place:
            found.append(first + place)
            todo += [(first, first + place), (first + place, end)]
    return sorted(found)


def _cut(work: Floats, squares: Floats) -> int:
    """Where this stretch falls in two, 0 for nowhere."""
    count = len(work)
    if count < 2 * LEAST:
        return 0
    blocks = work[: count - count % BLOCK].reshape(-1, BLOCK).sum(axis=1)
    variance = max(
        float(squares.mean()), float(np.square(np.diff(work)).mean()) / 2,
        float(np.square(np.diff(blocks)).mean()) / 2 / BLOCK,
    )  # fmt: skip
    if variance <= 0.0:
        return 0
    left = np.arange(LEAST, count - LEAST + 1)
    sums = np.cumsum(work)
    before, after = sums[left - 1] / left, (sums[-1] - sums[left - 1]) / (count - left)
    errors = np.abs(before - after) / np.sqrt(variance * (1.0 / left + 1.0 / (count - left)))
    best = int(np.argmax(errors))
    low, high = sorted((float(before[best]), float(after[best])))
    return int(left[best]) if errors[best] > SURE and low < (1.0 - MOVED) * high else 0


def reversals(wanted: Iterable[tuple[float, int]], phases: Sequence[float], end_s: float) -> list[int]:
    """How often each phase saw a change of direction. wanted: replicas of a tier, each from its moment on."""
    found = [0] * len(phases)
    place, way, last = 0, 0, None
    for at_s, replicas in wanted:
        if at_s >= end_s:
            break
        while place + 1 < len(phases) and at_s >= phases[place + 1]:
            place, way = place + 1, 0
        if last is not None and replicas != last:
            turned = 1 if replicas > last else -1
            found[place] += way == -turned
            way = turned
        last = replicas
    return found
