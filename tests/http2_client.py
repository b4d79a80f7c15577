"""A client of a gRPC server that connects, and then makes no call."""

from __future__ import annotations

import asyncio
import contextlib

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # and empty SETTINGS


async def wait_closed(port: int, seconds: float = 20.0) -> None:
    """Open a connection and wait until the server closes it. Raises TimeoutError."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE)
    async with asyncio.timeout(seconds):
        with contextlib.suppress(ConnectionError):
            while await reader.read(1000):
                pass
    writer.close()
