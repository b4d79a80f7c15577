"""Requests as messages, and messages as the picker's own objects. Times are monotonic seconds of this process."""

from __future__ import annotations

import math

from plimsoll.core.admission.request import MAX_REQUEST_SEQUENCES, AdmissionRequest
from plimsoll.core.admission.retry_advice import advise_retry
from plimsoll.core.routing.endpoint import Prompt
from plimsoll.core.slo import Deadlines
from plimsoll.core.types import MediaKind
from plimsoll.gateway.api_routes import ROUTES
from plimsoll.gateway.deadlines import RequestDeadline
from plimsoll.gateway.demand_counter import DemandTokens
from plimsoll.gateway.envoy.access_log import AccessRecord
from plimsoll.gateway.errors import Rejection, RejectionReason
from plimsoll.gateway.identity import Identity
from plimsoll.gateway.inflight import InFlightRequest
from plimsoll.gateway.one_queue.messages import Charged, Ended, FirstToken, Question, Running
from plimsoll.gateway.request_context import RequestContext
from plimsoll.gateway.service_admission import ForwardedRequest
from plimsoll.gateway.service_catalog import ServiceEntry

_MAX_OUTPUT_TOKENS = 2**62  # what a message can hold


def is_expressible(ctx: RequestContext) -> bool:
    """Whether a question can hold the request. One that cannot is too large for any engine."""
    return ctx.prompt.sequences <= MAX_REQUEST_SEQUENCES and ctx.n <= MAX_REQUEST_SEQUENCES


def to_question(number: int, ctx: RequestContext, can_queue: bool, now: float) -> Question:
    """Returns the question about a request whose key has been charged."""
    deadline, identity, media = ctx.deadline, ctx.identity, dict(ctx.estimate.media)
    schema_tokens = media.pop(MediaKind.SCHEMA, 0)
    return Question(
        number,
        ctx.request_id,
        ctx.service,
        ctx.claims_retry,
        can_queue,
        dict(ctx.rate_headers),
        now - ctx.arrived_s,
        ctx.model,
        ctx.route.path,
        ctx.prompt.tokens,
        ctx.prompt.sequences,
        None if ctx.max_tokens is None else min(ctx.max_tokens, _MAX_OUTPUT_TOKENS),
        ctx.stream,
        ctx.n,
        ctx.prompt_field,
        ctx.body_digest,
        ctx.idempotency_key,
        ctx.block_hashes,
        identity.key_name,
        identity.tenant,
        identity.request_class,
        ctx.estimate.total,
        media,
        _left(deadline.first_token_s, now),
        _left(deadline.complete_s, now),
        _left(deadline.timeout_s, 0.0) or 0.0,
        deadline.source,
        ctx.foreign is None,
        ctx.is_estimated,
        schema_tokens,
    )


def to_context(question: Question, service: ServiceEntry, via: str, now: float) -> RequestContext | None:
    """Returns the context of another gateway's request, None for a route that this release does not know.

    The memory for its body is the other gateway's.
    """
    route = ROUTES.get(question.route)
    if route is None:
        return None
    identity = Identity(question.key_name, question.tenant, question.request_class)
    schema = {MediaKind.SCHEMA: question.schema_tokens} if question.schema_tokens else {}
    return RequestContext(
        question.request_id,
        question.model,
        Prompt(question.prompt_tokens, question.sequences),
        question.max_tokens,
        question.stream,
        service.key,
        service.key,
        identity,
        question.body_digest,
        0,
        question.idempotency_key,
        now - max(0.0, question.age_s),
        question.n,
        route,
        question.prompt_field,
        block_hashes=question.block_hashes,
        estimate=DemandTokens(question.estimate_total, question.estimate_media | schema),
        limits=service.limits_of(identity.request_class),
        deadline=RequestDeadline(
            _at(question.first_token_in_s, now),
            _at(question.complete_in_s, now),
            question.timeout_s if question.timeout_source else math.inf,
            question.timeout_source,
        ),
        adapter=service.adapters.get(question.model),
        claims_retry=question.claims_retry,
        via=via,
        can_queue=question.can_queue,
        is_charged=True,
        rate_headers=question.rate_headers,
        is_estimated=question.is_estimated,
    )


