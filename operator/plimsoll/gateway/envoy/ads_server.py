"""Envoy's discovery service (ADS) on a unix socket: it delivers clusters, endpoints, request limits and the
certificate.

Problem: a file per service costs Envoy one inotify instance each, of which the kernel allows 128 per user. Encoding
and sending the resources of 1,000 services must not delay a pick.

Idea: a gRPC server with an event loop in a thread of its own. The picker hands it catalogs and learns which endpoints
Envoy has applied. While the picker is away, Envoy keeps what it has.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
from envoy.service.discovery.v3.discovery_pb2 import DeltaDiscoveryRequest, DeltaDiscoveryResponse

from plimsoll.adapters.certificate_files import CertificatePair
from plimsoll.adapters.internal_tls import TlsIdentity
from plimsoll.gateway.envoy.delta import AppliedCertificate, AppliedEndpoints, DeltaStream
from plimsoll.gateway.envoy.xds import EMPTY_SNAPSHOT, SnapshotBuilder, with_certificate, with_engine_identity
from plimsoll.gateway.service_catalog import ServiceCatalog
from plimsoll.telemetry import gateway_metrics

log = logging.getLogger(__name__)

SERVICE = "envoy.service.discovery.v3.AggregatedDiscoveryService"
CLOSE_SECONDS = 1.0
MAX_STREAMS = 8  # Envoy opens one; those of an Envoy that was killed end when its connection does


class AdsServer:
    """The server and its thread. `on_applied` and `on_certificate` are called in that thread."""

    def __init__(
        self,
        socket: Path,
        gateway: str,
        on_applied: Callable[[AppliedEndpoints], None],
        on_certificate: Callable[[AppliedCertificate], None] = lambda _: None,
        has_engine_tls: bool = False,
    ) -> None:
        self._socket = socket
        self._builder = SnapshotBuilder(gateway, has_engine_tls)
        self._on_applied = on_applied
        self._on_certificate = on_certificate
        self._certificate: CertificatePair | None = None
        self._engine_identity: TlsIdentity | None = None
        self._snapshot = EMPTY_SNAPSHOT
        self._published = asyncio.Event()
        self._streams: set[asyncio.Event] = set()
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._started = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="ads", daemon=True)

    def start(self) -> None:
        """Listen. Returns when Envoy can connect; until the first `publish` it gets nothing. Raises RuntimeError."""
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise RuntimeError(f"the discovery service cannot listen on {self._socket}") from self._failure

    def publish(self, catalog: ServiceCatalog) -> None:
        """Deliver the resources of this catalog from now on. Returns at once."""
        self._loop.call_soon_threadsafe(self._update, catalog)

    def publish_certificate(self, pair: CertificatePair) -> None:
        """Deliver this certificate from now on. Returns at once."""
        self._loop.call_soon_threadsafe(self._update_certificate, pair)

    def publish_engine_identity(self, identity: TlsIdentity) -> None:
        """Deliver this client certificate and authority for engines from now on. Returns at once."""
        self._loop.call_soon_threadsafe(self._update_engine_identity, identity)

    def close(self) -> None:
        """Stop the server and its thread."""
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(2 * CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:
            self._failure = error
            log.exception("the discovery service has ended")
        finally:
            self._started.set()

    async def _serve(self) -> None:
        server = grpc.aio.server(maximum_concurrent_rpcs=MAX_STREAMS)
        deliver = grpc.stream_stream_rpc_method_handler(
            self._deliver,
            request_deserializer=DeltaDiscoveryRequest.FromString,
            response_serializer=DeltaDiscoveryResponse.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(SERVICE, {"DeltaAggregatedResources": deliver})
        server.add_generic_rpc_handlers((handler,))
        server.add_insecure_port(f"unix:{self._socket}")
        await server.start()
        os.chmod(self._socket, 0o660)  # Envoy may run as another user of the same group
        self._started.set()
        await self._stopped.wait()
        await server.stop(CLOSE_SECONDS)

    def _update(self, catalog: ServiceCatalog) -> None:
        before = self._builder.encoded
        self._snapshot = with_engine_identity(
            with_certificate(self._builder.build(catalog), self._certificate), self._engine_identity
        )
        gateway_metrics.GATEWAY_RESOURCES_ENCODED.inc(self._builder.encoded - before)
        self._published.set()
        self._notify()

    def _update_certificate(self, pair: CertificatePair) -> None:
        self._certificate = pair
        self._snapshot = with_certificate(self._snapshot, pair)
        self._notify()

    def _update_engine_identity(self, identity: TlsIdentity) -> None:
        self._engine_identity = identity
        self._snapshot = with_engine_identity(self._snapshot, identity)
        self._notify()

    def _notify(self) -> None:
        for changed in self._streams:
            changed.set()

    async def _deliver(self, requests: AsyncIterator[Any], context: Any) -> None:
        """Serve one stream until it ends. Before the first catalog, nothing is known of what Envoy should have."""
        await self._published.wait()
        stream, changed = DeltaStream(), asyncio.Event()
        self._streams.add(changed)
        reader = asyncio.create_task(self._read(stream, changed, requests))
        try:
            while not reader.done():
                await changed.wait()
                changed.clear()
                for response in stream.responses(self._snapshot):
                    await context.write(response)
            reader.result()
        finally:
            reader.cancel()
            self._streams.discard(changed)

    async def _read(self, stream: DeltaStream, changed: asyncio.Event, requests: AsyncIterator[Any]) -> None:
        try:
            async for request in requests:
                rejected = stream.rejected
                found = stream.on_request(request, self._snapshot)
                gateway_metrics.GATEWAY_CONFIG_REJECTED.inc(stream.rejected - rejected)
                for applied in found:
                    if isinstance(applied, AppliedEndpoints):
                        self._on_applied(applied)
                    else:
                        self._on_certificate(applied)
                changed.set()
        finally:
            changed.set()
