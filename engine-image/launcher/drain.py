"""When a leaving engine may be told to stop.

Problem: vLLM answers 500 to what arrives after its SIGTERM, and the gateway learns with a delay that a pod is leaving.
Idea: first unready and refusing (503 with the retry mark, from the middleware), and SIGTERM only when the pod has been
unready long enough and no request has come for a while. The wait is bounded: a caller that never stops gets its 503
as well after SIGTERM, and the pod's grace must be left for requests in flight.
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
    """Waits until the engine may be stopped."""
    unready_at = time.time()
    while not may_stop(time.time(), unready_at, state.last_request(), drain):  # noqa: ASYNC110  another process
        await asyncio.sleep(POLL_SECONDS)
