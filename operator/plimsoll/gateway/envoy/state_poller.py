"""Which endpoints are routable, in flight, and failing, as Envoy knows and reports them.

An endpoint is routable when Envoy has applied it and has not ejected it, not when it is published. Envoy acknowledges
what it has applied at once. Its counts of requests and failures are polled every few seconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from plimsoll.gateway.envoy.admin import EnvoyAdminClient, EnvoyState, EnvoyStats, EnvoyUnavailable
from plimsoll.gateway.envoy.delta import AppliedEndpoints
from plimsoll.gateway.picker import Picker
from plimsoll.gateway.service_catalog import EMPTY_CATALOG, RoutableCatalog, ServiceCatalog
from plimsoll.telemetry import gateway_metrics

log = logging.getLogger(__name__)

FAST_POLL_SECONDS = 0.1
FAST_POLLS = 50  # then at the normal interval: Envoy may never call this picker if it has not within 5 s
MAX_POLL_SHARE = 0.05  # of this process's time; a poll of 10,000 endpoints takes some 0.1 s of CPU


class EnvoyStatePoller:
    """Keeps the picker's catalog in sync with the endpoints that Envoy can reach."""

    def __init__(
        self,
        admin: EnvoyAdminClient,
        picker: Picker,
        poll_seconds: float,
        health_checked: Callable[[], bool],
        on_stats: Callable[[EnvoyStats], None],
    ) -> None:
        """Create the poller.

        `health_checked` returns whether Envoy's health check has reached this picker. Until then, the health that Envoy
        reports is that of the previous picker. `on_stats` is called with the statistics of each poll.
        """
        self._on_stats = on_stats
        self._admin = admin
        self._picker = picker
        self._poll_seconds = poll_seconds
        self._health_checked = health_checked
        self._published: ServiceCatalog = EMPTY_CATALOG
        self._routable = RoutableCatalog()
        self._applied: dict[str, frozenset[str]] = {}
        self._unhealthy: frozenset[str] = frozenset()
        self._connect_failures: dict[str, int] | None = None
        self._totals: dict[str, int] = {}
        self._is_connected = False
        self._picker_healthy = False
        self.settled = asyncio.Event()  # Envoy is not running, or it has all services

    @property
    def in_sync(self) -> bool:
        """Whether Envoy responds, has all services, and calls this picker."""
        return self._picker_healthy and self._has_all

    @property
    def _has_all(self) -> bool:
        return self._published.services.keys() <= self._applied.keys()

    def has_applied(self, key: str, address: str) -> bool:
        """Whether Envoy knows this address of a service."""
        return address in self._applied.get(key, ())

    def set_published(self, catalog: ServiceCatalog) -> None:
        """Set the catalog that was published to Envoy. Endpoints that Envoy already knows stay routable."""
        self._published = catalog
        for removed in self._applied.keys() - catalog.services.keys():
            del self._applied[removed]
        self._update_catalog()

    def on_applied(self, endpoints: AppliedEndpoints) -> None:
        """Record what Envoy has applied."""
        if endpoints.is_new_envoy:
            self._applied.clear()
        self._applied |= {key: known for key, known in endpoints.addresses.items() if key in self._published.services}
        self._is_connected = True
        self._update_catalog()

    async def run(self, on_poll: Callable[[], None]) -> None:
        """Poll forever, and call `on_poll` after each poll."""
        fast_polls_left = FAST_POLLS
        while True:
            parse_s = await self.poll()
            on_poll()
            fast_polls_left = FAST_POLLS if self.in_sync else fast_polls_left - 1
            interval_s = self._poll_seconds if self.in_sync or fast_polls_left <= 0 else FAST_POLL_SECONDS
            await self._sleep(max(interval_s, parse_s / MAX_POLL_SHARE))

    async def _sleep(self, seconds: float) -> None:
        started_s = time.monotonic()
        await asyncio.sleep(seconds)
        gateway_metrics.GATEWAY_LOOP_LAG.set(max(0.0, time.monotonic() - started_s - seconds))

    async def poll(self) -> float:
        """Poll once. Returns the seconds that it took to parse Envoy's state."""
        health_checked = self._health_checked()  # its value before the poll
        try:
            state = await self._admin.state()
            stats = await self._admin.stats()
        except EnvoyUnavailable as error:
            if self.in_sync:
                log.warning("Envoy does not respond: %s", error)
            self._picker_healthy = False
            self.settled.set()
            return 0.0
        self._picker_healthy = health_checked and state.picker_healthy
        self._apply_state(state)
        self._count(stats)
        self._on_stats(stats)
        return state.parse_seconds

    def _update_catalog(self) -> None:
        """Give the picker the published services, with the endpoints that Envoy knows and has not ejected."""
        self._picker.set_catalog(self._routable.update(self._published, self._applied, self._unhealthy))
        if self._is_connected and self._published is not EMPTY_CATALOG and self._has_all:
            self.settled.set()

    def _apply_state(self, state: EnvoyState) -> None:
        unhealthy = frozenset(state.unhealthy)
        if unhealthy != self._unhealthy:
            self._unhealthy = unhealthy
            self._update_catalog()
        if self._connect_failures is not None:  # the first poll shows failures of any age
            for address, failures in state.connect_failures.items():
                if failures > self._connect_failures.get(address, 0):
                    self._picker.reports.mark_suspect(address)
        self._connect_failures = state.connect_failures
        self._picker.reports.on_envoy_stats(state.active)

    def _count(self, stats: EnvoyStats) -> None:
        gateway_metrics.GATEWAY_FAILED_OPEN.inc(self._increase("", stats.failed_open))
        gateway_metrics.GATEWAY_JWKS_FAILURES.inc(self._increase("jwks", stats.jwks_failures))
        for limit, total in stats.reached.items():
            limit.count_reached(self._increase(limit, total))
        gateway_metrics.GATEWAY_TRACE_EXPORTS_FAILED.inc(self._increase("traces", stats.failed_exports))
        gateway_metrics.GATEWAY_HEAP.set(stats.heap_ratio)
        gateway_metrics.GATEWAY_CONNECTIONS.set(stats.connections)

    def _increase(self, name: str, total: int) -> int:
        """Returns by how much a counter of Envoy grew since the last poll. A lower total means that Envoy restarted."""
        before, self._totals[name] = self._totals.get(name, 0), total
        return total - before if total >= before else total
