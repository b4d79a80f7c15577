"""The picker's doors: a unix socket for Envoy, a TCP port for probes, scrapers and the operator.

A bare asyncio.Protocol, because everything a framework adds is on the path of every request. A handler answers with
bytes at once, or with an awaitable for a slow body or a request that is held, which is cancelled when the peer goes; a
handler that fails answers 500, which Envoy takes for a picker that failed, and fails open.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import cast

from plimsoll.gateway.http1 import BadRequest, Parser, Request, response

log = logging.getLogger(__name__)

Reply = bytes | Awaitable[bytes]
Handler = Callable[[Request], Reply]


class Door(asyncio.Protocol):
    """One connection. max_body in bytes; a connection that says nothing for `idle_seconds` is closed, None keeps it."""

    def __init__(self, handle: Handler, max_body: int, idle_seconds: float | None) -> None:
        self._handle = handle
        self._parser = Parser(max_body)
        self._idle_seconds = idle_seconds
        self._timer: asyncio.TimerHandle | None = None
        self._slow: asyncio.Future[bytes] | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._slow is not None:
            self._slow.cancel()

    def data_received(self, data: bytes) -> None:
        self._parser.feed(data)
        self._watch()
        if self._slow is None:
            self._answer()

    def _watch(self) -> None:
        if self._idle_seconds is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._idle_seconds, self._transport.close)

    def _answer(self) -> None:
        """Answer all whole requests that are here, in order, up to one that takes time."""
        try:
            while (request := self._parser.next()) is not None:
                reply = self._ask(request)
                if not isinstance(reply, bytes):
                    self._slow = asyncio.ensure_future(reply)
                    self._slow.add_done_callback(self._answered)
                    return
                self._transport.write(reply)
        except BadRequest as error:
            self._transport.write(response(error.status, body=f"{error}\n".encode(), close=True))
            self._transport.close()

    def _ask(self, request: Request) -> Reply:
        try:
            return self._handle(request)
        except Exception:  # the boundary of one request: a fault in its answer is not the next one's
            log.exception("answering %s failed", request.path[:200])
            return response(500)

    def _answered(self, slow: asyncio.Future[bytes]) -> None:
        self._slow = None
        if slow.cancelled() or self._transport.is_closing():
            return
        error = slow.exception()
        if error is not None:  # the boundary of one request, as above
            log.error("a slow answer failed", exc_info=error)
        self._transport.write(response(500) if error is not None else slow.result())
        self._answer()
