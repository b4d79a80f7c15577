"""Slack classes: requests grouped by how long they may wait.

Problem: whether a wait violates the SLO depends on the time that a request's own service leaves until its target. A
workload has thousands of rows.

Idea: a few classes by this slack, finer where slack is small, because these requests miss first.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from plimsoll.core.workload import FloatArray

_CLASS_BOUNDS: Final = np.array(
    [0.005, 0.01, 0.02, 0.04, 0.07, 0.11, 0.16, 0.23, 0.31, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
)  # shares


def group_by_slack(
    slack_s: FloatArray, weights: FloatArray, included: NDArray[np.bool_]
) -> tuple[FloatArray, FloatArray]:
    """Mean slack, ascending, and weight of each class of the included rows, shapes (K,)."""
    rows = np.flatnonzero(included)
    order = rows[np.argsort(slack_s[rows], kind="stable")]
    mass = weights[order]
    midpoints = (np.cumsum(mass) - mass / 2) / max(mass.sum(), 1e-300)
    class_index = np.searchsorted(_CLASS_BOUNDS, midpoints)
    class_weights = np.bincount(class_index, mass, _CLASS_BOUNDS.size + 1).astype(np.float64)
    sums = np.bincount(class_index, mass * slack_s[order], _CLASS_BOUNDS.size + 1)
    # An empty class has the slack of the one before it, which keeps the order.
    return np.maximum.accumulate(
        np.where(class_weights > 0, sums / np.maximum(class_weights, 1e-300), 0.0)
    ), class_weights
