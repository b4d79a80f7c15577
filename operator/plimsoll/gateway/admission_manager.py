"""Admission of all services at this gateway, kept in sync with the catalog and the published admission limits.

Problem: services and engines come and go, classes change, and published limits can disappear while requests are
queued. A fault in admission must not fail a request.

Idea: level-triggered, like the catalog. After each change every service has the `ServiceAdmission` that its policy
requires. Requests queued at a removed one are returned as orphans and submitted again. A `ServiceAdmission` that raises
is dropped and its traceback is logged. Its requests bypass admission until the next sync creates a new one.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Final, ParamSpec, TypeVar

from plimsoll.core.admission.adapter_slots import AdapterSlots
from plimsoll.core.admission.admission_driver import usable_replicas
from plimsoll.core.admission.cost_model import EngineCostModel
from plimsoll.core.admission.prefix_tokens import PrefixTokens
from plimsoll.core.admission.request import AdmissionDecision, AdmissionRequest
from plimsoll.core.admission.token_bucket import Spent, per_second
from plimsoll.core.admission.token_estimator import TokenEstimator
from plimsoll.core.types import Role
from plimsoll.core.units import MINUTE_S
from plimsoll.gateway.adapters import not_loaded_at
from plimsoll.gateway.admission_policy import AdmissionPolicy
from plimsoll.gateway.envoy.access_log import AccessRecord
from plimsoll.gateway.inflight import InFlightTracker
from plimsoll.gateway.request_context import RequestContext
from plimsoll.gateway.service_admission import ForwardedRequest, ServiceAdmission
from plimsoll.gateway.service_catalog import ServiceCatalog, ServiceEntry

log = logging.getLogger(__name__)

MAX_RELEASED: Final = 16  # requests of one queue in one turn of the event loop

P = ParamSpec("P")
T = TypeVar("T")


class AdmissionManager:
    """Admission of one gateway pod. Times are monotonic seconds; `unix` is the same moment in Unix seconds."""

    def __init__(self, gateway: str, inflight: InFlightTracker) -> None:
        self.gateways: Callable[[str], int | None] = lambda key: None  # see `ServiceAdmission`
        self.on_quota_use: Callable[[str], None] = lambda key: None  # something is taken of a quota of the service
        self.services: dict[str, ServiceAdmission] = {}
        self._gateway = gateway
        self._inflight = inflight
        self._catalog: ServiceCatalog | None = None
        self._forwarded: dict[str, ForwardedRequest] = {}
        self._token_estimators: dict[str, defaultdict[str, TokenEstimator]] = {}  # by service and path
        self._orphaned: list[RequestContext] = []

    def __len__(self) -> int:
        """The number of requests at engines."""
        return len(self._forwarded)

    def set_catalog(self, catalog: ServiceCatalog, now: float, unix: float) -> None:
        """Replace the catalog. Call `take_orphaned`, and `release` for every service, next.

        Only services that changed are synced, and those whose `ServiceAdmission` was dropped.
        """
        before = {} if self._catalog is None else self._catalog.services
        self._catalog = catalog
        for key in self._token_estimators.keys() - catalog.services.keys():
            del self._token_estimators[key]
        for key in list(self.services):
            if key not in catalog.services:
                self._remove(key)
        changed = [s for key, s in catalog.services.items() if s is not before.get(key) or key not in self.services]
        for service in changed:
            self._isolate_errors(service.key, self._sync_service, service, now, unix)
        self._update_replicas_of([service.key for service in changed], now)

    def update_replicas(self, now: float) -> list[str]:
        """Sync every service with its usable engines. Returns the keys of the services that changed."""
        return self._update_replicas_of(list(self.services), now)

    def _update_replicas_of(self, keys: list[str], now: float) -> list[str]:
        present = (key for key in keys if key in self.services)
        return [key for key in present if self._isolate_errors(key, self._update_service_replicas, key, now)]

    def tick(self, now: float, unix: float) -> None:
        """Update all services. Call this every second, and `release` for every service next."""
        for key, admission in list(self.services.items()):
            self._isolate_errors(key, admission.tick, now, now - unix)

    def has_reservation(self, ctx: RequestContext, now: float) -> bool:
        """Whether the request has a retry reservation at its target service."""
        admission = self.services.get(ctx.target_service)
        if admission is None or not admission.controller.reservations:
            return False
        return bool(self._isolate_errors(admission.key, admission.has_reservation, ctx, now))

    def submit(
        self, ctx: RequestContext, now: float, can_queue: Callable[[RequestContext], bool]
    ) -> AdmissionDecision | None:
        """Returns the decision of the request's target service, or None if that service has no admission.

        `can_queue` says whether the gateway has memory to queue the request.
        """
        admission = self.services.get(ctx.target_service)
        if admission is None:
            return None
        if ctx.tenant in admission.policy.tenants:
            self.on_quota_use(admission.key)
        return self._isolate_errors(admission.key, admission.submit, ctx, now, can_queue)

    def reject(self, ctx: RequestContext, now: float) -> AdmissionDecision | None:
        """Reject a request at its target service. Returns None if that service has no admission."""
        admission = self.services.get(ctx.target_service)
        return None if admission is None else self._isolate_errors(admission.key, admission.reject, ctx, now)

    def discard_reservation(self, ctx: RequestContext, now: float) -> None:
        """Drop the retry reservation at the target service: its client does not receive that rejection."""
        admission = self.services.get(ctx.target_service)
        if admission is not None:
            self._isolate_errors(admission.key, admission.discard_reservation, ctx, now)

    def release(self, key: str, now: float) -> list[tuple[RequestContext, AdmissionDecision]]:
        """Returns the next requests that leave the queue of this service, with their decisions."""
        admission = self.services.get(key)
        if admission is None or not admission.queued:
            return []
        return self._isolate_errors(key, admission.release, now, MAX_RELEASED) or []

    def take_orphaned(self) -> list[RequestContext]:
        """Returns the requests that were queued at a removed `ServiceAdmission`. Submit each again."""
        if not self._orphaned:
            return []
        orphaned, self._orphaned = self._orphaned, []
        for ctx in orphaned:
            ctx.admission_request = None
        return orphaned

    def wake_at_s(self, key: str) -> float:
        """The time to call `release` for this service even without an event. Infinity if never."""
        admission = self.services.get(key)
        if admission is None or not admission.queued:
            return math.inf
        wake_at_s = self._isolate_errors(key, admission.wake_at_s)
        return math.inf if wake_at_s is None else wake_at_s

    def record_forwarded(self, ctx: RequestContext, address: str, now: float) -> None:
        """Record that the request is sent to an engine, admitted or without admission."""
        request = ctx.admission_request
        if request is None:
            prompt = ctx.prompt
            request = AdmissionRequest(
                ctx.request_id, "", ctx.tenant, ctx.arrived_s, prompt.tokens,
                max_tokens=ctx.max_tokens, sequences=prompt.sequences,
                adapter="" if ctx.adapter is None else ctx.adapter.name,
            )  # fmt: skip
        waited_s = now - ctx.arrived_s
        self._forwarded[ctx.request_id] = ForwardedRequest(
            request, ctx.target_service, address, waited_s, ctx.stream, ctx.route.path
        )

    def forwarded(self, request_id: str) -> ForwardedRequest | None:
        """Returns a request at an engine, None if it is unknown."""
        return self._forwarded.get(request_id)

    def adopt(self, forwarded: ForwardedRequest, now: float) -> None:
        """Count a request at an engine that another gateway decided about."""
        self._forwarded[forwarded.request.id] = forwarded
        admission = self.services.get(forwarded.target_service)
        if admission is not None:
            self._isolate_errors(admission.key, admission.adopt, forwarded, now)

    def record_first_token(self, request_id: str, record: AccessRecord, now: float) -> bool:
        """Record the first token of a running response. Returns False if it is known, or the request is not."""
        forwarded = self._forwarded.get(request_id)
        if forwarded is None or forwarded.has_first_token:
            return False
        forwarded.has_first_token = True
        admission = self.services.get(forwarded.target_service)
        if admission is not None:
            self._isolate_errors(admission.key, admission.record_first_token, request_id, forwarded, record, now)
        return True

    def complete(self, request_id: str, record: AccessRecord | None, now: float) -> ForwardedRequest | None:
        """Record the end of a request at an engine. `record` is None if it is lost. Call `release` next.

        Returns the request, None if its service has no admission.
        """
        forwarded = self._forwarded.pop(request_id, None)
        admission = None if forwarded is None else self.services.get(forwarded.target_service)
        if forwarded is not None and admission is not None:
            self._isolate_errors(admission.key, admission.complete, request_id, forwarded, record, now)
        return None if admission is None else forwarded

    def cancel(self, ctx: RequestContext, now: float) -> None:
        """Remove a queued request whose client disconnected."""
        admission = self.services.get(ctx.target_service)
        if admission is not None:
            self._isolate_errors(admission.key, admission.cancel, ctx.request_id, now)

    def rollback(self, ctx: RequestContext, now: float) -> None:
        """Undo the admission or the queueing of a request that is not sent."""
        admission = self.services.get(ctx.target_service)
        if admission is not None:
            self._isolate_errors(admission.key, admission.rollback, ctx.request_id, now)

    def rejection_details(self, ctx: RequestContext) -> tuple[int, EngineCostModel | None]:
        """Returns the number of ready engines of the target service and its cost model.

        The cost model is None unless the request exceeds what one engine can hold.
        """
        admission = self.services.get(ctx.target_service)
        if admission is None:
            return 0, None
        return len(admission.controller.pool.replicas), self._isolate_errors(
            admission.key, admission.exceeded_model, ctx
        )

    def take_spent_quotas(self, key: str, now: float) -> dict[str, Spent]:
        """Returns what is spent of each tenant's quota of a service, and forgets it."""
        admission = self.services.get(key)
        if admission is None:
            return {}
        return self._isolate_errors(key, admission.controller.quotas.take_spent, now) or {}

    def changed_quotas(self, key: str, now: float, *, is_all: bool) -> dict[str, Spent]:
        """Returns what is spent of each quota of a service that has changed since the last call, or of all."""
        admission = self.services.get(key)
        return {} if admission is None else admission.controller.quotas.changed(now, is_all=is_all)

    def spend_quota(self, key: str, tenant: str, spent: Spent, now: float) -> None:
        """Count what another gateway has admitted of a tenant's quota of a service, if it has one here."""
        admission = self.services.get(key)
        policy = None if admission is None else admission.policy.tenants.get(tenant)
        if admission is not None and policy is not None:
            self._isolate_errors(key, admission.controller.quotas.spend, tenant, policy, spent, now)

    def quota_rates(self, key: str, tenant: str) -> tuple[float, float]:
        """Returns the requests and the tokens per second of a tenant's quota, 0 if it is unknown here."""
        admission = self.services.get(key)
        policy = None if admission is None else admission.policy.tenants.get(tenant)
        if policy is None:
            return 0.0, 0.0
        return per_second(policy.requests_per_s), per_second(policy.tokens_per_min, MINUTE_S)

    def kv_tokens(self, key: str) -> int | None:
        """Returns how many tokens an engine of the service holds at once, None if that is unknown."""
        admission = self.services.get(key)
        return None if admission is None else admission.controller.pool.cost_model.kv_tokens

    def mean_output_tokens(self, key: str) -> float:
        """Returns the mean output of one sequence of the service in tokens, 0 if that is unknown."""
        admission = self.services.get(key)
        return 0.0 if admission is None else admission.controller.pool.cost_model.output_mean

    def signals(self, key: str) -> dict[str, Any]:
        """Returns the service's `admission` part of `/signals`, all zero for a service without admission."""
        admission = self.services.get(key)
        if admission is None:
            return {"queued": 0, "queued_work_s": 0.0, "reserved_work_s": 0.0, "in_use": 0, "slots": 0}
        controller = admission.controller
        slots_in_use = [
            r.sequences + self._inflight.external_inflight(r.address) for r in controller.pool.replicas.values()
        ]
        return {
            "queued": len(admission.queued),
            "queued_work_s": round(controller.queued_work_s, 6),
            "reserved_work_s": round(controller.reservations.pending_work_s, 6),
            "in_use": max(slots_in_use, default=0),
            "slots": admission.slot_limit,
        }

    def adapter_slots(self, key: str) -> AdapterSlots | None:
        """Returns the places of the service's LoRA adapters, None for a service without LoRA or without admission."""
        admission = self.services.get(key)
        slots = None if admission is None else admission.controller.pool.adapters
        return slots if slots is not None and slots.max_adapters else None

    def max_model_error(self, key: str) -> tuple[float, float]:
        """Returns the largest step-time ratio and the largest TTFT residual (s) of the service's engines.

        Both are measured against the cost model. They are 1 and 0 if nothing is known.
        """
        admission = self.services.get(key)
        replicas = () if admission is None else admission.controller.pool.replicas.values()
        return max((r.step_time_ratio for r in replicas), default=1.0), max(
            (r.ttft_residual_s for r in replicas), default=0.0
        )

    def take_prefix_tokens(self, key: str) -> PrefixTokens:
        """Returns the prompt tokens of the service since the last call, by what engines know of them."""
        admission = self.services.get(key)
        return PrefixTokens() if admission is None else admission.controller.pool.take_prefix_tokens()

    def _sync_service(self, service: ServiceEntry, now: float, unix: float) -> None:
        """Create, update or remove the `ServiceAdmission` of a service, as its policy requires."""
        policy, admission = service.policy, self.services.get(service.key)
        if policy is None or policy.limits is None or policy.limits.cost_model is None:
            self._remove(service.key)
        elif not policy.has_cost_model:
            return  # the cost model is still for the previous classes; keep the previous `ServiceAdmission`
        elif admission is not None and admission.is_compatible(policy):
            admission.update_policy(policy, now, now - unix)
        else:
            self._remove(service.key)
            replacement = self.services[service.key] = self._create(service.key, policy, now, unix)
            if admission is not None:
                replacement.controller.reservations = (
                    admission.controller.reservations
                )  # keep the `Retry-After` sent to clients

    def _create(self, key: str, policy: AdmissionPolicy, now: float, unix: float) -> ServiceAdmission:
        estimators = self._token_estimators.setdefault(key, defaultdict(TokenEstimator))
        admission = ServiceAdmission(key, policy, self._gateway, estimators, now, lambda key: self.gateways(key))
        admission.tick(now, now - unix)
        return admission

    def _remove(self, key: str) -> None:
        admission = self.services.pop(key, None)
        if admission is not None:
            self._orphaned += admission.queued.values()

    def _update_service_replicas(self, key: str, now: float) -> bool:
        assert self._catalog is not None
        admission, endpoints = self.services[key], self._catalog.services[key].endpoints
        routable = [e for e in endpoints if e.routable and e.role is not Role.PREFILL]
        admission.set_adapters(not_loaded_at(self._catalog.services[key].adapters.values(), routable))
        slots, prefills = usable_replicas(
            endpoints, self._inflight.loads, admission.slot_limit, self._inflight.external_inflight
        )
        return admission.set_replicas(slots, prefills, self._forwarded_to(key), now)

    def _forwarded_to(self, key: str) -> Iterator[ForwardedRequest]:
        return (forwarded for forwarded in self._forwarded.values() if forwarded.target_service == key)

    def _isolate_errors(self, key: str, operation: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Returns the result of `operation`. If it raises, removes the service's admission and returns None."""
        try:
            return operation(*args, **kwargs)
        except Exception:  # a fault in admission must not fail requests
            log.exception("admission of %s failed; its requests bypass admission until the next catalog sync", key)
            self._remove(key)
            return None
