"""A minimal HTTP/1.1 parser and serializer for the picker's listeners.

Problem: an HTTP framework costs ten times the pick itself, and this code runs for every request. The clients are Envoy
on the unix socket, and probes, Prometheus and the operator on TCP. None of them sends a stream.

Idea: an incremental, strict parser with limits on head and body. It supports two framings, Content-Length and chunked.
"""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

import msgspec

MAX_HEAD_BYTES = 128 * 1024  # Envoy allows 60 KB of client headers and adds the error response
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}


class HttpParseError(ValueError):
    """The request is not HTTP that this parser accepts. The connection closes with this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class HttpRequest(msgspec.Struct):
    """One request. Header names are in lower case; the last of equal names wins."""

    method: bytes
    path: bytes
    headers: dict[bytes, bytes]
    body: bytes


class HttpParser:
    """Parses bytes given to `feed` into requests returned by `next`. Unusable after it raises HttpParseError."""

    def __init__(self, max_body: int) -> None:
        self._buffer = bytearray()
        self._max_body = max_body
        self._head: tuple[bytes, bytes, dict[bytes, bytes]] | None = None
        self._body_length: int | None = None  # None for a chunked body
        self._chunks = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> HttpRequest | None:
        """Returns the next complete request, or None if it needs more bytes. Raises HttpParseError."""
        if self._head is None and not self._read_head():
            return None
        body = self._read_sized() if self._body_length is not None else self._read_chunked()
        if body is None or self._head is None:
            return None
        method, path, headers = self._head
        self._head = None
        return HttpRequest(method, path, headers, body)

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
        if end < 0:
            if len(self._buffer) >= MAX_HEAD_BYTES:
                raise HttpParseError(431, "the request head exceeds the limit")
            return False
        lines = bytes(self._buffer[:end]).split(b"\r\n")
        del self._buffer[: end + 4]
        method, path = _request_line(lines[0])
        headers = _headers(lines[1:])
        self._head = method, path, headers
        self._body_length = self._framing(headers)
        return True

    def _framing(self, headers: dict[bytes, bytes]) -> int | None:
        coding, length = headers.get(b"transfer-encoding"), headers.get(b"content-length")
        if coding is not None:
            if coding.lower() != b"chunked" or length is not None:
                raise HttpParseError(400, "unsupported transfer encoding")
            self._chunks.clear()
            return None
        if length is None:
            return 0
        if not length.isdigit() or len(length) > 12:
            raise HttpParseError(400, "the Content-Length is not a number")
        if int(length) > self._max_body:
            raise HttpParseError(413, "the body is too large")
        return int(length)

    def _read_sized(self) -> bytes | None:
        length = self._body_length or 0
        if len(self._buffer) < length:
            return None
        body = bytes(memoryview(self._buffer)[:length])  # one copy: it may be 8 MiB
        del self._buffer[:length]
        return body

    def _read_chunked(self) -> bytes | None:
        while True:
            end = self._buffer.find(b"\r\n", 0, 1024)
            if end < 0:
                if len(self._buffer) >= 1024:
                    raise HttpParseError(400, "a chunk has no size")
                return None
            size = _chunk_size(bytes(self._buffer[:end]))
            if len(self._chunks) + size > self._max_body:
                raise HttpParseError(413, "the body is too large")
            if len(self._buffer) < end + 2 + size + 2:
                return None
            self._chunks += self._buffer[end + 2 : end + 2 + size]
            if self._buffer[end + 2 + size : end + 4 + size] != b"\r\n":
                raise HttpParseError(400, "a chunk does not match its size, or a trailer follows")
            del self._buffer[: end + 4 + size]
            if size == 0:
                return bytes(self._chunks)


def _request_line(line: bytes) -> tuple[bytes, bytes]:
    parts = line.split(b" ")
    if len(parts) != 3 or not parts[0].isalpha() or parts[2] != b"HTTP/1.1":
        raise HttpParseError(400, "the request line is not HTTP/1.1")
    return parts[0], parts[1]


def _headers(lines: Iterable[bytes]) -> dict[bytes, bytes]:
    headers = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not name or name != name.strip():
            raise HttpParseError(400, "a header line is invalid")
        headers[name.lower()] = value.strip()
    return headers


def _chunk_size(line: bytes) -> int:
    digits = line.split(b";", 1)[0].strip()
    try:
        if len(digits) > 8:
            raise ValueError("too long")
        return int(digits, 16)
    except ValueError as error:
        raise HttpParseError(400, "a chunk size is not a hexadecimal number") from error


def response(status: int, headers: Iterable[tuple[str, str]] = (), body: bytes = b"", *, close: bool = False) -> bytes:
    """Returns a complete response. Raises ValueError if a header contains a line break."""
    lines = [f"{name}: {value}\r\n" for name, value in headers]
    header_block = _checked_headers("".join(lines), len(lines))
    start = _STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n"
    end = "\r\nconnection: close\r\n\r\n" if close else "\r\n\r\n"
    return f"{start}{header_block}content-length: {len(body)}{end}".encode("latin-1", "replace") + body


def chunked_head(status: int, headers: Iterable[tuple[str, str]]) -> bytes:
    """Returns the head of a response whose body follows in parts made by `chunk`, and ends with `CHUNKED_END`."""
    head = response(status, (*headers, ("transfer-encoding", "chunked")))
    return head.replace(b"content-length: 0\r\n", b"")


def chunk(data: bytes) -> bytes:
    """Returns a part of a chunked body. `data` must not be empty: that would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


CHUNKED_END = b"0\r\n\r\n"


def without_body(reply: bytes) -> bytes:
    """Returns the response to HEAD: that to GET, with the length of its body, which does not follow."""
    return reply[: reply.index(b"\r\n\r\n") + 4]


def ok_response(headers: str, count: int) -> bytes:
    """Returns a complete 200 response without a body. `headers` are `count` serialized header lines.

    Raises ValueError for another number of lines. Nearly every request gets it, and it costs half of `response`.
    """
    return f"HTTP/1.1 200 OK\r\n{_checked_headers(headers, count)}content-length: 0\r\n\r\n".encode(
        "latin-1", "replace"
    )


def _checked_headers(headers: str, count: int) -> str:
    if headers.count("\n") != count:
        raise ValueError("a header contains a line break")
    return headers
