"""What the picker decides about a request of a gateway of another product.

Problem: two implementations of one decision would drift apart.

Idea: `Picker` decides as it does for its own Envoy, and this module reads its reply. The headers by which Envoy and the
engine learn of the decision are the same; those that only Plimsoll's Envoy understands are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from plimsoll.gateway.api_routes import ROUTES, ApiRoute, BodyForm, ErrorShape
from plimsoll.gateway.audio_form import parse_audio_form
from plimsoll.gateway.envoy.listener import PICK_CLUSTER_PREFIX
from plimsoll.gateway.envoy.local_reply import REPLIES
from plimsoll.gateway.envoy.tracing import ATTRIBUTE_PREFIX
from plimsoll.gateway.envoy.virtual_host import STRIPPED_HEADERS
from plimsoll.gateway.errors import ErrorResponse, Rejection, from_header
from plimsoll.gateway.identity import Identity, client_of
from plimsoll.gateway.key_limits import RATE_LIMIT_HEADERS
from plimsoll.gateway.parse_worker import ParseWorker
from plimsoll.gateway.request_bounds import IDLE_TIMEOUT_HEADER
from plimsoll.gateway.request_context import REQUEST_ID_HEADER
from plimsoll.gateway.request_parser import NeedsWorker, ParsedRequest, parse_in_loop

INTERNAL_PREFIX: Final = "x-plimsoll-"
MODEL_HEADER: Final = "x-plimsoll-model"
_CLUSTER_HEADER: Final = "x-plimsoll-cluster"
_ENDPOINT_HEADER: Final = "x-plimsoll-endpoint"
_ERROR_HEADER: Final = "x-plimsoll-error-response"
_RANK_HEADER: Final = "x-data-parallel-rank"
Parsed = ParsedRequest | Rejection

_OWN_ENVOY: Final = (_CLUSTER_HEADER, IDLE_TIMEOUT_HEADER)  # that no other gateway understands


class Reply(NamedTuple):
    """A reply of the picker: status, headers in lower case, and body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Dispatch(NamedTuple):
    """The engines for a request, best first. `service` is the key of the service that handles it.

    `request_headers` are for the engine, and `response_headers` for the client.
    """

    service: str
    endpoints: tuple[str, ...]
    request_headers: Mapping[str, str]
    response_headers: Mapping[str, str]


def read_reply(reply: bytes) -> Reply:
    """Returns the parts of a reply that `http1.response` made."""
    head, _, body = reply.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return Reply(int(first.split(" ", 2)[1]), headers, body)


def read_decision(reply: Reply) -> Dispatch | Reply:
    """Returns the engines that a reply names, or the reply to the client."""
    if (error := reply.headers.get(_ERROR_HEADER)) is not None:
        response = from_header(error)
        return Reply(response.status, response.headers, response.body)
    if (endpoints := reply.headers.get(_ENDPOINT_HEADER)) is None:
        return reply
    service = reply.headers[_CLUSTER_HEADER].removeprefix(PICK_CLUSTER_PREFIX)
    to_engine = {
        name: value
        for name, value in reply.headers.items()
        if name.startswith(INTERNAL_PREFIX) and name not in _OWN_ENVOY and not name.startswith(ATTRIBUTE_PREFIX)
    }
    to_client = {name: reply.headers[name] for name in RATE_LIMIT_HEADERS if name in reply.headers}
    return Dispatch(service, tuple(endpoints.split(",")), {**to_engine, MODEL_HEADER: service}, to_client)


def own_headers(headers: Mapping[bytes, bytes], request_id: str) -> dict[bytes, bytes]:
    """Returns a client's headers without those that only Plimsoll sets, and with the request's ID."""
    prefix = INTERNAL_PREFIX.encode()
    external = {name: value for name, value in headers.items() if not name.startswith(prefix)}
    return {**external, REQUEST_ID_HEADER: request_id.encode()}


def removed_headers(names: Iterable[bytes], allowed: Iterable[str]) -> list[str]:
    """Returns the headers of a client that no engine may see. `allowed` are those that the picker sets."""
    texts = {name.decode("latin-1") for name in names}
    internal = {name for name in texts if name.startswith(INTERNAL_PREFIX) or name == _RANK_HEADER}
    return sorted((internal | texts & set(STRIPPED_HEADERS)) - set(allowed))


def find_route(headers: Mapping[bytes, bytes]) -> ApiRoute | ErrorResponse:
    """Returns the route of a request, or the response to one that engines do not serve."""
    path = headers.get(b":path", b"").partition(b"?")[0].decode("ascii", "replace")
    route = ROUTES.get(path)
    if route is None:
        return plain_error(404, REPLIES[404].code, REPLIES[404].message)
    if headers.get(b":method") != b"POST":
        return plain_error(405, REPLIES[405].code, f"{path} accepts only POST.", route.shape, allow="POST")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        message = "This gateway does not accept a compressed request body. Send it without Content-Encoding."
        return plain_error(415, REPLIES[415].code, message, route.shape)
    return route


def plain_error(
    status: int, code: str, message: str, shape: ErrorShape = ErrorShape.OPENAI, **headers: str
) -> ErrorResponse:
    """Returns an error that a retry does not help."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    fixed = {"content-type": "application/json", "x-plimsoll-reason": code, "x-should-retry": "false"}
    return ErrorResponse(status, {**fixed, **headers}, error, shape)


async def parse(
    worker: ParseWorker, body: bytes, headers: Mapping[bytes, bytes], route: ApiRoute, identity: Identity
) -> Parsed:
    """Returns the parsed body of a request, or why it is rejected."""
    if route.form is BodyForm.AUDIO:
        return parse_audio_form(body, headers.get(b"content-type", b""))
    try:
        return parse_in_loop(body, route)
    except NeedsWorker:
        return await worker.parse(body, route, client_of(identity, headers))
