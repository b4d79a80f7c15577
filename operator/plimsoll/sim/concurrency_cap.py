"""A gateway that admits by a cap on requests in flight, in place of the operator's model.

Problem: reactive baselines are reference points for sizing. With the operator's admission control, each of hundreds of
runs would need the operator as well, and its result would depend on what the operator has learned.

Idea: a plain cap needs neither. While each engine that generates responses has `requests` in flight, further requests
queue at the gateway in arrival order. They are rejected after their patience.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, runtime_checkable

from plimsoll.core.admission.cost_model import ClassPolicy
from plimsoll.core.admission.quota import TenantPolicy
from plimsoll.core.admission.request import MAX_QUEUE_S, AdmissionDecision, AdmissionOutcome
from plimsoll.core.types import Role
from plimsoll.sim.attempt import Attempt, TraceRequest
from plimsoll.sim.gateway import SimulatedGateway


@dataclass(frozen=True)
class ConcurrencyCap:
    """requests: in flight at one engine that generates responses. patience_s: how long a request may
    queue.
    """

    requests: int
    patience_s: Callable[[TraceRequest], float]


@runtime_checkable
class ConcurrencyCapped(Protocol):
    """A policy whose gateways admit by a cap, None without one."""

    cap: ConcurrencyCap | None


class CappedGateway(SimulatedGateway):
    """A gateway that decides by a cap. With several gateways, their owner decides by the whole cap."""

    def __init__(
        self,
        name: str,
        classes: tuple[ClassPolicy, ...],
        tenants: Mapping[str, TenantPolicy],
        max_queued: int,
        epoch_s: float,
        fallback: bool = False,
        max_adapters: int = 0,
        *,
        concurrency_cap: ConcurrencyCap,
    ) -> None:
        super().__init__(name, classes, tenants, max_queued, epoch_s, fallback, max_adapters)
        self._cap, self._patience_s = concurrency_cap.requests, concurrency_cap.patience_s
        self._deadlines: list[tuple[float, str]] = []

    @property
    def wake_s(self) -> float:
        """When the next queued request reaches its patience."""
        while self._deadlines and self._deadlines[0][1] not in self.queued:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def submit(self, attempt: Attempt, now_s: float, *, is_new: bool = True) -> AdmissionDecision | None:
        """Returns None if the request is admitted."""
        super().submit(attempt, now_s, is_new=is_new)
        if not self.queued and self._free_slots():
            return None
        key, due_s = (
            str(attempt.id),
            attempt.trace_request.at_s + min(MAX_QUEUE_S, max(0.0, self._patience_s(attempt.trace_request))),
        )
        if len(self.queued) >= self._max_queued or due_s <= now_s:
            return AdmissionDecision(key, AdmissionOutcome.SHED_SATURATED)
        self.queued[key] = attempt
        attempt.was_queued = True
        self._outcomes[AdmissionOutcome.QUEUED] += 1
        heapq.heappush(self._deadlines, (due_s, key))
        return AdmissionDecision(key, AdmissionOutcome.QUEUED)

    def release(self, now_s: float) -> list[tuple[Attempt, AdmissionDecision | None]]:
        """Queued requests that are now admitted, in arrival order, and those that are rejected after their patience."""
        released: list[tuple[Attempt, AdmissionDecision | None]] = []
        while self.wake_s <= now_s:
            _, key = heapq.heappop(self._deadlines)
            released.append((self.queued.pop(key), AdmissionDecision(key, AdmissionOutcome.SHED_SATURATED)))
        for key in list(islice(self.queued, self._free_slots() if self.queued else 0)):
            released.append((self.queued.pop(key), None))
        return released

    def _free_slots(self) -> int:
        """Requests that can be admitted now."""
        answering = (one.address for one in self._endpoints if one.role is not Role.PREFILL)
        return sum(max(0, self._cap - self._loads[address].inflight) for address in answering)
