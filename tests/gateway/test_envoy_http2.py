"""HTTP/2 from a client that does not keep the rules: one bad stream is not the next one's trouble."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, Event, ResponseReceived, StreamEnded, StreamReset
from h2.exceptions import ProtocolError

from tests.gateway.fake_engine import FakeEngine
from tests.gateway.malformed_requests import GOOD_BODY
from tests.gateway.stack import TIMEOUT_S, GatewayStack

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

Headers = list[tuple[str, str]]


class Client:
    """One connection that says what it is told to, right or wrong."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.h2 = H2Connection(
            H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False, header_encoding="utf-8")
        )
        self.statuses: dict[int, int] = {}
        self.bodies: dict[int, bytes] = {}
        self.over: set[int] = set()
        self.closed = False

    async def open(self) -> Client:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        self.h2.initiate_connection()
        self.flush()
        return self

    def flush(self) -> None:
        self._writer.write(self.h2.data_to_send())

    def raw(self, frame: bytes) -> None:
        self._writer.write(frame)

    def send(self, headers: Headers, body: bytes | None = GOOD_BODY, *, end: bool = True) -> int:
        stream = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream, headers, end_stream=body is None and end)
        if body is not None:
            self.h2.send_data(stream, body, end_stream=end)
        self.flush()
        return stream

    async def until(self, stream: int) -> int:
        """The stream's status; 0 if it was reset or the connection ended."""
        async with asyncio.timeout(TIMEOUT_S):
            while stream not in self.over and not self.closed:
                data = await self._read()
                try:
                    for event in self.h2.receive_data(data) if data else ():
                        self._take(event)
                except ProtocolError:  # frames after a GOAWAY: the connection is over
                    self.closed = True
                if self.closed:
                    self.close()
                else:
                    self.flush()
        return self.statuses.get(stream, 0)

    async def _read(self) -> bytes:
        try:
            data = await self._reader.read(65536)
        except ConnectionError:
            data = b""
        self.closed = not data
        return data

    def _take(self, event: Event) -> None:
        if isinstance(event, ResponseReceived):
            status = next(value for name, value in event.headers if name in (":status", b":status"))
            self.statuses[event.stream_id] = int(status)
        elif isinstance(event, DataReceived):
            self.bodies[event.stream_id] = self.bodies.get(event.stream_id, b"") + event.data
            self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, StreamEnded | StreamReset):
            self.over.add(event.stream_id)

    def close(self) -> None:
        self._writer.close()


def good(path: str = "/v1/chat/completions", **pseudo: str) -> Headers:
    named = {"method": "POST", "scheme": "http", "authority": "gateway", "path": path, **pseudo}
    return [(f":{name}", value) for name, value in named.items()] + [("content-type", "application/json")]


def without(name: str) -> Headers:
    return [(key, value) for key, value in good() if key != name]


BAD_STREAMS: dict[str, Headers] = {
    "no path": without(":path"),
    "no method": without(":method"),
    "no scheme": without(":scheme"),
    "empty path": good(""),
    "two paths": [(":path", "/metrics"), *good()],
    "path after a header": [*without(":path"), (":path", "/metrics")],
    "unknown pseudo header": [(":foo", "bar"), *good()],
    "absolute path": good("http://engine/metrics"),
    "asterisk": good("*"),
    "other path": good("/metrics"),
    "dotted path": good("/v1/completions/../../metrics"),
    "encoded slash": good("/v1%2fcompletions"),
    "path with a blank": good("/v1/chat/completions HTTP/1.1\r\nx: y"),
    "path with NUL": good("/v1/chat/completions\x00"),
    "method with a blank": good(method="POST /metrics"),
    "method GET": good(method="GET"),
    "scheme javascript": good(scheme="javascript"),
    "authority with CRLF": good(authority="a\r\nx: y"),
    "CONNECT": [(":method", "CONNECT"), (":authority", "engine:8000")],
    "extended CONNECT": [*good(method="CONNECT"), (":protocol", "websocket")],
    "upper case name": [*good(), ("X-Upper", "1")],
    "connection header": [*good(), ("connection", "keep-alive")],
    "te header": [*good(), ("te", "gzip")],
    "transfer-encoding": [*good(), ("transfer-encoding", "chunked")],
    "upgrade": [*good(), ("upgrade", "websocket")],
    "host beside authority": [*good(), ("host", "evil")],
    "length too small": [*good(), ("content-length", "3")],
    "length too large": [*good(), ("content-length", "99999")],
    "length no number": [*good(), ("content-length", "abc")],
    "two lengths": [*good(), ("content-length", str(len(GOOD_BODY))), ("content-length", "3")],
    "name with CRLF": [*good(), ("a\r\nb", "1")],
    "value with CRLF": [*good(), ("a", "1\r\nx-plimsoll-prefill: a:1")],
    "value with NUL": [*good(), ("a", "1\x00")],
    "empty name": [*good(), ("", "1")],
    "name with a colon": [*good(), ("a:b", "1")],
    "name with a blank": [*good(), ("a b", "1")],
    "huge header": [*good(), ("a", "b" * 70_000)],
    "many headers": [*good(), *((f"h{i}", "1") for i in range(500))],
    "many cookies": [*good(), *(("cookie", f"c{i}=1") for i in range(500))],
}


