"""Envoy's own state laid over the fleet: what is routable, in flight, failing.

A model is routable when Envoy lists a healthy endpoint of it, not when we have written a file. So Envoy is asked
every few seconds, and many times a second while it has yet to take up what was written.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from plimsoll.gateway.admin import Admin, EnvoyAway, View
from plimsoll.gateway.endpoints import EMPTY, Fleet
from plimsoll.gateway.picker import Picker
from plimsoll.gateway.xds import MODEL, PICK
from plimsoll.telemetry import metrics

log = logging.getLogger(__name__)

SOON_SECONDS = 0.1
SOON_TIMES = 50  # then at the usual pace: what Envoy has not taken up in five seconds it may never do


class EnvoyView:
    """Keeps the picker's fleet in line with what Envoy can reach."""

    def __init__(self, admin: Admin, picker: Picker, poll_seconds: float, asked: Callable[[], bool]) -> None:
        """asked: whether Envoy's health check has met this picker; before, it tells of the picker before."""
        self._admin = admin
        self._picker = picker
        self._poll_seconds = poll_seconds
        self._asked = asked
        self._wanted: Fleet = EMPTY
        self._healthy: dict[str, set[str]] = {}
        self._failures: dict[str, int] = {}
        self._failed_open = 0
        self._changed = asyncio.Event()
        self.looked = asyncio.Event()  # the first look is over, whether Envoy answered or not
        self.current = False  # Envoy answers, has every cluster that it should have, and would ask us

    def want(self, fleet: Fleet) -> None:
        """This is what was written for Envoy; endpoints it already knows stay routable."""
        self._wanted = fleet
        self._picker.set_fleet(fleet.with_healthy(self._healthy))
        self._changed.set()

    async def run(self, tick: Callable[[], None]) -> None:
        """Look for ever; `tick` is called after each look."""
        soon = SOON_TIMES
        while True:
            settled = await self.look()
            self.looked.set()
            tick()
            soon = SOON_TIMES if settled else soon - 1
            pause = self._poll_seconds if settled or soon <= 0 else SOON_SECONDS
            await self._pause(pause)
            if self._changed.is_set():
                self._changed.clear()
                soon = SOON_TIMES

    async def _pause(self, seconds: float) -> None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass
        metrics.GATEWAY_LOOP_LAG.set(max(0.0, time.monotonic() - began - seconds))

    async def look(self) -> bool:
        """One look; True if Envoy has all that was written for it."""
        asked = self._asked()  # as it was when the look began
        try:
            view = await self._admin.view()
            stats = await self._admin.stats()
        except EnvoyAway as away:
            if self.current:
                log.warning("Envoy does not answer: %s", away)
            self.current = False
            return False
        self._take(view)
        self._count_failed_open(stats.failed_open)
        return self._settled(view, asked)

    def _take(self, view: View) -> None:
        self._healthy = {
            service: {address for address, host in hosts.items() if host.healthy}
            for service, hosts in view.hosts.items()
        }
        self._picker.set_fleet(self._wanted.with_healthy(self._healthy))
        hosts = {address: host for of_service in view.hosts.values() for address, host in of_service.items()}
        for address, host in hosts.items():
            if host.connect_failures > self._failures.get(address, host.connect_failures):
                self._picker.doubt(address)
        self._failures = {address: host.connect_failures for address, host in hosts.items()}
        self._picker.looked({address: host.active for address, host in hosts.items()})

    def _count_failed_open(self, total: int) -> None:
        """Envoy counts since its own start; a smaller number than before means that it started anew."""
        metrics.GATEWAY_FAILED_OPEN.inc(total - self._failed_open if total >= self._failed_open else total)
        self._failed_open = total

    def _settled(self, view: View, asked: bool) -> bool:
        names = {PICK + key for key in self._wanted.services} | {MODEL + name for name in self._wanted.by_name}
        present = {name for name in view.clusters if name.startswith((PICK, MODEL))}
        self.current = asked and view.picker_healthy and names <= present
        addresses = {key: {e.address for e in s.answering} for key, s in self._wanted.services.items()}
        known = {key: set(view.hosts.get(key, ())) for key in addresses}
        return self.current and names == present and addresses == known
