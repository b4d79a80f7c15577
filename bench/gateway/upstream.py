"""Constant upstreams: `python -m bench.gateway.upstream PORT...`.

Every request gets the same response at once. One with `"stream": true` in its body gets CHUNKS server-sent events, one
each CHUNK_SECONDS. A path that engines do not have gets 404.
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Final, cast

import uvloop

from plimsoll.gateway.http1 import CHUNKED_END, HttpParser, HttpRequest, chunk, chunked_head, response
from plimsoll.gateway.request_body import whole

JSON_HEADERS: Final = (("content-type", "application/json"),)
ANSWER: Final = response(200, JSON_HEADERS, b'{"choices":[{"message":{"content":"hello"}}]}')
MODELS: Final = response(200, JSON_HEADERS, b'{"object":"list","data":[{"id":"chat","object":"model"}]}')
_STREAM: Final = re.compile(rb'"stream": ?true')  # routers write the body anew
CHUNKS: Final = 200
CHUNK_SECONDS: Final = 0.02
_STREAM_HEAD: Final = chunked_head(200, (("content-type", "text/event-stream"),))
_CHUNK: Final = chunk(b'data: {"choices":[{"index":0,"delta":{"content":" word"}}]}\n\n')


class Upstream(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._parser = HttpParser(1 << 24)
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed(data)
        while (request := self._parser.next()) is not None:
            if request.method == b"POST" and _STREAM.search(whole(request.body)):
                self._transport.write(_STREAM_HEAD)
                self._send_chunks(CHUNKS)
            else:
                self._transport.write(_answer(request))

    def _send_chunks(self, count: int) -> None:
        if self._transport.is_closing():
            return
        if not count:
            self._transport.write(CHUNKED_END)
            return
        self._transport.write(_CHUNK)
        asyncio.get_running_loop().call_later(CHUNK_SECONDS, self._send_chunks, count - 1)


def _answer(request: HttpRequest) -> bytes:
    if request.method == b"POST" and request.path.endswith(b"/completions"):
        return ANSWER
    if request.path == b"/v1/models":
        return MODELS
    return response(200 if request.path == b"/health" else 404, JSON_HEADERS, b"{}")


async def main(ports: list[int]) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Upstream, "127.0.0.1", port) for port in ports]
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    uvloop.run(main([int(port) for port in sys.argv[1:]]))
