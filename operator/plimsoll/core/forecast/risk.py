"""Which quantile to size for, steered by the requests that were missed.

Problem: a forecast's 95th percentile misses more or less than five in a hundred, since no model of load is right, and
requests are missed for a share of a horizon, not for all or nothing.

Idea: online risk control. After each horizon the score (a normal deviate) moves by step * (loss - budget): up by much
after a miss, down by little after none. However wrong the forecast, the mean loss over T horizons then differs from the
budget by at most (range of the score) / (step * T) while no clamp holds (Gibbs and Candes 2021 for coverage; Feldman et
al. 2023 for any bounded loss; Angelopoulos et al. 2024 for risk in place of coverage). The score begins at the budget's
own quantile, which is the prior: some ten horizons hardly move it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Final

_NORMAL: Final = NormalDist()
LEAST: Final = 0.5
MOST: Final = 0.999
_STEP: Final = 0.5  # standard deviations for a horizon lost wholly
_RANGE: Final = (_NORMAL.inv_cdf(LEAST), _NORMAL.inv_cdf(MOST))


@dataclass(frozen=True, slots=True)
class RiskControl:
    """budget: share of requests that may miss the promise, in (0, 1). score: normal deviate of the quantile in use.

    quantile: to ask a forecast for, LEAST to MOST; follows from the score. Raises ValueError for a budget that is none,
    or a score beyond the clamps.
    """

    budget: float
    score: float
    quantile: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0.0 < self.budget < 1.0:
            raise ValueError(f"an error budget is a share between 0 and 1, not {self.budget}")
        if not _RANGE[0] <= self.score <= _RANGE[1]:
            raise ValueError(f"the score lies in {_RANGE}, not at {self.score}")
        object.__setattr__(self, "quantile", min(MOST, max(LEAST, _NORMAL.cdf(self.score))))

    @property
    def promised(self) -> float:
        """Share of requests that may not miss."""
        return 1.0 - self.budget

    @property
    def exhausted(self) -> bool:
        """The upper clamp holds: more quantile would not help, so the budget is missed for another reason."""
        return self.score >= _RANGE[1]


def begin(budget: float) -> RiskControl:
    """Control that has seen nothing. budget: share of requests that may miss, in (0, 1); raises ValueError."""
    if not 0.0 < budget < 1.0:
        raise ValueError(f"an error budget is a share between 0 and 1, not {budget}")
    return RiskControl(budget, _clamped(_NORMAL.inv_cdf(1.0 - budget)))


def feed(control: RiskControl, loss: float) -> RiskControl:
    """Control after one more horizon. loss: share of its requests not served in promise, 0 to 1; raises ValueError.

    One call per horizon, after it has ended; horizons without requests are not fed.
    """
    if not 0.0 <= loss <= 1.0:
        raise ValueError(f"a loss is a share between 0 and 1, not {loss}")
    return RiskControl(control.budget, _clamped(control.score + _STEP * (loss - control.budget)))


def _clamped(score: float) -> float:
    return min(_RANGE[1], max(_RANGE[0], score))
