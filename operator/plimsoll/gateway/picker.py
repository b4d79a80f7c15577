"""The decision about one request: reject it, queue it, or name its cluster, its endpoint and its prefill engine.

The caller passes in the catalog, the access-log records, the time and the random generator. A queued request is a
future. The event that frees capacity for the request resolves the future.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from random import Random

from plimsoll.core.admission.request import AdmissionDecision, AdmissionOutcome
from plimsoll.core.admission.retry_detection import RecentRejections
from plimsoll.core.types import Role
from plimsoll.gateway import error_messages
from plimsoll.gateway.adapters import AdapterRequests
from plimsoll.gateway.admission_manager import AdmissionManager
from plimsoll.gateway.api_routes import CHAT_ROUTE, ApiRoute, BodyForm, ErrorShape
from plimsoll.gateway.audio_form import parse_audio_form
from plimsoll.gateway.availability import availability, next_engine_s, no_endpoint, no_unbooked_engine
from plimsoll.gateway.clock import Clock, LoopClock
from plimsoll.gateway.endpoint_subset import is_partial, is_unusable
from plimsoll.gateway.engine_choice import EngineChoice
from plimsoll.gateway.envoy_reports import EnvoyReports
from plimsoll.gateway.errors import Rejection, to_response
from plimsoll.gateway.http1 import response
from plimsoll.gateway.identity import Authenticator, Identity, count_unknown_class, model_not_allowed
from plimsoll.gateway.inflight import InFlightTracker
from plimsoll.gateway.key_limits import KeyLimits, charged_tokens
from plimsoll.gateway.one_queue.port import Owners
from plimsoll.gateway.picker_replies import dispatch_response, rejection_response, slo_deadlines
from plimsoll.gateway.request_attributes import AttributeStore
from plimsoll.gateway.request_body import Body, size_of, whole
from plimsoll.gateway.request_bounds import bound_request
from plimsoll.gateway.request_context import (
    RETRY_COUNT_HEADER,
    ForeignRequest,
    RequestContext,
    new_context,
    request_id_of,
)
from plimsoll.gateway.request_demand import demand_by_service, demand_tokens
from plimsoll.gateway.request_parser import MAX_SEQUENCES_PER_PROMPT, ParsedRequest, parse_body
from plimsoll.gateway.request_queue import RequestQueue
from plimsoll.gateway.request_stats import RequestStats
from plimsoll.gateway.retry_identity import OWN_SEED, body_digest, claims_retry
from plimsoll.gateway.revoked_requests import RevokedRequests
from plimsoll.gateway.service_catalog import EMPTY_CATALOG, ServiceCatalog, ServiceEntry
from plimsoll.gateway.tenant_cache import prefix_hashes
from plimsoll.telemetry import gateway_metrics

log = logging.getLogger(__name__)

Reply = bytes | Awaitable[bytes]
ParseBody = Callable[[Body, ApiRoute], ParsedRequest | Rejection]


class Picker:
    """Picks engines for all services. Times are monotonic seconds. `instance_id` identifies this picker's counters."""

    def __init__(
        self,
        random: Random,
        gateway: str = "",
        authenticator: Authenticator | None = None,
        clock: Clock | None = None,
        attributes: AttributeStore | None = None,
    ) -> None:
        """`gateway` is the name of this pod. Without an `authenticator` everybody is anonymous."""
        self.instance_id = secrets.token_hex(8)
        self.catalog: ServiceCatalog = EMPTY_CATALOG
        self.inflight = InFlightTracker()
        self.pick_s = 0.0  # time spent on picks since the metrics were read
        self.admission = AdmissionManager(gateway, self.inflight)
        self.stats_by_service: dict[str, RequestStats] = {}
        self._engines = EngineChoice(self.inflight)
        self.authenticator = authenticator or Authenticator()
        self.key_limits = KeyLimits()
        self._adapter_requests = AdapterRequests()
        self.attributes = AttributeStore() if attributes is None else attributes
        self._clock = clock or LoopClock()
        self.queue = RequestQueue(self._clock)
        self.recent_rejections = RecentRejections()
        self._random = random
        self.owners: Owners | None = None  # None: this gateway decides about all services
        self.digest_seed = OWN_SEED
        self.reports = EnvoyReports(self, self._clock)
        self.revoked = RevokedRequests(self, self._clock)

    def set_catalog(self, catalog: ServiceCatalog) -> None:
        """Replace the catalog."""
        now = self._clock.now()
        self.catalog = catalog
        self._engines.clear()
        self.inflight.keep_only({e.address for service in catalog.services.values() for e in service.endpoints})
        if self.owners is not None:
            self.owners.set_catalog(catalog)
        self.admission.set_catalog(catalog, now, self._clock.unix())
        self.release(list(self.admission.services), now)
        self._adapter_requests.keep_only({key: service.adapters for key, service in catalog.services.items()})
        for removed in self.stats_by_service.keys() - catalog.services.keys() - {""}:
            del self.stats_by_service[removed]
            gateway_metrics.remove_gateway_series(removed)

    def stats(self, service: str) -> RequestStats:
        service_stats = self.stats_by_service.get(service)
        if service_stats is None:
            service_stats = self.stats_by_service[service] = RequestStats(service)
        return service_stats

    def tick(self) -> None:
        """Update admission. Call this every second."""
        now = self._clock.now()
        self.key_limits.expire(now)
        self.revoked.reject(now)
        self.admission.tick(now, self._clock.unix())
        self.release(list(self.admission.services), now)

    def check(
        self,
        body: Body,
        headers: Mapping[bytes, bytes],
        now: float,
        route: ApiRoute = CHAT_ROUTE,
        parse: ParseBody = parse_body,
    ) -> Reply:
        """Returns the HTTP response to an ext_authz check with the client's body. Raises what `parse` raises."""
        identity = self.authenticate(headers)
        if isinstance(identity, Rejection):
            return self.reject(identity, route.shape)
        is_form = route.form is BodyForm.AUDIO and isinstance(body, bytes)
        parsed = parse_audio_form(whole(body), headers.get(b"content-type", b"")) if is_form else parse(body, route)
        return self.decide(parsed, body, headers, identity, now, route)

    def authenticate(self, headers: Mapping[bytes, bytes], *, is_counted: bool = True) -> Identity | Rejection:
        """Returns who sends a request with these headers, or why it is rejected. Counts it, unless it comes again."""
        identity = self.authenticator.authenticate(headers, self._clock.unix())
        if is_counted and isinstance(identity, Identity):
            self.authenticator.count(identity)
        return identity

    def decide(
        self,
        parsed: ParsedRequest | Rejection,
        body: Body,
        headers: Mapping[bytes, bytes],
        identity: Identity,
        now: float,
        route: ApiRoute = CHAT_ROUTE,
        foreign: ForeignRequest | None = None,
    ) -> Reply:
        """The second half of `check`, for a client that is known and a body that is already parsed.

        `foreign` is given if a gateway of another product carries the request.
        """
        attributes = self.attributes.begin(headers, identity, "" if isinstance(parsed, Rejection) else parsed.model)
        reply = self._decide(parsed, body, headers, identity, now, route, foreign)
        if attributes is None or not isinstance(reply, bytes):
            return reply
        return attributes.tag(reply, route, now)

    def _decide(
        self,
        parsed: ParsedRequest | Rejection,
        body: Body,
        headers: Mapping[bytes, bytes],
        identity: Identity,
        now: float,
        route: ApiRoute,
        foreign: ForeignRequest | None,
    ) -> Reply:
        if isinstance(parsed, Rejection):
            return self.reject(parsed, route.shape)
        service = self.catalog.by_name.get(parsed.model)
        if not identity.may_use(parsed.model, service, self.catalog):
            return self.reject(model_not_allowed(identity, parsed.model), route.shape)
        if service is None:
            return self.reject(error_messages.model_not_found(parsed.model), route.shape)
        if service.task not in route.tasks:
            rejection = error_messages.route_not_served(parsed.model, route.path, service.task)
            return self.reject(rejection, route.shape, service.key)
        if parsed.n > MAX_SEQUENCES_PER_PROMPT:
            limit = self._max_queued(service, self.catalog.fallback_of(service, route))
            rejection = error_messages.too_many_completions(parsed.model, parsed.n, limit)
            return self.reject(rejection, route.shape, service.key)
        request_id = request_id_of(headers) or self.inflight.new_request_id()
        parsed, digest = parsed.for_model(service.pictures), body_digest(body, self.digest_seed)
        ctx = new_context(request_id, parsed, service.key, digest, size_of(body), headers, identity, now, route)
        ctx.adapter = service.adapters.get(parsed.model)
        self.attributes.set_context(ctx)
        ctx.limits = service.limits_of(identity.request_class)
        if (broken := bound_request(ctx, parsed, headers)) is not None:
            return self.reject(broken, route.shape, service.key)
        count_unknown_class(identity, service)
        if service.policy is not None and route.is_booked:
            ctx.prompt = parsed.corrected_prompt(service.policy.token_ratios)
            # A pool of a gateway of another product has the engines of one service.
            has_fallback = ctx.adapter is None and foreign is None
            ctx.fallback = self.catalog.fallback_of(service, route) if has_fallback else None
            ctx.block_hashes = prefix_hashes(parsed.prompt_prefix, ctx, service, self.catalog.services)
        ctx.claims_retry, ctx.foreign = claims_retry(headers.get(RETRY_COUNT_HEADER)), foreign
        is_owned = self.owners is not None and not (foreign and is_partial(foreign.subset, service.endpoints))
        reply = self.owners.ask(service, ctx, now) if self.owners is not None and is_owned else None
        return self.decide_here(service, ctx, now) if reply is None else reply

    def decide_here(self, service: ServiceEntry, ctx: RequestContext, now: float) -> Reply:
        """Decide about a request whose service this gateway owns, or whose owner does not answer."""
        if not ctx.route.is_booked:
            return self._dispatch_unbooked(service, ctx, now)
        ctx.is_retry = self.recent_rejections.is_retry(ctx.claims_retry, ctx.retry_key, now)
        if self.inflight.expire_suspects(now):
            self.refresh(now)
        ctx.is_retry = self.admission.has_reservation(ctx, now) or ctx.is_retry
        reply = self._first(service, ctx, now)
        tokens = demand_tokens(ctx, service, self.admission.kv_tokens(service.key))
        ctx.counted_tokens = tokens if ctx.is_demand else None
        self.stats(service.key).record_arrival(tokens, retry=ctx.is_retry, demand=ctx.is_demand)
        self.release((), now)
        return self._enqueue(ctx, now) if reply is None else reply

    def reject(self, rejection: Rejection, shape: ErrorShape = ErrorShape.OPENAI, service: str = "") -> bytes:
        """Returns the HTTP response to a request that is no demand of any service, in the shape of its route."""
        self.stats(service).record_rejection(rejection)
        return rejection_response(to_response(rejection, self._random, shape))

    def _first(self, service: ServiceEntry, ctx: RequestContext, now: float) -> bytes | None:
        """Decide about a new request, as `_apply` returns it. Rejects more sequences than any engine accepts."""
        if (rejection := self.charge(service, ctx, now)) is not None:
            return self._reject(rejection, ctx, now)
        if ctx.foreign is not None and is_unusable(ctx.foreign.subset, service.endpoints):
            return self._reject(no_endpoint(service, ctx, self._clock.unix()), ctx, now)
        if (sequences := ctx.prompt.sequences) <= service.max_queued:
            return self._apply(ctx, self.admission.submit(ctx, now, self.queue.can_queue), now)
        if sequences <= (limit := self._max_queued(service, ctx.fallback)):
            self._exclude_from_demand(ctx)
            return self._try_fallback(ctx, now)
        self.stats(service.key).record_outcome(AdmissionOutcome.SHED_NO_CAPACITY)
        return self._reject(error_messages.too_many(ctx.model, sequences, ctx.n, limit, ctx.prompt_field), ctx, now)

    def _max_queued(self, service: ServiceEntry, fallback_key: str | None) -> int:
        """Returns how many sequences one engine of the service or of its fallback accepts at most."""
        fallback = None if fallback_key is None else self.catalog.services[fallback_key]
        return max(service.max_queued, 0 if fallback is None else fallback.max_queued)

    def tokens_charged(self, service: ServiceEntry, ctx: RequestContext) -> int:
        """Returns the tokens that a request takes off the limits of its key."""
        if not ctx.route.is_booked or ctx.prompt.sequences > self._max_queued(service, ctx.fallback):
            return 0
        return charged_tokens(ctx, self.admission.mean_output_tokens(service.key), service.max_model_len)

    def charge(self, service: ServiceEntry, ctx: RequestContext, now: float) -> Rejection | None:
        """Take a request off the limits of its key, once. Returns its rejection, None if it may pass."""
        if ctx.is_charged or not ctx.identity.is_limited:
            return None
        ctx.is_charged = True
        return self.key_limits.take(ctx.identity, self.tokens_charged(service, ctx), now)

    def reject_charge(self, ctx: RequestContext, rejection: Rejection, now: float) -> bytes:
        """Returns the HTTP response to a request that exceeds the limits of its key, before admission."""
        if not ctx.route.is_booked:
            return self.reject(rejection, ctx.route.shape)
        self.stats(ctx.service).record_arrival(ctx.estimate, retry=ctx.claims_retry, demand=False)
        return self._reject(rejection, ctx, now)

    def _apply(self, ctx: RequestContext, decision: AdmissionDecision | None, now: float) -> bytes | None:
        """Returns the reply for a decision, or None if the request is queued. Without admission, picks an engine."""
        if decision is None or decision.outcome is AdmissionOutcome.ADMITTED:
            return self._dispatch(ctx, decision, now)
        if decision.outcome is AdmissionOutcome.QUEUED:
            self.stats(ctx.target_service).record_outcome(AdmissionOutcome.QUEUED)
            return None
        if not decision.is_demand and not ctx.is_fallback:
            self._exclude_from_demand(ctx)
        if decision.outcome is AdmissionOutcome.DOWNGRADED:
            return self._try_fallback(ctx, now)
        if ctx.is_fallback:
            self.admission.discard_reservation(ctx, now)
            return self._reject_at_origin(ctx, now)
        return self._shed(ctx, decision, now)

    def _dispatch_unbooked(self, service: ServiceEntry, ctx: RequestContext, now: float) -> bytes:
        """Send a request that takes no capacity to the engine with the fewest requests, without admission."""
        shape, pick = ctx.route.shape, self._engines.choose(service, ctx, None)
        if (rejection := self.charge(service, ctx, now)) is not None:
            return self.reject(rejection, shape)
        if pick is None:
            return self.reject(no_unbooked_engine(service, ctx, self._clock.unix()), shape)
        engines = sum(e.routable and e.role is not Role.PREFILL for e in service.endpoints)
        if (reached := self.inflight.unbooked.reached_limit(service.key, ctx.client, engines)) is not None:
            return self.reject(error_messages.too_many_unbooked(ctx.model, ctx.route.path, *reached), shape)
        self.inflight.begin(
            service.key, pick, ctx.request_id, now, is_booked=False, is_foreign=ctx.is_foreign, client=ctx.client
        )
        retry_after_s = None if pick.fallbacks else next_engine_s(service, self._clock.unix(), self._random.randint)
        return dispatch_response(service, pick, ctx, retry_after_s, self._rate_headers(ctx, now), now)

    def _rate_headers(self, ctx: RequestContext, now: float) -> Mapping[str, str]:
        return ctx.rate_headers or self.key_limits.headers(ctx.identity, now)

    def _dispatch(self, ctx: RequestContext, decision: AdmissionDecision | None, now: float) -> bytes:
        service = self.catalog.services.get(ctx.target_service)
        pick = None if service is None else self._engines.choose(service, ctx, decision)
        if service is None or pick is None:
            if decision is not None:
                self.admission.rollback(ctx, now)
            if ctx.is_fallback:
                return self._reject_at_origin(ctx, now)
            return self._reject(no_endpoint(service, ctx, self._clock.unix()), ctx, now)
        key, stats = service.key, self.stats(service.key)
        if ctx.adapter is not None:
            self._adapter_requests.record(key, ctx.adapter)
        if ctx.is_fallback:
            self.stats(ctx.service).record_outcome(AdmissionOutcome.DOWNGRADED)
            tokens = demand_tokens(ctx, service, self.admission.kv_tokens(key))
            stats.record_arrival(tokens, retry=ctx.is_retry, demand=True)
        stats.record_sent(ctx.tenant)
        if decision is not None:
            stats.record_outcome(AdmissionOutcome.ADMITTED)
        if pick.endpoint.role is Role.DECODE:
            stats.record_prefill(remote=pick.prefill is not None)
        self.admission.record_forwarded(ctx, pick.endpoint.address, now)
        ctx.prefill = "" if pick.prefill is None else pick.prefill.address
        deadlines = slo_deadlines(service, ctx)
        demand = demand_by_service(ctx, self.catalog.services, self.admission.kv_tokens)
        self.inflight.begin(
            key, pick, ctx.request_id, now, ctx.retry_key, deadlines, demand, via=ctx.via, is_foreign=ctx.is_foreign
        )
        self.recent_rejections.discard(ctx.retry_key)
        if self.owners is not None:
            self.owners.on_sent(ctx.request_id, now)
        retry_after_s = None if pick.fallbacks else next_engine_s(service, self._clock.unix(), self._random.randint)
        return dispatch_response(service, pick, ctx, retry_after_s, self._rate_headers(ctx, now), now)

    def _try_fallback(self, ctx: RequestContext, now: float) -> bytes | None:
        """Send the request to the fallback service, once. If that rejects it, the origin service rejects it."""
        fallback = None if ctx.fallback is None else self.catalog.services.get(ctx.fallback)
        if ctx.fallback is None or fallback is None or not any(e.routable for e in fallback.endpoints):
            return self._reject_at_origin(ctx, now)
        ctx.target_service, ctx.fallback, ctx.admission_request = ctx.fallback, None, None
        return self._apply(ctx, self.admission.submit(ctx, now, self.queue.can_queue), now)

    def _reject_at_origin(self, ctx: RequestContext, now: float) -> bytes:
        """Returns the rejection by the service that the client named."""
        ctx.target_service, ctx.fallback, ctx.admission_request = ctx.service, None, None
        decision = self.admission.reject(ctx, now)
        if decision is None:
            return self._reject(no_endpoint(self.catalog.services.get(ctx.service), ctx, self._clock.unix()), ctx, now)
        return self._shed(ctx, decision, now)

    def _shed(self, ctx: RequestContext, decision: AdmissionDecision, now: float) -> bytes:
        self.stats(ctx.service).record_outcome(decision.outcome)
        ready, cost_model = self.admission.rejection_details(ctx)
        target = self.catalog.services.get(ctx.target_service)
        next_ready = availability(self.catalog.services.get(ctx.service), self._clock.unix())
        rejection = error_messages.admission_rejection(ctx, decision, ready, cost_model, next_ready, now, target)
        return self._reject(rejection, ctx, now)

    def _enqueue(self, ctx: RequestContext, now: float) -> asyncio.Future[bytes]:
        future = self.queue.add(ctx, lambda: self.on_client_disconnect(ctx.request_id, self._clock.now()))
        self._schedule_wakeup(ctx.target_service, now)
        return future

    def reject_queued(self, ctx: RequestContext, rejection: Rejection, now: float) -> None:
        """Answer a queued request with a rejection."""
        self.queue.remove(ctx.request_id)
        self.admission.cancel(ctx, now)
        reply = self._reject(rejection, ctx, now)
        if ctx.response is not None and not ctx.response.done():
            ctx.response.set_result(self.attributes.tag(ctx, reply, now))

    def remove_queued(self, ctx: RequestContext, now: float) -> None:
        """Take a request out of its queue, so that another gateway can decide about it."""
        self.queue.remove(ctx.request_id)
        self.admission.cancel(ctx, now)
        ctx.target_service, ctx.admission_request, ctx.response = ctx.service, None, None

    def on_ownership_change(self) -> None:
        """Update admission after services or requests of other gateways have come or gone."""
        now = self._clock.now()
        self.admission.update_replicas(now)
        self.release(list(self.admission.services), now)

    def on_client_disconnect(self, request_id: str, now: float) -> None:
        """Remove a queued request whose client disconnected."""
        ctx = self.queue.remove(request_id)
        if ctx is not None and ctx.response is not None:
            self.admission.cancel(ctx, now)
            self._count_disconnect(ctx)
            ctx.response.cancel()

    def _count_disconnect(self, ctx: RequestContext) -> None:
        self.attributes.answer(ctx.request_id, self._clock.now())
        for key in {ctx.target_service, ctx.service} & self.catalog.services.keys():
            self.stats(key).record_outcome(AdmissionOutcome.CLIENT_GONE)

    def refresh(self, now: float) -> None:
        """Update admission after a change of the usable engines."""
        self.release(self.admission.update_replicas(now), now)

    def release(self, keys: Iterable[str], now: float) -> None:
        """Resolve the requests that leave the queues of these services, and orphaned requests."""
        for key in keys:
            for ctx, decision in self.admission.release(key, now):
                self._resolve(ctx, decision, now)
            self._schedule_wakeup(key, now)
        for ctx in self.admission.take_orphaned():
            self._resolve(ctx, self.admission.submit(ctx, now, self.queue.can_queue), now)

    def _resolve(self, ctx: RequestContext, decision: AdmissionDecision | None, now: float) -> None:
        """Send the reply of a queued request, unless it stays queued, possibly at its fallback."""
        assert ctx.response is not None
        if ctx.response.cancelled():
            self.queue.remove(ctx.request_id)
            self.admission.rollback(ctx, now)
            self._count_disconnect(ctx)
            return
        try:
            reply = self._apply(ctx, decision, now)
        except Exception:  # one request's failure must not affect the others
            log.exception("the reply to a queued request failed")
            reply = response(500)
        if reply is None:
            self._schedule_wakeup(ctx.target_service, now)
            return
        self.queue.remove(ctx.request_id)
        ctx.response.set_result(self.attributes.tag(ctx, reply, now))

    def _schedule_wakeup(self, key: str, now: float) -> None:
        """Schedule the next `release` of the service at the time that admission asks for."""
        wake_at_s = self.admission.wake_at_s(key)
        self.queue.schedule(key, wake_at_s, now, lambda: self.release((key,), self._clock.now()))

    def _reject(self, rejection: Rejection, ctx: RequestContext, now: float) -> bytes:
        self.stats(ctx.service if ctx.service in self.catalog.services else "").record_rejection(rejection, ctx.tenant)
        reply = to_response(rejection, self._random, ctx.route.shape)
        if rejection.reason.is_demand:
            self.recent_rejections.record(ctx.retry_key, now, reply.retry_after_s)
        else:
            self._exclude_from_demand(ctx)
        return rejection_response(reply)

    def _exclude_from_demand(self, ctx: RequestContext) -> None:
        """No capacity of the service that the client named would serve the request: it adds no replicas there."""
        ctx.is_demand = False
        if ctx.counted_tokens is not None and ctx.service in self.catalog.services:
            self.stats(ctx.service).demand.withdraw(ctx.counted_tokens)
        ctx.counted_tokens = None
