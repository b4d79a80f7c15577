"""A worker process that parses bodies that would block the event loop.

Problem: large bodies (`NeedsWorker`) are parsed here one at a time. In one common queue, the bodies of a hostile
client would delay those of all others, and fill the room for them.

Idea: each client has a queue of its own, and the clients take turns. So a client's next body waits for at most one body
of each other client. A client may have `MAX_CLIENT_BYTES` here, all together `MAX_BYTES`. The process starts with the
picker, so that no body waits for its start. It is replaced when it has grown beyond `MAX_PROCESS_BYTES`, which returns
the memory that a hostile body made it allocate.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import multiprocessing
import os
import threading
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from plimsoll.core.admission.retry_advice import advise_retry
from plimsoll.gateway.api_routes import ApiRoute, BodyForm
from plimsoll.gateway.audio_form import parse_audio_form
from plimsoll.gateway.errors import Rejection, RejectionReason
from plimsoll.gateway.gateway_limit import GatewayLimit
from plimsoll.gateway.request_body import Body, Pieces, size_of
from plimsoll.gateway.request_parser import ParsedRequest, parse_body
from plimsoll.telemetry import gateway_metrics

log = logging.getLogger(__name__)

MAX_BYTES = 128 << 20  # of bodies that wait or are parsed; no fewer than Envoy holds by default
MAX_CLIENT_BYTES = 96 << 20  # the same of one client, so that others have room; a single body always fits
MAX_PROCESS_BYTES = 256 << 20  # resident; a new process takes some 26 MB, of which 15 MB are its own
SEND_BYTES = 1 << 20  # to the process at once: copying a whole body would keep the event loop from running
RETRY_SECONDS = 1.0
BUSY_REJECTION = Rejection(
    RejectionReason.GATEWAY_BUSY,
    "The gateway is busy parsing other large request bodies.",
    retry=advise_retry(RETRY_SECONDS),
)
FULL_REJECTION = replace(BUSY_REJECTION, limit=GatewayLimit.PARSE_BYTES)
CLIENT_REJECTION = Rejection(
    RejectionReason.GATEWAY_FULL,
    f"This gateway instance parses large request bodies one at a time, and at most {MAX_CLIENT_BYTES >> 20} MiB of one"
    " client may wait. Send fewer of them at once.",
    retry=advise_retry(RETRY_SECONDS),
    limit=GatewayLimit.CLIENT_PARSE_BYTES,
)


class _Body(NamedTuple):
    """A body that waits. `parsed` is the future of its result."""

    body: Body
    route: ApiRoute
    content_type: bytes
    parsed: asyncio.Future[ParsedRequest | Rejection]


_received: list[bytes] = []  # in the process: the body so far


def _receive(pieces: Pieces, *, is_first: bool) -> None:
    """Called in the process with a part of a body."""
    if is_first:
        _received.clear()
    _received.extend(pieces)


def _parts(body: Body) -> Iterator[Pieces]:
    """Yields a body in parts of some SEND_BYTES."""
    if isinstance(body, bytes):
        yield from ((body[start : start + SEND_BYTES],) for start in range(0, len(body), SEND_BYTES))
        return
    part, size = [], 0
    for piece in body:
        part.append(piece)
        size += len(piece)
        if size >= SEND_BYTES:
            yield tuple(part)
            part, size = [], 0
    yield tuple(part)


def _parse(route: ApiRoute, content_type: bytes) -> tuple[ParsedRequest | Rejection, int]:
    """Called in the process after the last part of a body.

    Returns the parsed request or its rejection, and the resident bytes of this process.
    """
    body = b"".join(_received)
    _received.clear()
    parsed = parse_audio_form(body, content_type) if route.form is BodyForm.AUDIO else parse_body(body, route)
    return parsed, int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def _end_with_parent() -> None:
    """Called first in the worker process. A picker that is killed leaves no process behind."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def _nothing() -> None:
    """Start a process: an executor starts one with its first call."""


