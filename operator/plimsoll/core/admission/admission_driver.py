"""Drives the `AdmissionController` of one service at one gateway, real or simulated, as requests, limits and engines
change.

Problem: the controller assumes that it sees every ready replica and every request, and that its caller holds what is
queued. At a gateway, engines disappear and return with running requests. The published limits use Unix time and cover
all gateways together.

Idea: the order of the controller's calls is here, once. The gateway and the simulator pass in the time, and functions
that make an `AdmissionRequest` of what each keeps of a request. A replica that returns, or a new controller, starts
with the requests that already run there. The owner of a service has all slots of each engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Generic, Protocol, TypeVar

from plimsoll.core.admission.arrival_estimator import ArrivalEstimator
from plimsoll.core.admission.capacity_announcement import CapacityAnnouncement
from plimsoll.core.admission.controller import NO_LIMIT, AdmissionController
from plimsoll.core.admission.cost_model import ClassPolicy, EngineCostModel
from plimsoll.core.admission.publication import AdmissionLimits
from plimsoll.core.admission.quota import TenantPolicy
from plimsoll.core.admission.request import MAX_QUEUE_S, AdmissionDecision, AdmissionOutcome, AdmissionRequest
from plimsoll.core.routing.endpoint import Endpoint, EndpointLoad
from plimsoll.core.routing.picker import eligible
from plimsoll.core.types import Role


class SentRequest(Protocol):
    """A request at an engine. `registered_late`: it ran before this controller did, so its TTFT updates no estimate."""

    address: str
    registered_late: bool


Queued = TypeVar("Queued")
Sent = TypeVar("Sent", bound=SentRequest)


class AdmissionDriver(Generic[Queued, Sent]):
    """Admission of one service at one gateway.

    `now` is a time of the gateway's clock, `clock_offset_s` that clock minus Unix time. Raises ValueError for limits
    without a cost model.
    """

    def __init__(
        self,
        gateway: str,
        classes: tuple[ClassPolicy, ...],
        tenants: Mapping[str, TenantPolicy],
        limits: AdmissionLimits,
        max_queued: int,
        now: float,
        *,
        queued_request: Callable[[Queued], AdmissionRequest],
        sent_request: Callable[[Sent], AdmissionRequest],
        gateways: Callable[[], int | None] = lambda: 1,
    ) -> None:
        """`gateways` returns among how many gateways the slots are divided: 1 at the owner of the service, None for the
        published shares.
        """
        self.cost_model = _cost_model_of(limits)
        self.controller = AdmissionController(classes, self.cost_model, tenants)
        self.queued: dict[str, Queued] = {}
        self.max_queued = max_queued
        self._gateway, self._gateways, self._published = gateway, gateways, limits
        self._queued_request, self._sent_request = queued_request, sent_request
        self._slots: dict[str, int] | None = {}  # by address; None forces the next `set_replicas` to update
        self._prefills: frozenset[str] = frozenset()
        self._overdue: list[str] = []  # IDs of requests queued for longer than MAX_QUEUE_S
        self._arrivals = ArrivalEstimator(now)

    @property
    def slot_limit(self) -> int:
        """The number of sequences that this gateway may run on each replica."""
        return self._limits.slot_limit(self._gateway)

    @property
    def _limits(self) -> AdmissionLimits:
        gateways = self._gateways()
        return self._published if gateways is None else self._published.with_equal_share(self._gateway, gateways)

    def wake_at_s(self) -> float:
        """The time to call `release` even without an event. Infinity if never."""
        return -math.inf if self._overdue else self.controller.wake_at_s if self.queued else math.inf

    def update_limits(self, limits: AdmissionLimits, now: float, clock_offset_s: float) -> None:
        """Apply newly published limits. Call `set_replicas` next."""
        previous, self.cost_model = self.cost_model, _cost_model_of(limits)
        self._published = limits
        changed = previous != self.cost_model
        self.controller.tick(now, self._announcement(now, clock_offset_s), self.cost_model if changed else None)
        if changed:
            self._slots = None  # shares are fractions of the batch size, which may have changed

    def set_replicas(
        self, slots: Mapping[str, int], prefills: frozenset[str], sent_requests: Iterable[Sent], now: float
    ) -> bool:
        """Set the ready replicas and this gateway's slots on each. Returns whether anything changed.

        `sent_requests` are all requests at engines of this service. Those at a new replica are registered.
        """
        if slots == self._slots and prefills == self._prefills:
            return False
        new = slots.keys() - (self._slots or {}).keys()
        self._slots, self._prefills = dict(slots), prefills
        self.controller.set_replicas(slots, now, prefills)
        for sent in sent_requests if new else ():
            if sent.address in new and self._register(sent, now):
                sent.registered_late = True
        return True

    def adopt(self, sent: Sent, now: float) -> None:
        """Count a request at an engine that another gateway decided about."""
        if sent.address in (self._slots or {}):
            self._register(sent, now)

    def has_reservation(self, queued: Queued, now: float) -> bool:
        """Whether the request has a retry reservation here."""
        return self.controller.reservations.find(self._queued_request(queued), now) is not None

    def discard_reservation(self, queued: Queued, now: float) -> None:
        """Drop the request's retry reservation, because its client does not receive this rejection."""
        reservation = self.controller.reservations.find(self._queued_request(queued), now)
        if reservation is not None:
            self.controller.reservations.redeem(reservation)

    def submit(
        self, queued: Queued, now: float, can_queue: Callable[[Queued], bool] = lambda _: True
    ) -> AdmissionDecision:
        """Returns the decision; queues the request if it is Queued. `can_queue`: the gateway has memory for it."""
        request = self._queued_request(queued)
        decision = self.controller.submit(request, now)
        if decision.outcome is AdmissionOutcome.QUEUED:
            if not can_queue(queued) or len(self.queued) >= self.max_queued:
                self.controller.cancel(request.id, now)
                return self.controller.reject(request, now)
            self.queued[request.id] = queued
        return decision

    def exceeded_model(self, queued: Queued) -> EngineCostModel | None:
        """Returns the cost model if even an empty engine cannot hold the request, else None."""
        pool = self.controller.pool
        return None if pool.can_ever_fit(pool.estimate_cost(self._queued_request(queued))) else pool.cost_model

    def release(self, now: float, limit: int = NO_LIMIT) -> list[tuple[Queued, AdmissionDecision]]:
        """Returns at most `limit` requests that leave the queue, with their decisions, as the controller does."""
        decisions = self.controller.release(now, limit)
        left = limit - len(decisions)
        overdue, self._overdue = self._overdue[:left], self._overdue[left:]
        decisions += [
            self._reject_overdue(self.queued[request_id], now) for request_id in overdue if request_id in self.queued
        ]
        return [(self.queued.pop(decision.request_id), decision) for decision in decisions]

    def cancel(self, request_id: str, now: float) -> bool:
        """Remove a queued request whose client disconnected. Returns False if it is not queued."""
        if self.queued.pop(request_id, None) is None:
            return False
        self.controller.cancel(request_id, now)
        return True

    def rollback(self, request_id: str, now: float) -> None:
        """Undo the admission or the queueing of a request that is not sent."""
        if not self.cancel(request_id, now):
            self.controller.complete(request_id, now)

    def on_first_token(self, request_id: str, sent: Sent, ttft_s: float | None, now: float) -> None:
        """Record the first token of a running response, `ttft_s` after its admission; None if that is unknown."""
        if ttft_s is not None and not sent.registered_late:
            self.controller.record_first_token(request_id, now, ttft_s)

    def on_end(self, request_id: str, sent: Sent, output_tokens: int | None, ttft_s: float | None, now: float) -> None:
        """Record the end of a request at an engine. Call `release` next."""
        self.controller.complete(request_id, now, output_tokens, None if sent.registered_late else ttft_s)

    def tick(self, now: float, clock_offset_s: float) -> None:
        """Update the controller. Call this once a second, and `release` next."""
        self._arrivals.update(self.controller.offered_work_s, now)
        self.controller.tick(now, self._announcement(now, clock_offset_s))
        self._overdue = [
            request_id
            for request_id, queued in self.queued.items()
            if now - self._queued_request(queued).arrived_s >= MAX_QUEUE_S
        ]

    def _register(self, sent: Sent, now: float) -> bool:
        return self.controller.register_running(self._sent_request(sent), sent.address, now)

    def _reject_overdue(self, queued: Queued, now: float) -> AdmissionDecision:
        request = self._queued_request(queued)
        self.controller.cancel(request.id, now)
        return self.controller.reject(request, now)

    def _announcement(self, now: float, clock_offset_s: float) -> CapacityAnnouncement:
        """Returns the expected capacity, on the gateway's clock and scaled to its share.

        Without a ready replica, a time that has passed is no promise any more.
        """
        limits = self._limits if self.controller.pool.replicas else self._limits.after(now - clock_offset_s)
        return limits.announcement(self._gateway, self._arrivals.work_rate, clock_offset_s)


