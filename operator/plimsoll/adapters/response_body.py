"""Reads the body of an HTTP response, as a whole within a limit or as a stream of lines."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import aiohttp


async def read_body(response: aiohttp.ClientResponse, max_bytes: int | None) -> bytes | None:
    """The whole body; None if it is longer than `max_bytes`."""
    body = bytearray()
    try:
        async for chunk in response.content.iter_any():
            body += chunk
            if max_bytes is not None and len(body) > max_bytes:
                return None
    finally:
        response.close()
    return bytes(body)


async def read_lines(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    """Newline-terminated documents of a chunked response, of any size."""
    pending = b""
    try:
        async for chunk in response.content.iter_any():
            *complete, pending = (pending + chunk).split(b"\n")
            for line in complete:
                if line:
                    yield line
    finally:
        response.close()
