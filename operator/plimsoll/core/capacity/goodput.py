"""Goodput: requests per second within the SLO, as a function of load.

Without admission control it has a peak, the goodput knee. With admission control it has a plateau.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from plimsoll.core.capacity.attainment import attainment
from plimsoll.core.capacity.queueing import Floats, validate_number
from plimsoll.core.capacity.tier_model import MAX_RATE_PER_S, TierProfile

_GRID_POINTS: Final = 33  # points of the grid search, which narrows by a factor of 16 in each round
_REFINEMENTS: Final = 6


def goodput_knee_per_s(profile: TierProfile, replicas: ArrayLike) -> Floats:
    """The goodput knee without admission control, (n,): the rate that maximises lambda P."""
    return _peak_rate(
        profile, np.broadcast_to(validate_number("replicas", replicas, least=1), profile.share.shape), admission=False
    )


def goodput(profile: TierProfile, rate_per_s: ArrayLike, replicas: ArrayLike, *, admission: bool = True) -> Floats:
    """Requests per second within the SLO, (n,), of those that are feasible alone.

    Without admission control it rises, peaks and falls. With it, the excess over the peak is rejected, and the rest is
    served as at the peak: a plateau. Random rejection already achieves that, and rejection by slack can only do better.
    """
    rate = np.broadcast_to(validate_number("rate_per_s", rate_per_s), profile.share.shape)
    replica_counts = np.broadcast_to(validate_number("replicas", replicas, least=1), profile.share.shape)
    if admission:
        rate = np.minimum(rate, _peak_rate(profile, replica_counts, admission=True))
    return rate * attainment(profile, rate, replica_counts, admission=admission).within_slo


def _peak_rate(profile: TierProfile, replica_counts: Floats, *, admission: bool) -> Floats:
    """argmax of rate times attainment up to the saturation rate, by a grid search around the best point."""
    low, high = (
        np.zeros(len(profile)),
        np.minimum(profile.saturation_rate_per_s(replica_counts, admission=admission), MAX_RATE_PER_S),
    )
    tier_index = np.repeat(np.arange(len(profile)), _GRID_POINTS)
    tiled, rows = profile.select(tier_index), np.arange(len(profile))
    for _ in range(_REFINEMENTS):
        rates = low[:, None] + (high - low)[:, None] * np.linspace(0, 1, _GRID_POINTS)
        shares = attainment(tiled, rates.ravel(), replica_counts[tier_index], admission=admission).within_slo
        best = np.argmax(rates * shares.reshape(rates.shape), axis=1)
        low, high = rates[rows, np.maximum(best - 1, 0)], rates[rows, np.minimum(best + 1, _GRID_POINTS - 1)]
    return (low + high) / 2
