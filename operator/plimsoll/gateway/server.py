"""The picker's HTTP server: a unix socket for Envoy, a TCP port for probes, Prometheus and the operator.

It is a bare protocol of asyncio, because the overhead of a framework would affect every request. What comes at once is
read and handled over several turns of the event loop. A handler returns bytes, an awaitable for a slow body or a queued
request, or the parts of a stream. The latter two are cancelled when the peer disconnects. A handler that raises
produces a 500. Envoy treats it as a failure of the picker and fails open, unless API keys are required.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

from plimsoll.gateway.http1 import HttpParseError, HttpParser, HttpRequest, response
from plimsoll.gateway.loop_turns import LoopTurns

log = logging.getLogger(__name__)

READ_BYTES = 16 << 10  # at once: larger pieces of many connections would keep the loop for long
_buffer = memoryview(bytearray(READ_BYTES))  # of the connection that is read at the moment

HandlerReply = bytes | Awaitable[bytes] | AsyncIterator[bytes]
Handler = Callable[[HttpRequest], HandlerReply]


class HttpProtocol(asyncio.BufferedProtocol):
    """One connection. `max_body` is in bytes. An idle connection closes after `idle_seconds`, never if None.

    `turns` are those of all connections of the loop.
    `handler_of`: returns the handler for a client by its verified certificate, None if it has none.
    """

    def __init__(
        self,
        handler: Handler,
        max_body: int,
        idle_seconds: float | None,
        turns: LoopTurns,
        handler_of: Callable[[Any], Handler] | None = None,
    ) -> None:
        self._handler = handler
        self._handler_of = handler_of
        self._parser = HttpParser(max_body)
        self._idle_seconds = idle_seconds
        self._turns = turns
        self._waits = 0  # pieces of work that wait for another turn of the loop
        self._is_lost = False
        self._timer: asyncio.TimerHandle | None = None
        self._pending_reply: asyncio.Future[bytes] | None = None
        self._is_paused = False
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._handler_of is not None:
            self._handler = self._handler_of(transport.get_extra_info("peercert"))
        self._restart_idle_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._parser.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._pending_reply is not None:
            self._pending_reply.cancel()

    def get_buffer(self, sizehint: int) -> memoryview:
        return _buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(_buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        self._run(lambda: self._read(data))

    def _run(self, work: Callable[[], None]) -> None:
        """Do some work now or in a later turn of the loop, unless the connection ends before.

        If it fails, the connection ends: in a later turn nothing else would end it.
        """

        def work_if_open() -> None:
            self._waits -= 1
            if self._is_lost:
                return
            try:
                work()
                self._pause_reading()
            except Exception:  # one connection's failure must not affect the others
                log.exception("the work of a connection failed")
                self._transport.abort()

        self._waits += 1
        if not self._turns.run(work_if_open):
            self._pause_reading()

    def _read(self, data: bytes) -> None:
        self._parser.feed(data)
        self._restart_idle_timer()
        if self._pending_reply is None:
            self._handle_requests()

    def _pause_reading(self) -> None:
        """Read no more while work waits for its turn, or a request for the reply to an earlier one: few can wait.

        Otherwise reading goes on, because the end of the connection cancels a pending reply.
        """
        is_paused = self._waits > 0 or (self._pending_reply is not None and self._parser.has_complete)
        if is_paused is not self._is_paused:
            self._is_paused = is_paused
            (self._transport.pause_reading if is_paused else self._transport.resume_reading)()

    def _restart_idle_timer(self) -> None:
        if self._idle_seconds is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._idle_seconds, self._transport.close)

    def _handle_requests(self) -> None:
        """Handle the complete requests in order, up to the first with a pending reply."""
        if self._waits:  # it handles them
            return
        try:
            while (request := self._parser.next()) is not None:
                reply = self._call_handler(request)
                if not isinstance(reply, bytes):
                    pending = self._write_parts(reply) if isinstance(reply, AsyncIterator) else reply
                    self._pending_reply = asyncio.ensure_future(pending)
                    self._pending_reply.add_done_callback(self._on_reply)
                    return
                self._transport.write(reply)
                if self._parser.has_complete and self._turns.is_over:
                    self._run(self._handle_requests)
                    return
        except HttpParseError as error:
            self._transport.write(response(error.status, body=f"{error}\n".encode(), close=True))
            self._transport.close()

    def _call_handler(self, request: HttpRequest) -> HandlerReply:
        try:
            return self._handler(request)
        except Exception:  # one request's failure must not affect the next
            log.exception("handling %s failed", request.path.partition(b"?")[0][:200])
            return response(500)

    async def _write_parts(self, parts: AsyncIterator[bytes]) -> bytes:
        """Write a response in parts. If one cannot be made, the connection closes, so that the response is cut."""
        try:
            async for part in parts:
                self._transport.write(part)
        except Exception:  # as above
            log.exception("a response in parts failed")
            self._transport.close()
        return b""

    def _on_reply(self, pending: asyncio.Future[bytes]) -> None:
        self._pending_reply = None
        if pending.cancelled() or self._transport.is_closing():
            return
        error = pending.exception()
        if error is not None:  # as above
            log.error("a pending reply failed", exc_info=error)
        self._transport.write(response(500) if error is not None else pending.result())
        self._handle_requests()
        self._pause_reading()
