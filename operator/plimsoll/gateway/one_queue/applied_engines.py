"""Holds an owner's answer until this gateway's own Envoy knows the engine.

Problem: each Envoy learns of a new engine by itself. The owner releases its queue as soon as its own Envoy has applied
the engine, and the Envoy that carries a request may be later: it would answer 503.

Idea: an acknowledgement of Envoy makes a new catalog, and each new catalog is a reason to look again. After
MAX_WAIT_SECONDS the answer goes to Envoy as it is, which then answers 503 with `Retry-After`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from plimsoll.telemetry import gateway_metrics

MAX_WAIT_SECONDS: Final = 5.0

Release = Callable[[], None]


class AppliedEngines:
    """The answers that wait for Envoy. They are requests of the queue, whose limit bounds their number."""

    def __init__(self, has_applied: Callable[[str, str], bool], max_wait_seconds: float = MAX_WAIT_SECONDS) -> None:
        """`has_applied` returns whether Envoy has applied an address of a service, by the key of the service."""
        self._has_applied = has_applied
        self._max_wait_s = max_wait_seconds
        self._waiting: dict[tuple[str, str], list[tuple[asyncio.TimerHandle, Release]]] = {}

    def when_applied(self, key: str, address: str, release: Release) -> None:
        """Call `release` once Envoy knows the engine, at once if it does."""
        if self._has_applied(key, address):
            release()
            return
        gateway_metrics.GATEWAY_OWNER_ANSWERS_DELAYED.inc()
        loop, engine = asyncio.get_running_loop(), (key, address)
        timer = loop.call_later(self._max_wait_s, self._release, engine)
        self._waiting.setdefault(engine, []).append((timer, release))

    def check(self) -> None:
        """Release the answers whose engine Envoy knows by now."""
        for engine in [engine for engine in self._waiting if self._has_applied(*engine)]:
            self._release(engine)

    def _release(self, engine: tuple[str, str]) -> None:
        for timer, release in self._waiting.pop(engine, []):
            timer.cancel()
            release()
