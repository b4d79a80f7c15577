"""Percentiles of times in little memory."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate
from typing import Final

_RATIO: Final = 1.005
_LOG: Final = math.log(_RATIO)
_LEAST_S: Final = 1e-5


class Times:
    """Counted by ratio: a percentile is off by a quarter of a hundredth at most. Shorter ones than 10 us are alike."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def observe(self, seconds: float, times: int = 1) -> None:
        place = int(math.log(max(seconds, _LEAST_S) / _LEAST_S) / _LOG)
        self._counts[place] = self._counts.get(place, 0) + times

    def add(self, other: Times) -> None:
        for place, times in other._counts.items():
            self._counts[place] = self._counts.get(place, 0) + times

    def quantile_s(self, share: float) -> float | None:
        """The nearest rank's; None of nothing."""
        places = sorted(self._counts)
        below = list(accumulate(self._counts[place] for place in places))
        if not below:
            return None
        place = places[bisect_left(below, max(1, math.ceil(share * below[-1])))]
        return float(_LEAST_S * _RATIO ** (place + 0.5))
