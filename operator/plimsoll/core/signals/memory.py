"""What is remembered of intervals, from all sources together: the last minute, and what fades.

Problem: sources come and go. What a source counted while it was there stays true after it left, and memory must not
grow with their number, nor with their past.

Idea: intervals are added up by time, not by source. `Recent` keeps slots of a few seconds for a minute. `Faded` keeps
one sum that loses weight with time, but not below that of a number of requests: where few come, the last ones count,
however old.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, Generic

from plimsoll.core.signals.intervals import CLOCK_S, Sums, times, together

WINDOW_S: Final = 60.0
_SLOT_S: Final = 5.0
_GRAIN: Final = 0.01


class Recent(Generic[Sums]):
    """Intervals of the last minute, or `window_s`, to the nearest few seconds; an interval counts where it ends."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._slots: dict[int, Sums] = {}
        self._newest: int | None = None
        self._older: Sums | None = None  # all slots but the newest, once summed
        self._whole: Sums | None = None

    def add(self, at_s: float, interval: Sums) -> None:
        """at_s: the interval's end."""
        slot = math.floor(at_s / _SLOT_S)
        known = self._slots.get(slot)
        self._slots[slot] = interval if known is None else together(known, interval)
        self._whole = None
        if slot != self._newest:
            self._newest, self._older = slot, None
        if len(self._slots) > 2 * self._window_s / _SLOT_S:
            self._forget(at_s)

    def over(self, now_s: float) -> Sums | None:
        """The sum over that time; None of nothing."""
        self._forget(now_s)
        if self._whole is None and self._slots:
            if self._older is None:
                self._older = _total(part for slot, part in self._slots.items() if slot != self._newest)
            newest = [part for slot, part in self._slots.items() if slot == self._newest]
            self._whole = _total(newest if self._older is None else [self._older, *newest])
        return self._whole

    def _forget(self, now_s: float) -> None:
        first, last = now_s - self._window_s, now_s + CLOCK_S
        gone = [slot for slot in self._slots if not first < (slot + 1) * _SLOT_S <= last + _SLOT_S]
        for slot in gone:
            del self._slots[slot]
            self._whole = self._older = None


def _total(parts: Iterable[Sums]) -> Sums | None:
    whole: Sums | None = None
    for part in parts:
        whole = part if whole is None else together(whole, part)
    return whole


class Faded(Generic[Sums]):
    """A sum of intervals that fades by e in `memory_s`, while more than `least` (requests) are left of it."""

    def __init__(self, memory_s: float, least: float) -> None:
        self._memory_s, self._least = memory_s, least
        self._at_s: float | None = None
        self.weight = 0.0  # requests in the sum, faded as it is
        self.sum: Sums | None = None

    def add(self, at_s: float, weight: float, interval: Sums) -> None:
        """Fade what there is to at_s (s), then add the interval; weight: its requests. None of them is no news."""
        if weight <= 0.0:
            return
        kept = self._kept(at_s, weight)
        if self.sum is None:
            self.sum = interval
        else:
            self.sum = together(self.sum if kept == 1.0 else times(self.sum, kept), interval)
        self.weight = self.weight * kept + weight

    def forget(self, lately: Sums | None, weight: float) -> None:
        """All but `lately`, the last of what was added, of this weight; of the rest so much stays that `least` are
        left."""
        older = self.weight - weight
        if self.sum is None or older <= 0.0:
            return
        kept = min(1.0, max(0.0, (self._least - weight) / older))
        faded = times(self.sum, kept)
        self.sum = faded if lately is None else together(faded, times(lately, 1.0 - kept))
        self.weight = kept * older + weight

    def _kept(self, at_s: float, weight: float) -> float:
        """Share of the sum that is left at at_s, by steps of a hundredth: it is not worth the time to be finer."""
        if self._at_s is None or not 0.0 <= at_s - self._at_s < _GRAIN * self._memory_s:
            passed_s = 0.0 if self._at_s is None else max(0.0, at_s - self._at_s)
            self._at_s = at_s
            kept = math.exp(-passed_s / self._memory_s)
            return kept if self.weight <= 0.0 else min(1.0, max(kept, (self._least - weight) / self.weight))
        return 1.0
