"""The context of one request at the gateway, from arrival to response."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from plimsoll.core.admission.request import AdmissionRequest
from plimsoll.core.admission.request_limits import NO_LIMITS, RequestLimits
from plimsoll.core.routing.endpoint import Prompt
from plimsoll.gateway.adapters import AdapterEntry
from plimsoll.gateway.api_routes import CHAT_ROUTE, ApiRoute
from plimsoll.gateway.deadlines import NO_DEADLINE, RequestDeadline
from plimsoll.gateway.demand_counter import DemandTokens
from plimsoll.gateway.identity import Identity, client_of
from plimsoll.gateway.request_parser import ParsedRequest

MAX_MODEL_LENGTH = 200  # characters of a model name in a message
MAX_IDEMPOTENCY_KEY_BYTES = 255  # a longer key is ignored

RETRY_COUNT_HEADER = b"x-stainless-retry-count"
IDEMPOTENCY_KEY_HEADER = b"idempotency-key"
REQUEST_ID_HEADER = b"x-plimsoll-request-id"

_MAX_REQUEST_ID_BYTES = 64


class ForeignRequest(NamedTuple):
    """A request that a gateway of another product carries, which asks by the endpoint-picker protocol.

    `subset` are the addresses to which that gateway can send it, None for all.
    """

    subset: frozenset[str] | None = None


class RequestContext(msgspec.Struct, eq=False):
    """The state of one request. `arrived_s` is in monotonic seconds.

    `model` is the name that the client sent. `route` is the route that it called. For `prompt`, `max_tokens`, `stream`,
    `n`, `prompt_field` and `is_estimated` see `ParsedRequest`.
    `service` is the key of the service that the client named. `target_service` is the one that handles the request now:
    the same or its fallback. `fallback` is the key of the service that may still take it. `identity` is who sends it;
    its class may be unknown to the service. `block_hashes` identify the prompt's prefix. `is_retry` is true if an
    earlier attempt was rejected. `admission_request` is the request as submitted to the target service. `response` is
    set while the request is queued. `is_demand` is false if no capacity would serve it. `estimate` are the estimated
    prompt tokens of all sequences, before `token_ratios`. `counted_tokens` are those that count as demand, None before
    they count. `limits` and `deadline` are those of the service that the client named, also at its fallback. `adapter`
    is the LoRA adapter that the client named. `prefill` is the address of the prefill engine, "" without one.
    `claims_retry` is true if the client marks the request as a retry. `via` is the gateway whose Envoy carries it, ""
    for this one; `can_queue` is whether that gateway has memory for its body. `client` tells its client apart.
    `is_charged`: the limits of its key have been applied, and `rate_headers` tell the client of them. `foreign` is set
    if a gateway of another product carries the request. `prefill_deadline_s` is how long a decode engine waits for a
    prefill engine, None for its default.
    """

    request_id: str
    model: str
    prompt: Prompt
    max_tokens: int | None
    stream: bool
    service: str
    target_service: str
    identity: Identity
    body_digest: int
    body_bytes: int
    idempotency_key: str | None
    arrived_s: float
    n: int = 1
    route: ApiRoute = CHAT_ROUTE
    prompt_field: str = "prompt"
    block_hashes: tuple[int, ...] = ()
    fallback: str | None = None
    is_retry: bool = False
    admission_request: AdmissionRequest | None = None
    response: asyncio.Future[bytes] | None = None
    is_demand: bool = True
    estimate: DemandTokens = DemandTokens(0)
    counted_tokens: DemandTokens | None = None
    limits: RequestLimits = NO_LIMITS
    deadline: RequestDeadline = NO_DEADLINE
    adapter: AdapterEntry | None = None
    prefill: str = ""
    claims_retry: bool = False
    via: str = ""
    can_queue: bool = True
    client: str = ""
    is_charged: bool = False
    rate_headers: Mapping[str, str] = {}
    foreign: ForeignRequest | None = None
    is_estimated: bool = True
    prefill_deadline_s: float | None = None

    @property
    def request_class(self) -> bytes:
        return self.identity.request_class

    @property
    def tenant(self) -> str:
        return self.identity.tenant

    @property
    def retry_key(self) -> tuple[str, int]:
        """The key that identifies the client's retries."""
        return self.identity.tenant, self.body_digest

    @property
    def is_fallback(self) -> bool:
        return self.target_service != self.service

    @property
    def is_foreign(self) -> bool:
        """Whether a gateway of another product carries the request."""
        return self.foreign is not None


def request_id_of(headers: Mapping[bytes, bytes]) -> str | None:
    """Returns the request ID that Envoy set, or None if it is missing or invalid."""
    value = headers.get(REQUEST_ID_HEADER, b"")
    return value.decode() if 0 < len(value) <= _MAX_REQUEST_ID_BYTES and value.isascii() else None


def new_context(
    request_id: str,
    parsed: ParsedRequest,
    service: str,
    body_digest: int,
    body_bytes: int,
    headers: Mapping[bytes, bytes],
    identity: Identity,
    now: float,
    route: ApiRoute = CHAT_ROUTE,
) -> RequestContext:
    """Returns the context of a new request for an existing service."""
    key = headers.get(IDEMPOTENCY_KEY_HEADER, b"")
    return RequestContext(  # positional: keyword arguments cost 1 us
        request_id,
        parsed.model[:MAX_MODEL_LENGTH],
        parsed.prompt,
        parsed.max_tokens,
        parsed.stream,
        service,
        service,
        identity,
        body_digest,
        body_bytes,
        key.decode("ascii", "replace") if 0 < len(key) <= MAX_IDEMPOTENCY_KEY_BYTES else None,
        now,
        parsed.n,
        route,
        parsed.prompt_field,
        estimate=_estimate(parsed),
        is_estimated=parsed.is_estimated,
        client=client_of(identity, headers),
    )


def _estimate(parsed: ParsedRequest) -> DemandTokens:
    prompt, media = parsed.prompt, parsed.media_tokens
    total = prompt.tokens * prompt.sequences
    return DemandTokens(total, {kind: tokens * prompt.sequences for kind, tokens in media.items()} if media else media)
