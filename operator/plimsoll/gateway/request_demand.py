"""What a request adds to the demand of services, which sizes their fleets: prompt tokens, in its class."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from plimsoll.gateway.demand_counter import DemandTokens
from plimsoll.gateway.request_context import RequestContext
from plimsoll.gateway.service_catalog import ServiceEntry


def demand_tokens(ctx: RequestContext, service: ServiceEntry | None, capacity: int | None) -> DemandTokens:
    """Returns the prompt tokens of all sequences, at most `capacity`: what one engine of the service holds at once."""
    estimate, policy = ctx.estimate, None if service is None else service.policy
    request_class = "" if policy is None else policy.class_of(ctx.request_class).name
    if capacity is None or estimate.total <= capacity:
        return DemandTokens(estimate.total, estimate.media, request_class)
    media = {kind: tokens * capacity // estimate.total for kind, tokens in estimate.media.items()}
    return DemandTokens(capacity, media, request_class)


def demand_by_service(
    ctx: RequestContext, services: Mapping[str, ServiceEntry], kv_tokens: Callable[[str], int | None]
) -> dict[str, DemandTokens]:
    """Returns what the request adds by service key. `kv_tokens` returns the KV cache of one engine, in tokens."""
    keys = {ctx.target_service, ctx.service} if ctx.is_fallback and ctx.is_demand else {ctx.target_service}
    return {key: demand_tokens(ctx, services.get(key), kv_tokens(key)) for key in keys}
