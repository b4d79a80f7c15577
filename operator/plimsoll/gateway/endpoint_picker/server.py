"""The endpoint picker for gateways of other products: a gRPC server of ext_proc, with the protocol's health checks.

Problem: each request of such a gateway is an open stream here until its response ends. A gateway can open any number of
them, send bodies without end, or vanish.

Idea: streams, bodies and times are limited, and a ping finds a gateway that is gone. Beyond the limit of streams a
request gets a 429 with `Retry-After`, as any other rejection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Final

import grpc
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from plimsoll.core.admission.retry_advice import advise_retry
from plimsoll.gateway.body_budget import BodyBudget
from plimsoll.gateway.endpoint_picker import messages
from plimsoll.gateway.endpoint_picker.decision import read_reply
from plimsoll.gateway.endpoint_picker.exchange import Exchange, Parts, ProtocolError
from plimsoll.gateway.envoy.access_log import AccessRecord
from plimsoll.gateway.errors import Rejection, RejectionReason
from plimsoll.gateway.gateway_limit import GatewayLimit
from plimsoll.gateway.parse_worker import ParseWorker
from plimsoll.gateway.picker import Picker
from plimsoll.gateway.settings import PickerSettings
from plimsoll.telemetry import gateway_metrics

log = logging.getLogger(__name__)

MAX_STREAMS: Final = 2000  # requests at once; each takes some 50 KB
MAX_STREAM_SECONDS: Final = 7200.0  # of one request
MAX_CONNECTIONS: Final = 1000  # further ones are closed; a gateway has one for each of its threads, or a few
HANDSHAKE_SECONDS: Final = 5.0  # until a new connection speaks TLS and HTTP/2; gRPC's own limit is two minutes
IDLE_SECONDS: Final = 60.0  # of a connection without a stream; a gateway's next request opens another one
CLOSE_SECONDS: Final = 5.0
RETRY_SECONDS: Final = 2.0  # when a stream may be free
_REFUSED_STREAMS: Final = 500  # beyond MAX_STREAMS, which get a 429; further ones an error of gRPC
_MESSAGE_OVERHEAD_BYTES: Final = 1 << 20
_HEALTH: Final = "grpc.health.v1.Health"
_LIVENESS: Final = "liveness"
_READINESS: Final = ("", "readiness", messages.SERVICE, "inference-extension")
_SERVING, _NOT_SERVING = 1, 2


def _is_notable(record: logging.LogRecord) -> bool:
    """Whether a record of gRPC's log is more than a stream that its client reset before the status was sent."""
    return "ExecuteBatchError" not in record.getMessage()


class EndpointPicker:
    """The server. `not_ready_reason` returns why the picker is not ready, or ""; `on_record` gets ended requests."""

    def __init__(
        self,
        picker: Picker,
        worker: ParseWorker,
        settings: PickerSettings,
        not_ready_reason: Callable[[], str],
        on_record: Callable[[AccessRecord], None],
        max_streams: int = MAX_STREAMS,
    ) -> None:
        self.bodies = BodyBudget(
            settings.endpoint_picker_body_bytes,
            settings.max_body_bytes,
            GatewayLimit.ENDPOINT_PICKER_BODY_BYTES,
            GatewayLimit.ENDPOINT_PICKER_CLIENT_BODY_BYTES,
        )
        self.parts = Parts(picker, worker, self.bodies, settings, on_record)
        self._not_ready_reason = not_ready_reason
        self._max_streams = max_streams
        self._streams = 0
        self._last_request_s = float("-inf")

    def busy_s(self) -> float:
        """Returns the monotonic time of the last request, or now while one is open. -inf if there was none."""
        return time.monotonic() if self._streams else self._last_request_s

    async def start(
        self, address: str, credentials: grpc.ServerCredentials | None = None
    ) -> tuple[grpc.aio.Server, int]:
        """Listen on HOST:PORT. Returns the server and its port. Raises RuntimeError if the port is taken."""
        limit = self.parts.settings.max_body_bytes + _MESSAGE_OVERHEAD_BYTES
        options = (
            ("grpc.max_receive_message_length", limit),
            ("grpc.max_send_message_length", limit),
            ("grpc.max_metadata_size", 64 << 10),
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
            ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_SECONDS)),
            ("grpc.max_connection_idle_ms", int(1000 * IDLE_SECONDS)),
            ("grpc.so_reuseport", 0),  # a second process on the port is an error
        )
        server = grpc.aio.server(maximum_concurrent_rpcs=self._max_streams + _REFUSED_STREAMS, options=options)
        process = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=messages.ProcessingRequest.FromString,
            response_serializer=messages.ProcessingResponse.SerializeToString,
        )
        # A check has the field 1, a text, and its answer the field 1, a number: as these two well-known types.
        check = grpc.unary_unary_rpc_method_handler(
            self._check_health,
            request_deserializer=StringValue.FromString,
            response_serializer=Int32Value.SerializeToString,
        )
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(messages.SERVICE, {"Process": process}),
                grpc.method_handlers_generic_handler(_HEALTH, {"Check": check}),
            )
        )
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
        logging.getLogger("grpc._cython.cygrpc").addFilter(_is_notable)
        await server.start()
        return server, port

    async def _check_health(self, request: Any, context: Any) -> Any:
        if request.value == _LIVENESS:
            return Int32Value(value=_SERVING)
        if request.value not in _READINESS:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return Int32Value(value=_NOT_SERVING if self._not_ready_reason() else _SERVING)

    async def _process(self, requests: Any, context: Any) -> None:
        """Serve one stream: one request."""
        self._last_request_s = time.monotonic()
        if self._streams >= self._max_streams:
            self._count("full")
            message = f"This endpoint picker has {self._streams} open requests, its limit."
            retry, limit = advise_retry(RETRY_SECONDS), GatewayLimit.ENDPOINT_PICKER_STREAMS
            full = Rejection(RejectionReason.GATEWAY_FULL, message, retry=retry, limit=limit)
            await context.write(messages.immediate(*read_reply(self.parts.picker.reject(full))))
            return
        self._streams += 1
        gateway_metrics.GATEWAY_ENDPOINT_PICKER_STREAMS.set(self._streams)
        exchange = Exchange(self.parts, context.read, context.write)
        try:
            async with asyncio.timeout(MAX_STREAM_SECONDS):
                await exchange.run()
        except grpc.aio.InternalError:
            return  # the stream was reset while an answer was sent
        except ProtocolError as error:
            log.warning("a gateway's ext_proc filter cannot be served: %s", error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the gateway did not send what must come next")
        finally:
            self._streams -= 1
            exchange.close()
            self._count(exchange.outcome)
            gateway_metrics.GATEWAY_ENDPOINT_PICKER_STREAMS.set(self._streams)

    def _count(self, outcome: str) -> None:
        gateway_metrics.GATEWAY_ENDPOINT_PICKER_REQUESTS.labels(outcome).inc()
