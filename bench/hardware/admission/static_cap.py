"""A constant cap on requests in flight, shared by the load's processes: the baseline for admission control.

Problem: each process sends its own part of a trace, but the cap applies to all of them together.
Idea: the same rule as `plimsoll.sim.concurrency_cap`. While `cap` requests are in flight, further requests wait in
arrival order. A request is rejected after half of the time that an idle engine would leave it. A client connects, sends
its number of prompt tokens and reads GRANTED or REJECTED. Its slot is free when the connection closes, so a client that
dies frees it too.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

GRANTED: Final = b"+"
REJECTED: Final = b"-"


class StaticCap:
    """patience_s: how long a prompt of so many tokens may wait."""

    def __init__(self, cap: int, patience_s: Callable[[int], float]) -> None:
        self._cap, self._patience_s = cap, patience_s
        self._queue: deque[asyncio.Future[None]] = deque()
        self.inside = 0
        self.most = 0  # inside at once

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return sum(not waiter.done() for waiter in self._queue)

    async def serve(self, path: Path) -> asyncio.Server:
        """Opens the door; to be closed by whoever asked."""
        return await asyncio.start_unix_server(self._handle, str(path), backlog=4096)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        granted = False
        try:
            granted = await self._acquire(self._patience_s(int(await reader.readline())))
            writer.write(GRANTED if granted else REJECTED)
            if granted:
                await reader.read()  # until it closes
        except (OSError, ValueError):
            pass
        finally:
            if granted:
                self._release()
            writer.close()

    async def _acquire(self, patience_s: float) -> bool:
        if self.inside < self._cap:
            self._count()
            return True
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(waiter)
        try:
            async with asyncio.timeout(patience_s):
                await waiter
        except TimeoutError:
            return waiter.done() and not waiter.cancelled()  # its turn may have come in this very moment
        return True

    def _release(self) -> None:
        self.inside -= 1
        while self._queue:
            waiter = self._queue.popleft()
            if not waiter.done():
                self._count()
                waiter.set_result(None)
                return

    def _count(self) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)


async def acquire_slot(path: str, prompt: int) -> asyncio.StreamWriter | None:
    """Waits for a turn; the place is kept until what comes back is closed. None: turned away."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"%d\n" % prompt)
    if await reader.read(1) == GRANTED:
        return writer
    writer.close()
    return None
