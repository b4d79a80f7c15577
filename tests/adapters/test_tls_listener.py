"""With TLS, connections count before their handshake, which anybody can leave unfinished."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import pytest
import uvloop

from plimsoll.adapters.connection_guard import ConnectionGuard, CutReason
from plimsoll.adapters.internal_tls import IdentityWatch, has_name, listener_context
from plimsoll.adapters.tls_listener import TlsListener
from plimsoll.gateway.http1 import HttpRequest, response
from plimsoll.gateway.loop_turns import LoopTurns
from plimsoll.gateway.server import HttpProtocol
from tests.certificates import Authority, SecretVolume

NAME: Final = "plimsoll-internal.plimsoll-system.svc"
HANDSHAKE_S: Final = 0.5
MAX_CONNECTIONS: Final = 2
GET: Final = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
Run = Callable[[Coroutine[Any, Any, None]], None]
both_loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run])


def answer_with(body: bytes) -> Callable[[HttpRequest], bytes]:
    return lambda _: response(200, body=body)


class Server:
    """A guarded listener with TLS, whose page says whether the client has the name."""

    def __init__(self, folder: Path) -> None:
        volume = SecretVolume(folder / "secret")
        volume.write(Authority(folder / "ca", "plimsoll").issue(NAME))
        self.watch, self.cuts = IdentityWatch(volume.directory, NAME), list[CutReason]()
        self.watch.take(self.watch.read())
        self.guard = ConnectionGuard(
            lambda: HttpProtocol(
                answer_with(b""),
                0,
                None,
                LoopTurns(),
                lambda certificate: answer_with(b"%d" % has_name(certificate, NAME)),
            ),
            self.cuts.append,
            max_connections=MAX_CONNECTIONS,
        )
        self.port, self.writers = 0, list[asyncio.StreamWriter]()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        context = listener_context(lambda: self.watch.identity)
        listener = TlsListener(self.guard, "127.0.0.1", 0, context, handshake_seconds=HANDSHAKE_S)
        self.port = listener.port
        yield
        listener.close()
        for writer in self.writers:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        await self.wait_until_open_are(0)

    async def connect(self, context: ssl.SSLContext | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        name = None if context is None else NAME
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=context, server_hostname=name)
        self.writers.append(writer)
        return reader, writer

    async def get(self) -> bytes:
        """The page, requested with the certificate of the server's own release."""
        assert self.watch.identity is not None
        reader, writer = await self.connect(self.watch.identity.client)
        writer.write(GET)
        async with asyncio.timeout(5.0):
            found = await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(1)
        writer.transport.abort()
        return found

    async def wait_until_open_are(self, count: int) -> None:
        async with asyncio.timeout(5.0):
            while self.guard.open != count:
                await asyncio.sleep(0.01)


async def until_cut(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(5.0):
            await reader.read()


@both_loops
def test_unfinished_handshakes_count_and_end(tmp_path: Path, run: Run) -> None:
    async def scenario() -> None:
        server = Server(tmp_path)
        async with server.listening():
            silent = [await server.connect() for _ in range(MAX_CONNECTIONS)]
            await server.wait_until_open_are(MAX_CONNECTIONS)
            await server.connect()
            await until_cut(silent[0][0])  # the surplus one takes the place of the oldest
            assert (server.cuts, server.guard.open) == ([CutReason.TOO_MANY], MAX_CONNECTIONS)
            for reader, _ in silent:
                await until_cut(reader)
            await server.wait_until_open_are(0)
            assert (await server.get()).endswith(b"\r\n\r\n1")
            await server.wait_until_open_are(0)

    run(scenario())


@both_loops
def test_failed_handshakes_leave_no_connection(tmp_path: Path, run: Run) -> None:
    async def scenario() -> None:
        server = Server(tmp_path)
        async with server.listening():
            for _ in range(2 * MAX_CONNECTIONS):
                reader, writer = await server.connect()
                writer.write(b"GET / HTTP/1.1\r\n\r\n")
                await until_cut(reader)
                with pytest.raises(ssl.SSLCertVerificationError):
                    await server.connect(ssl.create_default_context())
                await server.wait_until_open_are(0)
            _, writer = await server.connect()
            writer.transport.abort()
            assert (await server.get()).endswith(b"1")
            assert server.cuts == []

    run(scenario())


@both_loops
def test_request_with_the_last_flight_is_answered(tmp_path: Path, run: Run) -> None:
    """A client sends its request together with the end of its handshake."""

    async def scenario() -> None:
        server = Server(tmp_path)
        assert server.watch.identity is not None
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = server.watch.identity.client.wrap_bio(incoming, outgoing, server_hostname=NAME)
        async with server.listening(), asyncio.timeout(5.0):
            reader, writer = await server.connect()
            while True:
                with contextlib.suppress(ssl.SSLWantReadError):
                    client.do_handshake()
                    break
                writer.write(outgoing.read())
                incoming.write(await reader.read(1 << 16))
            client.write(GET)
            writer.write(outgoing.read())
            found = b""
            while not found.endswith(b"\r\n\r\n1"):
                incoming.write(await reader.read(1 << 16))
                with contextlib.suppress(ssl.SSLWantReadError):
                    found += client.read(1 << 16)

    run(scenario())