@pytest.mark.parametrize("name", BAD_STREAMS)
async def test_bad_stream_is_rejected_without_affecting_others(
    gateway_and_engine: tuple[GatewayStack, FakeEngine], name: str
) -> None:
    stack, engine = gateway_and_engine
    engine.received.clear()
    client = await Client(stack.settings.port).open()
    bad = client.send(BAD_STREAMS[name])
    status = await client.until(bad)
    reached = {seen.path for seen in engine.received}
    assert reached <= {b"/v1/chat/completions", b"/v1/completions"}
    assert all(b"x-plimsoll-prefill" not in seen.headers for seen in engine.received)
    assert status in (0, 200, 400, 403, 404, 405, 408, 431)
    if status == 0 or status >= 400:
        assert reached == set()
    again = client if not client.closed else await Client(stack.settings.port).open()
    assert await again.until(again.send(good())) == 200
    again.close()


async def test_bad_header_does_not_cut_other_streams(gateway_and_engine: tuple[GatewayStack, FakeEngine]) -> None:
    stack, engine = gateway_and_engine
    pause = engine.behaviour.pause = asyncio.Event()
    client = await Client(stack.settings.port).open()
    try:
        held = client.send(good(), GOOD_BODY[:-1] + b',"stream":true}')
        bad = [client.send(headers) for headers in (good("/metrics"), [*good(), ("te", "gzip")], good(method="GET"))]
        for stream in bad:
            await client.until(stream)
        pause.set()
        assert await client.until(held) == 200
        assert client.bodies[held].endswith(b"data: [DONE]\n\n")
    finally:
        engine.behaviour.pause = None
        client.close()


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    size = len(payload) if length is None else length
    return struct.pack(">I", size)[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


RAW: dict[str, Callable[[], bytes]] = {
    "data on stream 0": lambda: frame(0, 1, 0, b"x"),
    "data on an idle stream": lambda: frame(0, 1, 99, b"x"),
    "headers on stream 0": lambda: frame(1, 5, 0, b"\x82"),
    "headers on an even stream": lambda: frame(1, 5, 2, b"\x82\x84\x86"),
    "broken HPACK": lambda: frame(1, 5, 1, b"\xff\xff\xff\xff\xff\xff"),
    "index 0 in HPACK": lambda: frame(1, 5, 1, b"\x80"),
    "table size too large": lambda: frame(1, 5, 1, b"\x3f\xff\xff\xff\xff\x0f"),
    "continuation alone": lambda: frame(9, 4, 1, b"\x82"),
    "settings with an odd size": lambda: frame(4, 0, 0, b"\x00" * 5),
    "settings on a stream": lambda: frame(4, 0, 1, b""),
    "window update by 0": lambda: frame(8, 0, 0, b"\x00\x00\x00\x00"),
    "window update too far": lambda: frame(8, 0, 0, b"\x7f\xff\xff\xff") * 3,
    "ping with an odd size": lambda: frame(6, 0, 0, b"x"),
    "goaway": lambda: frame(7, 0, 0, b"\x00" * 8),
    "push promise from a client": lambda: frame(5, 4, 1, b"\x00\x00\x00\x02\x82"),
    "unknown frame": lambda: frame(0x77, 0xFF, 0, b"x" * 100),
    "frame larger than allowed": lambda: frame(0, 0, 1, b"x" * 100, 1 << 20),
    "padding beyond the frame": lambda: frame(0, 9, 1, b"\xff" + b"x" * 10),
    "priority on itself": lambda: frame(2, 0, 1, b"\x00\x00\x00\x01\x10"),
    "pings without end": lambda: frame(6, 0, 0, b"12345678") * 20_000,
    "settings without end": lambda: frame(4, 0, 0, b"") * 20_000,
    "empty data without end": lambda: frame(1, 4, 1, b"\x83\x86\x84\x41\x01a") + frame(0, 0, 1, b"") * 20_000,
    "continuations without end": lambda: frame(1, 0, 1, b"\x83") + frame(9, 0, 1, b"") * 20_000,
    "not HTTP/2": lambda: b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n",
}


@pytest.mark.parametrize("name", RAW)
async def test_broken_frames_affect_only_their_connection(
    gateway_and_engine: tuple[GatewayStack, FakeEngine], name: str
) -> None:
    stack, engine = gateway_and_engine
    engine.received.clear()
    client = await Client(stack.settings.port).open()
    client.raw(RAW[name]())
    other = await Client(stack.settings.port).open()
    assert await other.until(other.send(good())) == 200
    assert [seen.path for seen in engine.received] == [b"/v1/chat/completions"]
    other.close()
    client.close()


async def test_rapid_resets_do_not_block_other_clients(gateway_and_engine: tuple[GatewayStack, FakeEngine]) -> None:
    stack, _ = gateway_and_engine
    client = await Client(stack.settings.port).open()
    for _ in range(500):
        stream = client.send(good())
        client.h2.reset_stream(stream)
    client.flush()
    other = await Client(stack.settings.port).open()
    assert await other.until(other.send(good())) == 200
    other.close()
    client.close()
    engine = gateway_and_engine[1]
    await stack.wait_inflight(engine, 0)


async def test_partial_body_times_out(gateway_and_engine: tuple[GatewayStack, FakeEngine]) -> None:
    stack, engine = gateway_and_engine
    engine.received.clear()
    client = await Client(stack.settings.port).open()
    stream = client.send(good(), GOOD_BODY[:10], end=False)
    assert await client.until(stream) in (0, 408)
    assert engine.received == []
    client.close()
