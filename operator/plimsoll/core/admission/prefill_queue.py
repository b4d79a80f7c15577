"""The queue at one prefill replica, as one gateway estimates it.

Problem: a gateway knows what it sent there and how long that takes by the model. Requests of other gateways, a slower
GPU and noise create a queue that it did not predict. It learns about that queue only when one of its own requests ends.

Idea: a first-come-first-served server becomes free at max over j of a_j + s_j + ... + s_n, for jobs sent at a_j with
service time s_j (Lindley 1952). A known completion replaces all jobs sent up to it, and later jobs are computed from
it. So only the newest known completion counts. With W_j = s_1 + ... + s_j the maximum is W_n + max(a_j - W_(j-1)), and
a monotonic queue of maxima computes it in amortised constant time.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

_EPSILON_S: Final = 1e-9  # remaining work below this is a rounding error


@dataclass(slots=True, eq=False)
class RemotePrefill:
    """One request in a prefill queue.

    `service_s` is its own work, `cumulative_work_s` that of all before it and its own. `remaining_s` is the time from
    the end of its prefill to its first token.
    """

    queue: PrefillQueue
    number: int
    sent_s: float
    service_s: float
    cumulative_work_s: float
    remaining_s: float


class PrefillQueue:
    """The requests that one gateway sent to one prefill replica, estimated done at `free_s`."""

    def __init__(self, address: str, now: float) -> None:
        self.address = address
        self.free_s = now
        self._work_s = 0.0  # work of all jobs ever sent, without cancelled ones
        self._number = self._last_known = 0  # jobs sent; the newest with a known completion
        self._known_end_s = -math.inf  # that completion minus the cumulative work up to it
        self._pending: dict[int, RemotePrefill] = {}  # later jobs in order that may not be done
        self._busy_starts: deque[tuple[int, float]] = deque()  # (job, start minus the work before it)

    def submit(self, work_s: float, remaining_s: float, now: float) -> RemotePrefill:
        """Add a request sent now. `work_s` includes what other gateways send meanwhile."""
        self._drop_completed(now)
        self._number += 1
        prefill = self._pending[self._number] = RemotePrefill(self, self._number, now, work_s, 0.0, remaining_s)
        self._append(prefill)
        self._recompute()
        return prefill

    def complete(self, prefill: RemotePrefill, end_s: float, step_s: float) -> None:
        """Record that a prefill ended at `end_s`.

        `step_s` is the longest step, in which later jobs may have ended as well.
        """
        if prefill.number <= self._last_known:  # a later completion is known
            return
        busy_starts, known_s = self._busy_starts, self._known_end_s
        if busy_starts and busy_starts[0][0] <= prefill.number:
            known_s = max(known_s, busy_starts[0][1])
        latest_s = end_s - prefill.cumulative_work_s
        earliest_s = latest_s - min(step_s, self._work_s - prefill.cumulative_work_s)
        self._last_known, self._known_end_s = prefill.number, min(max(known_s, earliest_s), latest_s)
        while busy_starts and busy_starts[0][0] <= prefill.number:
            busy_starts.popleft()
        while self._pending and (first := next(iter(self._pending))) <= prefill.number:
            del self._pending[first]
        self._recompute()

    def cancel(self, prefill: RemotePrefill, now: float) -> None:
        """Drop the remaining work of a cancelled prefill, so that later jobs start earlier."""
        if prefill.number not in self._pending:  # done, or a later completion is known
            return
        done_s = prefill.service_s - (self._completion_s(prefill) - now)
        if done_s >= prefill.service_s:
            return
        first = next(iter(self._pending.values()))
        self._work_s = first.cumulative_work_s - first.service_s
        prefill.service_s = done_s
        if done_s <= _EPSILON_S:
            del self._pending[prefill.number]
        self._busy_starts = deque(busy_start for busy_start in self._busy_starts if busy_start[0] < first.number)
        for pending in self._pending.values():
            self._append(pending)
        self._recompute()
        self.free_s = max(self.free_s, now)  # the cancelled job may have been the only one

    def _completion_s(self, prefill: RemotePrefill) -> float:
        """Returns the estimated completion time."""
        begin_s = self._busy_starts[0][1] if self._busy_starts[0][0] <= prefill.number else -math.inf
        return prefill.cumulative_work_s + max(self._known_end_s, begin_s)

    def _drop_completed(self, now: float) -> None:
        """Drop jobs that are done by estimate, because their completion may never be reported."""
        while self._pending and self._completion_s(first := next(iter(self._pending.values()))) <= now:
            del self._pending[first.number]

    def _append(self, prefill: RemotePrefill) -> None:
        """Append the last job, and drop busy periods that end before it was sent."""
        busy_starts, begin_s = self._busy_starts, prefill.sent_s - self._work_s
        while busy_starts and busy_starts[-1][1] <= begin_s:
            busy_starts.pop()
        busy_starts.append((prefill.number, begin_s))
        self._work_s += prefill.service_s
        prefill.cumulative_work_s = self._work_s

    def _recompute(self) -> None:
        begin_s = self._busy_starts[0][1] if self._busy_starts else -math.inf
        self.free_s = self._work_s + max(self._known_end_s, begin_s)
