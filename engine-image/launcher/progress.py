"""Whether the engine makes progress, and what follows if it does not.

Problem: an engine that hangs (a kernel, NCCL, a deadlock) keeps its port open and its /health at 200, so requests go
there for ever. An engine that is merely busy must not be taken for it: a step of a slow CPU takes seconds.

Idea: the launcher asks the engine's API server every `poll_seconds` whether the engine core has come round its loop
(`launcher.core_probe`). The answer comes after the running step, whatever it computes: a prefill in chunks, 256
sequences, a transfer of KV blocks, nothing at all. So an answer is progress, and its delay is the length of a step.
Without an answer from either process the engine is unready after `unready_seconds`, and the launcher kills it and ends
after `restart_seconds`; the kubelet then starts the container again.

Both bounds are for accelerators, whose steps take less than a second. Other engines (CPU, simulator) get both bounds
times

    stretch = clamp(step_multiple * L / unready_seconds, 1, max_stretch)

where L is how long the core took at most for an answer, in seconds, within STEP_WINDOW_SECONDS before the last one.
With the contract's figures: unready after max(10 s, 20 L) and at most 120 s, restarted after four times that. (20: the
longest step of the warm-up has 1024 tokens. One of 8192 tokens, vLLM's default budget, takes 10 to 15 times as long, by
the profiles of the simulator.)

Time in which the launcher itself did not run (a paused container, a suspended machine) does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from launcher.contract import ProgressLimits

TICK_SECONDS: Final = 0.5
MAX_TICK_SECONDS: Final = 2 * TICK_SECONDS
WARMUP_PAUSE_SECONDS: Final = 0.05  # short, so that a question waits for the whole of a step
STEP_WINDOW_SECONDS: Final = 300.0

log = logging.getLogger(__name__)


class ProgressMonitor:
    """Time without progress of the engine. `stretches`: whether the engine's step times may stretch the bounds."""

    def __init__(self, limits: ProgressLimits, stretches: bool) -> None:
        self._limits = limits
        self._stretches = stretches
        self._observed_s = 0.0
        self._silent_since_s = 0.0
        self._longest_steps: deque[tuple[float, float]] = deque()  # (observed at, step), steps descending

    def advance(self, seconds: float) -> None:
        """Add elapsed time; a tick that is too long counts as MAX_TICK_SECONDS."""
        self._observed_s += min(seconds, MAX_TICK_SECONDS)

    def record(self, step_s: float) -> None:
        """Record a response of the engine core, `step_s` seconds after the probe."""
        self._silent_since_s = self._observed_s
        while self._longest_steps and self._longest_steps[-1][1] <= step_s:
            self._longest_steps.pop()
        self._longest_steps.append((self._observed_s, step_s))
        while self._longest_steps[0][0] < self._observed_s - STEP_WINDOW_SECONDS:  # only here: silence forgets nothing
            self._longest_steps.popleft()

    def excuse(self) -> None:
        """Let the silence begin now: the engine says why it makes no progress."""
        self._silent_since_s = self._observed_s

    @property
    def silent_s(self) -> float:
        """Seconds since the last sign of progress."""
        return self._observed_s - self._silent_since_s

    @property
    def is_stalled(self) -> bool:
        """Whether the engine should get no new requests."""
        return self.silent_s >= self._limits.unready_seconds * self._stretch

    @property
    def is_hung(self) -> bool:
        """Whether the engine should be restarted."""
        return self.silent_s >= self._limits.restart_seconds * self._stretch

    @property
    def _stretch(self) -> float:
        if not self._stretches or not self._longest_steps:
            return 1.0
        limits, longest_s = self._limits, self._longest_steps[0][1]
        return min(max(limits.step_multiple * longest_s / limits.unready_seconds, 1.0), limits.max_stretch)


def parse_step_seconds(status: int, body: bytes) -> float | None:
    """Return the step time in a response of the progress path; None if the core has not responded."""
    if status != 200:
        return None
    try:
        seconds = json.loads(body)["step_seconds"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return float(seconds) if isinstance(seconds, int | float) else None


async def observe(
    monitor: ProgressMonitor,
    ask: Callable[[], Awaitable[float | None]],
    pause: Callable[[], float],
    on_tick: Callable[[], bool],
) -> None:
    """Probe and wait until `on_tick`, called every TICK_SECONDS, returns True.

    `ask` returns the seconds of a step, or None without a response; it must not raise. `pause` returns the seconds from
    a response to the next probe.
    """

    async def poll() -> None:
        while True:
            step_s = await ask()
            if step_s is not None:
                monitor.record(step_s)
            await asyncio.sleep(pause())

    poller = asyncio.create_task(poll())
    try:
        at, is_stalled = time.monotonic(), False
        while not on_tick():
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            monitor.advance(now - at)
            at = now
            if monitor.is_stalled != is_stalled:
                is_stalled = not is_stalled
                if is_stalled:
                    log.warning("the engine has made no progress for %.0f s: unready", monitor.silent_s)
                else:
                    log.warning("the engine makes progress again")
    finally:
        poller.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await poller
