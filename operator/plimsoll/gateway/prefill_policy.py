"""Remote prefill by the service's policy: how long a decode engine waits for it, and whether it may do without.

Problem: one deadline for all prompts is too short for a long prompt and lets a short one wait for a dead engine. A
service whose decode engines have no room for prompts must reject what no prefill engine can take.

Idea: admission predicts the time of the first token, prefill queue included. A header tells the decode engine a
multiple of it. A second header forbids the engine to compute the prompt itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from plimsoll.api.contract import engine_contract
from plimsoll.core.admission.request import AdmissionDecision
from plimsoll.core.routing.picker import EndpointIndex, Pick
from plimsoll.core.types import KV_BLOCK_TOKENS, Role
from plimsoll.gateway.request_context import RequestContext
from plimsoll.gateway.service_catalog import ServiceEntry

PREFILL_SECONDS_HEADER: Final = engine_contract().headers["prefill_seconds"]
PREFILL_REQUIRED_HEADER: Final = engine_contract().headers["prefill_required"]
PREDICTION_FACTOR: Final = 3.0  # of the predicted time, within which all but a failed prefill ends
MIN_DEADLINE_S: Final = 3.0  # noise of short prefills, and time to open a connection
MAX_DEADLINE_S: Final = 600.0


def deadline_s(decision: AdmissionDecision | None) -> float | None:
    """Returns the deadline of a remote prefill in seconds; None without a prediction, for the engine's default."""
    if decision is None or not 0.0 < decision.first_token_s < math.inf:
        return None
    return min(max(MIN_DEADLINE_S, PREDICTION_FACTOR * decision.first_token_s), MAX_DEADLINE_S)


def needs_prefill_engine(service: ServiceEntry, ctx: RequestContext) -> bool:
    """Whether no decode engine of the service may compute this prompt. Short prompts and several sequences are exempt:
    their KV cache is never transferred. So are requests that only count tokens."""
    if not service.requires_prefill or not ctx.route.is_booked:
        return False
    return ctx.prompt.tokens >= KV_BLOCK_TOKENS and ctx.prompt.sequences == 1


def with_required_prefill(
    pick: Pick, index: EndpointIndex, service: ServiceEntry, ctx: RequestContext, *, may_move: bool = True
) -> Pick | None:
    """Returns the pick with a prefill engine if the service requires one, or None if there is none.

    In a rollout, a new decode engine may have no prefill engine of its revision yet: then another one is picked,
    if the request `may_move` to it.
    """
    if pick.prefill is not None or pick.endpoint.role is not Role.DECODE or not needs_prefill_engine(service, ctx):
        return pick
    prefill = index.pick_prefill(pick.endpoint, ctx.prompt)
    if prefill is None:
        return index.pick_paired(ctx.prompt) if may_move else None
    same = tuple(one for one in pick.fallbacks if one.revision == pick.endpoint.revision)
    return Pick(pick.endpoint, same, prefill)


def prefill_headers(service: ServiceEntry, pick: Pick, ctx: RequestContext) -> Iterator[tuple[str, str]]:
    """Yields the headers that tell the decode engine of its prefill engine, its deadline and the policy."""
    if pick.prefill is None:
        return
    yield "x-plimsoll-prefill", pick.prefill.address
    if ctx.prefill_deadline_s is not None:
        yield PREFILL_SECONDS_HEADER, f"{ctx.prefill_deadline_s:.1f}"
    if needs_prefill_engine(service, ctx):
        yield PREFILL_REQUIRED_HEADER, "1"
