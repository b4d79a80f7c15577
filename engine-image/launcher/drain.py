"""When a leaving engine may be stopped.

Problem: vLLM responds with 500 to requests after its SIGTERM, and the gateways learn with a delay that a pod is being
deleted. If it is the only engine of its tier, as on a node that is drained, no other one takes its requests for as long
as an engine starts.

Idea: a leaving engine stays ready and takes requests until it is quiet. Gateways send new requests to other engines as
soon as they can; while they have none that is ready, they say so again and again. That ends after a share of the drain
timeout, because the requests that run need the rest. An engine that still gets requests then rejects them (503 with the
retry mark, from the middleware) until none was accepted for a while, for a bounded time.
"""

from __future__ import annotations

import asyncio
import time

from launcher.contract import Drain
from launcher.pod_state import PodState

POLL_SECONDS = 0.1


def is_quiet(
    now: float, leaving_at: float, last_request: float | None, last_needed: float | None, drain: Drain
) -> bool:
    """Whether no gateway needs the engine any more; all times on one clock, in seconds.

    last_needed: when a gateway said so the last time; it may be late with the next.
    """
    without_request = last_request is None or now - last_request >= drain.quiet_seconds
    is_needed = last_needed is not None and now - last_needed < drain.min_handover_seconds
    return without_request and not is_needed and now - leaving_at >= drain.min_handover_seconds


async def wait_until_quiet(state: PodState, drain: Drain, leaving_at: float, limit_seconds: float) -> bool:
    """Wait until the engine is quiet, which returns True, or until the limit."""
    began = time.time()
    while not is_quiet(time.time(), leaving_at, state.last_request(), state.last_needed(), drain):
        if time.time() - began >= limit_seconds:
            return False
        await asyncio.sleep(POLL_SECONDS)
    return True


def handover_limit_seconds(drain: Drain, drain_timeout: float) -> float:
    """Return how long a leaving engine takes requests at most."""
    return max(drain.handover_share * drain_timeout, min(drain.max_rejecting_seconds, drain_timeout))


def left_seconds(drain: Drain, drain_timeout: float, leaving_seconds: float) -> float:
    """Return the rest of the drain timeout for the requests that run, once the engine has been leaving for a time.

    The first `max_rejecting_seconds` are not part of the timeout: the pod's grace period has them besides.
    """
    return max(0.0, drain_timeout - max(0.0, leaving_seconds - drain.max_rejecting_seconds))
