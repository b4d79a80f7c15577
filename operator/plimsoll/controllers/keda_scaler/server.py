"""KEDA's external scaler: the gRPC service that serves the recommended replica counts.

Problem: the decisions are the leader's, while a Kubernetes Service sends a connection to any operator pod, and KEDA
keeps its connection for ever.

Idea: only the leader listens. A connection to a standby is refused, and the client tries again until it finds the
leader. A leader that loses the lease, or stops, ends its streams without an error and closes its connections: KEDA
waits up to a minute after an error, longer with each, and 2 s after an end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

import grpc

from plimsoll.adapters.grpc_credentials import ServerCredentials
from plimsoll.controllers import certificates
from plimsoll.controllers.keda_scaler import messages
from plimsoll.controllers.keda_scaler.answers import (
    METRIC_NAME,
    TARGET,
    ErrorKind,
    Lookup,
    ScalerError,
    replicas,
    service_key,
)
from plimsoll.resources.platform_config import KedaScalerSettings
from plimsoll.telemetry import operator_metrics

MAX_MESSAGE_BYTES: Final = 64 * 1024  # a request has a few names; the metadata of a ScaledObject is small
MAX_METADATA_BYTES: Final = 16 * 1024  # of a request's headers
MAX_STREAMS: Final = 500  # one per ScaledObject with a trigger of type external-push
MAX_CALLS: Final = MAX_STREAMS + 200  # further ones get RESOURCE_EXHAUSTED
MAX_CONNECTIONS: Final = 100  # further ones are closed; KEDA has one for all triggers with the same credentials
HANDSHAKE_SECONDS: Final = 5.0  # until a new connection speaks TLS and HTTP/2; gRPC's own limit is two minutes
STREAM_INTERVAL_SECONDS: Final = 1.0  # between two looks at a recommendation
IDLE_SECONDS: Final = 60.0  # of a connection without a call; KEDA's next call opens another one
CLOSE_SECONDS: Final = 1.0
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.so_reuseport", 0),  # a second process on the port is an error
)


class KedaScaler:
    """The service. lookup: the recommendation for a service, None for an unknown one."""

    def __init__(self, lookup: Lookup, interval_s: float = STREAM_INTERVAL_SECONDS) -> None:
        self._lookup = lookup
        self._interval_s = interval_s
        self._streams = 0
        self._ending = asyncio.Event()

    async def start(
        self, address: str, credentials: grpc.ServerCredentials | None = None
    ) -> tuple[grpc.aio.Server, int]:
        """Listen on HOST:PORT. Returns the server and its port. Raises RuntimeError if the port is taken.

        credentials: of TLS; None for plaintext.
        """
        bounds = (
            ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
            ("grpc.max_connection_idle_ms", int(1000 * IDLE_SECONDS)),
            ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_SECONDS)),
        )
        server = grpc.aio.server(maximum_concurrent_rpcs=MAX_CALLS, options=(*_OPTIONS, *bounds))
        handlers = {
            "IsActive": self._unary(self._is_active, messages.ScaledObjectRef),
            "GetMetricSpec": self._unary(self._get_metric_spec, messages.ScaledObjectRef),
            "GetMetrics": self._unary(self._get_metrics, messages.GetMetricsRequest),
            "StreamIsActive": grpc.unary_stream_rpc_method_handler(
                self._stream_is_active,
                request_deserializer=messages.ScaledObjectRef.FromString,
                response_serializer=messages.IsActiveResponse.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(messages.SERVICE, handlers),))
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
        await server.start()
        return server, port

    def end_streams(self) -> None:
        """End the streams without an error, those to come too."""
        self._ending.set()

    def _unary(self, answer: Callable[[Any], Any], request_class: Any) -> Any:
        async def call(request: Any, context: Any) -> Any:
            try:
                response = answer(request)
            except ScalerError as error:
                await _abort(context, error)
            _count("OK")
            return response

        return grpc.unary_unary_rpc_method_handler(
            call,
            request_deserializer=request_class.FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )

    def _replicas(self, reference: Any) -> int:
        return replicas(self._lookup, reference.namespace, reference.scalerMetadata)

    def _is_active(self, reference: Any) -> Any:
        return messages.IsActiveResponse(result=self._replicas(reference) > 0)

    def _get_metric_spec(self, reference: Any) -> Any:
        """The same for each service, also for one that comes later: without a spec KEDA would make no HPA."""
        service_key(reference.namespace, reference.scalerMetadata)
        spec = messages.MetricSpec(metricName=METRIC_NAME, targetSize=TARGET, targetSizeFloat=TARGET)
        return messages.GetMetricSpecResponse(metricSpecs=[spec])

    def _get_metrics(self, request: Any) -> Any:
        if request.metricName != METRIC_NAME:
            raise ScalerError(ErrorKind.INVALID_ARGUMENT, f"the only metric is {METRIC_NAME}")
        count = self._replicas(request.scaledObjectRef)
        value = messages.MetricValue(metricName=METRIC_NAME, metricValue=count, metricValueFloat=count)
        return messages.GetMetricsResponse(metricValues=[value])

    async def _stream_is_active(self, reference: Any, context: Any) -> None:
        """Send whether replicas are recommended, at once and at each change, until `end_streams`.

        Without a recommendation, abort.
        """
        if self._streams >= MAX_STREAMS:
            _count("RESOURCE_EXHAUSTED")
            text = f"the operator serves at most {MAX_STREAMS} streams: use triggers of type external"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        self._streams += 1
        last: bool | None = None
        try:
            while not self._ending.is_set():
                response = self._is_active(reference)
                if response.result is not last:
                    await context.write(response)
                    _count("OK")
                    last = response.result
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), self._interval_s)
        except ScalerError as error:
            await _abort(context, error)
        finally:
            self._streams -= 1


async def serve(settings: KedaScalerSettings, lookup: Lookup) -> None:
    """Serve on all addresses until cancelled; with TLS from the time on that there is a certificate.

    Raises RuntimeError if the port is taken.
    """
    if settings.certificate_directory is None:
        await _serve(settings.port, lookup, None, asyncio.Event().wait)
        return
    directory, report = Path(settings.certificate_directory), partial(certificates.export, certificates.KEDA_SCALER)
    files = ServerCredentials(directory, settings.require_client_certificate, report=report)
    try:
        await _serve(settings.port, lookup, await files.wait(), files.follow)
    finally:
        certificates.remove(certificates.KEDA_SCALER)


async def _serve(
    port: int, lookup: Lookup, credentials: grpc.ServerCredentials | None, wait: Callable[[], Awaitable[object]]
) -> None:
    """Serve while `wait` runs."""
    scaler = KedaScaler(lookup)
    server, _ = await scaler.start(f"[::]:{port}", credentials)
    try:
        await wait()
    finally:
        scaler.end_streams()
        await server.stop(CLOSE_SECONDS)


async def _abort(context: Any, error: ScalerError) -> NoReturn:
    _count(error.kind.value)
    await context.abort(grpc.StatusCode[error.kind.value], str(error))
    raise AssertionError("abort always raises")


def _count(code: str) -> None:
    operator_metrics.OPERATOR_KEDA_ANSWERS.labels(code).inc()
