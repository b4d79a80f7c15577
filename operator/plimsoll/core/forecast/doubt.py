"""How much of the doubt about the level of a load is sized for.

Problem: at its upper quantile a level that is known to a percent orders a replica for load that most likely never
comes, and what would be missed without it is next to nothing, since it is the uppermost bit of a load that all others
carry.

Idea: newsvendor, as for spare replicas. With a level known to a normal error e, the replica whose share begins d above
it serves at most E[(X - d)+] = e G(d / e) of the work, with G(z) = phi(z) - z (1 - Phi(z)). It pays while that, times
what a missed GPU-second costs, is more than the replica's own. So the doubt counts up to the d where it is as much, and
never beyond the quantile. The larger a service, the nearer that is to the quantile itself. A quantile that misses have
steered beyond the promised share says that the price is wrong: the farther, the more of its own deviate counts, all of
it half way to the control's end, so that the control has room left.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from plimsoll.core.forecast import risk

Floats = NDArray[np.float64]

MOST: Final = 0.1  # of the level: one that is seconds old is known better before any replica ordered for it is up
_NORMAL: Final = NormalDist()
_END: Final = _NORMAL.inv_cdf(risk.MOST)
_ROOM: Final = 0.5  # of the way from the promise to the control's end, in which the price gives way to the quantile
_LEAST: Final = 0.1  # deviates of that way
_DEVIATES: Final = np.linspace(0.0, 5.0, 501)[::-1]
_BEYOND: Final = np.array([_NORMAL.pdf(z) - z * (1.0 - _NORMAL.cdf(z)) for z in _DEVIATES.tolist()])  # G, rising


def deviate(quantile: float) -> float:
    """Errors above the level at which the quantile lies, 0 or more."""
    return max(0.0, _NORMAL.inv_cdf(quantile))


def counted(level: Floats, error: Floats, deviates: Floats, promised: Floats, miss_cost: Floats) -> Floats:
    """Doubt that is sized for, GPU-seconds per second.

    level, error: of the load and its standard error, same unit. deviates: of the quantile. promised: of the share that
    is promised. miss_cost: GPU-seconds that one missed GPU-second of this tier costs in replicas of it; infinite where
    it has no price. Arrays of one shape.
    """
    worth = np.multiply(error, miss_cost, out=np.zeros_like(error, dtype=np.float64), where=error > 0.0)
    with np.errstate(divide="ignore"):  # without an error nothing is in doubt
        pays = np.interp(1.0 / worth, _BEYOND, _DEVIATES)
    missed = np.clip((deviates - promised) / np.maximum(_ROOM * (_END - promised), _LEAST), 0.0, 1.0)
    counts = np.minimum(deviates, pays) + missed * np.maximum(0.0, deviates - pays)
    return np.asarray(np.minimum(MOST * level, counts * error))


def miss_costs(miss_cost: Floats, request_gpu_s: Floats) -> Floats:
    """What a missed GPU-second costs in each tier: a request that is missed in one of them is missed as a whole.

    miss_cost: of a missed request, in multiples of all that it takes, by service. request_gpu_s: what it takes in each
    tier, GPUs of a replica counted; shape (services, tiers), as is the answer.
    """
    return np.asarray(miss_cost[:, None] * request_gpu_s.sum(axis=1, keepdims=True) / request_gpu_s)
