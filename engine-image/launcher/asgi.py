"""Type names for ASGI, and helpers that all parts of the middleware use."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


def header(scope: Scope, name: str) -> str:
    """Return the first value of a request header (lower-case name), or an empty string."""
    encoded = name.encode()
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == encoded), "")


def replace_headers(headers: Headers, changes: dict[bytes, bytes]) -> Headers:
    """Return the headers with some set to new values."""
    return [*((key, value) for key, value in headers if key.lower() not in changes), *changes.items()]


async def wait_first(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of the futures is done; cancels none."""
    await asyncio.wait(set(futures), return_when=asyncio.FIRST_COMPLETED)


async def send_json(send: Send, status: int, body: bytes, headers: dict[bytes, bytes]) -> None:
    """Send a complete JSON response."""
    length = {b"content-type": b"application/json", b"content-length": str(len(body)).encode()}
    await send({"type": "http.response.start", "status": status, "headers": list({**length, **headers}.items())})
    await send({"type": "http.response.body", "body": body, "more_body": False})
