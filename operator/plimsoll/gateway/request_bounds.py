"""The bounds of one request: what breaks them is rejected, and headers tell Envoy and the engine to keep the rest.

Envoy obeys its own timeout header, which it removes from what clients send. It takes no idle timeout from a header, so
its value selects a route. The engine's middleware sets an output limit where the request states none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final

from plimsoll.api.contract import engine_contract
from plimsoll.core.units import format_figure
from plimsoll.gateway.deadlines import read_deadline
from plimsoll.gateway.errors import Rejection, RejectionReason
from plimsoll.gateway.request_context import RequestContext
from plimsoll.gateway.request_parser import ParsedRequest

# Envoy ends the stream to the engine after it. A route's timeout would count as a failure of the engine: clients with
# short deadlines could have engines ejected.
UPSTREAM_TIMEOUT_HEADER: Final = "x-envoy-upstream-stream-duration-ms"
DEADLINE_HEADER: Final = "x-plimsoll-deadline-seconds"  # the whole time, for the message of Envoy's local reply
IDLE_TIMEOUT_HEADER: Final = "x-plimsoll-idle-timeout"  # seconds; selects a route of Envoy
MAX_OUTPUT_HEADER: Final = engine_contract().headers["max_output_tokens"]

MIN_UPSTREAM_TIMEOUT_MS: Final = 1  # for Envoy, 0 is no timeout


def bound_request(ctx: RequestContext, parsed: ParsedRequest, headers: Mapping[bytes, bytes]) -> Rejection | None:
    """Set the deadline of a request whose limits are set. Returns its rejection if it breaks one of them, else None."""
    limit = ctx.limits.max_output_tokens
    if limit is not None and ctx.route.is_booked:
        if (rejection := _output_rejection(ctx.model, parsed.output_limits, limit)) is not None:
            return rejection
        ctx.max_tokens = ctx.max_tokens or limit
    deadline = read_deadline(headers, ctx.limits, stream=ctx.stream, now=ctx.arrived_s)
    if isinstance(deadline, Rejection):
        return deadline
    ctx.deadline = deadline
    return None


def _output_rejection(model: str, stated: Mapping[str, object], limit: int) -> Rejection | None:
    """Returns the rejection of a request that asks for more output tokens than `limit`, None if it does not.

    `stated` are the body's fields that limit its output. One that is null or absent states nothing.
    """
    for name, value in stated.items():
        if value is None or (type(value) is int and 0 < value <= limit):
            continue
        shown = f"is {value}" if type(value) is int and abs(value) < 10**12 else "has another value"
        message = (
            f"The field '{name}' must be a whole number from 1 to {limit}, the limit of output tokens of model"
            f" '{model}' (requestLimits.maxOutputTokens). It {shown}."
        )
        return Rejection(RejectionReason.REQUEST_TOO_LARGE, message, param=name)
    return None


def limit_headers(ctx: RequestContext, now: float) -> Iterator[tuple[str, str]]:
    """Yields the headers by which Envoy and the engine keep the deadline and the limits of a request sent `now`."""
    deadline, limits = ctx.deadline, ctx.limits
    if deadline.complete_s < math.inf:
        left_ms = max(math.ceil(1e3 * (deadline.complete_s - now)), MIN_UPSTREAM_TIMEOUT_MS)
        yield UPSTREAM_TIMEOUT_HEADER, str(left_ms)
        yield DEADLINE_HEADER, format_figure(deadline.complete_s - ctx.arrived_s, 6)
    if ctx.stream and limits.idle_timeout_s is not None:
        yield IDLE_TIMEOUT_HEADER, str(limits.idle_timeout_s)
    if limits.max_output_tokens is not None and ctx.route.is_booked:
        yield MAX_OUTPUT_HEADER, str(limits.max_output_tokens)
