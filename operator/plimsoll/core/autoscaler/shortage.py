"""What refusals say of the model: requests are refused although every replica that it asks for is there.

Problem: a need is as right as the model, and the model learns from requests that ended. While the mix shifts, or where
it is wrong for good, gates refuse what the forecast believed to be carried, and nothing in the forecast says so.

Idea: what was let in fits on the ready replicas, so that all that came would have needed ready / (1 - refused). Where
that is more than the model asks for, the ratio is what it is short by: taken at once, forgotten slowly. It is held
against the most that the model has asked for in the time in which these were refused: load that has ended asks for
nothing, and its refusals are still in the share. It is looked at only when the fleet has been whole for as long as the
share of refusals is measured over, and only where so many are no chance (`allowance`). An answer takes about as long as
that share is measured over, so one minute beyond the budget says little: minutes beyond it are added up until one is
within it. Many refusals are no chance at once, some more than the budget when they go on.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from plimsoll.core.autoscaler.allowance import allowed

WINDOW_S: Final = 60.0  # over which the share of refusals is told
MEMORY_S: Final = 600.0  # the model has this long to come right by itself
MOST: Final = 3.0  # a larger ratio tells of something else than a mean gone wrong
_NONE: Final = 1.005


class Refusals(NamedTuple):
    """Of the last `WINDOW_S`: the share of first attempts that was refused, and how many these were.

    budget: share that is within the promise. in_flight, arrival_cv2: as for `allowance.allowed`.
    """

    share: float
    arrived: float
    budget: float
    in_flight: float
    arrival_cv2: float = 1.0

    def allowed(self, requests: float) -> float:
        """Most refusals of so many that are chance."""
        return allowed(self.budget, requests, self.in_flight, self.arrival_cv2)


@dataclass(slots=True)
class Shortage:
    """Of one tier. factor: replicas needed over those that the model asks for, at least 1."""

    factor: float = 1.0
    _at_s: float | None = None
    _whole: tuple[float, int] | None = None  # since when every replica ordered has been ready, and how many
    _came: float = 0.0  # first attempts while more than the budget were refused
    _lost: float = 0.0  # refused of these
    _asked: deque[tuple[float, float]] = field(default_factory=deque)  # when, and how many; no more, later, before less

    @property
    def is_none(self) -> bool:
        """Whether the model is taken at its word."""
        return self.factor < _NONE

    def hear(self, asked: float, ready: int, whole: bool, refusals: Refusals, now_s: float) -> None:
        """One tick. asked: replicas by the model, not rounded up. whole: all that are ordered are ready. now_s: seconds
        since the epoch."""
        passed_s = 0.0 if self._at_s is None else max(0.0, now_s - self._at_s)
        self._at_s = now_s
        self.factor = 1.0 + (self.factor - 1.0) * math.exp(-passed_s / MEMORY_S)
        if not whole:
            self._whole = None
        elif self._whole is None or self._whole[1] != ready or now_s < self._whole[0]:
            self._whole = now_s, ready
        settled = self._whole is not None and now_s - self._whole[0] >= WINDOW_S
        most = self._most_asked(asked, now_s)
        if not settled or most <= 0 or not refusals.budget < refusals.share < 1.0:
            self._came = self._lost = 0.0
            return
        new = refusals.arrived * (min(passed_s / WINDOW_S, 1.0) if self._came else 1.0)
        self._came += new
        self._lost += new * refusals.share
        if self._lost > refusals.allowed(self._came):
            self.factor = max(self.factor, min(ready / (1.0 - refusals.share) / most, MOST))

    def _most_asked(self, asked: float, now_s: float) -> float:
        """The most since `WINDOW_S` ago."""
        past = self._asked
        while past and not (past[-1][0] < now_s and past[-1][1] > asked):
            past.pop()
        past.append((now_s, asked))
        while past[0][0] < now_s - WINDOW_S:
            past.popleft()
        return past[0][1]
