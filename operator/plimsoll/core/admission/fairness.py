"""Whose turn it is among tenants that wait in one line.

Problem: first come, first served gives a flood of one tenant all there is; equal turns give a tenant of long prompts
several times what others get, and one that was idle for an hour must not have an hour's arrears.

Idea: virtual counters (Sheng et al. 2024, "Fairness in serving large language models"): what each tenant has been
given over its weight, in GPU seconds where the paper has weighted tokens. The least counter goes first. A tenant that
begins to wait is lifted to the least of those that wait, or to that of the last one served where nobody does. While two
tenants wait, what they have been given differs by no more than a request or two.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import msgspec

from plimsoll.core.admission.limits import Need
from plimsoll.core.admission.outcome import Request

TENANT_MEMORY_S: Final = 60.0  # a tenant that waits for nothing is forgotten so long after its last service
_SPARE: Final = 64  # stale entries that a heap may carry before it is swept


class Lane(IntEnum):
    """Order inside a class."""

    TICKET = 0  # told to come back now
    IN_TIME = 1
    LATE = 2  # misses its target whatever is done


class Held(msgspec.Struct):
    """A request that waits. due_s: its first token is wanted by then. until_s: waiting longer is of no use."""

    request: Request
    klass: int
    lane: Lane
    need: Need
    weight: float
    due_s: float
    until_s: float
    gone: bool = False


@dataclass(slots=True)
class _Account:
    counter: float
    weight: float
    served_s: float
    waiting: int = 0


class Accounts:
    """Virtual counters of all tenants of a service."""

    def __init__(self) -> None:
        self._of: dict[str, _Account] = {}

    def __len__(self) -> int:
        return len(self._of)

    def counter(self, tenant: str) -> float:
        """GPU seconds over weight, never below 0."""
        return self._of[tenant].counter

    def wait(self, tenant: str, weight: float, floor: float, now: float) -> None:
        """One more request of the tenant waits; the first lifts its counter to the floor."""
        account = self._of.get(tenant)
        if account is None:
            account = self._of[tenant] = _Account(floor, weight, now)
        elif not account.waiting:
            account.counter = max(account.counter, floor)
        account.weight = weight
        account.waiting += 1

    def leave(self, tenant: str) -> None:
        """One of its requests waits no more."""
        self._of[tenant].waiting -= 1

    def charge(self, tenant: str, weight: float, work_s: float, floor: float, now: float) -> None:
        """It has been given so many GPU seconds."""
        account = self._of.get(tenant)
        if account is None:
            account = self._of[tenant] = _Account(floor, weight, now)
        account.counter += work_s / weight
        account.served_s = now

    def correct(self, tenant: str, work_s: float) -> None:
        """What it was given differs by so many GPU seconds from what was charged."""
        account = self._of.get(tenant)
        if account is not None:
            account.counter = max(0.0, account.counter + work_s / account.weight)

    def forget(self, now: float) -> None:
        """Drop tenants that neither wait nor were served lately."""
        old = [name for name, a in self._of.items() if not a.waiting and now - a.served_s > TENANT_MEMORY_S]
        for name in old:
            del self._of[name]


@dataclass(slots=True)
class _Line:
    """One tenant's requests in one lane, least slack first."""

    number: int
    weight: float
    heap: list[tuple[float, int, Held]] = field(default_factory=list)
    live: int = 0
    work_s: float = 0.0


class LaneQueue:
    """Tenants that wait in one lane of one class. Entries that have left are dropped when they come to the front."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._lines: dict[str, _Line] = {}
        self._turns: list[tuple[float, int, str]] = []
        self._weights = 0.0
        self._number = 0
        self.floor = 0.0  # counter of the tenant last chosen
        self.work_s = 0.0

    def __len__(self) -> int:
        return len(self._lines)

    def push(self, held: Held, now: float) -> None:
        """Let it wait."""
        tenant = held.request.tenant
        self._number += 1
        front = self._front()
        self._accounts.wait(tenant, held.weight, self.floor if front is None else front[0], now)
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line(self._number, held.weight)
            self._weights += line.weight
            heapq.heappush(self._turns, (self._accounts.counter(tenant), line.number, tenant))
        line.live += 1
        line.work_s += held.need.work_s
        self.work_s += held.need.work_s
        heapq.heappush(line.heap, (held.due_s - held.need.alone_s, self._number, held))

    def first(self) -> Held:
        """The next one, which stays; there must be one."""
        front = self._front()
        assert front is not None
        self.floor = max(self.floor, front[0])
        heap = self._lines[front[2]].heap
        while heap[0][2].gone:
            heapq.heappop(heap)
        return heap[0][2]

    def drop(self, held: Held) -> None:
        """It waits no more; marks it gone."""
        held.gone = True
        tenant = held.request.tenant
        self._accounts.leave(tenant)
        line = self._lines[tenant]
        line.live -= 1
        taken = held.need.work_s if line.live else line.work_s  # the last one takes what rounding has left
        line.work_s = max(0.0, line.work_s - taken)
        self.work_s = max(0.0, self.work_s - taken)
        if line.live:
            if len(line.heap) > 2 * line.live + _SPARE:
                line.heap = [entry for entry in line.heap if not entry[2].gone]
                heapq.heapify(line.heap)
            return
        del self._lines[tenant]
        self._weights -= line.weight
        if not self._lines:
            self.work_s = self._weights = 0.0
            self._turns.clear()

    def ahead_s(self, tenant: str, weight: float) -> float:
        """GPU seconds given before a newcomer of this tenant: all that waits, or its own by its share of turns."""
        line = self._lines.get(tenant)
        if line is None:
            return 0.0
        return min(self.work_s, line.work_s * self._weights / weight)

    def _front(self) -> tuple[float, int, str] | None:
        """The entry of the tenant whose turn it is, up to date; None if nobody waits."""
        turns = self._turns
        while turns:
            counter, number, tenant = turns[0]
            line = self._lines.get(tenant)
            if line is None or line.number != number:
                heapq.heappop(turns)
                continue
            current = self._accounts.counter(tenant)
            if current <= counter:
                return turns[0]
            heapq.heapreplace(turns, (current, number, tenant))
        return None

    def sweep(self) -> None:
        """Drop turns of tenants that wait no more."""
        if len(self._turns) > 2 * len(self._lines) + _SPARE:
            self._turns = [turn for turn in self._turns if turn[2] in self._lines]
            self._turns = [turn for turn in self._turns if self._lines[turn[2]].number == turn[1]]
            heapq.heapify(self._turns)
