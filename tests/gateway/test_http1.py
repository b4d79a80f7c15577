"""The picker's own HTTP: whole requests out of bytes cut anywhere, and nothing out of what is not HTTP."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.gateway.http1 import MAX_HEAD_BYTES, HttpParseError, HttpParser, HttpRequest, response

SIZED = b"POST /check/v1/completions HTTP/1.1\r\nHost: picker\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nX-A:  b \r\nTransfer-Encoding: Chunked\r\n\r\n"
    b"3;x=y\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"
)
GET = b"GET /healthz HTTP/1.1\r\n\r\n"


def parse(*pieces: bytes, max_body: int = 1000) -> list[HttpRequest]:
    parser, found = HttpParser(max_body), []
    for piece in pieces:
        parser.feed(piece)
        while (request := parser.next()) is not None:
            found.append(request)
    return found


def test_parse_pipelined_requests() -> None:
    sized, chunked, get = parse(SIZED + CHUNKED + GET)
    assert sized == HttpRequest(
        b"POST", b"/check/v1/completions", {b"host": b"picker", b"content-length": b"5"}, b"hello"
    )
    assert (chunked.headers[b"x-a"], chunked.body) == (b"b", b"hello")
    assert get == HttpRequest(b"GET", b"/healthz", {}, b"")


@given(st.lists(st.sampled_from((SIZED, CHUNKED, GET)), max_size=5), st.lists(st.integers(1, 40)))
def test_parse_chunk_boundaries_do_not_matter(requests: list[bytes], cuts: list[int]) -> None:
    stream, pieces = b"".join(requests), []
    rest = stream
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    assert parse(*pieces, rest) == parse(stream)


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET / HTTP/1.0\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nbad : x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\ncontent-length: 1, 2\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\ncontent-length: 1001\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\ntransfer-encoding: gzip\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\ntransfer-encoding: chunked\r\ncontent-length: 1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n3e9\r\n", 413),
        (b"GET / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nabcd", 400),
        (b"GET / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + b"1" * 2000, 400),
        (b"G" * MAX_HEAD_BYTES, 431),
    ],
)
def test_parse_invalid_request_raises_status(raw: bytes, status: int) -> None:
    with pytest.raises(HttpParseError) as caught:
        parse(raw)
    assert caught.value.status == status


@given(st.binary(max_size=400))
def test_parse_any_bytes_succeed_or_raise_bad_request(data: bytes) -> None:
    try:
        parse(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + data)
        parse(data)
    except HttpParseError:
        pass


def test_response_is_serialised_completely() -> None:
    made = response(503, (("retry-after", "7"),), b"{}", close=True)
    assert made == (
        b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 7\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"
    )


def test_response_header_with_line_break_raises() -> None:
    with pytest.raises(ValueError, match="line break"):
        response(200, (("a", "b\r\nc: d"),))
