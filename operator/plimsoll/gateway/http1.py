"""HTTP/1.1 requests and responses of the picker's listeners.

Problem: an HTTP framework costs ten times the pick itself, and this code runs for every request. The clients are Envoy
on the unix socket, and probes, Prometheus and the operator on TCP. None of them sends a stream.

Idea: httptools parses, with limits on head and body. Two framings are read, Content-Length and chunked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from http import HTTPStatus

import httptools
import msgspec

from plimsoll.gateway.request_body import Body, joined

MAX_HEAD_BYTES = 128 * 1024  # beyond its first piece; Envoy allows 60 KB of client headers and adds the error response
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
    body: Body


class HttpParser:
    """Parses bytes given to `feed` into requests returned by `next`. Unusable after it raises HttpParseError.

    httptools refuses what is ambiguous: repeated lengths, a length with a transfer coding, chunk sizes that are not
    plain digits, line feeds in headers. It would collect a header line without a limit, take lines after the last chunk
    for headers, read other codings than `chunked`, and stop before the body of an upgrade: the checks here refuse that.
    """

    __slots__ = (
        "_body", "_body_bytes", "_complete", "_error", "_head_bytes", "_headers", "_in_head", "_max_body", "_parser",
        "_path",
    )  # fmt: skip

    def __init__(self, max_body: int) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._max_body = max_body
        self._complete: deque[HttpRequest] = deque()
        self._error: HttpParseError | None = None
        self._headers: dict[bytes, bytes] = {}
        self._in_head = False
        self._head_bytes = 0  # of an incomplete head, since the first piece of it

    def feed(self, data: bytes) -> None:
        if self._error is not None:
            return
        headers = self._headers
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._error = cause if isinstance(cause, HttpParseError) else HttpParseError(400, f"not HTTP/1.1: {error}")
        if self._in_head and self._headers is headers:  # the same head as before this piece
            self._head_bytes += len(data)
            if self._head_bytes >= MAX_HEAD_BYTES:
                self._error = self._error or HttpParseError(431, "the request head exceeds the limit")

    @property
    def has_complete(self) -> bool:
        """Whether `next` has a request."""
        return bool(self._complete)

    def close(self) -> None:
        """Ends parsing when the connection has ended: httptools' parser and this one refer to each other until then."""
        del self._parser

    def next(self) -> HttpRequest | None:
        """Returns the next complete request, or None if it needs more bytes. Raises HttpParseError."""
        if self._complete:
            return self._complete.popleft()
        if self._error is not None:
            raise self._error
        return None

    def on_message_begin(self) -> None:
        self._path = b""
        self._headers = {}
        self._body: list[bytes] = []
        self._body_bytes = self._head_bytes = 0
        self._in_head = True

    def on_url(self, part: bytes) -> None:
        self._path += part

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            raise HttpParseError(400, "a trailer follows the last chunk")
        self._headers[name.lower()] = value.rstrip()

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._parser.get_http_version() != "1.1":
            raise HttpParseError(400, "the request line is not HTTP/1.1")
        if self._parser.should_upgrade():
            raise HttpParseError(400, "an upgrade to another protocol is not supported")
        coding, length = self._headers.get(b"transfer-encoding"), self._headers.get(b"content-length")
        if coding is not None and coding.lower() != b"chunked":
            raise HttpParseError(400, "unsupported transfer encoding")
        if length is not None and int(length) > self._max_body:
            raise HttpParseError(413, "the body is too large")

    def on_body(self, part: bytes) -> None:
        self._body_bytes += len(part)
        if self._body_bytes > self._max_body:
            raise HttpParseError(413, "the body is too large")
        self._body.append(part)

    def on_message_complete(self) -> None:
        body = joined(self._body, self._body_bytes)
        self._complete.append(HttpRequest(self._parser.get_method(), self._path, self._headers, body))
        self._body = []


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
