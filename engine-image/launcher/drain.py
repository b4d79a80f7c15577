"""When a draining engine may be stopped.

Problem: vLLM responds with 500 to requests after its SIGTERM, and the gateway learns with a delay that a pod is
draining. Idea: the pod first becomes unready and rejects requests (503 with the retry mark, from the middleware).
SIGTERM follows only when it has been unready long enough and no request has come for a while. The wait is bounded: a
client that never stops gets its 503 after SIGTERM as well, and the pod's grace period must leave time for requests in
flight.
"""

from __future__ import annotations

import asyncio
import time

from launcher.contract import Drain
from launcher.pod_state import PodState

POLL_SECONDS = 0.1


def may_stop(now: float, unready_at: float, last_request: float | None, drain: Drain) -> bool:
    """Whether the engine may get its SIGTERM; all times on one clock, in seconds."""
    unready = now - unready_at
    if unready >= drain.max_unready_seconds:
        return True
    quiet = last_request is None or now - last_request >= drain.quiet_seconds
    return quiet and unready >= drain.min_unready_seconds


async def wait_until_quiet(state: PodState, drain: Drain) -> None:
    """Wait until the engine may be stopped."""
    unready_at = time.time()
    while not may_stop(time.time(), unready_at, state.last_request(), drain):  # noqa: ASYNC110  another process
        await asyncio.sleep(POLL_SECONDS)
