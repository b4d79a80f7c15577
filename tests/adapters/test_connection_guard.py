"""A server of probes and metrics cuts silent and surplus connections, and serves all others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from plimsoll.adapters import connection_guard
from plimsoll.adapters.connection_guard import ConnectionGuard, CutReason

HEAD_S = 0.2
WRITE_S = 1.0
PAGE_BYTES = 16 << 20  # more than the sockets of both ends take
REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


class Server:
    """A guarded server of aiohttp on a port of 127.0.0.1."""

    def __init__(self, port: int, cuts: list[CutReason], guard: ConnectionGuard) -> None:
        self.port, self.cuts, self.guard = port, cuts, guard

    async def connect(self, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        return reader, writer


async def until_cut(reader: asyncio.StreamReader) -> bytes:
    """All that the server sends until it closes the connection."""
    found = b""
    async with asyncio.timeout(10.0):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 20):
                found += data
    return found


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def page(_: web.Request) -> web.Response:
        return web.Response(body=bytes(PAGE_BYTES))

    app, cuts = web.Application(), list[CutReason]()
    app.router.add_get("/page", page)
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    assert runner.server is not None
    guard = ConnectionGuard(runner.server, cuts.append, max_connections=3, head_seconds=HEAD_S, write_seconds=WRITE_S)
    listener = await asyncio.get_running_loop().create_server(guard, "127.0.0.1", 0)
    yield Server(listener.sockets[0].getsockname()[1], cuts, guard)
    listener.close()
    await runner.cleanup()


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: a\r\n\r\nGET / HT"])
async def test_unfinished_request_is_cut(server: Server, sent: bytes) -> None:
    reader, writer = await server.connect(sent)
    answered = await until_cut(reader)
    assert answered.count(b"200 OK") == sent.count(b"\r\n\r\n")
    writer.close()
    assert (server.cuts, server.guard.open) == ([CutReason.SLOW_REQUEST], 0)


async def test_dripping_request_is_cut(server: Server) -> None:
    reader, writer = await server.connect(b"GET / HTTP/1.1\r\nX: ")

    async def drip() -> None:
        while True:
            writer.write(b"x")
            await asyncio.sleep(HEAD_S / 10)

    dripping = asyncio.create_task(drip())
    assert b"200" not in await until_cut(reader)
    dripping.cancel()
    writer.close()
    assert server.cuts == [CutReason.SLOW_REQUEST]


async def test_surplus_connection_replaces_the_longest_quiet_one(server: Server) -> None:
    """The probes of the kubelet are served, however many others are open."""
    first, second, third = [await server.connect(REQUEST) for _ in range(3)]
    for reader, _ in (first, second, third):
        assert b"200 OK" in await reader.readuntil(b"ok")
    first[1].write(REQUEST)
    assert b"200 OK" in await first[0].readuntil(b"ok")
    reader, writer = await server.connect(REQUEST)
    assert b"200 OK" in await reader.readuntil(b"ok")
    assert await until_cut(second[0]) == b""
    assert (server.cuts, server.guard.open) == ([CutReason.TOO_MANY], 3)
    for kept in (first, third, (reader, writer)):
        kept[1].write(REQUEST)
        assert b"200 OK" in await kept[0].readuntil(b"ok")
    for _, each in (first, second, third, (reader, writer)):
        each.close()


async def test_silent_connections_end_and_idle_ones_stay(server: Server) -> None:
    silent = [await server.connect() for _ in range(2)]
    async with aiohttp.ClientSession() as session:
        for _ in range(2):  # on one connection, which is idle for longer than a head may take
            async with session.get(f"http://127.0.0.1:{server.port}/") as reply:
                assert await reply.text() == "ok"
            await asyncio.sleep(2 * HEAD_S)
        assert server.guard.open == 1
    assert server.cuts == [CutReason.SLOW_REQUEST] * 2
    for reader, writer in silent:
        assert await until_cut(reader) == b""
        writer.close()


async def ask_for_page(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    server.guard.head_seconds = 60.0
    return await server.connect(b"GET /page HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")


async def test_page_that_is_not_read_is_cut(server: Server) -> None:
    reader, writer = await ask_for_page(server)
    async with asyncio.timeout(10.0):
        while not server.cuts:
            await asyncio.sleep(0.05)
    assert (server.cuts, server.guard.open) == ([CutReason.SLOW_READER], 0)
    assert len(await until_cut(reader)) < PAGE_BYTES
    writer.close()


async def test_page_that_is_read_is_whole(server: Server) -> None:
    server.guard.write_seconds = 60.0
    reader, writer = await ask_for_page(server)
    assert len(await until_cut(reader)) > PAGE_BYTES
    writer.close()
    assert server.cuts == []


async def test_surplus_unread_page_replaces_the_oldest(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_guard, "MAX_UNREAD", 1)
    server.guard.write_seconds = 60.0
    _, first = await ask_for_page(server)
    await asyncio.sleep(HEAD_S)
    _, second = await ask_for_page(server)
    async with asyncio.timeout(10.0):
        while not server.cuts:
            await asyncio.sleep(0.05)
    assert (server.cuts, server.guard.open) == ([CutReason.SLOW_READER], 1)
    first.close()
    second.close()
