"""A process of its own for bodies whose parsing would keep every other request waiting.

Only bodies that are both large and suspicious come here. The process starts with the first of them and is replaced
every so often, which gives back the memory that a hostile body made it take.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from plimsoll.gateway.classify import Request, classify
from plimsoll.gateway.replies import Reason, Refusal

MOST_WAITING = 32  # bodies held for the worker; each may be as large as a body can be
BODIES_PER_PROCESS = 100
BUSY = Refusal(Reason.GATEWAY_BUSY, "The gateway is busy with other large requests.", eta_seconds=1)


class Worker:
    """Classifies one body after the other in another process."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._waiting = 0

    async def classify(self, body: bytes) -> Request | Refusal:
        if self._waiting >= MOST_WAITING:
            return BUSY
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._start(), classify, body)
        except BrokenProcessPool:
            self._pool = None
            return BUSY
        finally:
            self._waiting -= 1

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _start(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                max_workers=1,
                mp_context=multiprocessing.get_context("spawn"),
                max_tasks_per_child=BODIES_PER_PROCESS,
            )
        return self._pool
