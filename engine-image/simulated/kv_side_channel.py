"""The side channel between a prefill engine and those that fetch its KV, in place of NIXL's.

Problem: whether KV is available depends on another process, which may have ended, been restarted or expired the lease.
Idea: one connection per fetch, on the port that NIXL uses. The decode engine sends engine and request and gets the
number of tokens. The blocks are held while the connection is open; `done` frees them. A broken connection shows the
decode engine that the prefill engine is gone, and restarts the expiry at the prefill engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

HANDSHAKE_SECONDS: Final = 5.0
_MAX_LINE_BYTES: Final = 4096
_UNREACHABLE: Final = (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)


class KvClaim:
    """Another engine's KV that is held for this one, until `done`. `lost` is called once if that engine goes away
    before.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, on_lost: Callable[[], None]) -> None:
        self._writer = writer
        self._on_lost = on_lost
        self._closed = False
        self._watch = asyncio.ensure_future(self._watch_peer(reader))

    def release(self) -> None:
        """Release the KV after it was fetched, or is not needed any more."""
        if not self._closed:
            self._closed = True
            self._writer.write(b"done\n")
            self._writer.close()
            self._watch.cancel()

    async def _watch_peer(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            await reader.read(1)
        if not self._closed:
            self._closed = True
            self._writer.close()
            self._on_lost()


async def claim_kv(params: Mapping[str, Any], on_lost: Callable[[], None]) -> KvClaim | None:
    """Claim the KV of these transfer parameters; None if it is not available."""
    with contextlib.suppress(*_UNREACHABLE, TypeError):
        async with asyncio.timeout(HANDSHAKE_SECONDS), contextlib.AsyncExitStack() as exit_stack:
            host, port = params.get("remote_host"), int(params.get("remote_port") or 0)
            reader, writer = await asyncio.open_connection(host, port)
            exit_stack.callback(writer.close)
            request = {"engine_id": params.get("remote_engine_id"), "request_id": params.get("remote_request_id")}
            writer.write(json.dumps(request).encode() + b"\n")
            if "tokens" in json.loads(await reader.readuntil(b"\n")):
                exit_stack.pop_all()
                return KvClaim(reader, writer, on_lost)
    return None


class LeaseServer:
    """The prefill engine's end. `keep` gives the tokens kept for a request, `leave` and `free` end that."""

    def __init__(
        self,
        engine_id: str,
        claim_lease: Callable[[str], int | None],
        restart_expiry: Callable[[str], None],
        free_lease: Callable[[str], None],
    ) -> None:
        self._engine_id = engine_id
        self._claim_lease = claim_lease
        self._restart_expiry = restart_expiry
        self._free_lease = free_lease

    async def listen(self, host: str, port: int) -> asyncio.Server:
        """Listen until the caller closes the server."""
        return await asyncio.start_server(self._serve, host, port, limit=_MAX_LINE_BYTES)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(*_UNREACHABLE, KeyError, TypeError):
            request = json.loads(await reader.readuntil(b"\n"))
            request_id = str(request["request_id"])
            tokens = self._claim_lease(request_id) if request["engine_id"] == self._engine_id else None
            if tokens is None:
                writer.write(b'{"error":"no such request"}\n')
            else:
                writer.write(json.dumps({"tokens": tokens}).encode() + b"\n")
                await self._hold_lease(request_id, reader)
        with contextlib.suppress(OSError):
            writer.close()

    async def _hold_lease(self, request_id: str, reader: asyncio.StreamReader) -> None:
        reply = b""
        with contextlib.suppress(OSError):
            reply = await reader.readline()
        if reply == b"done\n":
            self._free_lease(request_id)
        else:
            self._restart_expiry(request_id)
