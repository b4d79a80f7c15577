"""A worker process that parses bodies that would block the event loop.

Only bodies that are large and need a strict parse run here. The process starts with the first of them. It is replaced
after `BODIES_PER_PROCESS` bodies, which returns the memory that a hostile body made it allocate.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from plimsoll.core.admission.retry_advice import advise_retry
from plimsoll.gateway.api_routes import ApiRoute
from plimsoll.gateway.errors import Rejection, RejectionReason
from plimsoll.gateway.request_parser import ParsedRequest, parse_body

MAX_WAITING_BODIES = 32  # bounds memory: each may be as large as `max_body_bytes`
BODIES_PER_PROCESS = 100
BUSY_REJECTION = Rejection(
    RejectionReason.GATEWAY_BUSY, "The gateway is busy parsing other large request bodies.", retry=advise_retry(1)
)


class ParseWorker:
    """Parses bodies one after the other in another process."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._waiting = 0

    async def parse(self, body: bytes, route: ApiRoute) -> ParsedRequest | Rejection:
        if self._waiting >= MAX_WAITING_BODIES:
            return BUSY_REJECTION
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor(), parse_body, body, route)
        except BrokenProcessPool:
            self._pool = None
            return BUSY_REJECTION
        finally:
            self._waiting -= 1

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _executor(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                max_workers=1,
                mp_context=multiprocessing.get_context("spawn"),
                max_tasks_per_child=BODIES_PER_PROCESS,
            )
        return self._pool
