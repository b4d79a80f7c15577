"""When a service without a usable engine will have one, and what clients learn until then."""

from __future__ import annotations

import math
from collections.abc import Callable

from plimsoll.core.admission.retry_advice import advise_retry
from plimsoll.core.types import Role
from plimsoll.gateway import error_messages
from plimsoll.gateway.error_messages import Availability
from plimsoll.gateway.errors import Rejection
from plimsoll.gateway.prefill_policy import needs_prefill_engine
from plimsoll.gateway.request_context import RequestContext
from plimsoll.gateway.service_catalog import ServiceEntry


def availability(service: ServiceEntry | None, unix_s: float) -> Availability:
    """Returns when the service will have its next ready engine, by the operator's last report."""
    if service is None:
        return Availability()
    at_s = service.next_ready_s
    next_ready_s = None if at_s is None or at_s <= unix_s else at_s - unix_s
    return Availability(next_ready_s, service.deleted, service.stopped, service.problem, service.needs_certificate)


def next_engine_s(service: ServiceEntry, unix_s: float, randint: Callable[[int, int], int]) -> int:
    """Returns the `Retry-After` in seconds for a request whose only engine fails: when the next one is ready."""
    expected_s = availability(service, unix_s).next_ready_s
    advice = advise_retry(service.recovery_s if expected_s is None else expected_s, sdk_limit_s=math.inf)
    return advice.draw_retry_after_s(randint) or 1


def no_endpoint(service: ServiceEntry | None, ctx: RequestContext, unix_s: float) -> Rejection:
    """Returns the rejection of a request for which no engine is usable. Without a service its model is unknown."""
    if service is None:
        return error_messages.model_not_found(ctx.model)
    serves = any(e.routable and e.role is Role.DECODE for e in service.endpoints)
    if serves and needs_prefill_engine(service, ctx):
        return error_messages.prefill_unavailable(ctx.model)
    ready = any(e.available and e.role is not Role.PREFILL for e in service.endpoints)
    return error_messages.no_endpoint(ctx.model, ready, availability(service, unix_s))


def no_unbooked_engine(service: ServiceEntry, ctx: RequestContext, unix_s: float) -> Rejection:
    """Returns the rejection of a request that takes no capacity. It is final if no engine will ever serve its route."""
    if service.is_asleep:
        return error_messages.no_engine(ctx.model, service.task)
    return no_endpoint(service, ctx, unix_s)
