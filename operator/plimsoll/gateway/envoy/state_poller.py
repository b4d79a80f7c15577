"""Polls Envoy's state: which endpoints are routable, in flight, and failing.

An endpoint is routable when Envoy reports it healthy, not when its file is written. The poller reads Envoy's state
every few seconds, and every `FAST_POLL_SECONDS` until Envoy has applied the written files.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from plimsoll.gateway.envoy.admin import EnvoyAdminClient, EnvoyState, EnvoyUnavailable
from plimsoll.gateway.envoy.xds import MODEL_CLUSTER_PREFIX, PICK_CLUSTER_PREFIX
from plimsoll.gateway.picker import Picker
from plimsoll.gateway.service_catalog import EMPTY_CATALOG, ServiceCatalog
from plimsoll.telemetry import metrics

log = logging.getLogger(__name__)

FAST_POLL_SECONDS = 0.1
FAST_POLLS = 50  # then at the normal interval: Envoy may never apply what it has not applied after 5 s


class EnvoyStatePoller:
    """Keeps the picker's catalog in sync with the endpoints that Envoy can reach."""

    def __init__(
        self, admin: EnvoyAdminClient, picker: Picker, poll_seconds: float, health_checked: Callable[[], bool]
    ) -> None:
        """Create the poller.

        `health_checked` returns whether Envoy's health check has reached this picker. Until then, the health that Envoy
        reports is that of the previous picker.
        """
        self._admin = admin
        self._picker = picker
        self._poll_seconds = poll_seconds
        self._health_checked = health_checked
        self._published: ServiceCatalog = EMPTY_CATALOG
        self._healthy: dict[str, set[str]] = {}
        self._connect_failures: dict[str, int] = {}
        self._failed_open = 0
        self._changed = asyncio.Event()
        self.first_poll_done = asyncio.Event()  # set after the first poll, successful or not
        self.in_sync = False  # Envoy responds, has all clusters, and calls this picker

    def set_published(self, catalog: ServiceCatalog) -> None:
        """Set the catalog that was written for Envoy. Endpoints that Envoy already knows stay routable."""
        self._published = catalog
        self._picker.set_catalog(catalog.with_healthy(self._healthy))
        self._changed.set()

    async def run(self, on_poll: Callable[[], None]) -> None:
        """Poll forever, and call `on_poll` after each poll."""
        fast_polls_left = FAST_POLLS
        while True:
            in_sync = await self.poll()
            self.first_poll_done.set()
            on_poll()
            fast_polls_left = FAST_POLLS if in_sync else fast_polls_left - 1
            interval_s = self._poll_seconds if in_sync or fast_polls_left <= 0 else FAST_POLL_SECONDS
            await self._sleep(interval_s)
            if self._changed.is_set():
                self._changed.clear()
                fast_polls_left = FAST_POLLS

    async def _sleep(self, seconds: float) -> None:
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass
        metrics.GATEWAY_LOOP_LAG.set(max(0.0, time.monotonic() - started_s - seconds))

    async def poll(self) -> bool:
        """Poll once. Returns whether Envoy has applied all written files."""
        health_checked = self._health_checked()  # its value before the poll
        try:
            state = await self._admin.state()
            stats = await self._admin.stats()
        except EnvoyUnavailable as error:
            if self.in_sync:
                log.warning("Envoy does not respond: %s", error)
            self.in_sync = False
            return False
        self._apply_state(state)
        self._count_failed_open(stats.failed_open)
        return self._is_in_sync(state, health_checked)

    def _apply_state(self, state: EnvoyState) -> None:
        self._healthy = {
            service: {address for address, host in hosts.items() if host.healthy}
            for service, hosts in state.hosts.items()
        }
        self._picker.set_catalog(self._published.with_healthy(self._healthy))
        hosts = {address: host for of_service in state.hosts.values() for address, host in of_service.items()}
        for address, host in hosts.items():
            if host.connect_failures > self._connect_failures.get(address, host.connect_failures):
                self._picker.mark_suspect(address)
        self._connect_failures = {address: host.connect_failures for address, host in hosts.items()}
        self._picker.on_envoy_stats({address: host.active for address, host in hosts.items()})

    def _count_failed_open(self, total: int) -> None:
        """Count new requests that bypassed the picker. A lower total means that Envoy restarted."""
        metrics.GATEWAY_FAILED_OPEN.inc(total - self._failed_open if total >= self._failed_open else total)
        self._failed_open = total

    def _is_in_sync(self, state: EnvoyState, health_checked: bool) -> bool:
        expected_clusters = {PICK_CLUSTER_PREFIX + key for key in self._published.services} | {
            MODEL_CLUSTER_PREFIX + name for name in self._published.by_name
        }
        present_clusters = {
            name for name in state.clusters if name.startswith((PICK_CLUSTER_PREFIX, MODEL_CLUSTER_PREFIX))
        }
        self.in_sync = health_checked and state.picker_healthy and expected_clusters <= present_clusters
        expected_addresses = {
            key: {e.address for e in s.serving_endpoints} for key, s in self._published.services.items()
        }
        envoy_addresses = {key: set(state.hosts.get(key, ())) for key in expected_addresses}
        return self.in_sync and expected_clusters == present_clusters and expected_addresses == envoy_addresses
