"""Risk control: the quantile to size for, adjusted by the share of missed requests.

Problem: a forecast's 95th percentile misses more or less than five in a hundred, because no load model is exact. A
horizon is not missed as a whole, but for a share of its requests.

Idea: online risk control. After each horizon the score (a normal deviate) moves by step * (loss - budget): far up after
a miss, slightly down otherwise. For any forecast error, the mean loss over T horizons then differs from the budget by
at most (range of the score) / (step * T), while no clamp holds. Sources: Gibbs and Candes 2021 for coverage; Feldman et
al. 2023 for any bounded loss; Angelopoulos et al. 2024 for risk in place of coverage. The score starts at the budget's
own quantile, which is the prior: about ten horizons hardly move it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Final

_NORMAL: Final = NormalDist()
MIN_QUANTILE: Final = 0.5
MAX_QUANTILE: Final = 0.999
_STEP: Final = 0.5  # standard deviations, for a horizon in which all requests miss
_SCORE_RANGE: Final = (_NORMAL.inv_cdf(MIN_QUANTILE), _NORMAL.inv_cdf(MAX_QUANTILE))


@dataclass(frozen=True, slots=True)
class RiskControl:
    """State of the control.

    budget: share of requests that may miss the SLO, in (0, 1). score: normal deviate of the quantile in use. quantile:
    derived from the score, within the clamps; the quantile to forecast. Raises ValueError for a budget out of range, or
    a score beyond the clamps.
    """

    budget: float
    score: float
    quantile: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0.0 < self.budget < 1.0:
            raise ValueError(f"an error budget is a share between 0 and 1, not {self.budget}")
        if not _SCORE_RANGE[0] <= self.score <= _SCORE_RANGE[1]:
            raise ValueError(f"the score lies in {_SCORE_RANGE}, not at {self.score}")
        object.__setattr__(self, "quantile", min(MAX_QUANTILE, max(MIN_QUANTILE, _NORMAL.cdf(self.score))))

    @property
    def slo_share(self) -> float:
        """Share of requests that must meet the SLO."""
        return 1.0 - self.budget

    @property
    def exhausted(self) -> bool:
        """Whether the score is at the upper clamp: a higher quantile is not available, so the misses have another
        cause.
        """
        return self.score >= _SCORE_RANGE[1]


def initial_control(budget: float) -> RiskControl:
    """Control without observations. budget: share of requests that may miss, in (0, 1). Raises ValueError."""
    if not 0.0 < budget < 1.0:
        raise ValueError(f"an error budget is a share between 0 and 1, not {budget}")
    return RiskControl(budget, _clamp(_NORMAL.inv_cdf(1.0 - budget)))


def update_control(control: RiskControl, loss: float) -> RiskControl:
    """Return the control after one more horizon. loss: share of its requests outside the SLO, 0 to 1. Raises
    ValueError.

    Call it once per horizon, after the horizon has ended, and not for horizons without requests.
    """
    if not 0.0 <= loss <= 1.0:
        raise ValueError(f"a loss is a share between 0 and 1, not {loss}")
    return RiskControl(control.budget, _clamp(control.score + _STEP * (loss - control.budget)))


def _clamp(score: float) -> float:
    return min(_SCORE_RANGE[1], max(_SCORE_RANGE[0], score))
