"""A constant cap on what is in flight, shared by the load's processes: what the gate is held against.

Problem: each process sends its own part of a trace, and a cap is of all together.
Idea: as `plimsoll.sim.capped` has it: while `cap` requests are under way the next ones wait, first come first served,
and are turned away after half of the time that an idle engine would leave them. A client connects, says its prompt's
tokens, reads GO or AWAY, and is under way until it closes: one that dies frees its place.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

GO: Final = b"+"
AWAY: Final = b"-"


class Turnstile:
    """patience_s: how long a prompt of so many tokens may wait."""

    def __init__(self, cap: int, patience_s: Callable[[int], float]) -> None:
        self._cap, self._patience_s = cap, patience_s
        self._queue: deque[asyncio.Future[None]] = deque()
        self.inside = 0
        self.most = 0  # inside at once

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return sum(not turn.done() for turn in self._queue)

    async def serve(self, path: Path) -> asyncio.Server:
        """Opens the door; to be closed by whoever asked."""
        return await asyncio.start_unix_server(self._visit, str(path), backlog=4096)

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        entered = False
        try:
            entered = await self._enter(self._patience_s(int(await reader.readline())))
            writer.write(GO if entered else AWAY)
            if entered:
                await reader.read()  # until it closes
        except (OSError, ValueError):
            pass
        finally:
            if entered:
                self._leave()
            writer.close()

    async def _enter(self, patience_s: float) -> bool:
        if self.inside < self._cap:
            self._count()
            return True
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            async with asyncio.timeout(patience_s):
                await turn
        except TimeoutError:
            return turn.done() and not turn.cancelled()  # its turn may have come in this very moment
        return True

    def _leave(self) -> None:
        self.inside -= 1
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                self._count()
                turn.set_result(None)
                return

    def _count(self) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)


async def enter(path: str, prompt: int) -> asyncio.StreamWriter | None:
    """Waits for a turn; the place is kept until what comes back is closed. None: turned away."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"%d\n" % prompt)
    if await reader.read(1) == GO:
        return writer
    writer.close()
    return None
