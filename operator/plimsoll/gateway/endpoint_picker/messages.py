"""The messages of Envoy's external processing (ext_proc), as the endpoint-picker protocol uses them.

The protocol is that of the Gateway API Inference Extension (proposal 004), which names the headers and the metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from envoy.config.core.v3.base_pb2 import HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2
from google.protobuf.struct_pb2 import ListValue, Struct

ProcessingRequest: Final = external_processor_pb2.ProcessingRequest
ProcessingResponse: Final = external_processor_pb2.ProcessingResponse
SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"

DESTINATION: Final = "x-gateway-destination-endpoint"
_DESTINATION_NAMESPACE: Final = "envoy.lb"
_SERVED: Final = "x-gateway-destination-endpoint-served"
_SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
_SUBSET: Final = "x-gateway-destination-endpoint-subset"

NO_BODY: Final = ProcessingMode.NONE
BUFFERED: Final = ProcessingMode.BUFFERED
FULL_DUPLEX: Final = ProcessingMode.FULL_DUPLEX_STREAMED
_CHUNK_BYTES: Final = 62 * 1024  # of a body that goes back: below Envoy's limit of 64 KiB for one message


class ProcessingModes(NamedTuple):
    """How the gateway sends bodies, as values of ProcessingMode.BodySendMode."""

    request_body: int
    response_body: int


def read_headers(message: Any) -> dict[bytes, bytes]:
    """Returns the headers of a request, in lower case. The last of equal names wins."""
    values = message.request_headers.headers.headers
    return {header.key.lower().encode(): header.raw_value or header.value.encode() for header in values}


def read_status(message: Any) -> tuple[int | None, str | None]:
    """Returns the status in the headers of a response and the reason that the engine gives, None without them."""
    values = message.response_headers.headers.headers
    found = {header.key: header.raw_value or header.value.encode() for header in values}
    text, reason = found.get(":status", b""), found.get("x-plimsoll-reason")
    status = int(text) if len(text) == 3 and text.isdigit() else None
    return status, None if reason is None else reason[:64].decode("latin-1")


def read_subset(message: Any) -> frozenset[str] | None:
    """Returns the addresses of the subset hint, None without one. A list and a text with commas are both in use."""
    namespaces = message.metadata_context.filter_metadata
    if _SUBSET_NAMESPACE not in namespaces or _SUBSET not in (hint := namespaces[_SUBSET_NAMESPACE]):
        return None
    value = hint[_SUBSET]
    texts = list(value) if isinstance(value, ListValue) else [value]
    parts = (part.strip() for text in texts if isinstance(text, str) for part in text.split(","))
    return frozenset(part for part in parts if part)


def read_served(message: Any) -> str:
    """Returns the address of the endpoint that served the request, "" if the gateway does not say."""
    namespaces = message.metadata_context.filter_metadata
    if _DESTINATION_NAMESPACE not in namespaces or _SERVED not in (found := namespaces[_DESTINATION_NAMESPACE]):
        return ""
    value = found[_SERVED]
    return value if isinstance(value, str) else ""


def processing_modes(message: Any) -> ProcessingModes:
    """Returns how the gateway sends bodies. Without its word it does so as the protocol demands."""
    if not message.HasField("protocol_config"):
        return ProcessingModes(FULL_DUPLEX, FULL_DUPLEX)
    return ProcessingModes(message.protocol_config.request_body_mode, message.protocol_config.response_body_mode)


def destination(phase: str, endpoint: str, headers: Mapping[str, str], removed: Iterable[str]) -> Any:
    """Returns the response that names the endpoint, in the phase `request_headers` or `request_body`.

    `headers` are set in the request, and `removed` taken off it. The protocol allows several endpoints. But gateways
    that connect to the address in the header (clusters of type ORIGINAL_DST) understand one only.
    """
    response = ProcessingResponse()
    common = getattr(response, phase).response
    common.clear_route_cache = True
    common.header_mutation.set_headers.extend(_set_headers({**headers, DESTINATION: endpoint}))
    common.header_mutation.remove_headers.extend(removed)
    metadata = Struct()
    metadata.update({DESTINATION: endpoint})
    response.dynamic_metadata.update({_DESTINATION_NAMESPACE: metadata})
    return response


def proceed(phase: str) -> Any:
    """Returns the response that changes nothing in a phase: headers, body or trailers."""
    response = ProcessingResponse()
    getattr(response, phase).SetInParent()
    return response


def set_response_headers(headers: Mapping[str, str]) -> Any:
    """Returns the response that sets headers of the response to the client."""
    response = ProcessingResponse()
    response.response_headers.SetInParent()
    response.response_headers.response.header_mutation.set_headers.extend(_set_headers(headers))
    return response


def streamed_body(phase: str, body: bytes, end_of_stream: bool) -> Iterator[Any]:
    """Yields the responses that give a body back to a gateway that streams it, in the phase `*_body`."""
    for start in range(0, max(len(body), 1), _CHUNK_BYTES):
        response = ProcessingResponse()
        part = getattr(response, phase).response.body_mutation.streamed_response
        part.body = body[start : start + _CHUNK_BYTES]
        part.end_of_stream = end_of_stream and start + _CHUNK_BYTES >= len(body)
        yield response


def immediate(status: int, headers: Mapping[str, str], body: bytes) -> Any:
    """Returns the response to the client itself. Its reason is in the gateway's access log."""
    response = ProcessingResponse()
    found = response.immediate_response
    found.status.code = status
    found.headers.set_headers.extend(_set_headers({n: v for n, v in headers.items() if n != "content-length"}))
    found.body = body
    found.details = f"plimsoll_{headers.get('x-plimsoll-reason', 'answer')}"
    return response


def _set_headers(headers: Mapping[str, str]) -> Iterator[Any]:
    for name, value in headers.items():
        option = HeaderValueOption(append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD)
        option.header.key, option.header.raw_value = name, value.encode("latin-1", "replace")
        yield option
