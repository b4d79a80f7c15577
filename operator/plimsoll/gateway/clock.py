"""The time that the picker lives by, as one object, so that tests can be its hands."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

LATE_S = 0.001  # timers of the loop may be a millisecond early


class Handle(Protocol):
    """A call that is still to come."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Seconds. `now` is monotonic, `unix` is what the API server's objects are written in."""

    def now(self) -> float: ...

    def unix(self) -> float: ...

    def call_at(self, at_s: float, call: Callable[[], None]) -> Handle:
        """Call once at that monotonic time, at once if it has passed."""
        ...


class LoopClock:
    """The machine's clocks and the timers of the running loop."""

    def now(self) -> float:
        return time.monotonic()

    def unix(self) -> float:
        return time.time()

    def call_at(self, at_s: float, call: Callable[[], None]) -> Handle:
        delay_s = max(0.0, at_s - time.monotonic()) + LATE_S
        return asyncio.get_running_loop().call_later(delay_s, call)
