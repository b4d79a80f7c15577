"""Spreads work that comes at once over turns of the event loop.

Problem: a request takes the loop one or two milliseconds at most. When a hundred come at once, all connections and
timers wait for their sum.

Idea: one turn of the loop works for `TURN_SECONDS`, and then finishes the piece at hand. What comes after waits, in the
order in which it came, for the next turns. The caller bounds how much of it can wait.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

TURN_SECONDS: Final = 0.001


class LoopTurns:
    """The work of one event loop. `now` returns seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_open = False  # this turn has worked, and its end is scheduled
        self._end_s = 0.0

    @property
    def is_over(self) -> bool:
        """Whether this turn should do no more."""
        return self._is_open and self._now() >= self._end_s

    def run(self, work: Callable[[], None]) -> bool:
        """Do some work now, or in a later turn. Returns whether it is done."""
        if not self._is_open:
            self._open()
        elif self._waiting or self._now() >= self._end_s:
            self._waiting.append(work)
            return False
        work()
        return True

    def _open(self) -> None:
        self._is_open, self._end_s = True, self._now() + TURN_SECONDS
        asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """Called in the turn after one that has worked."""
        self._is_open = False
        if not self._waiting:
            return
        self._open()  # first: work may raise
        while self._waiting:
            self._waiting.popleft()()
            if self._now() >= self._end_s:
                return
