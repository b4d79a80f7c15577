"""Requests held at the gateway: which class and lane is next, and who need not wait any longer.

Problem: low classes must yield and yet not starve; a client that was told to come back now must not lose to newcomers;
a request that misses its target whatever is done must neither delay others nor wait for ever.

Idea: classes go by priority, except that one which has had less than its guaranteed share of the work let in goes
first. Inside a class three lanes: tickets that are due, newcomers in time, and those that miss anyway, which go first
only while they have had less than a small share. Inside a lane tenants take turns (`fairness`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from typing import Final

from msgspec.structs import replace

from plimsoll.core.admission.fairness import Accounts, Held, Lane, LaneQueue
from plimsoll.core.admission.limits import ClassPolicy, Need
from plimsoll.core.admission.outcome import Request

LATE_SHARE: Final = 0.1  # of a class's work, for requests that miss anyway, while others wait
SHARE_MEMORY_S: Final = 30.0  # over which guaranteed shares are measured
_SPARE: Final = 64


class HoldQueue:
    """All held requests of one service at one gateway, and what each class has been given."""

    def __init__(self, classes: tuple[ClassPolicy, ...]) -> None:
        self.accounts = Accounts()
        self._classes = classes
        self._by_priority = sorted(range(len(classes)), key=lambda k: -classes[k].priority)
        self._guaranteed = [k for k in self._by_priority if classes[k].guaranteed_share > 0]
        self._lanes = [[LaneQueue(self.accounts) for _ in Lane] for _ in classes]
        self._counts = [0] * len(classes)
        self._given_s = [[0.0, 0.0] for _ in classes]  # work let in lately: all, and of it the last lane's
        self._faded_at = -math.inf
        self._held: dict[str, Held] = {}
        self._expiry: list[tuple[float, int, Held]] = []
        self._number = 0
        self.work_s = 0.0  # GPU seconds of all that wait

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, id: str) -> bool:
        return id in self._held

    def expiry_s(self) -> float:
        """When the next one stops waiting; infinity if nobody does."""
        while self._expiry and self._expiry[0][2].gone:
            heapq.heappop(self._expiry)
        return self._expiry[0][0] if self._expiry else math.inf

    def push(self, held: Held, now: float) -> None:
        """Hold it."""
        self._number += 1
        self._lanes[held.klass][held.lane].push(held, now)
        heapq.heappush(self._expiry, (held.until_s, self._number, held))
        self._counts[held.klass] += 1
        self._held[held.request.id] = held
        self.work_s += held.need.work_s

    def first(self, late: bool = True) -> Held | None:
        """The next to be let in, which stays; None if nobody waits. late: whether one that misses anyway will do."""
        if not self._held:
            return None
        owed = self.owed()
        for klass in self._by_priority if owed is None else [owed, *self._by_priority]:
            if self._counts[klass]:
                found = self._first_of(klass, late)
                if found is not None:
                    return found
        return None

    def _first_of(self, klass: int, late: bool) -> Held | None:
        lanes = self._lanes[klass]
        given_s, given_late_s = self._given_s[klass]
        if late and lanes[Lane.LATE] and given_late_s < LATE_SHARE * given_s:
            return lanes[Lane.LATE].first()
        for lane in lanes if late else lanes[: Lane.LATE]:
            if lane:
                return lane.first()
        return None

    def remove(self, id: str) -> Held | None:
        """Take it out, let in or not; None if it is not held."""
        held = self._held.pop(id, None)
        if held is not None:
            self._counts[held.klass] -= 1
            self._lanes[held.klass][held.lane].drop(held)
            self.work_s = max(0.0, self.work_s - held.need.work_s) if self._held else 0.0
        return held

    def measure(self, need_of: Callable[[Request], Need], now: float) -> None:
        """What requests ask of the replicas is not what it was when they came."""
        for held in list(self._held.values()):
            self.remove(held.request.id)
            need = need_of(held.request)
            until_s = held.due_s - need.alone_s if held.until_s < held.due_s else held.until_s
            self.push(replace(held, need=need, until_s=until_s, gone=False), now)

    def expired(self, now: float) -> Iterator[Held]:
        """Those whose waiting is of no use any more, each removed."""
        while self.expiry_s() <= now:
            held = heapq.heappop(self._expiry)[2]
            self.remove(held.request.id)
            yield held

    def give(self, tenant: str, weight: float, klass: int, lane: Lane, work_s: float, now: float) -> None:
        """A request was let in, held before or not: its tenant and its class have had so many GPU seconds."""
        self._fade(now)
        self.accounts.charge(tenant, weight, work_s, self._lanes[klass][lane].floor, now)
        given = self._given_s[klass]
        given[0] += work_s
        if lane is Lane.LATE:
            given[1] += work_s

    def owed(self, newcomer: int | None = None) -> int | None:
        """The class that waits, or is the newcomer's, and has had less than its guaranteed share; None if none is."""
        if not self._guaranteed:
            return None
        total = sum(given[0] for given in self._given_s)
        for k in self._guaranteed:
            if (self._counts[k] or k == newcomer) and self._given_s[k][0] < self._classes[k].guaranteed_share * total:
                return k
        return None

    def waits(self, klass: int, lane: Lane) -> bool:
        """Whether somebody is held whose turn is before that of a newcomer of this class and lane."""
        if not self._held:
            return False
        owed = self.owed(klass)
        if owed is not None and owed != klass:
            return True
        if owed is None:
            priority = self._classes[klass].priority
            for other in self._by_priority:
                if self._classes[other].priority < priority:
                    break
                if self._counts[other] and other != klass:
                    return True
        return self._counts[klass] > 0 and any(self._lanes[klass][: lane + 1])

    def ahead_s(self, klass: int, lane: Lane, tenant: str, weight: float) -> float:
        """GPU seconds let in before a newcomer: what higher classes and earlier lanes hold, and its share of turns.

        A class that is owed its guaranteed share waits for no other.
        """
        priority = math.inf if self.owed(klass) == klass else self._classes[klass].priority
        ahead = self._lanes[klass][lane].ahead_s(tenant, weight)
        for other in self._by_priority:
            if self._classes[other].priority < priority:
                break
            if other != klass and self._counts[other]:
                ahead += sum(queue.work_s for queue in self._lanes[other])
        return ahead + sum(self._lanes[klass][index].work_s for index in range(lane))

    def tidy(self, now: float) -> None:
        """Drop what is no longer needed: idle tenants, entries that have left. To be called at each tick."""
        self.accounts.forget(now)
        for lanes in self._lanes:
            for lane in lanes:
                lane.sweep()
        if len(self._expiry) > 2 * len(self._held) + _SPARE:
            self._expiry = [entry for entry in self._expiry if not entry[2].gone]
            heapq.heapify(self._expiry)

    def _fade(self, now: float) -> None:
        """Forget what was given long ago, in steps of a hundredth of the memory."""
        passed = now - self._faded_at
        if passed < SHARE_MEMORY_S / 100:
            return
        keep = math.exp(-passed / SHARE_MEMORY_S)
        for given in self._given_s:
            given[0] *= keep
            given[1] *= keep
        self._faded_at = now
