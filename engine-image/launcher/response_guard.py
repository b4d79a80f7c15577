"""Checks the engine's responses, so that a failed one never looks successful.

Errors are buffered until they are complete, and sent in the format of the path's API. Responses that are not streamed
are buffered as well (they come in one piece anyway): an aborted one becomes a 503. Streams pass as they come. A stream
that fails gets an error event and is then cut: without the last chunk the server closes the connection, and the client
gets a broken transfer. Nothing is done for a client that has disconnected.

A stream's headers wait for its first event: if that reports a dead or full engine, nothing has been sent yet, and the
response becomes a 503 after which the gateway may try another engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from launcher import api_formats, errors
from launcher.api_formats import ApiFormat
from launcher.asgi import Headers, Message, Receive, Send, replace_headers, send_json
from launcher.errors import RejectionReason
from launcher.modelname import Rename, unchanged
from launcher.stream_scanner import EVENT_END, StreamScanner, strip_done

ABORTED_MESSAGE = "The engine stopped before the answer was complete."
UNFINISHED_MESSAGE = "The engine ended the stream before it was complete."
FAILED_MESSAGE = "The engine failed while it was answering."
INTERNAL_ERROR_MESSAGE = "Internal server error"


class ResponseGuard:
    """Response path of one request.

    header_names: headers of the contract. path: of the request; it decides the API. is_engine_dead: whether the engine
    process has ended. rename: puts the client's model name into responses. impossible: the error of a request for which
    the engine's queue never has room, None for others. next_engine: seconds until another engine is ready if this is
    the only one, else empty.
    """

    def __init__(
        self,
        send: Send,
        header_names: Mapping[str, str],
        count_error: Callable[[str], None],
        is_engine_dead: Callable[[], bool],
        path: str,
        rename: Rename = unchanged,
        impossible: Callable[[], dict[str, Any] | None] = lambda: None,
        next_engine: str = "",
    ) -> None:
        self._send = send
        self._header_names = header_names
        self._count_error = count_error
        self._is_engine_dead = is_engine_dead
        self._path = path
        self._api: ApiFormat | None = api_formats.FORMATS.get(path)  # None for a path without generation
        self._rename = rename
        self._impossible = impossible
        self._next_engine = next_engine
        self._client_gone = False
        self._buffered_start: Message | None = None
        self._buffered_body: list[bytes] | None = None
        self._scanner: StreamScanner | None = None
        self._error_counted = False
        self._aborted_stream = False
        self._headers_sent = False
        self._finished = False

    @property
    def finished(self) -> bool:
        """Whether the response is over: it is complete, may be retried elsewhere, or the client disconnected."""
        return self._finished or self._client_gone

    def watch_disconnect(self, receive: Receive) -> Receive:
        """Return the same `receive`, which also detects a disconnect of the client."""

        async def watched() -> Message:
            message = await receive()
            self._client_gone = self._client_gone or message["type"] == "http.disconnect"
            return message

        return watched

    async def send(self, message: Message) -> None:
        """Process a message from the engine's application."""
        if message["type"] == "http.response.start":
            await self._on_start(message)
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._buffered_body is not None:
            self._buffered_body.append(message.get("body", b""))
            if not message.get("more_body", False):
                await self._send_complete(b"".join(self._buffered_body))
        elif self._scanner is not None:
            await self._on_chunk(message, self._scanner)
        else:
            await self._forward(message)

    async def on_exception(self) -> None:
        """Send the client an error, if it can still get one, after an exception of the application."""
        if self._client_gone or self._aborted_stream:
            return
        if not self._headers_sent and self._is_engine_dead():
            await self._reject_retryable(FAILED_MESSAGE, RejectionReason.ENGINE_FAILED, "engine_dead")
        elif not self._headers_sent:
            await self._count_and_respond("exception", 500, INTERNAL_ERROR_MESSAGE, None)
        elif self._scanner is not None and not self._scanner.done:
            await self._break_stream(FAILED_MESSAGE, "exception", half_sent=not self._scanner.at_event_boundary)

    async def _forward(self, message: Message) -> None:
        """Forward a part of the engine's response; the last one ends it."""
        await self._send(message)
        self._finished = not message.get("more_body", False)

    async def _on_start(self, message: Message) -> None:
        kind = next((value for key, value in message.get("headers", ()) if key.lower() == b"content-type"), b"")
        status = message["status"]
        is_read = self._api is not None or self._rename is not unchanged
        if status >= 400 or (is_read and status == 200 and kind.startswith(b"application/json")):
            self._buffered_start, self._buffered_body = message, []
            return
        if self._api is not None and kind.startswith(b"text/event-stream"):
            self._buffered_start, self._scanner = message, StreamScanner(self._api)
            return
        self._headers_sent = True
        await self._send(message)

    async def _send_complete(self, body: bytes) -> None:
        """Send a buffered response that is complete."""
        start = self._buffered_start
        assert start is not None
        status, headers = start["status"], list(start.get("headers", ()))
        if status >= 500 and self._is_engine_dead():
            text = errors.to_openai_error(body, status)["error"]["message"]
            await self._reject_retryable(text, RejectionReason.ENGINE_FAILED, "engine_dead")
            return
        is_aborted = status < 400 and self._api is not None and self._api.is_aborted(body)
        if is_aborted and not self._client_gone:
            await self._count_and_respond("abort", 503, ABORTED_MESSAGE, RejectionReason.ABORTED)
            return
        if status >= 400 and body:
            document = errors.to_openai_error(body, status)
            if status == 503:
                message = document["error"]["message"]
                is_queue_full = errors.is_queue_full(message)
                if is_queue_full and await self._final():
                    return
                reason = RejectionReason.QUEUE_FULL if is_queue_full else RejectionReason.UNAVAILABLE
                headers = replace_headers(
                    headers,
                    errors.rejection_headers(
                        self._header_names, reason, retry_elsewhere=is_queue_full or errors.is_scaling(message)
                    ),
                )
                document["error"]["code"] = reason
            body = api_formats.error_body(document, status, self._path)
            headers = replace_headers(
                headers, {b"content-type": b"application/json", b"content-length": str(len(body)).encode()}
            )
        elif status < 400:
            body = self._rename(body)
            if any(key.lower() == b"content-length" for key, _ in headers):
                headers = replace_headers(headers, {b"content-length": str(len(body)).encode()})
        await self._send_response(start, headers, body)

    async def _send_response(self, start: Message, headers: Headers, body: bytes) -> None:
        self._headers_sent = True
        await self._send({**start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        self._finished = start["status"] < 500

    async def _count_and_respond(
        self, error_label: str, status: int, text: str, reason: RejectionReason | None
    ) -> None:
        self._count_error(error_label)
        self._headers_sent = True
        headers = (
            {} if reason is None else errors.rejection_headers(self._header_names, reason, False, self._next_engine)
        )
        document = errors.error_document(text, status, code=reason)
        await send_json(self._send, status, api_formats.error_body(document, status, self._path), headers)

    async def _final(self) -> bool:
        """Reject with 400 a request that the engine can never accept; returns False for others."""
        document = self._impossible()
        if document is None:
            return False
        self._headers_sent = self._finished = True
        reason = RejectionReason.REQUEST_TOO_LARGE.value.encode()
        headers = {b"x-should-retry": b"false", self._header_names["reason"].encode(): reason}
        await send_json(self._send, 400, api_formats.error_body(document, 400, self._path), headers)
        return True

    async def _reject_retryable(self, text: str, reason: RejectionReason, error_label: str) -> None:
        """Send a 503 with the mark that lets the gateway try another engine; the engine's own response is dropped."""
        self._count_error(error_label)
        self._headers_sent = self._aborted_stream = True
        retry = errors.rejection_headers(self._header_names, reason, True, self._next_engine)
        headers = retry | {b"connection": b"close"}
        document = errors.error_document(text, 503, code=reason)
        await send_json(self._send, 503, api_formats.error_body(document, 503, self._path), headers)
        self._finished = True

    async def _send_start(self, chunk: bytes) -> None:
        """Send the headers of a stream with its first bytes, unless these show that nothing will follow."""
        start, self._buffered_start = self._buffered_start, None
        assert start is not None
        assert self._api is not None
        if chunk.startswith(self._api.error_mark[1:]) and not self._client_gone:
            text = api_formats.event_message(chunk)
            if self._is_engine_dead():
                await self._reject_retryable(text, RejectionReason.ENGINE_FAILED, "engine_dead")
                return
            if errors.is_queue_full(text):
                if await self._final():
                    self._aborted_stream = True
                    return
                await self._reject_retryable(text, RejectionReason.QUEUE_FULL, "engine_error")
                return
            if self._api is api_formats.ANTHROPIC:  # vLLM loses the words of a full queue on the way to this API
                await self._reject_retryable(text, RejectionReason.UNAVAILABLE, "engine_error")
                return
        self._headers_sent = True
        await self._send(start)

    async def _on_chunk(self, message: Message, scanner: StreamScanner) -> None:
        chunk = self._rename(message.get("body", b""))
        message = {**message, "body": chunk}
        if self._buffered_start is not None and (chunk or not message.get("more_body", False)):
            await self._send_start(chunk)
        if self._aborted_stream or self._buffered_start is not None:
            return
        aborted_end = scanner.aborted_event_end(chunk)
        scanner.feed(chunk)
        if self._client_gone:
            await self._send(message)
        elif scanner.aborted:
            await self._send_aborted(message, chunk, aborted_end)
        elif scanner.error and not self._error_counted:
            await self._on_error_event(message, chunk)
        elif not message.get("more_body", False) and not scanner.done:
            await self._send({**message, "more_body": True})
            await self._break_stream(UNFINISHED_MESSAGE, "unfinished", half_sent=not scanner.at_event_boundary)
        else:
            await self._forward(message)

    async def _send_aborted(self, message: Message, chunk: bytes, aborted_end: int) -> None:
        """Send the aborted event to its end, which may be in a later chunk, then cut the stream."""
        last = not message.get("more_body", False)
        await self._send({**message, "body": chunk[:aborted_end] if aborted_end >= 0 else chunk, "more_body": True})
        if aborted_end >= 0 or last:
            await self._break_stream(ABORTED_MESSAGE, "abort", half_sent=aborted_end < 0)

    async def _on_error_event(self, message: Message, chunk: bytes) -> None:
        """Process vLLM's own error event. Clients detect it, so the stream may end normally unless the
        engine is dead.
        """
        self._error_counted = True
        assert self._api is not None
        if self._api is api_formats.OPENAI and chunk.startswith(b"data: "):
            chunk = errors.to_openai_event(chunk)
        if self._is_engine_dead():
            self._count_error("engine_dead")
            self._aborted_stream = True
            await self._send({**message, "body": strip_done(chunk, self._api), "more_body": True})
            return
        self._count_error("engine_error")
        await self._forward({**message, "body": chunk})

    async def _break_stream(self, text: str, reason: str, half_sent: bool) -> None:
        """Send an error event and cut the stream."""
        self._count_error(reason)
        self._aborted_stream = True
        assert self._api is not None
        event = (EVENT_END if half_sent else b"") + self._api.error_event(text, "engine_stopped")
        await self._send({"type": "http.response.body", "body": event, "more_body": True})
