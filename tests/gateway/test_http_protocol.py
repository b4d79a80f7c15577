"""The picker's HTTP protocol: order of responses, and what a disconnect cancels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from plimsoll.gateway.http1 import CHUNKED_END, HttpRequest, chunk, chunked_head, response
from plimsoll.gateway.loop_turns import TURN_SECONDS, LoopTurns
from plimsoll.gateway.server import HttpProtocol


class FakeTransport(asyncio.Transport):
    """A transport that keeps what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = self.paused = self.aborted = False

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes | bytearray | memoryview[int]) -> None:
        self.written += bytes(data)

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


CHECK_REQUEST = b"POST /check HTTP/1.1\r\ncontent-length: 0\r\n\r\n"


async def test_http_protocol_cancels_handler_on_disconnect() -> None:
    queued: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    protocol, wire = HttpProtocol(lambda request: queued, 1024, None, LoopTurns()), FakeTransport()
    protocol.connection_made(wire)
    protocol.data_received(CHECK_REQUEST)
    protocol.connection_lost(None)
    assert queued.cancelled()
    await asyncio.sleep(0)
    assert wire.written == b""


async def test_http_protocol_responds_in_order_and_maps_error_to_500() -> None:
    loop = asyncio.get_running_loop()
    replies: list[Any] = [loop.create_future(), response(404), loop.create_future(), response(413)]

    def handle(_: HttpRequest) -> Any:
        return replies.pop(0)

    first, third = replies[0], replies[2]
    protocol, wire = HttpProtocol(handle, 1024, None, LoopTurns()), FakeTransport()
    protocol.connection_made(wire)
    protocol.data_received(4 * CHECK_REQUEST)
    assert wire.written == b""
    first.set_result(response(200))
    await asyncio.sleep(0)
    third.set_exception(RuntimeError("as a test of faults"))
    await asyncio.sleep(0)
    statuses = [line.split(b" ")[1] for line in wire.written.split(b"\r\n") if line.startswith(b"HTTP/1.1")]
    assert statuses == [b"200", b"404", b"500", b"413"]


async def test_http_protocol_stops_reading_while_requests_wait() -> None:
    loop = asyncio.get_running_loop()
    first, second = loop.create_future(), loop.create_future()
    replies: list[Any] = [first, second, response(200)]
    protocol, wire = HttpProtocol(lambda _: replies.pop(0), 1024, None, LoopTurns()), FakeTransport()
    protocol.connection_made(wire)
    protocol.data_received(CHECK_REQUEST)
    assert not wire.paused, "a disconnect must be seen"
    protocol.data_received(2 * CHECK_REQUEST)
    assert wire.paused
    first.set_result(response(200))
    await asyncio.sleep(0)
    assert wire.paused, "the third waits for the second"
    second.set_result(response(200))
    await asyncio.sleep(0)
    assert (wire.paused, replies) == (False, [])


async def parts(*found: bytes | Exception) -> AsyncIterator[bytes]:
    for part in found:
        if isinstance(part, Exception):
            raise part
        yield part


async def finished(protocol: HttpProtocol) -> None:
    """Wait for the response in parts that is under way."""
    pending = protocol._pending_reply
    assert pending is not None
    await asyncio.wait((pending,))
    await asyncio.sleep(0)


async def test_http_protocol_writes_parts_and_then_next_response() -> None:
    replies: list[Any] = [parts(chunked_head(200, ()), chunk(b"a" * 17), CHUNKED_END), response(404)]
    protocol, wire = HttpProtocol(lambda _: replies.pop(0), 1024, None, LoopTurns()), FakeTransport()
    protocol.connection_made(wire)
    protocol.data_received(2 * CHECK_REQUEST)
    await finished(protocol)
    assert wire.written == (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n11\r\n" + b"a" * 17 + b"\r\n0\r\n\r\n" + response(404)
    )


async def test_http_protocol_cuts_response_whose_part_fails() -> None:
    protocol = HttpProtocol(
        lambda _: parts(chunked_head(200, ()), RuntimeError("as a test of faults")), 1024, None, LoopTurns()
    )
    protocol.connection_made(wire := FakeTransport())
    protocol.data_received(CHECK_REQUEST)
    await finished(protocol)
    assert wire.closed
    assert b"500" not in wire.written


async def test_http_protocol_ends_parts_on_disconnect() -> None:
    waits, ended = asyncio.Event(), asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        try:
            yield b"a"
            await waits.wait()
        finally:
            ended.set()

    protocol, wire = HttpProtocol(lambda _: endless(), 1024, None, LoopTurns()), FakeTransport()
    protocol.connection_made(wire)
    protocol.data_received(CHECK_REQUEST)
    await asyncio.sleep(0)
    protocol.connection_lost(None)
    await asyncio.wait_for(ended.wait(), 10)


class Work:
    """Handlers that each take most of a turn of the loop, by a clock of their own."""

    def __init__(self) -> None:
        self.now_s, self.handled = 0.0, 0
        self.turns = LoopTurns(lambda: self.now_s)

    def handle(self, request: HttpRequest) -> bytes:
        self.now_s += 0.75 * TURN_SECONDS
        self.handled += 1
        return response(200)

    def connect(self) -> tuple[HttpProtocol, FakeTransport]:
        protocol, wire = HttpProtocol(self.handle, 1024, None, self.turns), FakeTransport()
        protocol.connection_made(wire)
        return protocol, wire


async def test_requests_of_many_connections_take_turns_of_the_loop() -> None:
    work = Work()
    made = [work.connect() for _ in range(6)]
    for protocol, _ in made:
        protocol.data_received(CHECK_REQUEST)
    assert [bool(wire.written) for _, wire in made] == [True, True, False, False, False, False]
    assert [wire.paused for _, wire in made] == [False, False, True, True, True, True], "no more is read of them"
    await asyncio.sleep(0)
    assert [bool(wire.written) for _, wire in made] == [True, True, True, True, False, False], "in order"
    late, wire = work.connect()
    late.data_received(CHECK_REQUEST)
    assert not wire.written, "it does not overtake"
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert all(wire.written and not wire.paused for _, wire in [*made, (late, wire)])


async def test_requests_of_one_connection_take_turns_of_the_loop() -> None:
    work = Work()
    protocol, wire = work.connect()
    protocol.data_received(5 * CHECK_REQUEST)
    assert (work.handled, wire.paused) == (2, True)
    await asyncio.sleep(0)
    assert (work.handled, wire.paused) == (4, True)
    await asyncio.sleep(0)
    assert (work.handled, wire.paused, wire.written.count(b"HTTP/1.1 200")) == (5, False, 5)


async def test_lost_connection_takes_no_turn() -> None:
    work = Work()
    for _ in range(2):
        work.connect()[0].data_received(CHECK_REQUEST)
    lost, wire = work.connect()
    lost.data_received(CHECK_REQUEST)
    lost.connection_lost(None)
    await asyncio.sleep(0)
    assert (work.handled, wire.written) == (2, b"")


@pytest.mark.parametrize("turn", [0, 1])
async def test_failed_work_ends_its_connection_alone(turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(data: bytes) -> None:
        raise MemoryError

    work = Work()
    for _ in range(2 * turn):
        work.connect()[0].data_received(CHECK_REQUEST)
    (failing, wire), (other, other_wire) = work.connect(), work.connect()
    monkeypatch.setattr(failing, "_read", fail)
    failing.data_received(CHECK_REQUEST)
    other.data_received(CHECK_REQUEST)
    await asyncio.sleep(0)
    assert (wire.aborted, wire.written) == (True, b"")
    assert (other_wire.aborted, bool(other_wire.written)) == (False, True)
