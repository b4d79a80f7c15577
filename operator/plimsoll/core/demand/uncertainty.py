"""Counted uncertainty: how much of the error of the level is sized for.

Problem: sized for its upper quantile, a level known to one percent orders a replica that is most likely not needed.
What would be missed without the replica is nearly nothing: the uppermost part of a load that all other replicas carry.

Idea: newsvendor, as for standby replicas. The level has a normal error e. The replica whose share begins d above the
level serves at most E[(X - d)+] = e G(d / e) of the work, with G(z) = phi(z) - z (1 - Phi(z)). It pays off while that,
times the cost of a missed GPU-second, exceeds the cost of the replica. The uncertainty counts up to the d where the two
are equal, and never beyond the quantile. The larger the service, the nearer d is to the quantile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from statistics import NormalDist
from typing import Final

import numpy as np

MAX_LEVEL_SHARE: Final = 0.1  # of the level; a level that is seconds old is known better before a new replica is ready
_NORMAL: Final = NormalDist()
_DEVIATE_GRID: Final = np.linspace(0.0, 5.0, 501)[::-1]
_UNIT_LOSS: Final = np.array([_NORMAL.pdf(z) - z * (1.0 - _NORMAL.cdf(z)) for z in _DEVIATE_GRID.tolist()])  # G, rising


@lru_cache(256)  # few services differ in it
def quantile_deviate(quantile: float) -> float:
    """Standard errors above the level at which the quantile lies, 0 or more."""
    return max(0.0, _NORMAL.inv_cdf(quantile))


def counted_uncertainty(level: float, error: float, deviates: float, miss_cost: float) -> float:
    """Uncertainty to size for, GPU-seconds per second.

    level, error: of the load and its standard error, same unit. deviates: normal deviate of the quantile. miss_cost:
    cost of one missed GPU-second of this tier, in GPU-seconds of its replicas; infinite where it has no price.
    """
    if not error > 0.0:
        return 0.0
    miss_value = error * miss_cost
    paying_deviates = float(np.interp(1.0 / miss_value if miss_value else math.inf, _UNIT_LOSS, _DEVIATE_GRID))
    return min(MAX_LEVEL_SHARE * level, min(deviates, paying_deviates) * error)


def tier_miss_cost(miss_cost: float, request_gpu_s: Mapping[str, float], tier: str) -> float:
    """Cost of a missed GPU-second in a tier; a request missed in one tier is missed as a whole.

    miss_cost: cost of a missed request, in multiples of all GPU-seconds that it takes. request_gpu_s: GPU-seconds that
    it takes in each tier, all GPUs of a replica counted.
    """
    return miss_cost * sum(request_gpu_s.values()) / request_gpu_s[tier]
