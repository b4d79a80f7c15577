"""Just enough HTTP/1.1 for the picker's own doors: whole requests in, whole answers out.

Problem: a framework costs ten times the pick itself, and this is on the path of every request. Who speaks here is
Envoy (on the unix socket) or a probe, a scraper, the operator (on TCP); none of them needs more than requests of
known length.

Idea: an incremental parser that is strict, bounded in head and body, and knows two framings, Content-Length and
chunked.
"""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import NamedTuple

MAX_HEAD = 128 * 1024  # Envoy lets through 60 KB of a client's headers, and the picker's own reply rides on them
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}


class BadRequest(ValueError):
    """The peer does not speak the HTTP that we read; the connection ends with this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Request(NamedTuple):
    """One request; header names in lower case, the last of equal ones wins."""

    method: bytes
    path: bytes
    headers: dict[bytes, bytes]
    body: bytes


class Parser:
    """Bytes in through `feed`, requests out of `next`; raises BadRequest, after which it is of no more use."""

    def __init__(self, max_body: int) -> None:
        self._buffer = bytearray()
        self._max_body = max_body
        self._head: tuple[bytes, bytes, dict[bytes, bytes]] | None = None
        self._need: int | None = None  # body bytes, None while chunked
        self._chunks = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> Request | None:
        """The next whole request, or None if more bytes must come first."""
        if self._head is None and not self._read_head():
            return None
        body = self._sized() if self._need is not None else self._chunked()
        if body is None or self._head is None:
            return None
        method, path, headers = self._head
        self._head = None
        return Request(method, path, headers, body)

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n", 0, MAX_HEAD)
        if end < 0:
            if len(self._buffer) >= MAX_HEAD:
                raise BadRequest(431, "the head is too large")
            return False
        lines = bytes(self._buffer[:end]).split(b"\r\n")
        del self._buffer[: end + 4]
        method, path = _request_line(lines[0])
        headers = dict(_header(line) for line in lines[1:])
        self._head = method, path, headers
        self._need = self._framing(headers)
        return True

    def _framing(self, headers: dict[bytes, bytes]) -> int | None:
        coding, length = headers.get(b"transfer-encoding"), headers.get(b"content-length")
        if coding is not None:
            if coding.lower() != b"chunked" or length is not None:
                raise BadRequest(400, "framing that is not understood")
            self._chunks.clear()
            return None
        if length is None:
            return 0
        if not length.isdigit() or len(length) > 12:
            raise BadRequest(400, "a Content-Length that is no number")
        if int(length) > self._max_body:
            raise BadRequest(413, "the body is too large")
        return int(length)

    def _sized(self) -> bytes | None:
        need = self._need or 0
        if len(self._buffer) < need:
            return None
        body = bytes(self._buffer[:need])
        del self._buffer[:need]
        return body

    def _chunked(self) -> bytes | None:
        while True:
            end = self._buffer.find(b"\r\n", 0, 1024)
            if end < 0:
                if len(self._buffer) >= 1024:
                    raise BadRequest(400, "a chunk without a size")
                return None
            size = _chunk_size(bytes(self._buffer[:end]))
            if len(self._chunks) + size > self._max_body:
                raise BadRequest(413, "the body is too large")
            if len(self._buffer) < end + 2 + size + 2:
                return None
            self._chunks += self._buffer[end + 2 : end + 2 + size]
            if self._buffer[end + 2 + size : end + 4 + size] != b"\r\n":
                raise BadRequest(400, "a chunk of another size than told, or a trailer")
            del self._buffer[: end + 4 + size]
            if size == 0:
                return bytes(self._chunks)


def _request_line(line: bytes) -> tuple[bytes, bytes]:
    parts = line.split(b" ")
    if len(parts) != 3 or not parts[0].isalpha() or parts[2] != b"HTTP/1.1":
        raise BadRequest(400, "not a request line of HTTP/1.1")
    return parts[0], parts[1]


def _header(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    if not colon or not name or name != name.strip():
        raise BadRequest(400, "a header line that is none")
    return name.lower(), value.strip()


def _chunk_size(line: bytes) -> int:
    digits = line.split(b";", 1)[0].strip()
    try:
        if len(digits) > 8:
            raise ValueError("too long")
        return int(digits, 16)
    except ValueError as error:
        raise BadRequest(400, "a chunk size that is no number") from error


def response(status: int, headers: Iterable[tuple[str, str]] = (), body: bytes = b"", *, close: bool = False) -> bytes:
    """One whole answer. Header values must be free of line breaks; a ValueError says so."""
    lines = [f"{name}: {value}\r\n" for name, value in headers]
    told = _counted("".join(lines), len(lines))
    start = _STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n"
    end = "\r\nconnection: close\r\n\r\n" if close else "\r\n\r\n"
    return f"{start}{told}content-length: {len(body)}{end}".encode("latin-1", "replace") + body


def go(headers: str, count: int) -> bytes:
    """A whole answer of 200 without a body, with so many headers as they are sent; a ValueError says if they are more.

    For the one answer that nearly every request gets: it costs half of `response`.
    """
    return f"HTTP/1.1 200 OK\r\n{_counted(headers, count)}content-length: 0\r\n\r\n".encode("latin-1", "replace")


def _counted(headers: str, count: int) -> str:
    if headers.count("\n") != count:
        raise ValueError("a line break in a header")
    return headers
