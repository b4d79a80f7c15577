"""What refusals say of the model: requests are refused although every replica that it asks for is there.

Problem: a need is as right as the model, and the model learns from requests that ended. While the mix shifts, or where
it is wrong for good, gates refuse what the forecast believed to be carried, and nothing in the forecast says so.

Idea: what was let in fits on the ready replicas, so that all that came would have needed ready / (1 - refused). Where
that is more than the model asks for, the ratio is what it is short by: taken at once, forgotten slowly. It is looked at
only when the fleet has been whole for as long as the share of refusals is measured over, and only where so many are
no chance: who asks every second for hours finds a minute of few requests that were refused beyond any budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

WINDOW_S: Final = 60.0  # over which the share of refusals is told
MEMORY_S: Final = 600.0  # the model has this long to come right by itself
MOST: Final = 3.0  # a larger ratio tells of something else than a mean gone wrong
_NONE: Final = 1.005
_CHANCE: Final = 3.0  # standard errors by which the share must be beyond the budget


@dataclass(slots=True)
class Shortage:
    """Of one tier. factor: replicas needed over those that the model asks for, at least 1."""

    factor: float = 1.0
    _at_s: float | None = None
    _whole: tuple[float, int] | None = None  # since when every replica ordered has been ready, and how many

    @property
    def is_none(self) -> bool:
        """Whether the model is taken at its word."""
        return self.factor < _NONE

    def hear(
        self, asked: float, ready: int, whole: bool, refused: float, arrived: float, budget: float, now_s: float
    ) -> None:
        """One tick. asked: replicas by the model, not rounded up. whole: all that are ordered are ready. refused: share
        of the first attempts of the last `WINDOW_S`, which were `arrived`; up to `budget` is within the promise. now_s:
        seconds since the epoch."""
        passed_s = 0.0 if self._at_s is None else max(0.0, now_s - self._at_s)
        self._at_s = now_s
        self.factor = 1.0 + (self.factor - 1.0) * math.exp(-passed_s / MEMORY_S)
        if not whole:
            self._whole = None
            return
        if self._whole is None or self._whole[1] != ready or now_s < self._whole[0]:
            self._whole = now_s, ready
        chance = _CHANCE * math.sqrt(budget * (1.0 - budget) / arrived) if arrived > 0.0 else math.inf
        if now_s - self._whole[0] >= WINDOW_S and budget + chance < refused < 1.0 and asked > 0:
            self.factor = max(self.factor, min(ready / (1.0 - refused) / asked, MOST))