def to_running(request_id: str, in_flight: InFlightRequest, forwarded: ForwardedRequest, now: float) -> Running:
    """Returns a request at an engine as other gateways must know it."""
    request = forwarded.request
    digest = in_flight.retry_key[1] if isinstance(in_flight.retry_key, tuple) else 0
    return Running(
        request_id,
        in_flight.service,
        in_flight.endpoint,
        in_flight.prefill,
        now - request.arrived_s,
        forwarded.queued_s,
        request.request_class,
        request.tenant,
        digest,
        request.prompt_tokens,
        None if request.max_tokens is None else min(request.max_tokens, _MAX_OUTPUT_TOKENS),
        request.sequences,
        request.block_hashes,
        forwarded.stream,
        forwarded.path,
        request.adapter,
    )


def from_running(
    running: Running,
    via: str,
    now: float,
    tenant: str | None = None,
    deadlines: Deadlines | None = None,
    is_foreign: bool = False,
) -> tuple[InFlightRequest, ForwardedRequest]:
    """Returns the records of a request at an engine that another gateway decided about.

    `tenant` is that of its client, if it is known here: the message holds the one that quotas count.
    """
    arrived_s = now - max(0.0, running.age_s)
    request = AdmissionRequest(
        running.request_id, running.request_class, running.tenant, arrived_s, running.prompt_tokens,
        max_tokens=running.max_tokens, sequences=running.sequences, block_hashes=running.block_hashes,
        adapter=running.adapter,
    )  # fmt: skip
    queued_s = max(0.0, running.queued_s)
    retry_key = (running.tenant if tenant is None else tenant, running.body_digest)
    in_flight = InFlightRequest(
        running.service,
        running.endpoint,
        running.prefill,
        min(now, arrived_s + queued_s),
        retry_key,
        deadlines,
        via=via,
        is_foreign=is_foreign,
    )
    forwarded = ForwardedRequest(
        request, running.service, running.endpoint, queued_s, running.stream, running.route, registered_late=True
    )
    return in_flight, forwarded


def to_first_token(request_id: str, record: AccessRecord) -> FirstToken:
    """Returns the report of a running response."""
    assert record.status is not None
    assert record.ttft_us is not None
    return FirstToken(request_id, record.upstream or "", record.status, record.ttft_us, record.received_us)


def to_running_record(message: FirstToken) -> AccessRecord:
    """Returns Envoy's record of a running response."""
    return AccessRecord(
        message.request_id,
        message.upstream,
        status=message.status,
        flags="-",
        ttft_us=message.ttft_us,
        received_us=message.received_us,
        is_running=True,
    )


def to_ended(request_id: str, record: AccessRecord | None) -> Ended:
    """Returns the end of a request. `record` is None if it is lost."""
    if record is None:
        return Ended(request_id)
    return Ended(
        request_id,
        record.upstream or "",
        record.status,
        record.flags,
        record.ttft_us,
        record.duration_us,
        record.received_us,
        record.sent_bytes,
    )


def to_record(ended: Ended) -> AccessRecord | None:
    """Returns Envoy's record of the end of a request, None if it is lost."""
    if ended.upstream is None:
        return None
    return AccessRecord(
        ended.request_id,
        ended.upstream,
        None,
        ended.status,
        ended.flags,
        ttft_us=ended.ttft_us,
        duration_us=ended.duration_us,
        received_us=ended.received_us,
        sent_bytes=ended.sent_bytes,
    )


def to_rejection(charged: Charged) -> Rejection:
    """Returns the rejection of a request that exceeds the limits of its key."""
    advice = advise_retry(charged.eta_s, is_time_known=True)
    return Rejection(RejectionReason.RATE_LIMIT_EXCEEDED, charged.message, retry=advice, headers=charged.headers)


def _left(at_s: float, now: float) -> float | None:
    return at_s - now if at_s < math.inf else None


def _at(left_s: float | None, now: float) -> float:
    return math.inf if left_s is None else now + left_s
