"""Injectable clock and timer, so that tests can control time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

TIMER_SLACK_S = 0.001  # event-loop timers may fire 1 ms early


class TimerHandle(Protocol):
    """A scheduled call."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Time in seconds. `now` is monotonic; `unix` is the wall clock that Kubernetes objects use."""

    def now(self) -> float: ...

    def unix(self) -> float: ...

    def call_at(self, at_s: float, callback: Callable[[], None]) -> TimerHandle:
        """Call `callback` once at monotonic time `at_s`, or immediately if that has passed."""
        ...


class LoopClock:
    """The system clocks and the timers of the running event loop."""

    def now(self) -> float:
        return time.monotonic()

    def unix(self) -> float:
        return time.time()

    def call_at(self, at_s: float, callback: Callable[[], None]) -> TimerHandle:
        delay_s = max(0.0, at_s - time.monotonic()) + TIMER_SLACK_S
        return asyncio.get_running_loop().call_later(delay_s, callback)
