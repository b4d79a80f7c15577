"""The side channel between a prefill engine and those that fetch its KV, in the place of NIXL's.

Problem: whether KV can be had depends on another process: it may be gone, never have been, or have forgotten.
Idea: a connection for each fetch, on the port that NIXL uses. The decode engine names engine and request and hears how
many tokens there are; while the connection stands the blocks are kept; `done` frees them. A connection that breaks
tells the decode engine that the prefill engine is gone, and the prefill engine to let time run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

HANDSHAKE_SECONDS: Final = 5.0
_MOST_BYTES: Final = 4096
_UNREACHABLE: Final = (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)


class Claim:
    """Another engine's KV that is kept for us, until `done`. `lost` is called once if that engine goes away before."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lost: Callable[[], None]) -> None:
        self._writer = writer
        self._lost = lost
        self._over = False
        self._watch = asyncio.ensure_future(self._wait(reader))

    def done(self) -> None:
        """It was fetched, or nobody wants it any more."""
        if not self._over:
            self._over = True
            self._writer.write(b"done\n")
            self._writer.close()
            self._watch.cancel()

    async def _wait(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            await reader.read(1)
        if not self._over:
            self._over = True
            self._writer.close()
            self._lost()


async def claim(params: Mapping[str, Any], lost: Callable[[], None]) -> Claim | None:
    """Asks for the KV that transfer parameters name; None where it cannot be had."""
    with contextlib.suppress(*_UNREACHABLE, TypeError):
        async with asyncio.timeout(HANDSHAKE_SECONDS), contextlib.AsyncExitStack() as opened:
            host, port = params.get("remote_host"), int(params.get("remote_port") or 0)
            reader, writer = await asyncio.open_connection(host, port)
            opened.callback(writer.close)
            asked = {"engine_id": params.get("remote_engine_id"), "request_id": params.get("remote_request_id")}
            writer.write(json.dumps(asked).encode() + b"\n")
            if "tokens" in json.loads(await reader.readuntil(b"\n")):
                opened.pop_all()
                return Claim(reader, writer, lost)
    return None


class Lender:
    """The prefill engine's end. `keep` gives the tokens kept for a request, `leave` and `free` end that."""

    def __init__(
        self,
        engine_id: str,
        keep: Callable[[str], int | None],
        leave: Callable[[str], None],
        free: Callable[[str], None],
    ) -> None:
        self._engine_id = engine_id
        self._keep = keep
        self._leave = leave
        self._free = free

    async def listen(self, host: str, port: int) -> asyncio.Server:
        """Serves until the server is closed by the caller."""
        return await asyncio.start_server(self._serve, host, port, limit=_MOST_BYTES)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(*_UNREACHABLE, KeyError, TypeError):
            asked = json.loads(await reader.readuntil(b"\n"))
            request_id = str(asked["request_id"])
            tokens = self._keep(request_id) if asked["engine_id"] == self._engine_id else None
            if tokens is None:
                writer.write(b'{"error":"no such request"}\n')
            else:
                writer.write(json.dumps({"tokens": tokens}).encode() + b"\n")
                await self._lend(request_id, reader)
        with contextlib.suppress(OSError):
            writer.close()

    async def _lend(self, request_id: str, reader: asyncio.StreamReader) -> None:
        fetched = b""
        with contextlib.suppress(OSError):
            fetched = await reader.readline()
        if fetched == b"done\n":
            self._free(request_id)
        else:
            self._leave(request_id)
