"""One request of a gateway of another product, from its headers to the end of its response: one stream of ext_proc.

Problem: no access log tells how a request of another gateway ended. And a gateway that buffers a request's body
expects other answers than one that streams it.

Idea: the gateway sends the response too, in parts. Their times, sizes and status make the record that Plimsoll's own
Envoy would have logged, so all that counts requests stays the same. In both modes the engines are named once the whole
body is here: in the answer to the headers if bodies are streamed, else in the answer to the body.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import grpc

from plimsoll.core.admission.retry_advice import UNKNOWN_TIME
from plimsoll.gateway.api_routes import MODELS_PATH, ApiRoute
from plimsoll.gateway.body_budget import BodyBudget
from plimsoll.gateway.endpoint_picker import messages
from plimsoll.gateway.endpoint_picker.decision import (
    Dispatch,
    Reply,
    find_route,
    own_headers,
    parse,
    plain_error,
    read_decision,
    read_reply,
    removed_headers,
)
from plimsoll.gateway.endpoint_picker.exchange_record import ExchangeRecord
from plimsoll.gateway.envoy.access_log import AccessRecord
from plimsoll.gateway.errors import ErrorResponse, Rejection, RejectionReason
from plimsoll.gateway.identity import Identity, client_of
from plimsoll.gateway.parse_worker import ParseWorker
from plimsoll.gateway.picker import Picker
from plimsoll.gateway.request_context import ForeignRequest
from plimsoll.gateway.routes import JSON_HEADERS, models_body
from plimsoll.gateway.settings import PickerSettings


class ProtocolError(Exception):
    """The gateway does not keep to the protocol, or its mode is not supported. The message says what to set."""


class ClientLeft(Exception):
    """The gateway ended the stream, because its client has left."""


class Answered(Exception):
    """The picker answers the client itself."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.status)
        self.reply = reply


class Parts(NamedTuple):
    """What every exchange uses. `on_record` is called once for each request that has ended."""

    picker: Picker
    worker: ParseWorker
    bodies: BodyBudget
    settings: PickerSettings
    on_record: Callable[[AccessRecord], None]


