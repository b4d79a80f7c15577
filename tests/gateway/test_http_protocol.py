"""The picker's HTTP protocol: order of responses, and what a disconnect cancels."""

from __future__ import annotations

import asyncio
from typing import Any

from plimsoll.gateway.http1 import HttpRequest, response
from plimsoll.gateway.server import HttpProtocol


class FakeTransport(asyncio.Transport):
    """A transport that keeps what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes | bytearray | memoryview[int]) -> None:
        self.written += bytes(data)


CHECK_REQUEST = b"POST /check HTTP/1.1\r\ncontent-length: 0\r\n\r\n"


async def test_http_protocol_cancels_handler_on_disconnect() -> None:
    queued: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    protocol, wire = HttpProtocol(lambda request: queued, 1024, None), FakeTransport()
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
    protocol, wire = HttpProtocol(handle, 1024, None), FakeTransport()
    protocol.connection_made(wire)
    protocol.data_received(4 * CHECK_REQUEST)
    assert wire.written == b""
    first.set_result(response(200))
    await asyncio.sleep(0)
    third.set_exception(RuntimeError("as a test of faults"))
    await asyncio.sleep(0)
    statuses = [line.split(b" ")[1] for line in wire.written.split(b"\r\n") if line.startswith(b"HTTP/1.1")]
    assert statuses == [b"200", b"404", b"500", b"413"]
