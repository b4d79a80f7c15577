"""A worker process that parses bodies that would block the event loop.

Only bodies that are large run here (`needs_worker`). The process starts with the first of them. It is replaced when it
has grown beyond `MAX_PROCESS_BYTES`, which returns the memory that a hostile body made it allocate.
"""

from __future__ import annotations

import asyncio
import mmap
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from plimsoll.core.admission.retry_advice import advise_retry
from plimsoll.gateway.api_routes import ApiRoute
from plimsoll.gateway.errors import Rejection, RejectionReason
from plimsoll.gateway.request_parser import ParsedRequest, parse_body

MAX_WAITING_BYTES = 128 << 20  # of bodies; no fewer than Envoy holds by default
MAX_PROCESS_BYTES = 256 << 20  # resident; a new process takes some 60 MB
BUSY_REJECTION = Rejection(
    RejectionReason.GATEWAY_BUSY, "The gateway is busy parsing other large request bodies.", retry=advise_retry(1)
)


def _parse(body: bytes, route: ApiRoute) -> tuple[ParsedRequest | Rejection, int]:
    """Returns the parsed request or its rejection, and the resident bytes of this process."""
    parsed = parse_body(body, route)
    return parsed, int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


class ParseWorker:
    """Parses bodies one after the other in another process."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._waiting_bytes = 0

    async def parse(self, body: bytes, route: ApiRoute) -> ParsedRequest | Rejection:
        if self._waiting_bytes + len(body) > MAX_WAITING_BYTES:
            return BUSY_REJECTION
        self._waiting_bytes += len(body)
        pool = self._executor()
        try:
            parsed, resident_bytes = await asyncio.get_running_loop().run_in_executor(pool, _parse, body, route)
        except BrokenProcessPool:
            self._replace(pool)
            return BUSY_REJECTION
        finally:
            self._waiting_bytes -= len(body)
        if resident_bytes > MAX_PROCESS_BYTES:
            self._replace(pool)
        return parsed

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _replace(self, pool: ProcessPoolExecutor) -> None:
        """Let the next body start another process. This one ends after the bodies that it has."""
        if self._pool is pool:
            self._pool = None
            pool.shutdown(wait=False)

    def _executor(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn"))
        return self._pool