def usable_replicas(
    endpoints: Collection[Endpoint],
    loads: Mapping[str, EndpointLoad],
    slots: int,
    external_inflight: Callable[[str], int] = lambda _: 0,
) -> tuple[dict[str, int], frozenset[str]]:
    """Returns the number of sequences that a gateway may run on each replica, by address, and the prefill replicas.

    `external_inflight` returns the requests at an address that no gateway decided about: they reduce its slots there.
    Suspect replicas get no slots unless all are suspect. A prefill replica is used if a decode replica of its revision
    is there.
    """
    routable = [e for e in endpoints if e.routable and e.role is not Role.PREFILL]
    healthy = {e.address for e in eligible(routable, loads)}
    avoids_suspect = bool(healthy)
    free = {
        e.address: 0 if avoids_suspect and e.address not in healthy else max(0, slots - external_inflight(e.address))
        for e in routable
    }
    revisions = {e.revision for e in routable if e.role is Role.DECODE}
    prefills = (e for e in endpoints if e.role is Role.PREFILL and e.revision in revisions)
    return free, frozenset(e.address for e in eligible(prefills, loads))


def _cost_model_of(limits: AdmissionLimits) -> EngineCostModel:
    if limits.cost_model is None:
        raise ValueError("the admission limits have no cost model: InferenceServiceAdmission has no limits.costModel")
    return limits.cost_model
