"""Sums of intervals from all sources: over the last minute, and decaying.

Problem: sources come and go. What a source counted stays true after it leaves. Memory must not grow with the number of
sources or with their history.

Idea: intervals are summed by time, not by source. `SlidingWindow` has slots of a few seconds for a minute.
`DecayingSum` has one sum that decays with time, but not below the weight of a number of requests. Where requests are
rare, the last ones count, whatever their age.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final, Generic

from plimsoll.core.demand.counter_delta import CLOCK_SKEW_S, IntervalT, merge_intervals, scale_interval

SLIDING_WINDOW_S: Final = 60.0
_SLOT_S: Final = 5.0
_DECAY_STEP: Final = 0.01


class SlidingWindow(Generic[IntervalT]):
    """Intervals of the last minute, or of `window_s`, to the nearest few seconds; an interval counts where it ends."""

    def __init__(self, window_s: float = SLIDING_WINDOW_S) -> None:
        self._window_s = window_s
        self._slots: dict[int, IntervalT] = {}
        self._newest: int | None = None
        self._older: IntervalT | None = None  # cached sum of all slots but the newest
        self._total: IntervalT | None = None

    def add(self, at_s: float, interval: IntervalT) -> None:
        """Add an interval that ends at at_s."""
        slot = math.floor(at_s / _SLOT_S)
        current = self._slots.get(slot)
        self._slots[slot] = interval if current is None else merge_intervals(current, interval)
        self._total = None
        if slot != self._newest:
            self._newest, self._older = slot, None
        if len(self._slots) > 2 * self._window_s / _SLOT_S:
            self._evict_expired(at_s)

    def update(self, renew: Callable[[IntervalT], IntervalT]) -> None:
        """Replace what is in the window by what `renew` makes of it."""
        self._slots = {slot: renew(part) for slot, part in self._slots.items()}
        self._total = self._older = None

    def total(self, now_s: float) -> IntervalT | None:
        """The sum over the window; None if it is empty."""
        self._evict_expired(now_s)
        if self._total is None and self._slots:
            if self._older is None:
                self._older = _merge_all(part for slot, part in self._slots.items() if slot != self._newest)
            newest = [part for slot, part in self._slots.items() if slot == self._newest]
            self._total = _merge_all(newest if self._older is None else [self._older, *newest])
        return self._total

    def covered_s(self, now_s: float) -> float:
        """Seconds that `total` covers: the window, from the start of its first slot."""
        return now_s - math.floor((now_s - self._window_s) / _SLOT_S) * _SLOT_S

    def _evict_expired(self, now_s: float) -> None:
        first, last = now_s - self._window_s, now_s + CLOCK_SKEW_S
        expired = [slot for slot in self._slots if not first < (slot + 1) * _SLOT_S <= last + _SLOT_S]
        for slot in expired:
            del self._slots[slot]
            self._total = self._older = None


def _merge_all(parts: Iterable[IntervalT]) -> IntervalT | None:
    total: IntervalT | None = None
    for part in parts:
        total = part if total is None else merge_intervals(total, part)
    return total


class DecayingSum(Generic[IntervalT]):
    """A sum of intervals that decays by e in `time_constant_s`, while its weight exceeds `min_weight` (requests)."""

    def __init__(self, time_constant_s: float, min_weight: float) -> None:
        self._time_constant_s, self._min_weight = time_constant_s, min_weight
        self._at_s: float | None = None
        self.weight = 0.0  # requests in the sum, decayed like it
        self.sum: IntervalT | None = None

    def add(self, at_s: float, weight: float, interval: IntervalT) -> None:
        """Decay the sum to at_s (s), then add the interval. weight: its requests; weight 0 adds nothing."""
        if weight <= 0.0:
            return
        retained = self._retained_share(at_s, weight)
        if self.sum is None:
            self.sum = interval
        else:
            self.sum = merge_intervals(self.sum if retained == 1.0 else scale_interval(self.sum, retained), interval)
        self.weight = self.weight * retained + weight

    def discard_older(self, recent: IntervalT | None, weight: float) -> None:
        """Discard all but `recent`, the intervals added last, of this weight. Keep as much of the rest as `min_weight`
        requires.
        """
        older = self.weight - weight
        if self.sum is None or older <= 0.0:
            return
        retained = min(1.0, max(0.0, (self._min_weight - weight) / older))
        decayed = scale_interval(self.sum, retained)
        self.sum = decayed if recent is None else merge_intervals(decayed, scale_interval(recent, 1.0 - retained))
        self.weight = retained * older + weight

    def _retained_share(self, at_s: float, weight: float) -> float:
        """Share of the sum that remains at at_s, in steps of a hundredth; finer steps are not worth the time."""
        if self._at_s is None or not 0.0 <= at_s - self._at_s < _DECAY_STEP * self._time_constant_s:
            passed_s = 0.0 if self._at_s is None else max(0.0, at_s - self._at_s)
            self._at_s = at_s
            retained = math.exp(-passed_s / self._time_constant_s)
            return (
                retained if self.weight <= 0.0 else min(1.0, max(retained, (self._min_weight - weight) / self.weight))
            )
        return 1.0
