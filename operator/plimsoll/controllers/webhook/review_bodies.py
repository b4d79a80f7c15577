"""Reads the bodies of reviews, of which it holds a bounded number and a bounded number of bytes.

Problem: a client that sends its review slowly holds a place for seconds. A few such clients keep the API server's own
reviews out, whose bodies arrive in milliseconds.

Idea: a further body is never refused. Beyond the number, it takes the place of the body that is read for the longest
time. Beyond the bytes, the body with most of them is given up: it has `max_bytes / max_bodies` at least, and a review
of a common size has less.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from aiohttp import web


class DisplacedBody(Exception):
    """Other bodies needed the room of this one."""


@dataclass(frozen=True)
class BodyLimits:
    """Limits of the bodies that are read at once, in number and bytes, and of one body, in bytes and seconds.

    body_bytes: of an object and its predecessor, of 1.5 MiB each at most. seconds: the longest that the API server
    waits for an answer.
    """

    max_bodies: int = 64
    max_bytes: int = 32 * 1024**2
    body_bytes: int = 4 * 1024**2
    seconds: float = 5.0


@dataclass(eq=False)
class _Body:
    deadline: asyncio.Timeout
    data: bytearray = field(default_factory=bytearray)
    is_displaced: bool = False


class ReviewBodies:
    """The bodies that are being read."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._reading: dict[_Body, None] = {}  # the one that is read for the longest time first
        self._bytes = 0

    async def read(self, request: web.Request) -> bytearray:
        """Returns the whole body. Raises DisplacedBody, TimeoutError, or HTTPRequestEntityTooLarge."""
        limits = self._limits
        body = _Body(asyncio.timeout(limits.seconds))
        try:
            async with body.deadline:
                if len(self._reading) >= limits.max_bodies:
                    self._displace(next(iter(self._reading)))
                self._reading[body] = None
                try:
                    async for piece in request.content.iter_any():
                        self._add(body, piece)
                finally:
                    self._remove(body)
        except TimeoutError as error:
            raise DisplacedBody if body.is_displaced else error from None
        return body.data

    def _add(self, body: _Body, piece: bytes) -> None:
        if body.is_displaced:
            return
        if len(body.data) + len(piece) > self._limits.body_bytes:
            raise web.HTTPRequestEntityTooLarge(self._limits.body_bytes, len(body.data) + len(piece))
        body.data += piece
        self._bytes += len(piece)
        while self._bytes > self._limits.max_bytes:
            self._displace(max(self._reading, key=lambda one: len(one.data)))

    def _displace(self, body: _Body) -> None:
        """Give up a body at once."""
        body.is_displaced = True
        self._remove(body)
        body.deadline.reschedule(asyncio.get_running_loop().time())

    def _remove(self, body: _Body) -> None:
        if body in self._reading:
            del self._reading[body]
            self._bytes -= len(body.data)
            if body.is_displaced:
                body.data = bytearray()
