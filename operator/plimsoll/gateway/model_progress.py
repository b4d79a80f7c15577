"""The progress of one model until it is ready, as server-sent events: `GET /v1/models/NAME` with such an `Accept`.

Problem: a client that waits for a model without an engine gets no byte until the engine answers. The response to its
request cannot begin earlier: status and upstream are decided only when the engine is ready (design record 29).

Idea: progress is a response of its own, apart from the waiting request. It takes no capacity and starts no engine, and
every gateway has the data for it. Streams are limited in length, and in number per client, per model and in all; a
client opens the next one.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator
from enum import StrEnum
from random import Random
from typing import Any, Final

import orjson

from plimsoll.core.types import Role
from plimsoll.gateway import error_messages
from plimsoll.gateway.api_routes import EVENT_STREAM
from plimsoll.gateway.availability import availability
from plimsoll.gateway.clock import Clock, LoopClock
from plimsoll.gateway.errors import Rejection, to_response
from plimsoll.gateway.gateway_limit import GatewayLimit
from plimsoll.gateway.http1 import CHUNKED_END, chunk, chunked_head
from plimsoll.gateway.identity import Identity, model_not_allowed
from plimsoll.gateway.picker import Picker
from plimsoll.gateway.service_catalog import ServiceEntry
from plimsoll.telemetry import gateway_metrics

MAX_STREAMS: Final = 256  # of one gateway
MAX_MODEL_STREAMS: Final = 128  # of a service, by all its names
MAX_CLIENT_STREAMS: Final = 32
STREAM_SECONDS: Final = 600.0  # longest stream
EVENT_SECONDS: Final = 5.0  # between two events with the same content
POLL_SECONDS: Final = 0.5
_BOUNDS: Final = {
    GatewayLimit.PROGRESS_STREAMS: MAX_STREAMS,
    GatewayLimit.MODEL_PROGRESS_STREAMS: MAX_MODEL_STREAMS,
    GatewayLimit.CLIENT_PROGRESS_STREAMS: MAX_CLIENT_STREAMS,
}


class ModelState(StrEnum):
    """What a client that needs the model can do. READY ends the stream."""

    READY = "ready"
    STARTING = "starting"
    ASLEEP = "asleep"  # a request starts an engine
    STOPPED = "stopped"  # no request starts one


class ModelProgress:
    """The open streams of one gateway."""

    def __init__(self, picker: Picker, clock: Clock | None = None, poll_s: float = POLL_SECONDS) -> None:
        self._picker, self._clock, self._poll_s = picker, clock or LoopClock(), poll_s
        self._stopping = asyncio.Event()
        self._open: Counter[tuple[GatewayLimit, str]] = Counter()  # by what they count towards

    def stop(self) -> None:
        """End all streams, and each new one after its first event: the gateway is stopping."""
        self._stopping.set()

    def open(self, identity: Identity, name: str, source: str) -> bytes | AsyncIterator[bytes]:
        """Returns the response in parts, or in one piece if the name is not one for this client.

        source: the network that a client without a name belongs to.
        """
        rejection = self._rejection(identity, name)
        return self._stream(identity, name, source) if rejection is None else self._picker.reject(rejection)

    async def _stream(self, identity: Identity, name: str, source: str) -> AsyncIterator[bytes]:
        service = self._picker.catalog.by_name.get(name)
        counted = [
            (GatewayLimit.CLIENT_PROGRESS_STREAMS, identity.client(source)),
            (GatewayLimit.MODEL_PROGRESS_STREAMS, name if service is None else service.key),
            (GatewayLimit.PROGRESS_STREAMS, ""),
        ]
        for limit, of in counted:
            if self._open[limit, of] >= _BOUNDS[limit]:
                yield self._picker.reject(error_messages.too_many_streams(limit, _BOUNDS[limit], name))
                return
        self._open.update(counted)
        gateway_metrics.GATEWAY_PROGRESS_STREAMS.set(self._open[GatewayLimit.PROGRESS_STREAMS, ""])
        try:
            yield chunked_head(200, (("content-type", EVENT_STREAM), ("cache-control", "no-cache")))
            async for event, data in self._events(identity, name):
                yield chunk(f"event: {event}\ndata: {orjson.dumps(data).decode()}\n\n".encode())
            yield CHUNKED_END
        finally:
            self._open -= Counter(counted)  # keeps no zero
            gateway_metrics.GATEWAY_PROGRESS_STREAMS.set(self._open[GatewayLimit.PROGRESS_STREAMS, ""])

    async def _events(self, identity: Identity, name: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yields an event at each change of the state, and one every `EVENT_SECONDS`."""
        last, sent_s, end_s = "", -math.inf, self._clock.now() + STREAM_SECONDS
        while not last or (last != ModelState.READY and not self._stopping.is_set() and self._clock.now() < end_s):
            if last and await self._pause():
                return
            rejection = self._rejection(identity, name)
            if rejection is not None:  # since the stream began
                yield "error", {"error": to_response(rejection, Random(0)).error}
                return
            state, now = state_of(self._picker.catalog.by_name[name]), self._clock.now()
            if state != last or now - sent_s >= EVENT_SECONDS:
                last, sent_s = state, now
                yield state.value, progress(name, self._picker.catalog.by_name[name], self._clock.unix())

    async def _pause(self) -> bool:
        """Wait until it is time to look again. Returns whether the gateway is stopping."""
        try:
            await asyncio.wait_for(self._stopping.wait(), self._poll_s)
        except TimeoutError:
            return False
        return True

    def _rejection(self, identity: Identity, name: str) -> Rejection | None:
        """Returns why the client may not see this model now: its key may have been revoked since the stream began."""
        renewed = self._picker.authenticator.renew(identity, self._clock.unix())
        if isinstance(renewed, Rejection):
            return renewed
        service = self._picker.catalog.by_name.get(name)
        if not renewed.may_use(name, service, self._picker.catalog):
            return model_not_allowed(renewed, name)
        return error_messages.model_not_found(name) if service is None else None


def state_of(service: ServiceEntry) -> ModelState:
    if any(e.routable and e.role is not Role.PREFILL for e in service.endpoints):
        return ModelState.READY
    if service.deleted or service.stopped:
        return ModelState.STOPPED
    return ModelState.ASLEEP if service.is_asleep else ModelState.STARTING


def progress(name: str, service: ServiceEntry, unix_s: float) -> dict[str, Any]:
    """Returns the content of an event. `expected_in_s` is the time until the next ready engine, None if unknown."""
    state, available = state_of(service), availability(service, unix_s)
    expected_s = available.next_ready_s if state is ModelState.STARTING else None
    if state is ModelState.READY:
        message = f"Model '{name[:200]}' is ready."
    elif state is ModelState.ASLEEP:
        message = error_messages.no_engine(name, service.task).message
    else:
        message = error_messages.without_engine(name[:200], available)
    return {
        "object": "model.progress",
        "model": name,
        "state": state.value,
        "expected_in_s": None if expected_s is None else math.ceil(expected_s),
        "message": message,
    }