class ParseWorker:
    """Parses the bodies of all clients in another process, by turns."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._queues: dict[str, deque[_Body]] = {}  # by client; the first client's turn is next
        self._bytes: Counter[str] = Counter()  # of all bodies here, by client
        self._turns: asyncio.Task[None] | None = None
        self._is_broken = False  # the last process ended by itself
        self._broken_lock = threading.Lock()

    def start(self) -> None:
        """Start the process, so that the first body does not wait for it."""
        if self._pool is None:
            pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _end_with_parent)
            pool.submit(_nothing).add_done_callback(self._log_failed_start)
            self._pool = pool  # else the next body starts another one

    async def parse(
        self, body: Body, route: ApiRoute, client: str, content_type: bytes = b""
    ) -> ParsedRequest | Rejection:
        """Returns the parsed request, or its rejection. `client` names who sent the body."""
        size = size_of(body)
        if self._bytes[client] and self._bytes[client] + size > MAX_CLIENT_BYTES:
            return CLIENT_REJECTION
        if self._bytes.total() + size > MAX_BYTES:
            return FULL_REJECTION
        waiting = _Body(body, route, content_type, asyncio.get_running_loop().create_future())
        self._queues.setdefault(client, deque()).append(waiting)
        self._add_bytes(client, size)
        if self._turns is None or self._turns.done():
            self._turns = asyncio.create_task(self._take_turns())
        return await waiting.parsed

    def close(self) -> None:
        if self._turns is not None:
            self._turns.cancel()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    async def _take_turns(self) -> None:
        """Parse all bodies that wait, one of each client in turn."""
        while self._queues:
            client = next(iter(self._queues))
            queue = self._queues.pop(client)
            waiting = queue.popleft()
            if queue:
                self._queues[client] = queue  # behind all others
            try:
                await self._parse(waiting)
            finally:
                self._add_bytes(client, -size_of(waiting.body))

    async def _parse(self, waiting: _Body) -> None:
        """Parse a body, unless its client has left."""
        if waiting.parsed.done():
            return
        try:
            parsed = await self._parse_in_process(waiting)
        except Exception:  # one body's failure must not affect the others
            log.exception("parsing a large body failed")
            parsed = BUSY_REJECTION
        if not waiting.parsed.done():
            waiting.parsed.set_result(parsed)

    async def _parse_in_process(self, waiting: _Body) -> ParsedRequest | Rejection:
        """Parse a body. Raises if a process cannot be started."""
        self.start()
        pool = self._pool
        assert pool is not None
        try:
            for number, part in enumerate(_parts(waiting.body)):
                await asyncio.wrap_future(pool.submit(_receive, part, is_first=number == 0))
            call = pool.submit(_parse, waiting.route, waiting.content_type)
            parsed, resident_bytes = await asyncio.wrap_future(call)
        except BrokenProcessPool:
            self._log_end()
            self._replace(pool)
            return BUSY_REJECTION
        self._is_broken = False
        if resident_bytes > MAX_PROCESS_BYTES:
            self._replace(pool)
        return parsed

    def _log_failed_start(self, start: Future[None]) -> None:
        """Called in a thread of the executor."""
        if not start.cancelled() and start.exception() is not None:
            self._log_end()

    def _log_end(self) -> None:
        """One line, also when each of many bodies ends a process."""
        with self._broken_lock:
            if not self._is_broken:
                log.error("The process that parses request bodies above 64 KiB ended. Another one starts.")
            self._is_broken = True

    def _replace(self, pool: ProcessPoolExecutor) -> None:
        """Start another process in the place of this one."""
        pool.shutdown(wait=False)
        self._pool = None
        self.start()

    def _add_bytes(self, client: str, size: int) -> None:
        self._bytes[client] += size
        if not self._bytes[client]:
            del self._bytes[client]
        gateway_metrics.GATEWAY_PARSE_BYTES.set(self._bytes.total())
