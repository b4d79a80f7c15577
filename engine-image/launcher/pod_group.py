"""When a worker of an engine of several pods may end.

Problem: a node that is drained ends a worker while the leader still completes requests, which need every pod. The
worker sees no requests.

Idea: the worker ends after the leader. It asks the leader's launcher whether it is there, and believes an absence only
after several questions in a row, since one connection or name resolution may fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

POLL_SECONDS = 1.0
QUESTION_SECONDS = 2.0
ABSENCES = 3


async def wait_until_leader_ended(is_there: Callable[[], Awaitable[bool]], poll_seconds: float = POLL_SECONDS) -> None:
    """Return once the leader was absent ABSENCES times in a row."""
    absences = 0
    while absences < ABSENCES:
        absences = 0 if await is_there() else absences + 1
        await asyncio.sleep(poll_seconds)


async def accepts_connections(host: str, port: int) -> bool:
    """Whether a program listens on a port of a host."""
    try:
        async with asyncio.timeout(QUESTION_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
