"""The picker's decisions as HTTP responses to Envoy's ext_authz check, and what follows from them for the SLO."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from plimsoll.api.contract import engine_contract
from plimsoll.core.admission.request_limits import NO_LIMITS
from plimsoll.core.routing.picker import Pick
from plimsoll.core.slo import Deadlines
from plimsoll.gateway.adapters import ADAPTER_HEADER
from plimsoll.gateway.deadlines import NO_DEADLINE
from plimsoll.gateway.envoy.listener import PICK_CLUSTER_PREFIX
from plimsoll.gateway.errors import ErrorResponse, to_header
from plimsoll.gateway.http1 import ok_response, response
from plimsoll.gateway.prefill_policy import prefill_headers
from plimsoll.gateway.request_bounds import limit_headers
from plimsoll.gateway.request_context import RequestContext
from plimsoll.gateway.service_catalog import ServiceEntry
from plimsoll.gateway.tenant_cache import CACHE_SALT_HEADER, salt_of

# Request header with the `Retry-After` for a failure of the only engine; the engine and Envoy's local reply use it.
NEXT_ENGINE_HEADER: Final = engine_contract().headers["next_engine"]
PRIORITY_HEADER: Final = engine_contract().headers["priority"]


def slo_deadlines(service: ServiceEntry, ctx: RequestContext) -> Deadlines | None:
    """Returns the deadlines by which the response to a request is assessed, None without an SLO."""
    slo = None if service.policy is None else service.policy.class_of(ctx.request_class).slo
    deadlines = None if slo is None else slo.deadlines(ctx.prompt.tokens)
    if deadlines is not None and ctx.route.is_prefill_only:
        deadlines = deadlines._replace(tpot_s=math.inf)
    return deadlines


def write_response(reply: ErrorResponse) -> bytes:
    """Returns an error response as HTTP bytes."""
    return response(reply.status, reply.headers.items(), reply.body)


def rejection_response(reply: ErrorResponse) -> bytes:
    """Returns the ext_authz response for a rejection; one that Envoy would count as a failure goes in a header."""
    if reply.fits_ext_authz:
        return write_response(reply)
    return response(200, (("x-plimsoll-cluster", "picker"), ("x-plimsoll-error-response", to_header(reply))))


def dispatch_response(
    service: ServiceEntry,
    pick: Pick,
    ctx: RequestContext,
    next_engine_s: int | None,
    limits: Mapping[str, str],
    now: float,
) -> bytes:
    """`next_engine_s` is the `Retry-After` of a failure of the only engine, None if there are other engines.

    `limits` are the headers that tell the client of its key's limits.
    """
    endpoints = ",".join([e.address for e in (pick.endpoint, *pick.fallbacks)])
    headers, count = (
        (
            f"x-plimsoll-cluster: {PICK_CLUSTER_PREFIX}{service.key}\r\n"
            f"x-plimsoll-endpoint: {endpoints}\r\n"
            f"x-plimsoll-request-id: {ctx.request_id}\r\n"
        ),
        3,
    )
    if next_engine_s is not None:
        headers, count = f"{headers}{NEXT_ENGINE_HEADER}: {next_engine_s}\r\n", count + 1
    if ctx.adapter is not None:
        headers, count = f"{headers}{ADAPTER_HEADER}: {ctx.adapter.name}\r\n", count + 1
    if service.isolates_tenants and ctx.route.is_booked:
        headers, count = f"{headers}{CACHE_SALT_HEADER}: {salt_of(ctx.tenant)}\r\n", count + 1
    if service.policy is not None and len(service.policy.classes) > 1 and ctx.route.is_booked:
        priority = -service.policy.class_of(ctx.request_class).priority  # an engine takes the lowest number first
        headers, count = f"{headers}{PRIORITY_HEADER}: {priority}\r\n", count + 1
    if ctx.is_fallback:
        headers, count = f"{headers}x-plimsoll-response-model: {service.preferred_name}\r\n", count + 1
    if limits or pick.prefill is not None or ctx.limits is not NO_LIMITS or ctx.deadline is not NO_DEADLINE:
        for name, value in (*prefill_headers(service, pick, ctx), *limits.items(), *limit_headers(ctx, now)):
            headers, count = f"{headers}{name}: {value}\r\n", count + 1
    return ok_response(headers, count)
