"""Requests grouped by how long they may wait.

Problem: whether a wait breaks a promise depends on what a request's own service leaves until its target, and a workload
has thousands of rows.

Idea: a few classes by that slack, finer where it is least and requests are missed first.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from plimsoll.core.workload import FloatArray

_CUTS: Final = np.array([0.005, 0.01, 0.02, 0.04, 0.07, 0.11, 0.16, 0.23, 0.31, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])  # shares


def by_slack(slack_s: FloatArray, weights: FloatArray, counted: NDArray[np.bool_]) -> tuple[FloatArray, FloatArray]:
    """Mean slack, ascending, and weight of each class of the counted rows, shapes (K,)."""
    good = np.flatnonzero(counted)
    order = good[np.argsort(slack_s[good], kind="stable")]
    mass = weights[order]
    middle = (np.cumsum(mass) - mass / 2) / max(mass.sum(), 1e-300)
    cell = np.searchsorted(_CUTS, middle)
    found = np.bincount(cell, mass, _CUTS.size + 1).astype(np.float64)
    sums = np.bincount(cell, mass * slack_s[order], _CUTS.size + 1)
    # An empty class takes the slack of the one before it, so that the order stays.
    return np.maximum.accumulate(np.where(found > 0, sums / np.maximum(found, 1e-300), 0.0)), found
