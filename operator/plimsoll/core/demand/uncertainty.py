"""Counted uncertainty: how much of the error of the level is sized for.

Problem: sized for its upper quantile, a level known to one percent orders a replica that is most likely not needed.
What would be missed without the replica is nearly nothing: the uppermost part of a load that all other replicas carry.

Idea: newsvendor, as for standby replicas. The level has a normal error e. The replica whose share begins d above the
level serves at most E[(X - d)+] = e G(d / e) of the work, with G(z) = phi(z) - z (1 - Phi(z)). It pays off while that,
times the cost of a missed GPU-second, exceeds the cost of the replica. The uncertainty counts up to the d where the two
are equal, and never beyond the quantile. The larger the service, the nearer d is to the quantile. A quantile that
misses have raised beyond the SLO share shows that the cost is wrong. The farther it is raised, the more of its own
deviate counts. Halfway to the control's upper clamp all of it counts, so that the control keeps room.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from plimsoll.core.demand import risk_control

Floats = NDArray[np.float64]

MAX_LEVEL_SHARE: Final = 0.1  # of the level; a level that is seconds old is known better before a new replica is ready
_NORMAL: Final = NormalDist()
_MAX_DEVIATE: Final = _NORMAL.inv_cdf(risk_control.MAX_QUANTILE)
_PRICE_FADE_SHARE: Final = (
    0.5  # share of the way from the SLO share to the control's clamp, over which the quantile replaces the cost
)
_MIN_FADE_DEVIATES: Final = 0.1  # lower bound of that way, in deviates
_DEVIATE_GRID: Final = np.linspace(0.0, 5.0, 501)[::-1]
_UNIT_LOSS: Final = np.array([_NORMAL.pdf(z) - z * (1.0 - _NORMAL.cdf(z)) for z in _DEVIATE_GRID.tolist()])  # G, rising


def quantile_deviate(quantile: float) -> float:
    """Standard errors above the level at which the quantile lies, 0 or more."""
    return max(0.0, _NORMAL.inv_cdf(quantile))


def counted_uncertainty(
    level: Floats, error: Floats, deviates: Floats, slo_deviates: Floats, miss_cost: Floats
) -> Floats:
    """Uncertainty to size for, GPU-seconds per second.

    level, error: of the load and its standard error, same unit. deviates: normal deviate of the quantile. slo_deviates:
    that of the SLO share. miss_cost: cost of one missed GPU-second of this tier, in GPU-seconds of its replicas;
    infinite where it has no price. Arrays of one shape.
    """
    miss_value = np.multiply(error, miss_cost, out=np.zeros_like(error, dtype=np.float64), where=error > 0.0)
    with np.errstate(divide="ignore"):  # an error of 0 divides by 0; the result is 0
        paying_deviates = np.interp(1.0 / miss_value, _UNIT_LOSS, _DEVIATE_GRID)
    fade = np.clip(
        (deviates - slo_deviates) / np.maximum(_PRICE_FADE_SHARE * (_MAX_DEVIATE - slo_deviates), _MIN_FADE_DEVIATES),
        0.0,
        1.0,
    )
    used_deviates = np.minimum(deviates, paying_deviates) + fade * np.maximum(0.0, deviates - paying_deviates)
    return np.asarray(np.minimum(MAX_LEVEL_SHARE * level, used_deviates * error))


def tier_miss_costs(miss_cost: Floats, request_gpu_s: Floats) -> Floats:
    """Cost of a missed GPU-second in each tier; a request missed in one tier is missed as a whole.

    miss_cost: cost of a missed request by service, in multiples of all GPU-seconds that it takes. request_gpu_s:
    GPU-seconds that it takes in each tier, all GPUs of a replica counted; shape (services, tiers), as the result.
    """
    return np.asarray(miss_cost[:, None] * request_gpu_s.sum(axis=1, keepdims=True) / request_gpu_s)
