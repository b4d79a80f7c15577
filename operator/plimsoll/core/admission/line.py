"""The queue at one prefill replica, as far as one gateway can know it.

Problem: a gateway knows what it has sent there and what that takes by the model. What others send, a slower card, and
noise make a queue that it did not foresee, and it learns of that only when one of its own requests has ended.

Idea: a first-come-first-served server is free at max over j of a_j + s_j + ... + s_n, for jobs sent at a_j that take
s_j (Lindley 1952). What was sent before a job whose end is known does not matter any more: that end takes the place of
all of it, and those behind it are reckoned from there. So the newest known end counts, once, late or early. With
W_j = s_1 + ... + s_j the maximum is W_n + max(a_j - W_(j-1)), and a queue of descending maxima gives it in constant
time on the mean.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

_NOTHING_S: Final = 1e-9  # what rounding leaves of no work


@dataclass(slots=True, eq=False)
class Leg:
    """One request in a line. own_s: its work; work_s: that of all before it and its own. rest_s: from its end to the
    first token."""

    line: Line
    number: int
    sent_s: float
    own_s: float
    work_s: float
    rest_s: float


class Line:
    """What one gateway has sent to one prefill replica. free_s: when that will be done."""

    def __init__(self, address: str, now: float) -> None:
        self.address = address
        self.free_s = now
        self._work_s = 0.0  # of all that was ever sent, but for what was withdrawn
        self._number = self._known = 0  # legs sent; the newest whose end is known
        self._end_s = -math.inf  # of that one, less the work up to it
        self._legs: dict[int, Leg] = {}  # those since, in order, that may not be done yet
        self._begins: deque[tuple[int, float]] = deque()  # of busy times since, each less the work before it

    def send(self, work_s: float, rest_s: float, now: float) -> Leg:
        """A request goes there now; it and what others send meanwhile take so long."""
        self._forget(now)
        self._number += 1
        leg = self._legs[self._number] = Leg(self, self._number, now, work_s, 0.0, rest_s)
        self._append(leg)
        self._reckon()
        return leg

    def ended(self, leg: Leg, end_s: float, step_s: float) -> None:
        """The leg was done then. step_s: of the longest step, in which others behind it may have been done as well."""
        if leg.number <= self._known:  # a later one has told more
            return
        begins, known_s = self._begins, self._end_s
        if begins and begins[0][0] <= leg.number:
            known_s = max(known_s, begins[0][1])
        latest_s = end_s - leg.work_s
        earliest_s = latest_s - min(step_s, self._work_s - leg.work_s)
        self._known, self._end_s = leg.number, min(max(known_s, earliest_s), latest_s)
        while begins and begins[0][0] <= leg.number:
            begins.popleft()
        while self._legs and (first := next(iter(self._legs))) <= leg.number:
            del self._legs[first]
        self._reckon()

    def withdrawn(self, leg: Leg, now: float) -> None:
        """What is left of the leg by now will not be done, and who is behind it comes sooner."""
        if leg.number not in self._legs:  # a later one has told more
            return
        done_s = leg.own_s - (self._done_s(leg) - now)
        if done_s >= leg.own_s:
            return
        first = next(iter(self._legs.values()))
        self._work_s = first.work_s - first.own_s
        leg.own_s = done_s
        if done_s <= _NOTHING_S:
            del self._legs[leg.number]
        self._begins = deque(begin for begin in self._begins if begin[0] < first.number)
        for one in self._legs.values():
            self._append(one)
        self._reckon()
        self.free_s = max(self.free_s, now)  # it may never have had another

    def _done_s(self, leg: Leg) -> float:
        """When it will be, or was, done."""
        begin_s = self._begins[0][1] if self._begins[0][0] <= leg.number else -math.inf
        return leg.work_s + max(self._end_s, begin_s)

    def _forget(self, now: float) -> None:
        """Those that are done by now: nobody may ever tell that they have ended."""
        while self._legs and self._done_s(first := next(iter(self._legs.values()))) <= now:
            del self._legs[first.number]

    def _append(self, leg: Leg) -> None:
        """The last one; busy times before it that end sooner than it was sent do not matter to those behind it."""
        begins, begin_s = self._begins, leg.sent_s - self._work_s
        while begins and begins[-1][1] <= begin_s:
            begins.pop()
        begins.append((leg.number, begin_s))
        self._work_s += leg.own_s
        leg.work_s = self._work_s

    def _reckon(self) -> None:
        begin_s = self._begins[0][1] if self._begins else -math.inf
        self.free_s = self._work_s + max(self._end_s, begin_s)
