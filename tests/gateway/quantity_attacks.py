"""Clients that make a gateway hold much: half-sent bodies over HTTP/1.1 and HTTP/2, slow readers of a fast engine."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import yaml

from plimsoll.core.units import parse_quantity

CHART_VALUES = yaml.safe_load((Path(__file__).parents[2] / "charts/plimsoll/values.yaml").read_text())
ENVOY_MEMORY_BYTES = int(parse_quantity(CHART_VALUES["gateway"]["envoy"]["resources"]["limits"]["memory"]))
BODY_BYTES = int(7.5e6)
HEAD = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"


def peak_bytes(pid: int) -> int:
    """The largest resident set of a process so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


async def half_send(port: int, source: str = "127.0.0.1") -> bytes:
    """Sends a body without its last byte. Returns the response, or nothing if the connection is reset."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
    try:
        writer.write(HEAD.format(BODY_BYTES).encode() + b"a" * (BODY_BYTES - 1))
        return await reader.read(1 << 16)
    except ConnectionError:
        return b""
    finally:
        writer.close()


Headers = dict[bytes, bytes]


def half_send_http2(port: int, count: int) -> list[Headers]:
    """Sends `count` bodies without their last byte over one connection. Returns the headers of the responses."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        client = Http2Client(sock)
        for _ in range(count):
            try:
                client.half_send()
            except (h2.exceptions.TooManyStreamsError, h2.exceptions.StreamClosedError):
                client.receive(0.1)
        while client.receive(0.5):
            pass
    return client.responses


class Http2Client:
    """One connection, and the headers of the responses to its streams."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self._connection.initiate_connection()
        self._sock.sendall(self._connection.data_to_send())
        self._closed: set[int] = set()
        self.responses: list[Headers] = []
        self.receive(1.0)

    def receive(self, timeout: float) -> bool:
        """Wait for frames. Returns whether any arrived."""
        self._sock.settimeout(timeout)
        try:
            data = self._sock.recv(1 << 16)
        except TimeoutError:
            return False
        for event in self._connection.receive_data(data):
            if isinstance(event, h2.events.ResponseReceived):
                self.responses.append(dict(event.headers))
                self._closed.add(event.stream_id)
        self._sock.settimeout(5.0)
        self._sock.sendall(self._connection.data_to_send())
        return bool(data)

    def half_send(self) -> None:
        """Send a body up to its last byte, or until it is refused or not read any more."""
        stream, left = self._connection.get_next_available_stream_id(), BODY_BYTES - 1
        path = [(":method", "POST"), (":scheme", "http"), (":authority", "x"), (":path", "/v1/chat/completions")]
        self._connection.send_headers(stream, [*path, ("content-type", "application/json")])
        while left and stream not in self._closed:
            size = min(self._connection.local_flow_control_window(stream), left, 16384)
            if size:
                self._connection.send_data(stream, b"a" * size)
                self._sock.sendall(self._connection.data_to_send())
                left -= size
            elif not self.receive(0.3):
                break


async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An engine that sends as fast as it can."""
    piece = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
    try:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(300):
            writer.write(piece)
            await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


def slow_reader(port: int, request: bytes) -> socket.socket:
    """Sends a request over a new connection without reading its response."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    client.connect(("127.0.0.1", port))
    client.sendall(request)
    return client
