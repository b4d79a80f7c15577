"""Level-triggered work queue: an event only names a key, and the work reads the current state.

One worker at a time processes a key; a key that is added meanwhile is processed once more. A failed key is retried
with a growing delay of its own, so that one failing object does not slow the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from plimsoll.core.errors import BackendUnavailable, PlimsollError
from plimsoll.telemetry import operator_metrics
from plimsoll.telemetry.service_log import ServiceLog

K = TypeVar("K", bound=Hashable)

log = ServiceLog(__name__)

MIN_RETRY_SECONDS = 0.25
MAX_RETRY_SECONDS = 60.0
MAX_DOUBLINGS = 8  # of the first delay; more than reach the longest one
MIN_FAILURE_PAUSE_SECONDS = 1.0  # between two failures of a key, even if its object changes all the time


def _service(key: Hashable) -> tuple[str, str] | None:
    """The key as that of a service; None for a queue of something else."""
    return (key[0], key[1]) if isinstance(key, tuple) and len(key) == 2 else None


class WorkQueue(Generic[K]):
    """Runs `work(key)` for every key added, at most `workers` at once."""

    def __init__(self, work: Callable[[K], Awaitable[None]], workers: int = 8) -> None:
        self._work = work
        self._workers = workers
        self._waiting: deque[K] = deque()
        self._queued: set[K] = set()  # waiting, or to be processed again
        self._active: set[K] = set()
        self._failures: dict[K, int] = {}
        self._paused_until: dict[K, float] = {}  # time of the loop; keys that failed more than once
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._due_since: dict[K, float] = {}  # time of the loop; keys that wait or are in process, the oldest first
        self._ended_s = math.inf  # when a key was finished last, or the workers began
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._queued)

    @property
    def is_idle(self) -> bool:
        """True when no key is waiting, in process or due later."""
        return not (self._queued or self._active or self._timers)

    @property
    def age_s(self) -> float:
        """How long the oldest key has been waiting or in process, 0 without any."""
        since = next(iter(self._due_since.values()), None)
        return 0.0 if since is None else asyncio.get_running_loop().time() - since

    @property
    def stalled_s(self) -> float:
        """How long no key has been finished although one was due and workers run, 0 without any."""
        return max(0.0, min(self.age_s, asyncio.get_running_loop().time() - self._ended_s))

    def add(self, key: K) -> None:
        """Process the key soon. Several calls before that count as one. A key that keeps failing is processed at most
        once in `MIN_FAILURE_PAUSE_SECONDS`: its own status may be what changes."""
        if key in self._paused_until and key not in self._queued:
            pause_s = self._paused_until[key] - asyncio.get_running_loop().time()
            if pause_s > 0.0:
                self.add_later(key, pause_s)
                return
        self._enqueue(key)

    def _enqueue(self, key: K) -> None:
        timer = self._timers.pop(key, None)
        if timer:
            timer.cancel()
        if key not in self._queued:
            self._queued.add(key)
            self._due_since.setdefault(key, asyncio.get_running_loop().time())
            if key not in self._active:
                self._waiting.append(key)
        self._wake.set()

    def add_later(self, key: K, seconds: float) -> None:
        """Process the key after `seconds`, unless it is added before. The earliest of several times counts."""
        loop, timer = asyncio.get_running_loop(), self._timers.get(key)
        if key in self._queued or (timer is not None and timer.when() <= loop.time() + seconds):
            return
        if timer is not None:
            timer.cancel()
        self._timers[key] = loop.call_later(seconds, self._due, key)

    def _due(self, key: K) -> None:
        self._timers.pop(key, None)
        self._enqueue(key)

    async def run(self) -> None:
        """Process keys until cancelled."""
        self._ended_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._workers):
                    group.create_task(self._worker())
        finally:
            for timer in self._timers.values():  # each holds the queue, and so all that its work uses
                timer.cancel()
            self._timers.clear()

    async def _worker(self) -> None:
        while True:
            while not self._waiting:
                self._wake.clear()
                await self._wake.wait()
            await asyncio.sleep(0)  # a reconcile that writes nothing does not wait by itself
            if not self._waiting:
                continue
            key = self._waiting.popleft()
            operator_metrics.OPERATOR_QUEUE.set(len(self._waiting))
            self._queued.discard(key)
            self._active.add(key)
            try:
                await self._process(key)
            finally:
                self._active.discard(key)
                self._ended_s = asyncio.get_running_loop().time()
                del self._due_since[key]
                if key in self._queued:
                    self._due_since[key] = self._ended_s
                    self._waiting.append(key)
                    self._wake.set()

    async def _process(self, key: K) -> None:
        try:
            with operator_metrics.OPERATOR_RECONCILE_SECONDS.time():
                await self._work(key)
        except PlimsollError as error:
            operator_metrics.OPERATOR_RECONCILES.labels("retry").inc()
            log.warning(_service(key), "reconcile failed; retrying", error=str(error))
            self._retry(key, error)
        except Exception as error:  # one failing object must not stop the others
            operator_metrics.OPERATOR_RECONCILES.labels("unexpected").inc()
            log.exception(_service(key), "unexpected error in reconcile; retrying")
            self._retry(key, error)
        else:
            operator_metrics.OPERATOR_RECONCILES.labels("done").inc()
            self._failures.pop(key, None)
            self._paused_until.pop(key, None)

    def _retry(self, key: K, error: Exception) -> None:
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        if failures > 1:
            self._paused_until[key] = asyncio.get_running_loop().time() + MIN_FAILURE_PAUSE_SECONDS
        delay = min(MIN_RETRY_SECONDS * 2 ** min(failures - 1, MAX_DOUBLINGS), MAX_RETRY_SECONDS)
        if isinstance(error, BackendUnavailable) and error.retry_after_seconds is not None:
            delay = max(delay, error.retry_after_seconds)
        with contextlib.suppress(RuntimeError):
            self.add_later(key, delay)
