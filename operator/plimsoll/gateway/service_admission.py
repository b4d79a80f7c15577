"""Admission of one service at this gateway: adapts gateway requests to the `AdmissionController`.

Problem: the controller assumes that it sees every ready replica and every request. At a gateway, engines disappear and
return with running requests, and Envoy carries requests that admission never saw. The published limits use Unix time
and cover all gateways together.

Idea: the manager keeps the forwarded requests outside the controller. A replica that returns, or a new controller for
other classes, starts with the requests that already run. Requests at an engine that no picker sent reduce this
gateway's slots there. The owner of a service has all slots of each engine. Another gateway counts its own requests, and
has an equal share for the time in which the owner does not answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final

import msgspec

from plimsoll.core.admission.arrival_estimator import ArrivalEstimator
from plimsoll.core.admission.capacity_announcement import CapacityAnnouncement
from plimsoll.core.admission.controller import AdmissionController
from plimsoll.core.admission.cost_model import EngineCostModel
from plimsoll.core.admission.fairness import IDLE_TENANT_TTL_S
from plimsoll.core.admission.publication import AdmissionLimits
from plimsoll.core.admission.request import AdmissionDecision, AdmissionOutcome, AdmissionRequest
from plimsoll.core.admission.token_estimator import TokenEstimator
from plimsoll.core.routing.endpoint import Prompt
from plimsoll.gateway.admission_policy import AdmissionPolicy
from plimsoll.gateway.envoy.access_log import AccessRecord, RequestOutcome
from plimsoll.gateway.request_context import RequestContext
from plimsoll.gateway.settings import MAX_QUEUE_SECONDS

MAX_TENANTS: Final = 1000  # tracked by name; all others share one account
# Prompt tokens are estimated from bytes. An estimate near the limit must not reject a prompt as too long.
CERTAIN_KV_SHARE: Final = 0.75
PROMPT_OVERESTIMATE: Final = 4


class ForwardedRequest(msgspec.Struct, eq=False):
    """A request at an engine. `queued_s` is the time from its arrival to its admission, `path` that of its route."""

    request: AdmissionRequest
    target_service: str
    address: str
    queued_s: float
    stream: bool
    path: str
    registered_late: bool = False  # admitted before this controller existed: its TTFT updates no estimate
    has_first_token: bool = False  # known while its response runs
    output_tokens: int | None = None  # of its complete stream, None if unknown
    work_s: float = 0.0  # engine time of its complete response, 0 if unknown


class ServiceAdmission:
    """Admission of one service. Raises ValueError for a policy without a cost model."""

    def __init__(
        self,
        key: str,
        policy: AdmissionPolicy,
        gateway: str,
        token_estimators: Mapping[str, TokenEstimator],
        now: float,
        gateways: Callable[[str], int | None] = lambda key: None,
    ) -> None:
        """Create the admission of the service.

        `token_estimators` are those of each path, because each API has other bytes around a token. `gateways` returns
        among how many gateways the slots of a service are divided: 1 at its owner, None for the published shares.
        """
        self.key = key
        self.policy = policy  # includes the published limits
        self._cost_model = _cost_model(policy)
        self.controller = AdmissionController(policy.classes, self._cost_model, policy.tenants)
        self.queued: dict[str, RequestContext] = {}
        self._gateway = gateway
        self._gateways = gateways
        self._token_estimators = token_estimators
        self._slots_by_endpoint: dict[str, int] | None = {}  # None forces the next `set_replicas` to update
        self._prefills: frozenset[str] = frozenset()
        self._tenant_seen_s: dict[str, float] = {}  # last request by tenant
        self._overdue: list[str] = []  # request IDs queued for longer than `MAX_QUEUE_SECONDS`
        self._arrivals = ArrivalEstimator(now)

    @property
    def slot_limit(self) -> int:
        """The number of sequences that this gateway may run on each replica."""
        return self._limits.slot_limit(self._gateway)

    @property
    def _limits(self) -> AdmissionLimits:
        """The published limits, with this gateway's share."""
        limits, gateways = self.policy.limits, self._gateways(self.key)
        assert limits is not None
        if gateways is None or limits.cost_model is None:
            return limits
        return replace(limits, shares={self._gateway: max(1, limits.cost_model.batch // gateways)})

    @property
    def slots_in_use(self) -> int:
        """The largest number of sequences that this gateway runs on one replica."""
        return max((replica.sequences for replica in self.controller.pool.replicas.values()), default=0)

    def wake_at_s(self) -> float:
        """The time to call `release` even without an event. Infinity if never."""
        return self.controller.wake_at_s

    def is_compatible(self, policy: AdmissionPolicy) -> bool:
        """Whether the controller can keep running with this policy. Otherwise create a new one."""
        return policy.classes == self.policy.classes

    def update_policy(self, policy: AdmissionPolicy, now: float, unix: float) -> None:
        """Apply a policy that the operator or the user changed."""
        if policy is self.policy:
            return
        previous, previous_model = self.policy, self._cost_model
        self.policy, self._cost_model = policy, _cost_model(policy)
        if policy.tenants != previous.tenants:
            self.controller.set_tenants(policy.tenants)
        model_changed = previous_model != self._cost_model
        self.controller.tick(now, self._announcement(now, unix), self._cost_model if model_changed else None)
        if model_changed:
            self._slots_by_endpoint = None  # shares are fractions of the batch size, which may have changed

    def set_replicas(
        self,
        slots: Mapping[str, int],
        prefills: frozenset[str],
        forwarded_requests: Iterable[ForwardedRequest],
        now: float,
    ) -> bool:
        """Set the ready replicas and this gateway's slots on each. Returns whether anything changed.

        `forwarded_requests` are all requests at engines of this service. Those at a new replica are registered.
        """
        if slots == self._slots_by_endpoint and prefills == self._prefills:
            return False
        new = slots.keys() - (self._slots_by_endpoint or {}).keys()
        self._slots_by_endpoint, self._prefills = dict(slots), prefills
        self.controller.set_replicas(slots, now, prefills)
        for forwarded in forwarded_requests if new else ():
            if forwarded.address in new and self.controller.register_running(
                self._reclassify(forwarded.request), forwarded.address, now
            ):
                forwarded.registered_late = True
        return True

    def set_adapters(self, not_loaded_on: Mapping[str, Collection[str]]) -> None:
        """Set the addresses of engines that have not loaded an adapter, by adapter, as far as that is known."""
        self.controller.pool.adapters.configure(self.policy.max_loras, not_loaded_on)

    def adopt(self, forwarded: ForwardedRequest, now: float) -> None:
        """Count a request at an engine that another gateway decided about."""
        if forwarded.address in (self._slots_by_endpoint or {}):
            self.controller.register_running(self._reclassify(forwarded.request), forwarded.address, now)

    def has_reservation(self, ctx: RequestContext, now: float) -> bool:
        """Whether the request has a retry reservation here."""
        return self.controller.reservations.find(self._to_admission_request(ctx), now) is not None

    def submit(self, ctx: RequestContext, now: float, can_queue: Callable[[RequestContext], bool]) -> AdmissionDecision:
        """Returns the decision; queues the request if it is Queued. `can_queue`: the gateway has memory for it."""
        request = self._to_admission_request(ctx)
        decision = self.controller.submit(request, now)
        if decision.outcome is AdmissionOutcome.QUEUED:
            if not can_queue(ctx) or len(self.queued) >= self.policy.max_queued:
                self.controller.cancel(ctx.request_id, now)
                return self.controller.reject(request, now)
            self.queued[ctx.request_id] = ctx
        return decision

    def reject(self, ctx: RequestContext, now: float) -> AdmissionDecision:
        """Reject the request without a fallback, for a reason unknown to the controller."""
        return self.controller.reject(replace(self._to_admission_request(ctx), has_fallback=False), now)

    def discard_reservation(self, ctx: RequestContext, now: float) -> None:
        """Drop the request's retry reservation, because its client does not receive this rejection."""
        reservation = self.controller.reservations.find(self._to_admission_request(ctx), now)
        if reservation is not None:
            self.controller.reservations.redeem(reservation)

    def exceeded_model(self, ctx: RequestContext) -> EngineCostModel | None:
        """Returns the cost model if even an empty engine cannot hold the request, else None."""
        pool = self.controller.pool
        return None if pool.can_ever_fit(pool.estimate_cost(self._to_admission_request(ctx))) else pool.cost_model

    def release(self, now: float) -> list[tuple[RequestContext, AdmissionDecision]]:
        """Returns the requests that leave the queue, with their decisions."""
        decisions = self.controller.release(now)
        overdue, self._overdue = self._overdue, []
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

    def record_first_token(
        self, request_id: str, forwarded: ForwardedRequest, record: AccessRecord, now: float
    ) -> None:
        """Record the first token of a running response."""
        ttft_s = _ttft_s(forwarded, record)
        if ttft_s is not None:
            self.controller.record_first_token(request_id, now, ttft_s)

    def complete(self, request_id: str, forwarded: ForwardedRequest, record: AccessRecord | None, now: float) -> None:
        """Record the end of a request at an engine. `record` is None if it is lost."""
        ttft_s = output_tokens = None
        if record is not None and record.ttft_s is not None:
            output_tokens = self._output_tokens(forwarded, record)
            ttft_s = _ttft_s(forwarded, record)
        forwarded.output_tokens = output_tokens
        forwarded.work_s = self._work_s(request_id, forwarded, output_tokens)
        self.controller.complete(request_id, now, output_tokens, ttft_s)

    def _work_s(self, request_id: str, forwarded: ForwardedRequest, output_tokens: int | None) -> float:
        """Returns the engine time of a request that ends, with its prompt's cached part and its real output."""
        replica = self.controller.pool.replicas.get(forwarded.address)
        running = None if replica is None else replica.running.get(request_id)
        if running is None:
            return 0.0
        cost = running.cost
        output = 1.0 if output_tokens is None else output_tokens / cost.output_tokens
        return cost.stall_s + output * max(0.0, cost.work_s - cost.stall_s)

    def tick(self, now: float, unix: float) -> None:
        """Update the controller. Call this once a second."""
        self._arrivals.update(self.controller.offered_work_s, now)
        self.controller.tick(now, self._announcement(now, unix))
        self._overdue = [
            request_id for request_id, ctx in self.queued.items() if now - ctx.arrived_s >= MAX_QUEUE_SECONDS
        ]
        for name in [name for name, seen_s in self._tenant_seen_s.items() if now - seen_s > IDLE_TENANT_TTL_S]:
            del self._tenant_seen_s[name]

    def _reject_overdue(self, ctx: RequestContext, now: float) -> AdmissionDecision:
        self.controller.cancel(ctx.request_id, now)
        return self.controller.reject(self._to_admission_request(ctx), now)

    def _to_admission_request(self, ctx: RequestContext) -> AdmissionRequest:
        """Returns the controller's view of a request, cached in the context."""
        if ctx.admission_request is None:
            prompt, request_class = ctx.prompt, self.policy.class_of(ctx.request_class).name
            ctx.admission_request = AdmissionRequest(  # positional: keyword arguments cost 1 us
                ctx.request_id,
                request_class,
                self._tracked_tenant(ctx.tenant, ctx.arrived_s),
                ctx.arrived_s,
                self._prompt_tokens(prompt, is_estimated=ctx.is_estimated),
                0,
                ctx.max_tokens,
                prompt.sequences,
                ctx.deadline.first_token_s if ctx.deadline.first_token_s < math.inf else None,
                ctx.body_digest,
                ctx.idempotency_key,
                ctx.fallback is not None,
                ctx.block_hashes,
                ctx.is_retry,
                ctx.deadline.complete_s if ctx.deadline.complete_s < math.inf else None,
                "" if ctx.adapter is None else ctx.adapter.name,
                ctx.stream,
            )
        return ctx.admission_request

    def _announcement(self, now: float, unix: float) -> CapacityAnnouncement:
        """Returns the expected capacity, on the monotonic clock and scaled to this gateway's share.

        Without a ready replica, a time that has passed is no promise any more.
        """
        limits = self._limits if self.controller.pool.replicas else self._limits.after(unix)
        return limits.announcement(self._gateway, self._arrivals.work_rate, now - unix)

    def _output_tokens(self, forwarded: ForwardedRequest, record: AccessRecord) -> int | None:
        if not forwarded.stream or record.outcome is not RequestOutcome.SUCCEEDED:
            return None
        return self._token_estimators[forwarded.path].estimate(
            record.sent_bytes or 0, forwarded.request.sequences, self._cost_model.output_mean
        )

    def _tracked_tenant(self, name: str, now: float) -> str:
        if (
            name not in self._tenant_seen_s
            and name not in self.policy.tenants
            and len(self._tenant_seen_s) >= MAX_TENANTS
        ):
            return ""
        self._tenant_seen_s[name] = now
        return name

    def _prompt_tokens(self, prompt: Prompt, *, is_estimated: bool) -> int:
        tokens = prompt.tokens
        if not is_estimated and prompt.sequences == 1:  # several prompts of token IDs count by their mean
            return tokens
        certain_tokens = int(CERTAIN_KV_SHARE * self._cost_model.kv_tokens / prompt.sequences)
        return tokens if tokens <= certain_tokens else max(certain_tokens, tokens // PROMPT_OVERESTIMATE)

    def _reclassify(self, request: AdmissionRequest) -> AdmissionRequest:
        """Returns a running request with its class mapped to the classes of this policy."""
        request_class = self.policy.class_of(request.request_class.encode()).name
        return request if request.request_class == request_class else replace(request, request_class=request_class)


def _ttft_s(forwarded: ForwardedRequest, record: AccessRecord) -> float | None:
    """Returns the time from admission to the first token. None if it was not predicted, or for another engine."""
    if record.ttft_s is None or forwarded.registered_late or record.upstream not in (None, "", forwarded.address):
        return None
    return max(0.0, record.ttft_s - (record.received_us or 0) / 1e6 - forwarded.queued_s)


def _cost_model(policy: AdmissionPolicy) -> EngineCostModel:
    if policy.limits is None or policy.limits.cost_model is None:
        raise ValueError("the policy has no cost model: its InferenceServiceAdmission has no limits.costModel")
    return policy.limits.cost_model


def slots_by_endpoint(slots: int, external_inflight: Mapping[str, int], suspect: Collection[str]) -> dict[str, int]:
    """Returns the number of sequences that this gateway may run on each endpoint, by address.

    `external_inflight` counts the requests that no picker sent, by address. `suspect` endpoints get no slots unless all
    endpoints are suspect.
    """
    avoid = suspect if len(suspect) < len(external_inflight) else ()
    return {
        address: 0 if address in avoid else max(0, slots - external) for address, external in external_inflight.items()
    }
