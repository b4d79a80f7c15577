"""The endpoint picker on 127.0.0.1 with a gRPC client in the place of another gateway, and no Envoy."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import grpc
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from plimsoll.gateway.endpoint_picker import messages
from plimsoll.gateway.endpoint_picker.server import EndpointPicker
from plimsoll.gateway.envoy.access_log import AccessRecord
from plimsoll.gateway.identity import Authenticator
from plimsoll.gateway.parse_worker import ParseWorker
from plimsoll.gateway.picker import Picker
from plimsoll.gateway.settings import PickerSettings
from tests.gateway.kube_objects import Object
from tests.gateway.one_queue_harness import make_catalog

BODY = json.dumps({"model": "chat", "messages": []}).encode()
CHAT = {":path": "/v1/chat/completions", ":method": "POST"}
Values = Mapping[str, Any]


def first_message(
    headers: Mapping[str, str] | None = None,
    *,
    subset: object = None,
    request_mode: int = messages.FULL_DUPLEX,
    end_of_stream: bool = False,
) -> Any:
    """The headers of a chat completion; `subset` is the value of the subset hint."""
    message = messages.ProcessingRequest()
    for name, value in {**CHAT, **(headers or {})}.items():
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    message.request_headers.end_of_stream = end_of_stream
    message.protocol_config.request_body_mode = request_mode
    message.protocol_config.response_body_mode = messages.FULL_DUPLEX
    if subset is not None:
        hint = {"x-gateway-destination-endpoint-subset": subset}
        message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(hint)
    return message


def body_message(body: bytes = BODY, end_of_stream: bool = True) -> Any:
    message = messages.ProcessingRequest()
    message.request_body.body, message.request_body.end_of_stream = body, end_of_stream
    return message


def response_message(status: str = "200", served: str = "", reason: str = "") -> Any:
    """The headers of an engine's response; `served` is the engine that the gateway names."""
    message = messages.ProcessingRequest()
    message.response_headers.headers.headers.add(key=":status", raw_value=status.encode())
    if reason:
        message.response_headers.headers.headers.add(key="x-plimsoll-reason", raw_value=reason.encode())
    if served:
        found = {"x-gateway-destination-endpoint-served": served}
        message.metadata_context.filter_metadata["envoy.lb"].update(found)
    return message


def response_body(part: bytes, end_of_stream: bool = False) -> Any:
    message = messages.ProcessingRequest()
    message.response_body.body, message.response_body.end_of_stream = part, end_of_stream
    return message


def set_headers(response: Any, phase: str = "request_headers") -> dict[str, str]:
    """The headers that a response sets in the request."""
    options = getattr(response, phase).response.header_mutation.set_headers
    return {option.header.key: option.header.raw_value.decode() for option in options}


def error_of(response: Any) -> tuple[int, str, dict[str, str]]:
    """Status, code and headers of a response to the client."""
    found = response.immediate_response
    headers = {option.header.key: option.header.raw_value.decode() for option in found.headers.set_headers}
    return found.status.code, json.loads(found.body)["error"]["code"], headers


class PickerServer:
    """A picker that another gateway can ask. `records` are those of the requests that have ended."""

    def __init__(self, picker: Picker, settings: PickerSettings, max_streams: int) -> None:
        self.picker = picker
        self.records: list[AccessRecord] = []
        self.reason = ""  # why it is not ready
        self._worker = ParseWorker()
        self.server = EndpointPicker(picker, self._worker, settings, lambda: self.reason, self._on_record, max_streams)
        self.channel: grpc.aio.Channel
        self.port: int

    def _on_record(self, record: AccessRecord) -> None:
        self.records.append(record)
        self.picker.reports.on_access_record(record, self.picker._clock.now())

    def stream(self, deserializer: Any = messages.ProcessingResponse.FromString, serializer: Any = None) -> Any:
        """A stream of a new request."""
        call = self.channel.stream_stream(
            f"/{messages.SERVICE}/Process",
            request_serializer=serializer or messages.ProcessingRequest.SerializeToString,
            response_deserializer=deserializer,
        )
        return call()

    async def ask(self, *sent: Any) -> tuple[Any, Any]:
        """The stream of a request, and the first response to it."""
        stream = self.stream()
        response = asyncio.create_task(stream.read())  # the server may answer, and end, before it has read everything
        with contextlib.suppress(grpc.aio.AioRpcError):
            for message in sent or (first_message(), body_message()):
                await stream.write(message)
        return stream, await response

    async def health(self, service: str) -> int | str:
        check = self.channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=StringValue.SerializeToString,
            response_deserializer=Int32Value.FromString,
        )
        try:
            return int((await check(StringValue(value=service))).value)
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)

    def inflight(self) -> dict[str, int]:
        return {address: load.inflight for address, load in self.picker.inflight.loads.items() if load.inflight}

    def close(self) -> None:
        self._worker.close()


@asynccontextmanager
async def serve(
    *services: Object,
    pods: tuple[Object, ...] = (),
    picker: Picker | None = None,
    authenticator: Authenticator | None = None,
    max_streams: int = 10,
    **settings: Any,
) -> AsyncIterator[PickerServer]:
    """A picker with these objects, and a channel to it. A `picker` of the test's own has its catalog already."""
    if picker is None:
        picker = Picker(Random(1), "gateway-0", authenticator)
        picker.set_catalog(make_catalog(services, pods))
    made = PickerServer(picker, PickerSettings(**settings), max_streams)
    running, port = await made.server.start("127.0.0.1:0")
    made.port = port
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as made.channel:
        try:
            yield made
        finally:
            await running.stop(0)
            made.close()
