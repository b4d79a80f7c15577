"""The admission queue of one service at one gateway: which request is next, and which requests expire.

Problem: low classes must yield but not starve. A client with a due retry reservation must go before new requests. A
request that misses its target in any case must neither delay others nor wait forever.

Idea: classes go by priority, except that a class below its guaranteed share of the admitted work goes first. Each class
has three lanes: due retry reservations, on-time requests, and late requests. Late requests go first only while they
have received less than `MAX_LATE_SHARE` of the class's work. Inside a lane, tenants share by `fairness`.
After an outage hundreds are late: they use what new requests leave, which can still be in time (`late_limits`).
A request whose adapter has no place at any engine is parked, so that it delays no other. When there is a place, the
next one of the adapter returns to its lane.
When engines begin to serve, what all queued requests cost changes, and when they are due: they are outdated. The caller
renews them one by one, so that thousands need not occupy one turn of an event loop.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from plimsoll.core.admission.cost_model import ClassPolicy
from plimsoll.core.admission.fairness import Lane, LaneQueue, QueuedRequest, TenantAccounts, is_sparse

MAX_LATE_SHARE: Final = 0.1  # share of a class's work for late requests while others wait
LATE_WAIT_SHARE: Final = 0.5  # of the longest wait for a first token in time
SHARE_WINDOW_S: Final = 30.0  # window for guaranteed shares


@dataclass(slots=True)
class _Parked:
    """The parked requests of an adapter: highest class and least slack first, and the first is not a removed one."""

    heap: list[tuple[int, float, int, QueuedRequest]] = field(default_factory=list)
    pending: int = 0


_Expiry = tuple[float, int, QueuedRequest]  # time, number


class AdmissionQueue:
    """All queued requests of one service at one gateway, and the work admitted by class."""

    def __init__(self, classes: tuple[ClassPolicy, ...]) -> None:
        self.accounts = TenantAccounts()
        self._classes = classes
        self._by_priority = sorted(range(len(classes)), key=lambda k: -classes[k].priority)
        self._guaranteed = [k for k in self._by_priority if classes[k].guaranteed_share > 0]
        self._lanes = [[LaneQueue(self.accounts) for _ in Lane] for _ in classes]
        self._queued_per_class = [0] * len(classes)
        self._admitted_s = [[0.0, 0.0] for _ in classes]  # recently admitted work: total and late
        self._decayed_at_s = -math.inf
        self._queued: dict[str, QueuedRequest] = {}
        self._parked: dict[str, _Parked] = {}  # by adapter
        self._expiries: list[list[_Expiry]] = [[]]  # heaps; those of outdated requests come first
        self._last_number = 0
        self._generation = self._served_generation = 0
        self.outdated = 0  # queued requests of earlier generations: the first entries of `_queued`
        self.work_s = 0.0  # GPU-seconds of all queued requests

    def __len__(self) -> int:
        return len(self._queued)

    def __contains__(self, id: str) -> bool:
        return id in self._queued

    def next_expiry_s(self) -> float:
        """Returns the time when the next request expires, infinity if the queue is empty."""
        return min(map(_first_expiry_s, self._expiries))

    def push(self, queued: QueuedRequest, now: float) -> None:
        """Queue a request."""
        self._lanes[queued.class_index][queued.lane].push(queued, now)
        self._queued_per_class[queued.class_index] += 1
        self._hold(queued)

    def park(self, queued: QueuedRequest) -> None:
        """Queue a request, or move it out of its lane, until its adapter has a place."""
        self.remove(queued.request.id)
        parked = replace(queued, removed=False, is_parked=True)
        self._hold(parked)
        rank = (-self._classes[queued.class_index].priority, queued.deadline_s - queued.cost.idle_ttft_s)
        waiting = self._parked.setdefault(queued.request.adapter, _Parked())
        heapq.heappush(waiting.heap, (*rank, self._last_number, parked))
        waiting.pending += 1

    def unpark(self, is_open: Callable[[str], bool], now: float) -> int:
        """Return the next request of each adapter that has a place to its lane. Returns how many adapters have one."""
        with_place = [adapter for adapter in self._parked if is_open(adapter)]
        for adapter in with_place:
            self.unpark_next(adapter, now)
        return len(with_place)

    def unpark_next(self, adapter: str, now: float) -> None:
        """Return the parked request of an adapter with the highest class and the least slack to its lane."""
        if parked := self._parked.get(adapter):
            queued = parked.heap[0][3]
            self.remove(queued.request.id)
            self.push(replace(queued, removed=False, is_parked=False), now)

    def _hold(self, queued: QueuedRequest) -> None:
        self._last_number += 1
        queued.generation = self._generation
        heapq.heappush(self._expiries[-1], (queued.queue_until_s, self._last_number, queued))
        self._queued[queued.request.id] = queued
        self.work_s += queued.cost.work_s

    def peek(self, include_late: bool = True) -> QueuedRequest | None:
        """Returns the next request without removing it, or None. `include_late` includes late requests."""
        if not self._queued:
            return None
        below_share = self.class_below_share()
        for class_index in self._by_priority if below_share is None else [below_share, *self._by_priority]:
            if self._queued_per_class[class_index]:
                queued = self._peek_class(class_index, include_late)
                if queued is not None:
                    return queued
        return None

    def _peek_class(self, class_index: int, include_late: bool) -> QueuedRequest | None:
        lanes = self._lanes[class_index]
        admitted_s, admitted_late_s = self._admitted_s[class_index]
        if include_late and lanes[Lane.LATE] and admitted_late_s < MAX_LATE_SHARE * admitted_s:
            return lanes[Lane.LATE].peek()
        for lane in lanes if include_late else lanes[: Lane.LATE]:
            if lane:
                return lane.peek()
        return None

    def remove(self, id: str) -> QueuedRequest | None:
        """Remove a request. Returns None if it is not queued."""
        queued = self._queued.pop(id, None)
        if queued is not None:
            is_outdated = queued.generation != self._generation
            if queued.is_parked:
                self._remove_parked(queued)
            else:
                self._queued_per_class[queued.class_index] -= 1
                if is_outdated:
                    queued.removed = True
                    self.accounts.dequeue(queued.request.tenant)
                else:
                    self._lanes[queued.class_index][queued.lane].remove(queued)
            if is_outdated:
                self.outdated -= 1
                if not self.outdated:
                    del self._expiries[:-1]
            self.work_s = max(0.0, self.work_s - queued.cost.work_s) if self._queued else 0.0
        return queued

    def _remove_parked(self, queued: QueuedRequest) -> None:
        queued.removed = True
        parked = self._parked[queued.request.adapter]
        parked.pending -= 1
        if not parked.pending:
            del self._parked[queued.request.adapter]
            return
        if is_sparse(len(parked.heap), parked.pending):
            parked.heap = [entry for entry in parked.heap if not entry[3].removed]
            heapq.heapify(parked.heap)
        while parked.heap[0][3].removed:
            heapq.heappop(parked.heap)

    def outdate(self, *, is_first_engine: bool) -> None:
        """Make all queued requests outdated: the first engine begins to serve, or requests cost otherwise.

        They leave their lanes at once, because each that leaves alone leaves a stale entry.
        """
        if not self._queued:
            return
        self._generation += 1
        if is_first_engine:
            self._served_generation = self._generation
        self.outdated = len(self._queued)
        self._lanes = [[LaneQueue(self.accounts, lane.min_virtual_time) for lane in lanes] for lanes in self._lanes]
        self._expiries = [*filter(None, self._expiries), []]

    def renew(self, renewed: Callable[[QueuedRequest, bool], QueuedRequest], limit: int, now: float) -> None:
        """Queue what `renewed` makes of at most `limit` outdated requests in their place, the earliest first.

        It gets the queued request, and whether no engine has served since it was queued.
        """
        for queued in list(islice(self._queued.values(), min(limit, self.outdated))):
            is_unserved = queued.generation < self._served_generation
            again = renewed(queued, is_unserved)
            self.remove(queued.request.id)
            self.push(again, now)

    def pop_expired(self, now: float) -> Iterator[QueuedRequest]:
        """Remove and yield the expired requests."""
        while self.next_expiry_s() <= now:
            queued = min(filter(None, self._expiries))[0][2]
            self.remove(queued.request.id)
            yield queued

    def charge_admitted(
        self, tenant: str, weight: float, class_index: int, lane: Lane, work_s: float, now: float
    ) -> None:
        """Charge the tenant and the class of an admitted request for `work_s` GPU-seconds."""
        self._decay(now)
        self.accounts.charge(tenant, weight, work_s, self._lanes[class_index][lane].min_virtual_time, now)
        admitted_s = self._admitted_s[class_index]
        admitted_s[0] += work_s
        if lane is Lane.LATE:
            admitted_s[1] += work_s

    def class_below_share(self, new_class: int | None = None) -> int | None:
        """Returns the index of a waiting class below its guaranteed share, or None.

        `new_class` counts as waiting: the class of a new request.
        """
        if not self._guaranteed:
            return None
        total_s = sum(admitted_s[0] for admitted_s in self._admitted_s)
        for k in self._guaranteed:
            if (self._queued_per_class[k] or k == new_class) and self._admitted_s[k][0] < self._classes[
                k
            ].guaranteed_share * total_s:
                return k
        return None

    def must_queue(self, class_index: int, lane: Lane) -> bool:
        """Whether a queued request goes before a new request of this class and lane."""
        if not self._queued:
            return False
        below_share = self.class_below_share(class_index)
        if below_share is not None and below_share != class_index:
            return True
        if below_share is None:
            priority = self._classes[class_index].priority
            for other in self._by_priority:
                if self._classes[other].priority < priority:
                    break
                if self._queued_per_class[other] and other != class_index:
                    return True
        return self._queued_per_class[class_index] > 0 and any(self._lanes[class_index][: lane + 1])

    def work_ahead_s(self, class_index: int, lane: Lane, tenant: str, weight: float) -> float:
        """Returns the GPU-seconds ahead of a new request: higher classes, earlier lanes, and its own lane.

        A class below its guaranteed share waits for no other class.
        """
        priority = (
            math.inf if self.class_below_share(class_index) == class_index else self._classes[class_index].priority
        )
        ahead_s = self._lanes[class_index][lane].work_ahead_s(tenant, weight)
        for other in self._by_priority:
            if self._classes[other].priority < priority:
                break
            if other != class_index and self._queued_per_class[other]:
                ahead_s += sum(queue.work_s for queue in self._lanes[other])
        return ahead_s + sum(self._lanes[class_index][index].work_s for index in range(lane))

    def compact(self, now: float) -> None:
        """Drop idle tenants and removed entries. Call this at each tick."""
        self.accounts.evict_idle(now)
        for lanes in self._lanes:
            for lane in lanes:
                lane.compact()
        if is_sparse(len(self._expiries[-1]), len(self._queued)):
            self._expiries[-1] = [entry for entry in self._expiries[-1] if not entry[2].removed]
            heapq.heapify(self._expiries[-1])

    def _decay(self, now: float) -> None:
        """Decay the admitted work, at most every hundredth of `SHARE_WINDOW_S`."""
        elapsed_s = now - self._decayed_at_s
        if elapsed_s < SHARE_WINDOW_S / 100:
            return
        decay = math.exp(-elapsed_s / SHARE_WINDOW_S)
        for admitted_s in self._admitted_s:
            admitted_s[0] *= decay
            admitted_s[1] *= decay
        self._decayed_at_s = now


def _first_expiry_s(expiry: list[_Expiry]) -> float:
    """Returns the time of the first request in a heap, infinity for none. Drops removed ones before it."""
    while expiry and expiry[0][2].removed:
        heapq.heappop(expiry)
    return expiry[0][0] if expiry else math.inf


def late_limits(idle_ttft_s: float, target_s: float, new_share: float) -> tuple[float, float]:
    """Returns the wait for the first token in seconds, and the utilization, up to which a late request is placed.

    `idle_ttft_s` is its TTFT on an idle replica, `target_s` the one that it should have had, `new_share` the work of
    new arrivals over that of full replicas. New requests keep the rest of the wait and of the replicas. A prompt that
    no idle replica computes in time is late without having waited, and has no limits.
    """
    if idle_ttft_s > target_s or target_s == math.inf:
        return math.inf, 1.0
    return idle_ttft_s + LATE_WAIT_SHARE * (target_s - idle_ttft_s), max(MAX_LATE_SHARE, 1.0 - new_share)
