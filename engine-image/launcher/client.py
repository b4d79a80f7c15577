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


class TlsRefused(OSError):
    """The engine's API server runs, but does not accept this client's certificate, or this client its TLS."""


@dataclass(frozen=True)
class EngineClient:
    """`tls` gives the context of a connection; None for plain HTTP."""

    port: int
    tls: Callable[[], ssl.SSLContext] | None = None

    async def request(self, path: str, body: bytes | None = None, timeout: float = 5.0) -> Response:
        """See `launcher.client.request`."""
        try:
            return await request(self.port, path, body, timeout, None if self.tls is None else self.tls())
        except ssl.SSLError as error:
            raise TlsRefused(str(error)) from error


async def request(
    port: int,
    path: str,
    body: bytes | None = None,
    timeout: float = 5.0,
    context: ssl.SSLContext | None = None,
) -> Response:
    """GET, or POST of a JSON `body`; raises OSError, TimeoutError, or ValueError for no HTTP answer.

    context: for TLS. A server that refuses the client's certificate then closes the connection after the handshake,
    with or without an alert, which raises TlsRefused.
    """
    async with asyncio.timeout(timeout):
        reader, writer = await asyncio.open_connection(HOST, port, ssl=context)
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
        except ConnectionError as error:
            raise error if context is None else TlsRefused(str(error)) from error
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    if context is not None and not raw:
        raise TlsRefused("it closed the connection without a response")
    header, _, rest = raw.partition(b"\r\n\r\n")
    status_line = header.split(b" ", 2)
    if len(status_line) < 2 or not status_line[1].isdigit():
        raise ValueError("the engine's answer is not HTTP")
    return Response(int(status_line[1]), rest)
