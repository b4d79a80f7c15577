"""A small engine on loopback: speaks as much of the API as the gateway's tests need, and misbehaves on demand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field

from plimsoll.gateway.http1 import HttpParser, HttpRequest, response
from plimsoll.gateway.request_body import whole

CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}\n\n'
DONE = b"data: [DONE]\n\n"


@dataclass
class Behaviour:
    """tokens: events of a stream. hold: an event that every answer waits for before its first byte, and `pause` one
    that streams wait for after their first event. die_after: events after which the connection is reset; 0 is before
    the first byte. marked: answer 503 for this reason, with the marker that says 'try elsewhere'. text: of an answer
    that is no stream. usage: JSON at the end of answers."""

    tokens: int = 3
    release_event: asyncio.Event | None = None
    pause: asyncio.Event | None = None
    die_after: int | None = None
    error_marker: str = ""
    status: int = 200
    text: str = "x"
    usage: bytes = b""


@dataclass
class FakeEngine:
    """One engine and what it was asked."""

    host: str = "127.0.0.1"
    behaviour: Behaviour = field(default_factory=Behaviour)
    received: list[HttpRequest] = field(default_factory=list)
    port: int = 0
    open: int = 0
    _server: asyncio.Server | None = None
    _connections: set[asyncio.Transport] = field(default_factory=set)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    async def start(self) -> FakeEngine:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def kill(self) -> None:
        """As a killed process: the port refuses, and every connection is reset."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for transport in list(self._connections):
            transport.abort()

    def header(self, name: str, request: int = -1) -> str | None:
        value = self.received[request].headers.get(name.encode())
        return None if value is None else value.decode()


class _Connection(asyncio.Protocol):
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._parser = HttpParser(64 << 20)
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._engine._connections.add(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine._connections.discard(self._transport)
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._parser.feed(data)
        if (request := self._parser.next()) is not None:
            request.body = whole(request.body)
            self._engine.received.append(request)
            self._task = asyncio.ensure_future(self._answer(request, self._engine.behaviour))

    async def _answer(self, request: HttpRequest, how: Behaviour) -> None:
        self._engine.open += 1
        try:
            await self._whole(request, how)
        finally:
            self._engine.open -= 1

    async def _whole(self, request: HttpRequest, how: Behaviour) -> None:
        if how.error_marker:
            headers = (("x-plimsoll-retry", "1"), ("retry-after", "1"), ("x-plimsoll-reason", how.error_marker))
            error = b'{"error":{"message":"not here","code":"%s"}}' % how.error_marker.encode()
            self._transport.write(response(503, (*headers, ("content-type", "application/json")), error))
            return
        if how.release_event is not None:
            await how.release_event.wait()
        if how.die_after == 0:
            self._transport.abort()
            return
        headers = (("content-type", "application/json"), ("x-engine", self._engine.address))
        if b'"stream":true' in whole(request.body).replace(b" ", b"") and how.status == 200:
            await self._stream(how)
        else:
            body = json.dumps({"model": "m", "choices": [{"index": 0, "message": {"content": how.text}}]}).encode()
            body = body[:-1] + b', "usage": ' + how.usage + b"}" if how.usage else body
            self._transport.write(response(how.status, headers, body))

    async def _stream(self, how: Behaviour) -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-engine: {self._engine.address}\r\n"
        self._transport.write(head.encode() + b"transfer-encoding: chunked\r\n\r\n")
        for sent in range(how.tokens):
            if sent == how.die_after:
                self._transport.abort()
                return
            self._transport.write(_chunk(CHUNK))
            if sent == 0 and how.pause is not None:
                await how.pause.wait()
        if how.usage:
            self._transport.write(_chunk(b'data: {"choices":[],"usage":' + how.usage + b"}\n\n"))
        self._transport.write(_chunk(DONE) + b"0\r\n\r\n")


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


Starter = Callable[..., FakeEngine]