class Exchange:
    """One request. Call `run` once, and `close` at the end in any case."""

    def __init__(
        self, parts: Parts, read: Callable[[], Awaitable[Any]], write: Callable[[Any], Awaitable[None]]
    ) -> None:
        """`read` returns the next message of the gateway, `grpc.aio.EOF` at the end; `write` sends an answer."""
        self._picker, self._worker, self._bodies, self._settings, self._on_record = parts
        self._read = read
        self._write = write
        self._reader: asyncio.Future[Any] | None = None  # the next message, while the request is queued
        self._record: ExchangeRecord | None = None
        self._mode = messages.ProcessingModes(messages.FULL_DUPLEX, messages.FULL_DUPLEX)
        self._client_headers: dict[bytes, bytes] = {}
        self._has_trailers = False  # of the request

    @property
    def outcome(self) -> str:
        """The outcome of the request: `invalid`, or as `ExchangeRecord.outcome`."""
        return "invalid" if self._record is None else self._record.outcome

    async def run(self) -> None:
        """Serve the request. Raises ProtocolError, and TimeoutError if the gateway does not send the headers."""
        try:
            async with asyncio.timeout(self._settings.headers_timeout_seconds):
                first = await self._next()
            self._record = record = self._begin(first)
            dispatch, body = await self._decide(first, record)
            await self._send(first, dispatch, body)
            del body
            self._bodies.release(record.request_id)
            await self._follow_response(dispatch.response_headers, record)
        except Answered as answered:
            status, headers, content = answered.reply
            if self._record is not None:
                self._record.on_answer(status, headers, len(content))
            await self._write(messages.immediate(status, headers, content))
        except ClientLeft:
            return

    def close(self) -> None:
        """Record the end of the request, and give back what it holds."""
        if self._reader is not None:
            self._reader.cancel()
        if self._record is not None:
            self._bodies.release(self._record.request_id)
            self._on_record(self._record.finish(is_response_seen=self._mode.response_body != messages.NO_BODY))

    async def _next(self) -> Any:
        """Returns the next message. Raises ClientLeft at the end of the stream."""
        reader, self._reader = self._reader, None
        message = await (self._read() if reader is None else reader)
        if message is grpc.aio.EOF:
            raise ClientLeft
        return message

    # ---------------------------------------------------------------- request

    def _begin(self, first: Any) -> ExchangeRecord:
        """Read the first message. Raises ProtocolError."""
        if not first.HasField("request_headers") or first.observability_mode:
            raise ProtocolError("the first message must be request_headers, without observability_mode")
        self._mode = messages.processing_modes(first)
        if self._mode.request_body not in (messages.BUFFERED, messages.FULL_DUPLEX):
            raise ProtocolError("set request_body_mode to FULL_DUPLEX_STREAMED or BUFFERED")
        self._client_headers = messages.read_headers(first)
        return ExchangeRecord(self._picker.inflight.new_request_id(), self._client_headers)

    async def _decide(self, first: Any, record: ExchangeRecord) -> tuple[Dispatch, bytes]:
        """Returns where the request goes, and its body. Raises Answered or ClientLeft if it goes nowhere."""
        picker = self._picker
        headers = own_headers(self._client_headers, record.request_id)
        self._answer_models(headers)
        route = find_route(headers)
        if isinstance(route, ErrorResponse):
            raise Answered(Reply(route.status, route.headers, route.body))
        identity = picker.authenticate(headers)
        if isinstance(identity, Rejection):
            raise self._rejected(identity, route)
        body = (
            b"" if first.request_headers.end_of_stream else await self._receive_body(headers, route, record, identity)
        )
        record.on_body(len(body))
        parsed = await parse(self._worker, body, headers, route, identity)
        foreign = ForeignRequest(messages.read_subset(first))
        reply = picker.decide(parsed, body, headers, identity, time.monotonic(), route, foreign)
        decision = read_decision(read_reply(reply if isinstance(reply, bytes) else await self._wait_queued(reply)))
        if isinstance(decision, Reply):
            raise Answered(decision)
        record.on_dispatch(decision)
        return self._within(decision, foreign.subset, route), body

    def _answer_models(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises Answered for a list of the models: no engine knows all of them."""
        if headers.get(b":path", b"").partition(b"?")[0] != MODELS_PATH.encode() or headers.get(b":method") != b"GET":
            return
        identity = self._picker.authenticate(headers)
        if isinstance(identity, Identity):
            raise Answered(Reply(200, dict(JSON_HEADERS), models_body(self._picker, identity)))
        raise Answered(read_reply(self._picker.reject(identity)))

    async def _receive_body(
        self, headers: Mapping[bytes, bytes], route: ApiRoute, record: ExchangeRecord, identity: Identity
    ) -> bytes:
        """Returns the body. Raises Answered if it is too large, or if there is no room for it."""
        announced, started_s = headers.get(b"content-length", b""), time.monotonic()
        limit = self._settings.max_body_bytes
        if announced.isdigit() and len(announced) < 16 and int(announced) > limit:
            raise _too_large(route, limit)
        client = client_of(identity, headers)
        if (rejection := self._bodies.reserve(record.request_id, announced, started_s, client)) is not None:
            raise self._rejected(rejection, route)
        if self._mode.request_body == messages.BUFFERED:
            await self._write(messages.proceed("request_headers"))
        body = bytearray()
        try:
            async with asyncio.timeout(self._settings.body_timeout_seconds):
                while not await self._receive_part(body):
                    if len(body) > limit:
                        raise _too_large(route, limit)
        except TimeoutError:
            error = plain_error(408, "request_timeout", "The request's body did not arrive in time.", route.shape)
            raise Answered(Reply(error.status, error.headers, error.body)) from None
        if len(body) > limit:
            raise _too_large(route, limit)
        self._bodies.record(record.request_id, len(body), started_s)
        return bytes(body)

    async def _receive_part(self, body: bytearray) -> bool:
        """Add the next part of the request's body. Returns whether it was the last one."""
        message = await self._next()
        if message.HasField("request_trailers"):
            self._has_trailers = True
            return True
        if not message.HasField("request_body"):
            raise ProtocolError("the request's body or trailers must follow its headers")
        body += message.request_body.body
        return self._mode.request_body == messages.BUFFERED or bool(message.request_body.end_of_stream)

    async def _wait_queued(self, reply: Awaitable[bytes]) -> bytes:
        """Returns the reply to a queued request. Raises ClientLeft if its client goes first."""
        queued = asyncio.ensure_future(reply)
        self._reader = asyncio.ensure_future(self._read())
        try:
            await asyncio.wait({queued, self._reader}, return_when=asyncio.FIRST_COMPLETED)
            if queued.done():
                return queued.result()
            if self._reader.result() is grpc.aio.EOF:
                raise ClientLeft
            raise ProtocolError("no message may follow the request's body before the answer to it")
        finally:
            queued.cancel()

    def _within(self, dispatch: Dispatch, subset: frozenset[str] | None, route: ApiRoute) -> Dispatch:
        """Returns the dispatch with engines of the subset only. Raises Answered if there is none."""
        if subset is None:
            return dispatch
        endpoints = tuple(address for address in dispatch.endpoints if address in subset)
        if not endpoints:
            message = "None of the engines that the gateway may use can serve the request now."
            raise self._rejected(Rejection(RejectionReason.NO_ENDPOINT, message, retry=UNKNOWN_TIME), route)
        return dispatch._replace(endpoints=endpoints)

    def _rejected(self, rejection: Rejection, route: ApiRoute) -> Answered:
        reply = read_decision(read_reply(self._picker.reject(rejection, route.shape)))
        assert isinstance(reply, Reply)
        return Answered(reply)

    # ---------------------------------------------------------------- engine and response

    async def _send(self, first: Any, dispatch: Dispatch, body: bytes) -> None:
        """Name the engine, and give the body back if the gateway does not keep it."""
        set_headers = dispatch.request_headers
        removed = removed_headers(self._client_headers, set_headers)
        if self._mode.request_body == messages.BUFFERED and not first.request_headers.end_of_stream:
            await self._write(messages.destination("request_body", dispatch.endpoints[0], set_headers, removed))
            return
        await self._write(messages.destination("request_headers", dispatch.endpoints[0], set_headers, removed))
        if not first.request_headers.end_of_stream:
            for part in messages.streamed_body("request_body", body, not self._has_trailers):
                await self._write(part)
        if self._has_trailers:
            await self._write(messages.proceed("request_trailers"))

    async def _follow_response(self, headers: Mapping[str, str], record: ExchangeRecord) -> None:
        """Pass the response on unchanged, with `headers` added, until it ends. Raises ClientLeft if it does not."""
        is_duplex = self._mode.response_body == messages.FULL_DUPLEX
        while not record.is_response_complete:
            message = await self._next()
            phase = message.WhichOneof("request")
            if phase == "response_headers":
                status, reason = messages.read_status(message)
                record.on_response_headers(status, messages.read_served(message), reason)
                answers = [messages.set_response_headers(headers)]
                is_last = message.response_headers.end_of_stream
            elif phase == "response_body":
                part, is_last = message.response_body.body, message.response_body.end_of_stream
                begun = record.on_response_body(part)
                if begun is not None and not is_last:
                    self._picker.reports.on_running_record(begun, time.monotonic())
                answers = list(messages.streamed_body(phase, part, is_last)) if is_duplex else [messages.proceed(phase)]
            else:
                answers, is_last = [messages.proceed(phase)], phase == "response_trailers"
            if is_last:
                record.on_response_end()  # first: the last answer lets the gateway end the stream
            for answer in answers:
                await self._write(answer)


def _too_large(route: ApiRoute, limit: int) -> Answered:
    message = f"The request body is larger than the limit of {limit} bytes (chart value gateway.maxBodyBytes)."
    error = plain_error(413, RejectionReason.BODY_TOO_LARGE.value, message, route.shape)
    return Answered(Reply(error.status, error.headers, error.body))
