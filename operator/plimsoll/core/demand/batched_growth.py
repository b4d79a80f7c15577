"""Growth distributions of many tiers in arrays.

`tail_and_integral` and `standby_pays_off` for all tiers at once, identical to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from plimsoll.core.demand.batched_observe import Flags, Floats
from plimsoll.core.demand.growth_prior import GROWTH_FACTORS
from plimsoll.core.demand.standby_value import GrowthDistribution

_COLUMNS: Final = 1 + len(GROWTH_FACTORS)
_FACTORS: Final = np.array(GROWTH_FACTORS)
_FACTOR_EDGES: Final = np.array((1.0, *GROWTH_FACTORS))


class GrowthTable:
    """One row per tier. All distributions have the factors `GROWTH_FACTORS`."""

    def __init__(self, distributions: Sequence[GrowthDistribution]) -> None:
        rows = np.frombuffer(b"".join([one.packed for one in distributions])).reshape(len(distributions), 2 * _COLUMNS)
        self._exceedance, self._cumulative_integrals = rows[:, :_COLUMNS], rows[:, _COLUMNS:]
        self.horizon_s: Floats = np.array([one.horizon_s for one in distributions])

    def tail_and_integral(self, rows: NDArray[np.intp], factor: Floats) -> tuple[Floats, Floats]:
        """`GrowthDistribution.tail_and_integral` of these rows, with one factor per row."""
        place = np.searchsorted(_FACTORS, factor)
        inside = np.minimum(place, _COLUMNS - 2)
        at, share = _FACTOR_EDGES[inside], self._exceedance[rows, inside]
        cumulative = self._cumulative_integrals[rows, inside]
        with np.errstate(invalid="ignore"):  # beyond the last factor
            width = factor - at
            end = share + (self._exceedance[rows, inside + 1] - share) * width / (_FACTOR_EDGES[inside + 1] - at)
            inner_integral = cumulative + 0.5 * (share + end) * width
        past_last, below_one = place == _COLUMNS - 1, factor <= 1.0
        integral = np.where(past_last, self._cumulative_integrals[rows, -1], inner_integral)
        return (
            np.where(below_one, 1.0, np.where(past_last, 0.0, end)),
            np.where(below_one, np.maximum(0.0, factor), integral),
        )

    def standby_pays_off(
        self, rows: NDArray[np.intp], work: Floats, replica_work: Floats, replicas: Floats, miss_cost: Floats
    ) -> Flags:
        """`standby_value.standby_pays_off` of these rows."""
        price = self.horizon_s[rows]
        with np.errstate(all="ignore"):  # where there is no work
            low, high = replicas * replica_work / work, (replicas + 1.0) * replica_work / work
            needed = work * (self.tail_and_integral(rows, high)[1] - self.tail_and_integral(rows, low)[1])
        return np.asarray((work != 0.0) & (miss_cost * needed * price > price))
