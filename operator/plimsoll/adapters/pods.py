"""A page that a pod serves, over HTTP: one small function, since the operator asks for many pages every second.

It is aiohttp for its price: on a kept-alive connection an answer costs a third of the CPU time that httpx takes, and a
quarter where sniffio is not installed (httpx then looks for it in vain at every lock).
"""

from __future__ import annotations

import asyncio
from typing import Final

import aiohttp

from plimsoll.core.errors import Unavailable

TIMEOUT_S: Final = 2.0
MOST_BYTES: Final = 64 << 20  # `/signals` of ten thousand services with thirty engines each
_HEADERS: Final = {"Accept-Encoding": "identity"}  # a pod has better things to do
_NO_TIMEOUT: Final = aiohttp.ClientTimeout()  # the one of all together is ours


async def get(
    session: aiohttp.ClientSession,
    address: str,
    port: int,
    path: str,
    timeout_s: float = TIMEOUT_S,
    most_bytes: int = MOST_BYTES,
) -> bytes:
    """What a pod, by its IP, answers with 200 at a path.

    Raises Unavailable, in words, for any other answer, a redirect too, one that is cut or longer, and none in time.
    """
    host = f"[{address}]" if ":" in address else address
    url = f"http://{host}:{port}{path}"
    try:
        async with asyncio.timeout(timeout_s):
            return await _body(session, url, most_bytes)
    except TimeoutError:
        raise Unavailable(f"{url} did not answer within {timeout_s:g} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise Unavailable(f"{url}: {error or type(error).__name__}") from error


async def _body(session: aiohttp.ClientSession, url: str, most_bytes: int) -> bytes:
    body = bytearray()
    async with session.get(url, headers=_HEADERS, timeout=_NO_TIMEOUT, allow_redirects=False) as answer:
        if answer.status != 200:
            raise Unavailable(f"{url} answered with {answer.status}", answer.status)
        async for part in answer.content.iter_any():
            body += part
            if len(body) > most_bytes:
                raise Unavailable(f"{url} answered with more than {most_bytes} bytes")
    return bytes(body)
