"""Weight of a rejection, such that the SLO is met window by window and not only in the long-run mean.

Problem: a fleet sized for a mean of 5 % rejections rejects more than 5 % in every second or third minute. Rejections
come in clusters, because slots that are in use stay in use for a while. The larger the clusters, the rarer they must
be.

Idea: a window is a minute, or the time of enough requests to allow a minimum number of misses. In it, rejections are a
gamma variable of mean m and variance D m. Their dispersion D is the larger of two: that of the overflow from slots, by
Wilkinson's formula, or that of a queue of requests that wait up to their slack. The mean that meets the SLO in a share
WINDOW_CONFIDENCE of the windows is then one function of the number of clusters that a window allows. Misses that are
not rejections occur independently and count once.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

import numpy as np

from plimsoll.core.capacity.peakedness import overflow_peakedness
from plimsoll.core.capacity.queueing import Floats

MIN_ALLOWED_MISSES: Final = (
    25.0  # minimum of misses that the SLO allows in a window: 500 requests at 95 %, 2,500 at 99 %
)
SLO_WINDOW_S: Final = 60.0  # the shortest window
WINDOW_CONFIDENCE: Final = 0.99  # share of the windows that meet the SLO
_MAX_SLOTS: Final = 10_000.0  # more slots have about the same peakedness
_MIN_EFFECTIVE_MISSES: Final = 1e-2
_MAX_EFFECTIVE_MISSES: Final = 1e4
_WEIGHT_POINTS: Final = 129
_SLOT_POINTS: Final = 33  # of a table from one slot to _MAX_SLOTS
_MAX_SERIES_TERMS: Final = 200
_LARGE_ARGUMENT: Final = 50.0


def rejection_dispersion(budget: Floats, slots: Floats, queue_room: Floats) -> Floats:
    """Index of dispersion of the rejections in a window of many service times, (n,), at least 1.

    budget: share that may miss, in (0, 1). slots: of the requests served at once. queue_room: requests that may wait
    when all slots are in use. For slots: 2 Z - 1 (see `peakedness`). Bursty arrivals reach the same rejections at a
    lower load, where clusters end sooner; in simulation both even out. For a queue cut off at K: a Brownian motion
    between 0 and K loses sigma^2 / 2K per second in the mean, with a variance of sigma^2 / 3 (Williams 1992,
    "Asymptotic variance parameters for the boundary local times of reflected Brownian motion on a compact interval"),
    so 2 K / 3.
    """
    log_slots = np.log(np.clip(slots, 1.0, _MAX_SLOTS))
    peakedness = np.empty_like(log_slots)
    for share in np.unique(budget):
        rows = budget == share
        peakedness[rows] = np.interp(log_slots[rows], *_peakedness_table(float(share)))
    return np.maximum(2.0 * peakedness - 1.0, np.minimum(queue_room, _MAX_SLOTS) * 2.0 / 3.0)


def rejection_weight(budget: Floats, missed_in_steps: Floats, rate_per_s: Floats, dispersion_index: Floats) -> Floats:
    """Number of misses that one rejection counts for, (n,), at least 1.

    missed_in_steps: share missed for other reasons. dispersion_index: of the rejections.
    """
    allowed = np.maximum(budget * rate_per_s * SLO_WINDOW_S, MIN_ALLOWED_MISSES)
    budget_left = np.maximum(1.0 - missed_in_steps / budget, 0.0)
    effective_misses = np.clip(
        allowed * budget_left / np.maximum(dispersion_index, 1.0), _MIN_EFFECTIVE_MISSES, _MAX_EFFECTIVE_MISSES
    )
    return np.asarray(np.exp(np.interp(np.log(effective_misses), *_weight_table())))


def prepare(slo_share: float) -> None:
    """Make the tables that sizing needs for this SLO percentile. It takes about 0.1 s, too long for an event loop."""
    _weight_table()
    _peakedness_table(1.0 - slo_share)


@lru_cache(64)
def _peakedness_table(budget: float) -> tuple[Floats, Floats]:
    slots = np.unique(np.rint(np.geomspace(1.0, _MAX_SLOTS, _SLOT_POINTS)))
    return np.log(slots), np.array([overflow_peakedness(budget, int(count)) for count in slots])


@lru_cache(1)
def _weight_table() -> tuple[Floats, Floats]:
    """log of the weight over log of the clusters that a window allows."""
    effective_misses = np.geomspace(_MIN_EFFECTIVE_MISSES, _MAX_EFFECTIVE_MISSES, _WEIGHT_POINTS)
    weights = np.array([math.log(x / _gamma_shape(float(x))) for x in effective_misses])
    return np.log(effective_misses), np.maximum.accumulate(weights[::-1])[
        ::-1
    ]  # clusters larger than a window do not lower the weight


def _gamma_shape(x: float) -> float:
    """Shape of a gamma distribution of scale 1 that is at most x with probability WINDOW_CONFIDENCE."""
    low, high = 0.0, x
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _gamma_cdf(middle, x) >= WINDOW_CONFIDENCE else (low, middle)
    return low or high


def _gamma_cdf(shape: float, x: float) -> float:
    """P(gamma of this shape and scale 1 <= x): its series (DLMF 8.11.4), or Wilson and Hilferty (1931) for large x."""
    if x > _LARGE_ARGUMENT:
        score = ((x / shape) ** (1.0 / 3.0) - 1.0 + 1.0 / (9.0 * shape)) * 3.0 * math.sqrt(shape)
        return 0.5 * math.erfc(-score / math.sqrt(2.0))
    term = total = 1.0
    for n in range(1, _MAX_SERIES_TERMS):
        term *= x / (shape + n)
        total += term
    return total * math.exp(shape * math.log(x) - x - math.lgamma(shape + 1.0))
