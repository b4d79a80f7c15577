"""Requests in promise per second against load: a peak, the knee, without a gate, and a plateau behind one."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from plimsoll.core.knee import HIGHEST_RATE, Profile, attainment
from plimsoll.core.queueing import Floats, checked

_GRID: Final = 33  # points of the search for the peak, which closes in by a factor of 16 each time
_CLOSINGS: Final = 6


def knee_rate(tiers: Profile, replicas: ArrayLike) -> Floats:
    """The rate of most goodput, lambda P, without admission, (n,): past it more load makes less of it."""
    return _peak(tiers, np.broadcast_to(checked("replicas", replicas, least=1), tiers.share.shape), admission=False)


def goodput(tiers: Profile, rate_per_s: ArrayLike, replicas: ArrayLike, *, admission: bool = True) -> Floats:
    """Requests in promise per second, (n,), of those feasible alone.

    Without admission it rises, peaks and falls. With it what exceeds the peak is refused, so that the rest is served as
    at the peak: a plateau. Refusing at random does that already; refusing by slack can only do better.
    """
    rate = np.broadcast_to(checked("rate_per_s", rate_per_s), tiers.share.shape)
    c = np.broadcast_to(checked("replicas", replicas, least=1), tiers.share.shape)
    if admission:
        rate = np.minimum(rate, _peak(tiers, c, admission=True))
    return rate * attainment(tiers, rate, c, admission=admission).attained


def _peak(tiers: Profile, c: Floats, *, admission: bool) -> Floats:
    """argmax of rate times attainment up to the full rate, by a grid that closes in on its best point."""
    low, high = np.zeros(len(tiers)), np.minimum(tiers.full_rate_per_s(c, admission=admission), HIGHEST_RATE)
    every = np.repeat(np.arange(len(tiers)), _GRID)
    tiled, at = tiers.take(every), np.arange(len(tiers))
    for _ in range(_CLOSINGS):
        rates = low[:, None] + (high - low)[:, None] * np.linspace(0, 1, _GRID)
        shares = attainment(tiled, rates.ravel(), c[every], admission=admission).attained
        best = np.argmax(rates * shares.reshape(rates.shape), axis=1)
        low, high = rates[at, np.maximum(best - 1, 0)], rates[at, np.minimum(best + 1, _GRID - 1)]
    return (low + high) / 2
