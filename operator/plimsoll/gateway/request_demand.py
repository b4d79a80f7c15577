"""The prompt tokens that a request adds to the demand of services, which sizes their fleets."""

from __future__ import annotations

from collections.abc import Callable

from plimsoll.gateway.demand_counter import DemandTokens
from plimsoll.gateway.request_context import RequestContext


def demand_tokens(ctx: RequestContext, capacity: int | None) -> DemandTokens:
    """Returns the prompt tokens of all sequences, at most `capacity`: what one engine of the service holds at once."""
    estimate = ctx.estimate
    if capacity is None or estimate.total <= capacity:
        return estimate
    media = {kind: tokens * capacity // estimate.total for kind, tokens in estimate.media.items()}
    return DemandTokens(capacity, media)


def demand_by_service(ctx: RequestContext, kv_tokens: Callable[[str], int | None]) -> dict[str, DemandTokens]:
    """Returns the prompt tokens by service key. `kv_tokens` returns the KV cache of one engine, in tokens."""
    demand = {ctx.target_service: demand_tokens(ctx, kv_tokens(ctx.target_service))}
    if ctx.is_fallback and ctx.is_demand:
        demand[ctx.service] = demand_tokens(ctx, kv_tokens(ctx.service))
    return demand
