"""The routes of the picker's two listeners.

The unix socket serves Envoy: `/reserve/...` before a large body is read and `/check/...` with a client's body (both
ext_authz), any path with the header `x-plimsoll-error-response` (writes that error response), `/v1/models`,
`/v1/models/NAME` (as an event stream: its progress), and `/healthz` for Envoy's health check. The TCP port serves
`/healthz`, `/readyz`, `/metrics` and `/signals`. With TLS, another port serves the first two without it.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from random import Random
from typing import Any, Final
from urllib.parse import unquote_to_bytes

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from plimsoll.adapters.internal_tls import has_name
from plimsoll.gateway import error_messages
from plimsoll.gateway.api_routes import EVENT_STREAM, MODELS_PATH, ApiRoute, ErrorShape, route_of
from plimsoll.gateway.body_budget import BodyBudget
from plimsoll.gateway.envoy.body_filters import BODY_BYTES_HEADER, RESERVE_PREFIX
from plimsoll.gateway.envoy.listener import CHECK_PREFIX
from plimsoll.gateway.errors import Rejection, from_header, to_response
from plimsoll.gateway.http1 import HttpRequest, response, without_body
from plimsoll.gateway.identity import Identity, client_of, model_not_allowed, source_network
from plimsoll.gateway.model_progress import ModelProgress
from plimsoll.gateway.parse_worker import ParseWorker
from plimsoll.gateway.picker import Picker
from plimsoll.gateway.picker_replies import write_response
from plimsoll.gateway.request_body import size_of
from plimsoll.gateway.request_context import request_id_of
from plimsoll.gateway.request_parser import NeedsWorker, parse_in_loop
from plimsoll.gateway.server import HandlerReply
from plimsoll.gateway.service_catalog import ServiceCatalog, ServiceEntry
from plimsoll.gateway.signals_document import build_signals, update_metrics
from plimsoll.telemetry import gateway_metrics

JSON_HEADERS = (("content-type", "application/json"),)
_CHECK = CHECK_PREFIX.encode()
_RESERVE = RESERVE_PREFIX.encode()
_BODY_BYTES = BODY_BYTES_HEADER.encode()
_MODEL = f"{MODELS_PATH}/".encode()
_ANTHROPIC_VERSION: Final = b"anthropic-version"  # header of each request of its SDKs


class EnvoyEndpoint:
    """Handles requests from Envoy.

    health_checked: Envoy's health check has reached this picker. last_request_s: monotonic time of the last request of
    a client, -inf if there was none.
    """

    def __init__(self, picker: Picker, worker: ParseWorker, bodies: BodyBudget) -> None:
        self._picker = picker
        self._bodies = bodies
        self._worker = worker
        self._all_models: tuple[ServiceCatalog, bytes] | None = None  # what a client without limits gets, and of which
        self.progress = ModelProgress(picker)
        self.health_checked = False
        self.last_request_s = -math.inf

    def __call__(self, request: HttpRequest) -> HandlerReply:
        if request.path == b"/healthz":
            self.health_checked = True
            return response(200)
        if request.method == b"OPTIONS":  # no route for clients has it: Envoy itself responds to preflights
            return response(404)
        self.last_request_s = time.monotonic()
        if request.path.startswith(_CHECK):
            return self._check(request)
        if request.path.startswith(_RESERVE):
            return self._reserve(request)
        if (reply := request.headers.get(b"x-plimsoll-error-response")) is not None:
            return write_response(from_header(reply.decode("ascii")))
        path = request.path.partition(b"?")[0]
        if path == MODELS_PATH.encode() or path.startswith(_MODEL):
            models = self._models(request, path)
            return without_body(models) if request.method == b"HEAD" and isinstance(models, bytes) else models
        return response(404)

    def _reserve(self, request: HttpRequest) -> bytes:
        identity = self._picker.authenticate(request.headers, is_counted=False)
        route = route_of(request.path[len(_RESERVE) :])
        if isinstance(identity, Rejection):
            return self._picker.reject(identity, route.shape)
        request_id = request_id_of(request.headers)
        announced, now = request.headers.get(_BODY_BYTES, b""), time.monotonic()
        client = client_of(identity, request.headers)
        rejection = None if request_id is None else self._bodies.reserve(request_id, announced, now, client)
        if rejection is None:
            return response(200)
        self._picker.authenticator.count(identity)
        self._picker.attributes.begin(request.headers, identity, "")
        return self._picker.reject(rejection, route.shape)

    def _check(self, request: HttpRequest) -> HandlerReply:
        started_s = time.monotonic()
        if (request_id := request_id_of(request.headers)) is not None:
            self._bodies.record(request_id, size_of(request.body), started_s)
        route = route_of(request.path[len(_CHECK) :])
        try:
            reply = self._picker.check(request.body, request.headers, started_s, route, parse_in_loop)
        except NeedsWorker:
            return self._check_in_worker(request, route)
        self._picker.pick_s += time.monotonic() - started_s
        return reply

    async def _check_in_worker(self, request: HttpRequest, route: ApiRoute) -> bytes:
        identity = self._picker.authenticate(request.headers, is_counted=False)
        if isinstance(identity, Rejection):
            return self._picker.reject(identity, route.shape)
        client, kind = client_of(identity, request.headers), request.headers.get(b"content-type", b"")
        parsed = await self._worker.parse(request.body, route, client, kind)
        reply = self._picker.decide(parsed, request.body, request.headers, identity, time.monotonic(), route)
        return reply if isinstance(reply, bytes) else await reply

    def _models(self, request: HttpRequest, path: bytes) -> bytes | AsyncIterator[bytes]:
        """Handles `/v1/models` and `/v1/models/NAME`: they show a client only what it may use."""
        identity, shape = self._picker.authenticate(request.headers), _shape(request.headers)
        if isinstance(identity, Rejection):
            return self._picker.reject(identity, shape)
        self._picker.attributes.begin(request.headers, identity, "")
        if path in (MODELS_PATH.encode(), _MODEL):
            return response(200, JSON_HEADERS, self._models_body(identity))
        name = unquote_to_bytes(path[len(_MODEL) :]).decode("utf-8", "replace")
        if request.method == b"GET" and wants_events(request.headers.get(b"accept", b"")):
            return self.progress.open(identity, name, source_network(request.headers))
        return model(self._picker, identity, name, shape)

    def _models_body(self, identity: Identity) -> bytes:
        """As `models_body`. A list of 1,000 services takes 5 ms, so that of all is made once for each catalog."""
        catalog = self._picker.catalog
        if identity.models is not None:
            return models_body(self._picker, identity)
        if self._all_models is None or self._all_models[0] is not catalog:
            self._all_models = catalog, models_body(self._picker, identity)
        return self._all_models[1]


def _shape(headers: Mapping[bytes, bytes]) -> ErrorShape:
    """Returns the shape of an error about models, whose paths both APIs have."""
    return ErrorShape.ANTHROPIC if _ANTHROPIC_VERSION in headers else ErrorShape.OPENAI


def wants_events(accept: bytes) -> bool:
    """Whether a client asks for an event stream, and does not take JSON as well."""
    accepted = accept.lower()
    return EVENT_STREAM.encode() in accepted and b"application/json" not in accepted


def models_body(picker: Picker, identity: Identity) -> bytes:
    """Returns the body of `/v1/models`: the preferred name of every service and adapter that may be used."""
    names = [
        (name, service)
        for service in identity.usable_services(picker.catalog)
        for name in preferred_names(service)
        if identity.may_use(name, service, picker.catalog)
    ]
    cards = [_card(service, name) for name, service in sorted(names, key=_name)]
    return orjson.dumps({"object": "list", "data": cards})


def preferred_names(service: ServiceEntry) -> list[str]:
    """Returns the preferred name of a service, if it has one, and those of its adapters."""
    adapters = dict.fromkeys(adapter.names[0] for adapter in service.adapters.values())
    return [*service.names[:1], *adapters]


def _name(named: tuple[str, ServiceEntry]) -> str:
    return named[0]


def model(picker: Picker, identity: Identity, name: str, shape: ErrorShape) -> bytes:
    """Returns the response to `/v1/models/NAME`, for any name that the gateway serves."""
    service = picker.catalog.by_name.get(name)
    if not identity.may_use(name, service, picker.catalog):
        return picker.reject(model_not_allowed(identity, name), shape)
    if service is None:
        return write_response(to_response(error_messages.model_not_found(name), Random(0), shape))
    return response(200, JSON_HEADERS, orjson.dumps(_card(service, name)))


def _card(service: ServiceEntry, name: str) -> dict[str, str | int]:
    return {"id": name, "object": "model", "created": service.created, "owned_by": "plimsoll"}


PROBE_PAGES: Final = frozenset({b"/healthz", b"/readyz"})
PUBLIC_PAGES: Final = PROBE_PAGES | {b"/metrics"}


class AdminEndpoint:
    """Handles requests from the kubelet, Prometheus and the operator."""

    def __init__(
        self, picker: Picker, pod: str, synced: Callable[[], bool], not_ready_reason: Callable[[], str]
    ) -> None:
        """`not_ready_reason` returns why this gateway is not ready, or ""."""
        self._picker = picker
        self._pod = pod
        self._synced = synced
        self._not_ready_reason = not_ready_reason

    def of_client(self, name: str, certificate: Any) -> Callable[[HttpRequest], bytes]:
        """Returns the handler for a client of a listener with TLS, whose certificate must have the name for all pages.

        Prometheus needs none.
        """
        refusal = f"this page needs a client certificate for {name}"
        return self if has_name(certificate, name) else self.limited(PUBLIC_PAGES, refusal)

    def limited(self, pages: frozenset[bytes], refusal: str) -> Callable[[HttpRequest], bytes]:
        """Returns the handler that serves certain pages only, and refuses others with 403."""
        return lambda one: self(one) if one.path.partition(b"?")[0] in pages else response(403, body=refusal.encode())

    def __call__(self, request: HttpRequest) -> bytes:
        path = request.path.partition(b"?")[0]
        if request.method == b"HEAD":
            return without_body(self._get(path))
        return self._get(path) if request.method == b"GET" else response(405, (("allow", "GET, HEAD"),))

    def _get(self, path: bytes) -> bytes:
        if path == b"/healthz":  # a response proves that the event loop runs
            return response(200, body=b"ok\n")
        if path == b"/readyz":
            reason = self._not_ready_reason()
            return response(503 if reason else 200, body=f"{reason or 'ok'}\n".encode())
        if path == b"/metrics":
            update_metrics(self._picker)
            return response(200, (("content-type", CONTENT_TYPE_LATEST),), generate_latest(gateway_metrics.GATEWAY))
        if path == b"/signals":
            document = build_signals(self._picker, self._pod, synced=self._synced())
            return response(200, JSON_HEADERS, orjson.dumps(document))
        return response(404)
