"""Requests that nobody means well: paths, framing, headers and bodies, as bytes on the wire."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

GOOD_BODY = b'{"model":"chat","messages":[{"role":"user","content":"hi"}]}'
Case = tuple[str, bytes]


def request(
    path: str | bytes = "/v1/chat/completions",
    method: str = "POST",
    headers: tuple[str, ...] = (),
    body: bytes = GOOD_BODY,
    version: str = "HTTP/1.1",
    length: bool = True,
) -> bytes:
    raw = path if isinstance(path, bytes) else path.encode("latin-1")
    lines = [
        method.encode() + b" " + raw + b" " + version.encode(),
        b"host: gateway",
        b"content-type: application/json",
    ]
    lines += [header.encode("latin-1") for header in headers]
    if length:
        lines.append(f"content-length: {len(body)}".encode())
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


_TARGETS = ("/metrics", "/pooling", "/v1/realtime", "/classify", "/v1/load_lora_adapter", "/sleep", "/healthz")
_TRAVERSAL_PATHS = (
    "/v1/chat/completions/..{0}",
    "/v1/chat/completions/../../..{0}",
    "/v1/chat/completions/%2e%2e/%2e%2e/%2e%2e{0}",
    "/v1/chat/completions/%2e%2e%2f..{0}",
    "/v1/chat/completions/..%2f..%2f..{0}",
    "/v1/chat/completions/..%5c..%5c..{0}",
    "/v1/completions/..;{0}",
    "/v1/completions/.%00.{0}",
    "/v1/completions/..%c0%af{0}",
    "/v1/completions/..%252f{0}",
    "/%2e{0}",
    "/.{0}",
    "/{0}",
    "{0}?/v1/completions",
    "{0}#/v1/completions",
    "{0}%23/v1/completions",
    "{0}%3f/v1/completions",
    "{0};/v1/completions",
    "http://gateway{0}",
    "http://engine:8000{0}",
    "//engine:8000{0}",
)
_NEAR_MISS_PATHS = (
    "/v1/chat/completions/",
    "/v1/chat/completions/batch",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/v1/completions/derender",
    "/v1/chat/completions%2fbatch",
    "/v1/chat/completions%2f",
    "/v1/chat/completions%00",
    "/v1/chat/completions%20",
    "/v1/chat/completions;a=b",
    "/v1/chat/%63ompletions",
    "/V1/CHAT/COMPLETIONS",
    "/v1//chat/completions",
    "//v1/chat/completions",
    "/v1/chat\\completions",
    "/v1%2fchat%2fcompletions",
    "/v1/models/",
    "/v1/models/chat",
    "/v1%2fmodels",
    "/v1/batches",
    "/invocations",
    "/v1/systemone",
    "/%6detrics",
    "/metrics/",
    "/docs",
    "/openapi.json",
    "/check/v1/chat/completions",
    "/health",
    "/signals",
    "*",
    "v1/chat/completions",
    "/v1/chat/completions\x00",
    "/v1/chat/completions\x7f",
    "/v1/chat/completions\xff",
    "/" + "a" * 70_000,
    "/v1/chat/completions?" + "a" * 70_000,
)


def paths() -> Iterator[Case]:
    for template, target in itertools.product(_TRAVERSAL_PATHS, _TARGETS):
        yield f"path {template.format(target)}", request(template.format(target))
    for path in _NEAR_MISS_PATHS:
        yield f"path {path[:60]!r}", request(path)
    methods = ("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PRI", "post", "FOO", "X" * 100)
    for method in methods:
        yield f"method {method[:20]}", request(method=method)
    for target in ("engine:8000", "/v1/chat/completions", "127.0.0.1:8000", ""):
        yield f"CONNECT {target}", request(target, "CONNECT", body=b"", length=False)
        yield f"CONNECT {target} with a body", request(target, "CONNECT")


def framing() -> Iterator[Case]:
    def raw(name: str, *headers: str, body: bytes = GOOD_BODY) -> Case:
        return f"framing {name}", request(headers=headers, body=body, length=False)

    smuggled = b"0\r\n\r\nGET /metrics HTTP/1.1\r\nhost: engine\r\n\r\n"
    size = len(GOOD_BODY)
    yield raw("no length", body=b"")
    yield raw("CL.TE", "content-length: 6", "transfer-encoding: chunked", body=smuggled)
    yield raw("TE.CL", "transfer-encoding: chunked", "content-length: 4", body=smuggled)
    for coding in (
        "xchunked",
        "chunked, identity",
        "identity, chunked",
        "gzip, chunked",
        "chunked,chunked",
        "\x0bchunked",
    ):
        yield raw(f"coding {coding!r}", f"transfer-encoding: {coding}", body=smuggled)
    yield raw("two codings", "transfer-encoding: chunked", "transfer-encoding: identity", body=smuggled)
    yield raw("blank before colon", "transfer-encoding : chunked", body=smuggled)
    yield raw("folded coding", "x: y\r\n transfer-encoding: chunked", f"content-length: {size}")
    for length in ("-1", "+5", "0x10", "1e3", "9" * 30, "", " ", "5, 5", "5, 6", "4294967297", "\u00b2"):
        yield raw(f"length {length!r}", f"content-length: {length}")
    yield raw("two lengths", f"content-length: {size}", f"content-length: {size}")
    yield raw("two different lengths", f"content-length: {size}", "content-length: 3")
    for chunk in (
        b"zz\r\n",
        b"-1\r\n",
        b"0x5\r\nhello\r\n",
        b"5;" + b"e" * 70_000 + b"\r\nhello\r\n",
        b"5\nhello\r\n",
        b"fffffffffffffffff\r\n",
    ):
        yield raw(f"chunk {chunk[:12]!r}", "transfer-encoding: chunked", body=chunk + b"0\r\n\r\n")
    yield raw("trailer", "transfer-encoding: chunked", body=b"2\r\n{}\r\n0\r\nx-plimsoll-prefill: a:1\r\n\r\n")
    yield raw("many trailers", "transfer-encoding: chunked", body=b"2\r\n{}\r\n0\r\n" + b"a: b\r\n" * 5000 + b"\r\n")
    yield "framing bare LF", request(headers=("x: y\ncontent-length: 3",))
    yield "framing bare CR", request(headers=("x: y\rcontent-length: 3",))
    yield "framing LF only", request().replace(b"\r\n", b"\n")
    yield "framing pipelined secret", request() + request("/metrics", "GET", body=b"")
    yield "framing garbage after", request() + b"\x00\x01\x02\x03\r\n\r\n"
    for line in (
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"\x00" * 64,
        b"SSH-2.0-x\r\n",
    ):
        yield f"framing {line[:16]!r}", line
    for version in ("HTTP/1.0", "HTTP/0.9", "HTTP/1.2", "HTTP/2.0", "HTTP/11", "http/1.1", "ICY/1.1"):
        yield f"framing {version}", request(version=version)


def headers() -> Iterator[Case]:
    steering = (
        "x-plimsoll-cluster: picker",
        "x-plimsoll-cluster: model/chat",
        "x-plimsoll-endpoint: 127.0.0.1:1",
        "x-plimsoll-error-response: eyJzdGF0dXMiOjIwMH0=",
        "X-PLIMSOLL-PREFILL: 10.0.0.1:8000",
        "x-plimsoll-remote-prefill: prefill",
        "x-plimsoll-request-id: 1",
        "x-plimsoll-retry: 1",
        "x_plimsoll_prefill: 10.0.0.1:8000",
        "x-envoy-auth-failure-mode-allowed: true",
        "x-envoy-original-path: /metrics",
        "x-envoy-retry-on: 5xx",
        "x-envoy-upstream-alt-stat-name: a",
        "x-envoy-upstream-rq-timeout-ms: 1",
        "x-envoy-hedge-on-per-try-timeout: true",
        "x-envoy-decorator-operation: a",
        "x-envoy-internal: true",
        "x-data-parallel-rank: 7",
        "x-original-url: /metrics",
        "x-rewrite-url: /metrics",
        "x-http-method-override: DELETE",
        "x-forwarded-host: evil",
        "forwarded: host=evil",
    )
    for header in steering:
        yield f"header {header}", request(headers=(header,))
    upgrades = ("websocket", "h2c", "HTTP/2.0", "TLS/1.0", "connect-udp", "foo")
    for upgrade in upgrades:
        yield f"upgrade {upgrade}", request(headers=(f"upgrade: {upgrade}", "connection: upgrade"))
    strange = (
        "host: evil",
        "host: a b",
        "host: ",
        "expect: 100-continue",
        "expect: nonsense",
        "connection: close, host",
        "connection: content-length",
        "connection: x-plimsoll-endpoint",
        "te: trailers",
        "te: gzip",
        "content-encoding: gzip",
        "content-encoding: br",
        "content-type: application/json; charset=utf-16",
        "content-type: text/plain",
        "content-type: multipart/form-data; boundary=x",
        "accept-encoding: gzip",
        "range: bytes=0-5",
        ": empty",
        "no colon",
        "bad name: x",
        "b\x00d: x",
        "bad: x\x00y",
        "bad: x\x01y",
        "\xff: x",
        "obs: \xff\xfe",
        "x-request-id: " + "r" * 8000,
        'x-request-id: a"b\\c{}',
        "big: " + "b" * 70_000,
        "b" * 70_000 + ": big",
    )
    for header in strange:
        yield f"header {header[:40]!r}", request(headers=(header,))
    yield "header many", request(headers=tuple(f"h{i}: {i}" for i in range(150)))
    yield "header very many", request(headers=tuple(f"h{i}: {i}" for i in range(10_000)))
    yield "header none", b"POST /v1/chat/completions HTTP/1.1\r\n\r\n"


def bodies() -> Iterator[Case]:
    """Bodies that must not be answered with a 200, each for a reason of its own."""
    good = GOOD_BODY.decode()
    texts: tuple[bytes, ...] = (
        b"",
        b"{",
        b"[]",
        b"null",
        b"1",
        b'"model"',
        b"{}",
        b'{"model":""}',
        b'{"model":null}',
        b'{"model":1}',
        b'{"model":true}',
        b'{"model":["chat"]}',
        b'{"model":{"a":"chat"}}',
        b'{"Model":"chat"}',
        b'{"model":"CHAT"}',
        b'{"model":"chat\\u0000"}',
        b'{"model":" chat"}',
        b'{"model":"chat","model":"chat"}',
        b'{"model":"chat","mod\\u0065l":"other"}',
        b'{"mod\\u0065l":"other","model":"chat"}',
        b'{"model":"chat","messages":[],"messages":[]}',
        b'{"model":"chat","n":1,"n":2}',
        b'{"model":"chat"}{"model":"chat"}',
        b'{"model":"chat"} x',
        b'{"model":"chat",}',
        b"{'model':'chat'}",
        b'{model:"chat"}',
        b'{"model":"chat","x":NaN}',
        b'{"model":"chat","x":Infinity}',
        b'{"model":"chat","x":01}',
        b'{"model":"chat" /* x */}',
        b'{"model":"chat\n"}',
        b'{"model":"\xff"}',
        b'{"model":"chat","x":"\xc0\xaf"}',
        b'{"model":"chat","x":"\xed\xa0\x80"}',
        b'{"model":"\\ud800"}',
        b"\xef\xbb\xbf" + GOOD_BODY,
        good.encode("utf-16"),
        good.encode("utf-16-le"),
        good.encode("utf-16-be"),
        good.encode("utf-32"),
        good.encode("utf-32-le"),
        b'{"model":"chat","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model":"chat","x":' + b'{"a":' * 100_000,
        b"[" * 200_000,
        b'{"model":"' + b"m" * 100_000 + b'"}',
        b'{"model":"../chat"}',
        b'{"model":"chat/../chat"}',
        b'{"model":"picker"}',
        b'{"model":"model/chat"}',
        b'{"model":"pick/team/chat"}',
        b'{"model":"team%2fchat"}',
        b"\x1f\x8b\x08\x00" + b"\x00" * 20,
        b"model=chat&prompt=hi",
        json.dumps({"messages": [{"model": "chat"}]}).encode(),
    )
    for text in texts:
        yield f"body {text[:40]!r}", request(body=text)


def harmless() -> Iterator[Case]:
    """Odd bodies that a client may send; the engine judges them."""
    for text in (
        b'{"model":"chat","n":2.5}',
        b'{"model":"chat","n":-1}',
        b'{"model":"chat","stream":"yes"}',
        b'{"model":"chat","max_tokens":true}',
        b'{"model":"chat","x":1' + b"0" * 5000 + b"}",
        b'{"model":"chat","x":1e99999}',
        b'{"model":"chat","prompt":[[1,2],[3]]}',
        b'{"model":"chat","prompt":{"a":1}}',
        b'{"model":"chat","messages":"no list"}',
        b'{"model":"chat","x":"\\ud83d\\ude00 \\u0041 \xf0\x9f\x98\x80"}',
        b'{"model":"chat","tools":[{"model":"x","model":"y"}]}',
        b' \r\n\t{"model":"chat"}\n ',
        b'{"model":"c\\u0068at"}',
    ):
        yield f"harmless {text[:40]!r}", request(body=text)
