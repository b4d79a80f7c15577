"""One gateway's picker, assembled: objects in by the watches, files out to Envoy, doors open, until it is told to end.

Order matters at the start. The unix socket opens only after the first sync: until then Envoy fails open on the
clusters it has, which is right, while a picker that knows nothing yet would call every model unknown; and no file is
written before it, which would take every model away from Envoy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from random import Random

from plimsoll.adapters.kube import INFERENCESERVICES, PODS
from plimsoll.gateway.accesslog import AccessLog, Outcome, Record
from plimsoll.gateway.admin import Admin, EnvoyAway
from plimsoll.gateway.doors import EnvoyDoor, PublicDoor
from plimsoll.gateway.endpoints import fleet
from plimsoll.gateway.envoy_view import EnvoyView
from plimsoll.gateway.picker import Picker
from plimsoll.gateway.policy import Policies
from plimsoll.gateway.server import Door
from plimsoll.gateway.settings import Settings
from plimsoll.gateway.visit import Names
from plimsoll.gateway.watch import Objects, Source, follow
from plimsoll.gateway.worker import Worker
from plimsoll.gateway.xds import publish
from plimsoll.telemetry import metrics

log = logging.getLogger(__name__)

GATHER_SECONDS = 0.02  # a burst of watch events is one change
PUBLIC_IDLE_SECONDS = 60.0
TICK_SECONDS = 1.0
BACKLOG = 4096  # each request that is held keeps a connection of Envoy, so bursts need new ones


class Gateway:
    """The picker process. `run` returns after a drain, and raises if one of its parts ends by itself."""

    def __init__(self, settings: Settings, source: Source) -> None:
        self._settings = settings
        self._source = source
        self._objects = Objects(settings.namespaces)
        self._admin = Admin(settings.admin_socket)
        names = Names(settings.class_header.encode(), settings.tenant_header.encode())
        self._picker = Picker(Random(), settings.pod, names)
        self._policies = Policies()
        self._worker = Worker()
        self._door = EnvoyDoor(self._picker, self._worker)
        self._view = EnvoyView(self._admin, self._picker, settings.poll_seconds, lambda: self._door.asked)
        self._log = AccessLog(settings.fifo, self._record)
        self._changed = asyncio.Event()
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Begin the drain; safe to call from a signal handler of the loop."""
        self._stop.set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        settings = self._settings
        self._log.open()
        public = PublicDoor(self._picker, settings.pod, lambda: self._objects.synced, self.missing)
        servers = [
            await loop.create_server(
                lambda: Door(public, 0, PUBLIC_IDLE_SECONDS), settings.address, settings.picker_port
            )
        ]
        parts = [
            asyncio.create_task(follow(self._source, self._objects, self._changed.set)),
            asyncio.create_task(self._publish_changes(servers)),
            asyncio.create_task(self._view.run(self._tick)),
            asyncio.create_task(self._tick_admission()),
        ]
        ending = asyncio.create_task(self._drain())
        try:
            done, _ = await asyncio.wait((*parts, ending), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (*parts, ending):
                task.cancel()
            await asyncio.gather(*parts, ending, return_exceptions=True)
            for server in servers:
                server.close()
            self._log.close()
            self._worker.close()

    def missing(self) -> str:
        """What keeps this gateway from taking requests; "" if nothing does."""
        if self._stop.is_set():
            return "draining"
        if not self._objects.synced:
            return "the API server's objects are not all here yet"
        if not self._view.current:
            return "Envoy is not up, lacks clusters, or does not ask this picker yet"
        return ""

    async def _publish_changes(self, servers: list[asyncio.Server]) -> None:
        """After each change the fleet is computed anew and written; after the first one Envoy may ask."""
        while True:
            await self._changed.wait()
            await asyncio.sleep(GATHER_SECONDS)
            self._changed.clear()
            if not self._objects.synced:
                continue
            now = fleet(self._objects.of(INFERENCESERVICES), self._objects.of(PODS), self._policies)
            metrics.GATEWAY_FILES_WRITTEN.inc(publish(now, self._settings.xds, self._settings.pod))
            self._view.want(now)
            if len(servers) == 1:
                servers.append(await self._open_to_envoy())

    async def _open_to_envoy(self) -> asyncio.Server:
        """An Envoy that outlived the picker before may ask at once, so its endpoints are known first.

        It may also still be draining, since that picker told it to.
        """
        await self._view.looked.wait()
        with contextlib.suppress(EnvoyAway):
            await self._admin.pass_health()
        path = self._settings.picker_socket
        path.unlink(missing_ok=True)
        most = self._settings.max_body_bytes + 1024
        server = await asyncio.get_running_loop().create_unix_server(
            lambda: Door(self._door, most, None), str(path), backlog=BACKLOG
        )
        os.chmod(path, 0o660)  # Envoy may run as another user of the same group
        return server

    def _record(self, record: Record) -> None:
        picked = self._picker.ended(record, time.monotonic())
        if picked and record.outcome is Outcome.FAILED:
            log.warning(
                "request %s failed at %s: %s %s %s", record.id, record.host, record.code, record.flags, record.details
            )

    def _tick(self) -> None:
        bad, self._log.bad = self._log.bad, 0
        metrics.GATEWAY_BAD_RECORDS.inc(bad)

    async def _tick_admission(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._picker.tick()

    async def _drain(self) -> None:
        """Wait for the signal, then until nobody is being served any more or the grace ends.

        Envoy goes on taking requests, since the pod's address lives on in other machines for seconds; but each answer
        closes its connection.
        """
        await self._stop.wait()
        began = time.monotonic()
        log.info("draining")
        try:
            await self._admin.fail_health()
            while time.monotonic() - began < self._settings.drain_seconds:
                await asyncio.sleep(min(0.2, self._settings.drain_seconds))
                quiet = time.monotonic() - began >= self._settings.drain_minimum_seconds
                if quiet and (await self._admin.stats()).active == 0:
                    break
        except EnvoyAway as away:
            log.warning("Envoy is gone, so nothing is left to drain: %s", away)
        log.info("drained after %.1f s", time.monotonic() - began)
