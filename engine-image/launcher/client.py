"""A small HTTP client for the engine on loopback: one request, one connection, standard library only."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from dataclasses import dataclass

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Response:
    """Status and body of an answer."""

    status: int
    body: bytes


@dataclass(frozen=True)
class EngineClient:
    """`tls` gives the context of a connection and the name in the engine's certificate; None for plain HTTP."""

    port: int
    tls: Callable[[], tuple[ssl.SSLContext, str]] | None = None

    async def request(self, path: str, body: bytes | None = None, timeout: float = 5.0) -> Response:
        """See `launcher.client.request`."""
        context, name = (None, None) if self.tls is None else self.tls()
        return await request(self.port, path, body, timeout, context, name)


async def request(
    port: int,
    path: str,
    body: bytes | None = None,
    timeout: float = 5.0,
    context: ssl.SSLContext | None = None,
    name: str | None = None,
) -> Response:
    """GET, or POST of a JSON `body`; raises OSError, TimeoutError, or ValueError for no HTTP answer.

    context, name: for TLS, with the name in the engine's certificate.
    """
    async with asyncio.timeout(timeout):
        reader, writer = await asyncio.open_connection(HOST, port, ssl=context, server_hostname=name)
        try:
            method = "GET" if body is None else "POST"
            payload = body or b""
            head = (
                f"{method} {path} HTTP/1.1\r\nhost: {HOST}:{port}\r\nconnection: close\r\n"
                f"content-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
            )
            writer.write(head.encode() + payload)
            await writer.drain()
            raw = await reader.read()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    header, _, rest = raw.partition(b"\r\n\r\n")
    status_line = header.split(b" ", 2)
    if len(status_line) < 2 or not status_line[1].isdigit():
        raise ValueError("the engine's answer is not HTTP")
    return Response(int(status_line[1]), rest)
