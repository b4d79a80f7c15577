"""The picker process of one gateway: watches API objects, configures Envoy, and serves until SIGTERM.

The order at start-up matters. The unix socket opens only after the first sync. Until then Envoy fails open to the
clusters that it has, unless API keys or tokens are required. A picker without a catalog would reject every model as
unknown. Nothing is published before the first sync, because an empty catalog would remove every model from Envoy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from random import Random
from typing import Any

from plimsoll.adapters.connection_guard import ConnectionGuard, CutReason
from plimsoll.adapters.grpc_credentials import ServerCredentials
from plimsoll.adapters.internal_tls import TlsIdentity, listener_context
from plimsoll.adapters.tls_listener import TlsListener
from plimsoll.api.contract import internal_tls_name
from plimsoll.core.routing.endpoint import Endpoint
from plimsoll.gateway.access_log_lines import access_line
from plimsoll.gateway.body_budget import BodyBudget
from plimsoll.gateway.certificate_watch import CertificateWatch, export_endpoint_picker
from plimsoll.gateway.drain import drain
from plimsoll.gateway.endpoint_picker import server as endpoint_picker_server
from plimsoll.gateway.endpoint_picker.server import EndpointPicker
from plimsoll.gateway.envoy.access_log import AccessLogReader, AccessRecord
from plimsoll.gateway.envoy.admin import EnvoyAdminClient, EnvoyUnavailable
from plimsoll.gateway.envoy.ads_server import AdsServer
from plimsoll.gateway.envoy.delta import AppliedCertificate, AppliedEndpoints
from plimsoll.gateway.envoy.state_poller import EnvoyStatePoller
from plimsoll.gateway.envoy.tls import CERTIFICATE
from plimsoll.gateway.failure_log import FailureLog
from plimsoll.gateway.handover import Handover
from plimsoll.gateway.identity import Authenticator
from plimsoll.gateway.internal_identity import InternalIdentityWatch
from plimsoll.gateway.line_writer import LineWriter
from plimsoll.gateway.loop_turns import LoopTurns
from plimsoll.gateway.objectives import ObjectiveSource, ObjectiveStore
from plimsoll.gateway.one_queue.coordinator import OneQueue
from plimsoll.gateway.one_queue.tls_stream import PeerTls
from plimsoll.gateway.parse_worker import ParseWorker
from plimsoll.gateway.picker import Picker
from plimsoll.gateway.request_attributes import AttributeStore
from plimsoll.gateway.routes import PROBE_PAGES, AdminEndpoint, EnvoyEndpoint
from plimsoll.gateway.server import HttpProtocol
from plimsoll.gateway.service_catalog import CatalogBuilder
from plimsoll.gateway.settings import ApiKeyMode, PickerSettings
from plimsoll.gateway.successor import GatewayPods, wait_for_successor
from plimsoll.gateway.watch_cache import WatchCache, run_watches
from plimsoll.telemetry import gateway_metrics

log = logging.getLogger(__name__)

DEBOUNCE_SECONDS = 0.02  # merges a burst of watch events into one change
ADMIN_IDLE_SECONDS = 60.0
TICK_SECONDS = 1.0
SETTLE_SECONDS = 10.0  # for an Envoy that runs to connect to this picker's discovery service and apply it
SOCKET_BACKLOG = 4096  # each queued request occupies an Envoy connection, so bursts need new ones


def _count_cut(reason: CutReason) -> None:
    gateway_metrics.GATEWAY_CONNECTIONS_CUT.labels(reason.value).inc()


class GatewayProcess:
    """The picker process. `run` returns after a drain and raises if one of its tasks fails."""

    def __init__(self, settings: PickerSettings, source: ObjectiveSource) -> None:
        self._settings = settings
        self._source = source
        self._watch_cache = WatchCache(settings.namespaces)
        self._admin = EnvoyAdminClient(settings.admin_socket)
        self._authenticator = Authenticator(settings.api_keys, settings.trusted_headers, settings.jwt_issuers)
        attributes = AttributeStore(is_enabled=settings.access_log, is_traced=bool(settings.traces_endpoint))
        self._picker = Picker(Random(), settings.pod, self._authenticator, attributes=attributes)
        self._access_lines = LineWriter(sys.stdout.fileno()) if settings.access_log else None
        self._failure_log = FailureLog()
        self._gateway_pods = GatewayPods(settings)
        self._internal_name = internal_tls_name(settings.namespace)  # of operator and gateways
        self._catalog_builder = CatalogBuilder(settings.internal_tls is not None)
        self._objectives = ObjectiveStore(settings.namespace) if settings.inference_objectives else None
        self._worker = ParseWorker()
        self._turns = LoopTurns()
        self._bodies = BodyBudget(settings.body_budget_bytes, settings.max_body_bytes)
        self._envoy_endpoint = EnvoyEndpoint(self._picker, self._worker, self._bodies)
        self._state_poller = EnvoyStatePoller(
            self._admin,
            self._picker,
            settings.poll_seconds,
            lambda: self._envoy_endpoint.health_checked,
            lambda stats: self._bodies.expire(time.monotonic(), envoy_is_idle=stats.active == 0),
        )
        if settings.peer_secret is None:
            self._one_queue = None
            self._picker.key_limits.gateways = lambda key_name: self._gateway_pods.ready_count
        else:
            peer_tls = None if settings.internal_tls is None else PeerTls(self._identity, self._internal_name)
            self._one_queue = OneQueue(self._picker, settings, self._state_poller.has_applied, peer_tls)
        self._ads = AdsServer(
            settings.ads_socket, settings.pod, self._on_applied, self._on_certificate, settings.internal_tls is not None
        )
        self._internal_identity = (
            None
            if settings.internal_tls is None
            else InternalIdentityWatch(settings.internal_tls, self._internal_name, self._ads.publish_engine_identity)
        )
        self._certificate = (
            None
            if settings.tls_directory is None
            else CertificateWatch(settings.tls_directory, self._ads.publish_certificate)
        )
        self._access_log = AccessLogReader(settings.fifo, self._on_record)
        self._endpoint_picker = (
            None
            if settings.endpoint_picker_port is None
            else EndpointPicker(self._picker, self._worker, settings, self._not_picking_reason, self._on_record)
        )
        self._has_catalog = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop
        self._changed = asyncio.Event()
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Start the shutdown. Safe to call from a signal handler of the event loop."""
        self._stop.set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        settings = self._settings
        self._loop = loop
        gateway_metrics.GATEWAY_BODY_BYTES_LIMIT.set(settings.body_budget_bytes)
        gateway_metrics.GATEWAY_CONNECTIONS_LIMIT.set(settings.max_connections)
        self._worker.start()
        self._access_log.open()
        if self._certificate is not None:
            self._certificate.take(self._certificate.read())
        if self._internal_identity is not None:
            self._internal_identity.take(self._internal_identity.read())
        self._ads.start()  # Envoy says once which certificates it has, so they are known by then
        admin_endpoint = AdminEndpoint(
            self._picker, settings.pod, lambda: self._watch_cache.synced, self.not_ready_reason
        )
        if self._one_queue is not None:
            await self._one_queue.start()
        servers = [await self._open_admin_port(admin_endpoint)]
        if settings.probe_port is not None:
            probes = admin_endpoint.limited(PROBE_PAGES, "this port is for probes")
            servers.append(
                await self._open_port(
                    settings.probe_port, lambda: HttpProtocol(probes, 0, ADMIN_IDLE_SECONDS, self._turns)
                )
            )
        tasks = [
            asyncio.create_task(run_watches(self._source, self._watch_cache, self._changed.set)),
            asyncio.create_task(self._publish_changes(servers)),
            asyncio.create_task(self._state_poller.run(self._on_poll)),
            asyncio.create_task(self._tick_admission()),
            asyncio.create_task(Handover(self._endpoints, self._on_refused, self._engine_tls_context).run()),
            *map(asyncio.create_task, self._optional_tasks()),
        ]
        shutdown_task = asyncio.create_task(self._shut_down())
        try:
            done, _ = await asyncio.wait((*tasks, shutdown_task), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (*tasks, shutdown_task):
                task.cancel()
            await asyncio.gather(*tasks, shutdown_task, return_exceptions=True)
            for server in servers:
                server.close()
            if self._one_queue is not None:
                self._one_queue.close()
            self._ads.close()
            self._access_log.close()
            if self._access_lines is not None:
                self._access_lines.close()
            self._worker.close()

    def _optional_tasks(self) -> Iterator[Coroutine[Any, Any, None]]:
        """Yields what runs with certain settings only."""
        settings = self._settings
        if self._one_queue is not None:
            yield self._one_queue.follow_secret()
        if settings.api_keys is not ApiKeyMode.DISABLED:
            yield self._authenticator.keys.follow(self._source, settings.namespace, self._changed.set)
        if self._objectives is not None:
            yield self._objectives.follow(self._source, self._changed.set)
        if settings.pod_selector:
            yield self._gateway_pods.follow(self._source, self._on_gateway_pods)
        if self._certificate is not None:
            yield self._certificate.follow()
        if self._internal_identity is not None:
            yield self._internal_identity.follow()
        if self._endpoint_picker is not None:
            yield self._serve_endpoint_picker(self._endpoint_picker)

    def not_ready_reason(self) -> str:
        """Returns why this gateway is not ready for requests, or "" if it is.

        It stays ready while it stops: a Service without another ready endpoint still routes to it. It also stays ready
        while its connections or its heap are full: under an attack that fills all gateways, each that left would take
        its places, which become free all the time, from the clients.
        """
        if reason := self._watch_cache.not_ready_reason:
            return reason
        if not self._authenticator.ready:
            return "the first list of API keys (Secrets) from the API server is not complete"
        if not self._has_objectives:
            return "the first list of InferenceObjectives from the API server is not complete"
        if self._one_queue is not None and self._settings.pod_selector and self._gateway_pods.names is None:
            return "the first list of gateway pods from the API server is not complete"
        if not self._state_poller.in_sync:
            return "Envoy is not running, lacks clusters, or does not reach this picker yet"
        for watch in (self._certificate, self._internal_identity):
            if watch is not None and (reason := watch.not_ready_reason):
                return reason
        return ""

    @property
    def _has_objectives(self) -> bool:
        """Whether InferenceObjectives are known, or why there are none, or none are asked for."""
        return self._objectives is None or self._objectives.synced

    async def _publish_changes(self, servers: list[asyncio.Server | TlsListener]) -> None:
        """Rebuild and publish the catalog after each change. Opens the socket for Envoy after the first one."""
        while True:
            await self._changed.wait()
            await asyncio.sleep(DEBOUNCE_SECONDS)
            self._changed.clear()
            if not (self._watch_cache.synced and self._authenticator.ready and self._has_objectives):
                continue
            if self._objectives is not None:
                self._catalog_builder.set_objectives(self._objectives.by_service())
            changes = self._watch_cache.take_changes()
            catalog = self._catalog_builder.update(changes.services, changes.slices, changes.admissions)
            if self._objectives is not None:
                self._objectives.report(catalog)
            self._ads.publish(catalog)
            self._state_poller.set_published(catalog)
            if not self._has_catalog.is_set():
                servers.append(await self._open_envoy_socket())
                self._has_catalog.set()

    async def _open_admin_port(self, endpoint: AdminEndpoint) -> asyncio.Server | TlsListener:
        """Open the port for Prometheus and the operator."""
        settings = self._settings
        if settings.internal_tls is None:
            return await self._open_port(
                settings.picker_port, lambda: HttpProtocol(endpoint, 0, ADMIN_IDLE_SECONDS, self._turns)
            )
        of_client = partial(endpoint.of_client, self._internal_name)
        return await self._open_port(
            settings.picker_port,
            lambda: HttpProtocol(endpoint, 0, ADMIN_IDLE_SECONDS, self._turns, of_client),
            listener_context(self._identity),
        )

    async def _open_port(
        self, port: int, make: Callable[[], asyncio.BaseProtocol], tls: ssl.SSLContext | None = None
    ) -> asyncio.Server | TlsListener:
        guard, address = ConnectionGuard(make, _count_cut), self._settings.address
        if tls is not None:
            return TlsListener(guard, address, port, tls)
        return await asyncio.get_running_loop().create_server(guard, address, port)

    async def _open_envoy_socket(self) -> asyncio.Server:
        """Open the unix socket for Envoy.

        An Envoy that outlived the previous picker sends checks at once, so it must say first which endpoints it has.
        It may still fail its health check because the previous picker drained it.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._state_poller.settled.wait(), SETTLE_SECONDS)
        with contextlib.suppress(EnvoyUnavailable):
            await self._admin.pass_health()
        path = self._settings.picker_socket
        path.unlink(missing_ok=True)
        max_body = self._settings.max_body_bytes + 1024
        server = await asyncio.get_running_loop().create_unix_server(
            lambda: HttpProtocol(self._envoy_endpoint, max_body, None, self._turns), str(path), backlog=SOCKET_BACKLOG
        )
        os.chmod(path, 0o660)  # Envoy may run as another user of the same group
        return server

    async def _serve_endpoint_picker(self, endpoint_picker: EndpointPicker) -> None:
        """Serve gateways of other products, once there is a catalog, and with TLS a certificate. Never returns."""
        settings, credentials = self._settings, None
        serve: Callable[[], Awaitable[object]] = asyncio.Event().wait
        await self._has_catalog.wait()
        if settings.endpoint_picker_tls is not None:
            files = ServerCredentials(settings.endpoint_picker_tls, False, report=export_endpoint_picker)
            credentials, serve = await files.wait(), files.follow
        server, _ = await endpoint_picker.start(f"{settings.address}:{settings.endpoint_picker_port}", credentials)
        try:
            await serve()
        finally:
            await server.stop(endpoint_picker_server.CLOSE_SECONDS)

    def _not_picking_reason(self) -> str:
        """Returns why gateways of other products should ask another picker, or ""."""
        return "the gateway is stopping" if self._stop.is_set() else self.not_ready_reason()

    def _last_request_s(self) -> float:
        """Returns the monotonic time at which a client's request was last seen."""
        others_s = -math.inf if self._endpoint_picker is None else self._endpoint_picker.busy_s()
        return max(self._envoy_endpoint.last_request_s, others_s)

    def _on_refused(self, address: str) -> None:
        self._catalog_builder.mark_refusing(address)
        self._changed.set()

    def _endpoints(self) -> Iterator[Endpoint]:
        return (endpoint for service in self._picker.catalog.services.values() for endpoint in service.endpoints)

    def _on_gateway_pods(self) -> None:
        if self._one_queue is not None:
            self._one_queue.set_pods(self._gateway_pods.ready, self._gateway_pods.names or ())

    def _on_applied(self, endpoints: AppliedEndpoints) -> None:
        """Called in the discovery service's thread."""
        self._loop.call_soon_threadsafe(self._state_poller.on_applied, endpoints)
        if endpoints.is_new_envoy:
            self._loop.call_soon_threadsafe(self._bodies.clear)

    def _on_certificate(self, applied: AppliedCertificate) -> None:
        """Called in the discovery service's thread."""
        watch = self._certificate if applied.name == CERTIFICATE else self._internal_identity
        if watch is not None:
            self._loop.call_soon_threadsafe(watch.on_applied, applied)

    def _identity(self) -> TlsIdentity | None:
        return None if self._internal_identity is None else self._internal_identity.identity

    def _engine_tls_context(self) -> ssl.SSLContext | None:
        identity = self._identity()
        return None if identity is None else identity.client

    def _on_record(self, record: AccessRecord) -> None:
        if record.is_running:
            self._picker.reports.on_running_record(record, time.monotonic())
            return
        self._bodies.release(record.request_id or "")
        was_picked = self._picker.reports.on_access_record(record, time.monotonic())
        attributes = self._picker.attributes.take(record.request_id or "")
        if self._access_lines is not None:
            line = access_line(record, attributes, time.time())
            if line is not None:
                self._access_lines.write(line)
        if was_picked:
            self._failure_log.write(record)

    def _on_poll(self) -> None:
        self._failure_log.flush()
        invalid_lines, self._access_log.invalid_lines = self._access_log.invalid_lines, 0
        gateway_metrics.GATEWAY_BAD_RECORDS.inc(invalid_lines)
        if self._access_lines is not None:
            gateway_metrics.GATEWAY_ACCESS_LINES_DROPPED.inc(self._access_lines.take_dropped())
        gateway_metrics.GATEWAY_BODY_BYTES.set(self._bodies.reserved_bytes)
        if self._one_queue is not None:
            self._one_queue.update_metrics()

    async def _tick_admission(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._picker.tick()

    async def _shut_down(self) -> None:
        """Wait for the stop signal, for another gateway, and for the end of the requests; for `drain_seconds` at most.

        Until another gateway is ready, nothing changes for clients.
        """
        await self._stop.wait()
        started_s = time.monotonic()
        log.info("stopping")
        await wait_for_successor(self._source, self._settings)
        self._envoy_endpoint.progress.stop()
        deadline_s = started_s + self._settings.drain_seconds
        try:
            await drain(self._admin, self._last_request_s, self._settings, deadline_s)
        except EnvoyUnavailable as error:
            log.warning("stopping the drain: Envoy does not respond: %s", error)
        log.info("drained after %.1f s", time.monotonic() - started_s)
