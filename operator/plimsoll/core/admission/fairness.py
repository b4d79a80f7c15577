"""Weighted fair queueing among the tenants of one lane.

Problem: with first-come-first-served, one tenant's flood takes all capacity. With equal turns, a tenant of long prompts
gets several times the work of others. A tenant that was idle must not accumulate credit.

Idea: virtual time (Sheng et al. 2024, "Fairness in serving large language models"): the work that a tenant has received
over its weight, in GPU-seconds where the paper uses weighted tokens. The lowest virtual time goes first. A tenant that
starts to wait is lifted to the lowest virtual time of the waiting tenants, or to that of the last one served. While two
tenants wait, their received work differs by at most one or two requests.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from plimsoll.core.admission.cost_model import RequestCost
from plimsoll.core.admission.request import AdmissionRequest

IDLE_TENANT_TTL_S: Final = 60.0  # idle tenants are dropped this long after their last service
_STALE_ENTRIES_ALLOWED: Final = 64  # stale heap entries to keep before a sweep


class Lane(IntEnum):
    """The order inside a class."""

    RESERVED = 0  # has a retry reservation that is due
    ON_TIME = 1
    LATE = 2  # misses its TTFT target even on an idle replica, or missed it while none was ready


@dataclass(slots=True)
class QueuedRequest:
    """A queued request. `deadline_s` is the deadline of its first token. It is shed at `queue_until_s`.

    `client_deadline_s` is the latest time of the first token by the client's own deadline, infinity without one.
    `is_parked`: it waits for a place of its adapter, in no lane. `generation` is that of the queue when its cost and
    deadlines were computed.
    """

    request: AdmissionRequest
    class_index: int
    lane: Lane
    cost: RequestCost
    weight: float
    deadline_s: float
    queue_until_s: float
    client_deadline_s: float = math.inf
    removed: bool = False
    is_parked: bool = False
    generation: int = 0


def is_sparse(entries: int, live: int) -> bool:
    """Whether a heap of so many entries has too many stale ones for its live ones."""
    return entries > 2 * live + _STALE_ENTRIES_ALLOWED


def queued_request(
    request: AdmissionRequest,
    class_index: int,
    lane: Lane,
    cost: RequestCost,
    weight: float,
    start_s: float,
    max_queue_time_s: float,
    target_s: float,
    client_deadline_s: float,
) -> QueuedRequest:
    """Returns a request with its deadlines. It is late if it misses its target on a replica that is idle at `start_s`.

    `target_s` is the TTFT that its class promises, infinity without one.
    """
    arrived_s = min(request.arrived_s, start_s)
    queue_until_s = min(arrived_s + max_queue_time_s, client_deadline_s - cost.idle_ttft_s)
    deadline_s = min(arrived_s + target_s, client_deadline_s)
    if start_s + cost.idle_ttft_s > arrived_s + target_s:
        lane, deadline_s = Lane.LATE, queue_until_s
    elif target_s == math.inf:
        deadline_s = queue_until_s
    else:
        queue_until_s = deadline_s - cost.idle_ttft_s
    return QueuedRequest(request, class_index, lane, cost, weight, deadline_s, queue_until_s, client_deadline_s)


@dataclass(slots=True)
class _Account:
    virtual_time: float
    weight: float
    last_served_s: float
    waiting: int = 0


class TenantAccounts:
    """The virtual times of all tenants of a service."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    def virtual_time(self, tenant: str) -> float:
        """Returns the tenant's virtual time: GPU-seconds over weight, at least 0."""
        return self._accounts[tenant].virtual_time

    def enqueue(self, tenant: str, weight: float, min_virtual_time: float, now: float) -> None:
        """Count a queued request. The first one lifts the tenant's virtual time to `min_virtual_time`."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(min_virtual_time, weight, now)
        elif not account.waiting:
            account.virtual_time = max(account.virtual_time, min_virtual_time)
        account.weight = weight
        account.waiting += 1

    def dequeue(self, tenant: str) -> None:
        """Count a request that left the queue."""
        self._accounts[tenant].waiting -= 1

    def charge(self, tenant: str, weight: float, work_s: float, min_virtual_time: float, now: float) -> None:
        """Charge the tenant for `work_s` GPU-seconds."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(min_virtual_time, weight, now)
        account.virtual_time += work_s / weight
        account.last_served_s = now

    def correct(self, tenant: str, work_s: float) -> None:
        """Correct a charge by `work_s` GPU-seconds: actual minus charged work."""
        account = self._accounts.get(tenant)
        if account is not None:
            account.virtual_time = max(0.0, account.virtual_time + work_s / account.weight)

    def evict_idle(self, now: float) -> None:
        """Drop tenants that have no queued request and no recent service."""
        idle = [
            name for name, a in self._accounts.items() if not a.waiting and now - a.last_served_s > IDLE_TENANT_TTL_S
        ]
        for name in idle:
            del self._accounts[name]


