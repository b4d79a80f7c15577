"""What is behind the picker's two doors, by path.

On the unix socket, from Envoy: `/check/...` with a client's body (the question of ext_authz), any path with the header
`x-plimsoll-reply` (a refusal to be written out), `/v1/models`, `/v1/models/NAME`, and `/healthz` for Envoy's health
check.
On TCP: `/healthz`, `/readyz`, `/metrics`, `/signals`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from random import Random
from urllib.parse import unquote_to_bytes

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from plimsoll.gateway import words
from plimsoll.gateway.classify import needs_worker
from plimsoll.gateway.endpoints import Service
from plimsoll.gateway.http1 import Request, response
from plimsoll.gateway.listener import CHECK_PREFIX, MODELS
from plimsoll.gateway.picker import Picker, written
from plimsoll.gateway.replies import answer, from_header
from plimsoll.gateway.server import Reply
from plimsoll.gateway.signals import show_metrics, signals
from plimsoll.gateway.worker import Worker
from plimsoll.telemetry import metrics

JSON = (("content-type", "application/json"),)
_CHECK = CHECK_PREFIX.encode()
_MODEL = f"{MODELS}/".encode()


class EnvoyDoor:
    """Answers Envoy. `asked`: its health check has met this picker."""

    def __init__(self, picker: Picker, worker: Worker) -> None:
        self._picker = picker
        self._worker = worker
        self.asked = False

    def __call__(self, request: Request) -> Reply:
        if request.path.startswith(_CHECK):
            return self._check(request)
        if (reply := request.headers.get(b"x-plimsoll-reply")) is not None:
            return written(from_header(reply.decode("ascii")))
        path = request.path.partition(b"?")[0]
        if path == MODELS.encode():
            return response(200, JSON, models(self._picker))
        if path.startswith(_MODEL):
            return model(self._picker, unquote_to_bytes(path[len(_MODEL) :]).decode("utf-8", "replace"))
        if request.path != b"/healthz":
            return response(404)
        self.asked = True
        return response(200)

    def _check(self, request: Request) -> Reply:
        began = time.monotonic()
        if needs_worker(request.body):
            return self._check_slowly(request)
        reply = self._picker.check(request.body, request.headers, began)
        metrics.GATEWAY_PICK_SECONDS.inc(time.monotonic() - began)
        return reply

    async def _check_slowly(self, request: Request) -> bytes:
        asked = await self._worker.classify(request.body)
        reply = self._picker.decide(asked, request.body, request.headers, time.monotonic())
        return reply if isinstance(reply, bytes) else await reply


def models(picker: Picker) -> bytes:
    """The body of `/v1/models`: every service under its preferred name."""
    services = sorted(picker.fleet.services.values(), key=lambda s: s.names[0])
    return orjson.dumps({"object": "list", "data": [_card(service, service.names[0]) for service in services]})


def model(picker: Picker, name: str) -> bytes:
    """The response to `/v1/models/NAME`: any name that requests may use."""
    service = picker.fleet.by_name.get(name)
    if service is None:
        return written(answer(words.unknown(name), Random(0)))
    return response(200, JSON, orjson.dumps(_card(service, name)))


def _card(service: Service, name: str) -> dict[str, str | int]:
    return {"id": name, "object": "model", "created": service.created, "owned_by": "plimsoll"}


class PublicDoor:
    """Answers the kubelet, the scraper and the operator."""

    def __init__(self, picker: Picker, pod: str, synced: Callable[[], bool], ready: Callable[[], str]) -> None:
        """ready: what keeps this gateway from being ready, "" if nothing does."""
        self._picker = picker
        self._pod = pod
        self._synced = synced
        self._ready = ready

    def __call__(self, request: Request) -> bytes | Awaitable[bytes]:
        path = request.path.partition(b"?")[0]
        if request.method != b"GET":
            return response(405, (("allow", "GET"),))
        if path == b"/healthz":  # that this is answered at all is the news: one loop runs everything
            return response(200, body=b"ok\n")
        if path == b"/readyz":
            missing = self._ready()
            return response(503 if missing else 200, body=f"{missing or 'ok'}\n".encode())
        if path == b"/metrics":
            show_metrics(self._picker)
            return response(200, (("content-type", CONTENT_TYPE_LATEST),), generate_latest(metrics.GATEWAY))
        if path == b"/signals":
            document = signals(self._picker, self._pod, synced=self._synced())
            return response(200, JSON, orjson.dumps(document))
        return response(404)
