"""Fetches a page from a pod over HTTP.

It uses aiohttp because the operator fetches many pages per second: for 500 engines a page takes a tenth of the CPU time
of httpx or less (docs/design/0022-http-client.md).
"""

from __future__ import annotations

import asyncio
from typing import Final

import aiohttp

from plimsoll.core.errors import BackendUnavailable, cause_of
from plimsoll.core.units import format_seconds

TIMEOUT_S: Final = 2.0
MAX_ENGINE_PAGE_BYTES: Final = 1 << 20  # vLLM's /metrics has some 100 KB
MAX_GATEWAY_PAGE_BYTES: Final = 16 << 20  # /signals of 2,500 services with 30 engines each
_HEADERS: Final = {"Accept-Encoding": "identity"}  # compression would cost CPU time in the pod
_NO_TIMEOUT: Final = aiohttp.ClientTimeout()  # asyncio.timeout below limits the whole request


async def get_page(
    session: aiohttp.ClientSession,
    address: str,
    port: int,
    path: str,
    *,
    max_bytes: int,
    timeout_s: float = TIMEOUT_S,
) -> bytes:
    """The body of a pod's response at a path. address: the pod's IP.

    Raises BackendUnavailable for a status other than 200, a truncated or oversized body, and a timeout.
    """
    host = f"[{address}]" if ":" in address else address
    url = f"http://{host}:{port}{path}"
    try:
        async with asyncio.timeout(timeout_s):
            return await _read_body(session, url, max_bytes)
    except TimeoutError:
        raise BackendUnavailable(f"{url} did not answer within {format_seconds(timeout_s)}") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise BackendUnavailable(f"{url}: {cause_of(error)}") from error


async def _read_body(session: aiohttp.ClientSession, url: str, max_bytes: int) -> bytes:
    body = bytearray()
    async with session.get(url, headers=_HEADERS, timeout=_NO_TIMEOUT, allow_redirects=False) as response:
        if response.status != 200:
            raise BackendUnavailable(f"{url} answered with {response.status}", response.status)
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > max_bytes:
                raise BackendUnavailable(f"{url} answered with more than {max_bytes} bytes")
    return bytes(body)
