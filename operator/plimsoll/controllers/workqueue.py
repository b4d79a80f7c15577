"""The level-triggered work queue: events only name a key, the work looks at the world as it is then.

A key is worked on by one worker at a time; being added while in work means one more round afterwards. Failures are
tried again with growing delays, a key's own, so that one sick object does not slow the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from plimsoll.core.errors import PlimsollError, Unavailable
from plimsoll.telemetry import metrics

K = TypeVar("K", bound=Hashable)

log = logging.getLogger(__name__)

FIRST_DELAY_SECONDS = 0.25
LAST_DELAY_SECONDS = 60.0


class WorkQueue(Generic[K]):
    """Runs `work(key)` for every key added, at most `workers` at once."""

    def __init__(self, work: Callable[[K], Awaitable[None]], workers: int = 8) -> None:
        self._work = work
        self._workers = workers
        self._waiting: deque[K] = deque()
        self._known: set[K] = set()  # waiting, or to be worked on again
        self._active: set[K] = set()
        self._failures: dict[K, int] = {}
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._known)

    @property
    def idle(self) -> bool:
        """True when nothing waits, works or is due later."""
        return not (self._known or self._active or self._timers)

    def add(self, key: K) -> None:
        """Have the key worked on soon; many calls before that are one."""
        timer = self._timers.pop(key, None)
        if timer:
            timer.cancel()
        if key not in self._known:
            self._known.add(key)
            if key not in self._active:
                self._waiting.append(key)
        self._wake.set()

    def add_later(self, key: K, seconds: float) -> None:
        """Have the key worked on after a while, unless it is added before."""
        if key in self._known or key in self._timers:
            return
        self._timers[key] = asyncio.get_running_loop().call_later(seconds, self._due, key)

    def _due(self, key: K) -> None:
        self._timers.pop(key, None)
        self.add(key)

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._workers):
                group.create_task(self._worker())

    async def _worker(self) -> None:
        while True:
            while not self._waiting:
                self._wake.clear()
                await self._wake.wait()
            key = self._waiting.popleft()
            metrics.OPERATOR_QUEUE.set(len(self._waiting))
            self._known.discard(key)
            self._active.add(key)
            try:
                await self._attempt(key)
            finally:
                self._active.discard(key)
                if key in self._known:
                    self._waiting.append(key)
                    self._wake.set()

    async def _attempt(self, key: K) -> None:
        try:
            with metrics.OPERATOR_RECONCILE_SECONDS.time():
                await self._work(key)
        except PlimsollError as error:
            metrics.OPERATOR_RECONCILES.labels("retry").inc()
            log.warning("will try again", extra={"key": key, "error": str(error)})
            self._retry(key, error)
        except Exception as error:  # the queue's boundary: one bad object stops no other
            metrics.OPERATOR_RECONCILES.labels("unexpected").inc()
            log.exception("unexpected failure", extra={"key": key})
            self._retry(key, error)
        else:
            metrics.OPERATOR_RECONCILES.labels("done").inc()
            self._failures.pop(key, None)

    def _retry(self, key: K, error: Exception) -> None:
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        delay = min(FIRST_DELAY_SECONDS * 2 ** (failures - 1), LAST_DELAY_SECONDS)
        if isinstance(error, Unavailable) and error.retry_after_seconds is not None:
            delay = max(delay, error.retry_after_seconds)
        with contextlib.suppress(RuntimeError):
            self.add_later(key, delay)
