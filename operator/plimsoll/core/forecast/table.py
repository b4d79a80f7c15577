"""The odds of many tiers in arrays: `Odds.past` and `is_worth` for all of them at once, to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from plimsoll.core.forecast.fleet import Flags, Floats
from plimsoll.core.forecast.spare import Odds
from plimsoll.core.jumps import FACTORS

_COLUMNS: Final = 1 + len(FACTORS)
_FACTORS: Final = np.array(FACTORS)
_AT: Final = np.array((1.0, *FACTORS))


class Table:
    """One row for each tier. All odds have the factors `FACTORS`."""

    def __init__(self, odds: Sequence[Odds]) -> None:
        rows = np.frombuffer(b"".join([one.packed for one in odds])).reshape(len(odds), 2 * _COLUMNS)
        self._exceedance, self._upto = rows[:, :_COLUMNS], rows[:, _COLUMNS:]
        self.horizon_s: Floats = np.array([one.horizon_s for one in odds])

    def past(self, rows: NDArray[np.intp], factor: Floats) -> tuple[Floats, Floats]:
        """As `Odds.past` of these rows, one factor for each."""
        place = np.searchsorted(_FACTORS, factor)
        inside = np.minimum(place, _COLUMNS - 2)
        at, share = _AT[inside], self._exceedance[rows, inside]
        upto = self._upto[rows, inside]
        with np.errstate(invalid="ignore"):  # beyond the last factor
            width = factor - at
            end = share + (self._exceedance[rows, inside + 1] - share) * width / (_AT[inside + 1] - at)
            whole = upto + 0.5 * (share + end) * width
        beyond, below = place == _COLUMNS - 1, factor <= 1.0
        integral = np.where(beyond, self._upto[rows, -1], whole)
        return (
            np.where(below, 1.0, np.where(beyond, 0.0, end)),
            np.where(below, np.maximum(0.0, factor), integral),
        )

    def is_worth(
        self, rows: NDArray[np.intp], work: Floats, replica_work: Floats, replicas: Floats, miss_cost: Floats
    ) -> Flags:
        """As `is_worth` of these rows."""
        price = self.horizon_s[rows]
        with np.errstate(all="ignore"):  # where there is no work
            low, high = replicas * replica_work / work, (replicas + 1.0) * replica_work / work
            needed = work * (self.past(rows, high)[1] - self.past(rows, low)[1])
        return np.asarray((work != 0.0) & (miss_cost * needed * price > price))
