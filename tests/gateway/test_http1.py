"""The picker's own HTTP: whole requests out of bytes cut anywhere, and nothing out of what is not HTTP."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.gateway.http1 import MAX_HEAD_BYTES, HttpParseError, HttpParser, HttpRequest, response
from plimsoll.gateway.request_body import MAX_WHOLE_BYTES

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
        (b"GET / RTSP/1.0\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"BAD / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nhost: a\n\n", 400),
        (b"GET / HTTP/1.1\r\na: b\nc: d\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\na: b\r\n c: d\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\na: \x00b\r\n\r\n", 400),
        (b"CONNECT a:1 HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 5\r\n\r\nhello", 400),
        (b"GET / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab", 400),
        (b"GET / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\na", 400),
        (b"GET / HTTP/1.1\r\ncontent-length: +1\r\n\r\na", 400),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nbad : x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\ncontent-length: 1, 2\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\ncontent-length: 1001\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\ntransfer-encoding: gzip\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\ntransfer-encoding: chunked\r\ncontent-length: 1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET / HTTP/1.1\r\ntransfer-encoding: gzip, chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n3e9\r\n" + b"a" * 1001, 413),
        (b"GET / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0x2\r\nab\r\n0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1_0\r\n" + b"a" * 16 + b"\r\n0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\ncontent-length: 1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nabcd", 400),
        (b"GET / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + b"1" * 2000, 400),
    ],
)
def test_parse_invalid_request_raises_status(raw: bytes, status: int) -> None:
    with pytest.raises(HttpParseError) as caught:
        parse(raw)
    assert caught.value.status == status
    with pytest.raises(HttpParseError) as caught:
        parse(*(raw[at : at + 1] for at in range(len(raw))))
    assert caught.value.status == status


def test_parse_endless_head_raises_431() -> None:
    with pytest.raises(HttpParseError) as caught:
        parse(b"GET / HTTP/1.1\r\na: ", *(b"a" * 4096 for _ in range(MAX_HEAD_BYTES // 4096)))
    assert caught.value.status == 431


def test_parse_long_body_is_no_long_head() -> None:
    body = b"a" * (2 * MAX_HEAD_BYTES)
    sized = b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    requests = parse(sized + GET[:9], GET[9:] + sized[:40], sized[40:], max_body=len(body))
    assert [len(request.body) for request in requests] == [len(body), 0, len(body)]


def test_large_body_stays_in_the_pieces_that_were_received() -> None:
    """To join 8 MiB would keep the event loop for longer than a turn."""
    half = b"a" * MAX_WHOLE_BYTES
    head = b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n"
    (large,) = parse(head % (2 * len(half)), half, half, max_body=2 * len(half))
    assert large.body == (half, half)
    (small,) = parse(head % len(half), half[:9], half[9:], max_body=len(half))
    assert small.body == half


def test_parse_requests_before_invalid_one_are_returned() -> None:
    parser = HttpParser(1000)
    parser.feed(SIZED + GET + b"GET / HTTP/1.0\r\n\r\n" + GET)
    first, second = parser.next(), parser.next()
    assert (first and first.body, second and second.path) == (b"hello", b"/healthz")
    for _ in range(2):
        with pytest.raises(HttpParseError):
            parser.next()


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


class Tracked(HttpParser):
    """One that a weak reference can follow."""


def test_closed_parser_is_freed_without_garbage_collector() -> None:
    parser = Tracked(1000)
    parser.feed(SIZED)
    alive = weakref.ref(parser)
    gc.disable()
    try:
        parser.close()
        del parser
        assert alive() is None
    finally:
        gc.enable()