@dataclass(slots=True)
class _TenantQueue:
    """One tenant's requests in one lane, least slack first."""

    sequence_number: int
    weight: float
    heap: list[tuple[float, int, QueuedRequest]] = field(default_factory=list)
    pending: int = 0
    work_s: float = 0.0


class LaneQueue:
    """The waiting tenants of one lane of one class. Removed entries are dropped when they reach the front."""

    def __init__(self, accounts: TenantAccounts, min_virtual_time: float = 0.0) -> None:
        self._accounts = accounts
        self._queues: dict[str, _TenantQueue] = {}
        self._tenant_heap: list[tuple[float, int, str]] = []
        self._total_weight = 0.0
        self._last_number = 0
        self.min_virtual_time = min_virtual_time  # virtual time of the last chosen tenant
        self.work_s = 0.0

    def __len__(self) -> int:
        return len(self._queues)

    def push(self, queued: QueuedRequest, now: float) -> None:
        """Queue a request."""
        tenant = queued.request.tenant
        self._last_number += 1
        front = self._front()
        self._accounts.enqueue(tenant, queued.weight, self.min_virtual_time if front is None else front[0], now)
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = _TenantQueue(self._last_number, queued.weight)
            self._total_weight += queue.weight
            heapq.heappush(self._tenant_heap, (self._accounts.virtual_time(tenant), queue.sequence_number, tenant))
        queue.pending += 1
        queue.work_s += queued.cost.work_s
        self.work_s += queued.cost.work_s
        heapq.heappush(queue.heap, (queued.deadline_s - queued.cost.idle_ttft_s, self._last_number, queued))

    def peek(self) -> QueuedRequest:
        """Returns the next request without removing it. The queue must not be empty."""
        front = self._front()
        assert front is not None
        self.min_virtual_time = max(self.min_virtual_time, front[0])
        heap = self._queues[front[2]].heap
        while heap[0][2].removed:
            heapq.heappop(heap)
        return heap[0][2]

    def remove(self, queued: QueuedRequest) -> None:
        """Remove a request and mark it removed."""
        queued.removed = True
        tenant = queued.request.tenant
        self._accounts.dequeue(tenant)
        queue = self._queues[tenant]
        queue.pending -= 1
        removed_s = queued.cost.work_s if queue.pending else queue.work_s  # the last one also removes rounding errors
        queue.work_s = max(0.0, queue.work_s - removed_s)
        self.work_s = max(0.0, self.work_s - removed_s)
        if queue.pending:
            if is_sparse(len(queue.heap), queue.pending):
                queue.heap = [entry for entry in queue.heap if not entry[2].removed]
                heapq.heapify(queue.heap)
            return
        del self._queues[tenant]
        self._total_weight -= queue.weight
        if not self._queues:
            self.work_s = self._total_weight = 0.0
            self._tenant_heap.clear()

    def work_ahead_s(self, tenant: str, weight: float) -> float:
        """Returns the GPU-seconds ahead of a new request: all queued work, or its tenant's own over its share."""
        queue = self._queues.get(tenant)
        if queue is None:
            return 0.0
        return min(self.work_s, queue.work_s * self._total_weight / weight)

    def _front(self) -> tuple[float, int, str] | None:
        """Returns the current entry of the tenant whose turn it is, or None if the queue is empty."""
        tenant_heap = self._tenant_heap
        while tenant_heap:
            virtual_time, number, tenant = tenant_heap[0]
            queue = self._queues.get(tenant)
            if queue is None or queue.sequence_number != number:
                heapq.heappop(tenant_heap)
                continue
            current = self._accounts.virtual_time(tenant)
            if current <= virtual_time:
                return tenant_heap[0]
            heapq.heapreplace(tenant_heap, (current, number, tenant))
        return None

    def compact(self) -> None:
        """Drop heap entries of tenants that no longer wait."""
        if is_sparse(len(self._tenant_heap), len(self._queues)):
            self._tenant_heap = [entry for entry in self._tenant_heap if entry[2] in self._queues]
            self._tenant_heap = [
                entry for entry in self._tenant_heap if self._queues[entry[2]].sequence_number == entry[1]
            ]
            heapq.heapify(self._tenant_heap)
