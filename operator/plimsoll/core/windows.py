"""How much a refusal counts, so that the promise is kept window by window and not only in the mean of all time.

Problem: who sizes for a mean of 5 % refused refuses more than 5 % in every second or third minute. Refusals come in
clumps, as places that are taken stay so for a while: the larger the clumps, the rarer they must be.

Idea: in a window of a minute, or of as many requests as allow for `ALLOWED` misses, refusals are a gamma variable of
mean m and variance D m. D, their dispersion, is that of what overflows from places, peaked as Wilkinson's formula says,
or from a line of those who wait up to their slack, whichever is more. The mean that keeps a share `KEPT` of the windows
is then one function of how many clumps a window allows for. Misses that are no refusals fall on each request by itself
and count once.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

import numpy as np

from plimsoll.core.overflow import peakedness
from plimsoll.core.queueing import Floats

ALLOWED: Final = 25.0  # misses that the promise allows for in a window, at least: 500 requests at 95 %, 2,500 at 99 %
WINDOW_S: Final = 60.0  # a window is no shorter
KEPT: Final = 0.99  # of the windows
_MOST_PLACES: Final = 10_000.0  # more are about as peaked
_LEAST_CLUMPS: Final = 1e-2
_MOST_CLUMPS: Final = 1e4
_POINTS: Final = 129
_PLACES: Final = 33  # of a table from one place to the most
_TERMS: Final = 200
_LARGE: Final = 50.0


def dispersion(budget: Floats, places: Floats, waiting: Floats) -> Floats:
    """Variance over mean of the refusals in a window of many stays, (n,), at least 1.

    budget: share that may be missed, in (0, 1). places: of those served at once. waiting: those who find room to wait
    when all places are taken. A group of places: 2 Z - 1 (see `overflow`). Of arrivals that bunch as few are refused at
    a lower load, where clumps end sooner: simulated, both even out. A line that is cut off at K: a Brownian motion
    between 0 and K loses sigma^2 / 2K a second in the mean, with a variance of sigma^2 / 3 (Williams 1992, "Asymptotic
    variance parameters for the boundary local times of reflected Brownian motion on a compact interval"), so 2 K / 3.
    """
    held = np.log(np.clip(places, 1.0, _MOST_PLACES))
    peaked = np.empty_like(held)
    for share in np.unique(budget):
        rows = budget == share
        peaked[rows] = np.interp(held[rows], *_peaked(float(share)))
    return np.maximum(2.0 * peaked - 1.0, np.minimum(waiting, _MOST_PLACES) * 2.0 / 3.0)


def weight(budget: Floats, steady: Floats, rate_per_s: Floats, spread: Floats) -> Floats:
    """What one refusal counts for, (n,), at least 1. steady: share missed otherwise; spread: their dispersion."""
    allowed = np.maximum(budget * rate_per_s * WINDOW_S, ALLOWED)
    left = np.maximum(1.0 - steady / budget, 0.0)
    clumps = np.clip(allowed * left / np.maximum(spread, 1.0), _LEAST_CLUMPS, _MOST_CLUMPS)
    return np.asarray(np.exp(np.interp(np.log(clumps), *_weights())))


@lru_cache(64)
def _peaked(budget: float) -> tuple[Floats, Floats]:
    places = np.unique(np.rint(np.geomspace(1.0, _MOST_PLACES, _PLACES)))
    return np.log(places), np.array([peakedness(budget, int(count)) for count in places])


@lru_cache(1)
def _weights() -> tuple[Floats, Floats]:
    """log of the weight over log of the clumps that a window allows for."""
    clumps = np.geomspace(_LEAST_CLUMPS, _MOST_CLUMPS, _POINTS)
    weights = np.array([math.log(x / _shape(float(x))) for x in clumps])
    return np.log(clumps), np.maximum.accumulate(weights[::-1])[::-1]  # clumps larger than windows are no better


def _shape(x: float) -> float:
    """The shape of a gamma law of scale 1 that is at most x with the probability `KEPT`."""
    low, high = 0.0, x
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _below(middle, x) >= KEPT else (low, middle)
    return low or high


def _below(shape: float, x: float) -> float:
    """P(gamma of this shape and scale 1 <= x): its series (DLMF 8.11.4), or Wilson and Hilferty (1931) for large x."""
    if x > _LARGE:
        score = ((x / shape) ** (1.0 / 3.0) - 1.0 + 1.0 / (9.0 * shape)) * 3.0 * math.sqrt(shape)
        return 0.5 * math.erfc(-score / math.sqrt(2.0))
    term = total = 1.0
    for n in range(1, _TERMS):
        term *= x / (shape + n)
        total += term
    return total * math.exp(shape * math.log(x) - x - math.lgamma(shape + 1.0))
