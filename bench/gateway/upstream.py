"""A constant upstream: every request gets the same response at once. `python -m bench.gateway.upstream PORT`."""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop

from plimsoll.gateway.http1 import HttpParser, response

ANSWER = response(200, (("content-type", "application/json"),), b'{"choices":[{"message":{"content":"hello"}}]}')


class Upstream(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._parser = HttpParser(1 << 24)
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed(data)
        while self._parser.next() is not None:
            self._transport.write(ANSWER)


async def main(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
