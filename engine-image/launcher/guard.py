"""Watches what the engine sends and never lets a bad end look like a good one.

Errors are held back until they are whole, and sent in OpenAI's shape. Answers that are not streamed are held back as
well (they come in one piece anyway): one that was aborted becomes a 503. Streams pass as they come; a stream that ends
badly gets an error event and is then cut: we return without the last chunk, the server closes the connection, and the
client sees a broken transfer. Nothing is done for a client that has gone away itself.

A stream's headers wait for its first event: if that says that the engine is dead or full, nothing was promised yet, and
the answer becomes a 503 that the gateway may take to another engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from launcher import errors
from launcher.asgi import Headers, Message, Receive, Send, replaced, respond
from launcher.errors import Reason
from launcher.modelname import Rename, unchanged
from launcher.stream import ABORT, EVENT_END, FIRST_ERROR, StreamWatch, before_done

ABORTED = "The engine stopped before the answer was complete."
UNFINISHED = "The engine ended the stream before it was complete."
FAILED = "The engine failed while it was answering."
INTERNAL = "Internal server error"


class AnswerGuard:
    """One request's way back.

    `names`: the contract's headers. `generation` where the path makes completions; `dead` asks whether the engine is.
    `rename` puts the client's name of the model into answers.
    `impossible`: the error of a request that the engine's queue never has room for, None for others.
    """

    def __init__(
        self,
        send: Send,
        names: Mapping[str, str],
        count: Callable[[str], None],
        dead: Callable[[], bool],
        generation: bool,
        rename: Rename = unchanged,
        impossible: Callable[[], dict[str, Any] | None] = lambda: None,
    ) -> None:
        self._send = send
        self._names = names
        self._count = count
        self._dead = dead
        self._generation = generation
        self._rename = rename
        self._impossible = impossible
        self._gone = False
        self._start: Message | None = None
        self._held: list[bytes] | None = None
        self._watch: StreamWatch | None = None
        self._counted_error = False
        self._cut = False
        self._sent = False
        self._finished = False

    @property
    def finished(self) -> bool:
        """Whether nobody waits for this answer any more: it came whole, may be had elsewhere, or the client went."""
        return self._finished or self._gone

    def watching(self, receive: Receive) -> Receive:
        """The same `receive`, noticing a client that goes away."""

        async def watched() -> Message:
            message = await receive()
            self._gone = self._gone or message["type"] == "http.disconnect"
            return message

        return watched

    async def send(self, message: Message) -> None:
        """Takes a message from the engine's application."""
        if message["type"] == "http.response.start":
            await self._started(message)
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._held is not None:
            self._held.append(message.get("body", b""))
            if not message.get("more_body", False):
                await self._whole(b"".join(self._held))
        elif self._watch is not None:
            await self._streamed(message, self._watch)
        else:
            await self._forward(message)

    async def failed(self) -> None:
        """The application raised: the client gets an error if it can still get one."""
        if self._gone or self._cut:
            return
        if not self._sent and self._dead():
            await self._elsewhere(FAILED, Reason.ENGINE_FAILED, "engine_dead")
        elif not self._sent:
            await self._count_and_respond("exception", 500, INTERNAL, None)
        elif self._watch is not None and not self._watch.done:
            await self._break(FAILED, "exception", half_sent=not self._watch.between)

    async def _forward(self, message: Message) -> None:
        """Passes a part of the engine's answer on; the last one ends it."""
        await self._send(message)
        self._finished = not message.get("more_body", False)

    async def _started(self, message: Message) -> None:
        kind = next((value for key, value in message.get("headers", ()) if key.lower() == b"content-type"), b"")
        status = message["status"]
        if status >= 400 or (self._generation and status == 200 and kind.startswith(b"application/json")):
            self._start, self._held = message, []
            return
        if self._generation and kind.startswith(b"text/event-stream"):
            self._start, self._watch = message, StreamWatch()
            return
        self._sent = True
        await self._send(message)

    async def _whole(self, body: bytes) -> None:
        """An answer that was held back is complete."""
        start = self._start
        assert start is not None
        status, headers = start["status"], list(start.get("headers", ()))
        if status >= 500 and self._dead():
            words = errors.reshape(body, status)["error"]["message"]
            await self._elsewhere(words, Reason.ENGINE_FAILED, "engine_dead")
            return
        if status < 400 and ABORT in body and not self._gone:
            await self._count_and_respond("abort", 503, ABORTED, Reason.ABORTED)
            return
        if status >= 400 and body:
            document = errors.reshape(body, status)
            if status == 503:
                full = errors.queue_full(document["error"]["message"])
                if full and await self._final():
                    return
                reason = Reason.QUEUE_FULL if full else Reason.UNAVAILABLE
                headers = replaced(headers, errors.marks(self._names, reason, elsewhere=full))
                document["error"]["code"] = reason
            body = errors.dump(document)
            headers = replaced(
                headers, {b"content-type": b"application/json", b"content-length": str(len(body)).encode()}
            )
        elif status < 400:
            body = self._rename(body)
            if any(key.lower() == b"content-length" for key, _ in headers):
                headers = replaced(headers, {b"content-length": str(len(body)).encode()})
        await self._pass(start, headers, body)

    async def _pass(self, start: Message, headers: Headers, body: bytes) -> None:
        self._sent = True
        await self._send({**start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        self._finished = start["status"] < 500

    async def _count_and_respond(self, counted: str, status: int, words: str, reason: Reason | None) -> None:
        self._count(counted)
        self._sent = True
        told = {} if reason is None else errors.marks(self._names, reason)
        await respond(self._send, status, errors.dump(errors.error(words, status, code=reason)), told)

    async def _final(self) -> bool:
        """Refuses with 400 a request that a full queue is no reason to send again; False for others."""
        document = self._impossible()
        if document is None:
            return False
        self._sent = self._finished = True
        reason = Reason.REQUEST_TOO_LARGE.value.encode()
        headers = {b"x-should-retry": b"false", self._names["reason"].encode(): reason}
        await respond(self._send, 400, errors.dump(document), headers)
        return True

    async def _elsewhere(self, words: str, reason: Reason, counted: str) -> None:
        """A 503 with the mark that lets the gateway try another engine; the engine's own answer is dropped."""
        self._count(counted)
        self._sent = self._cut = True
        marks = errors.marks(self._names, reason, elsewhere=True) | {b"connection": b"close"}
        await respond(self._send, 503, errors.dump(errors.error(words, 503, code=reason)), marks)
        self._finished = True

    async def _begin(self, chunk: bytes) -> None:
        """The first bytes of a stream: its headers go out now, unless these say that nothing will follow."""
        start, self._start = self._start, None
        assert start is not None
        if chunk.startswith(FIRST_ERROR) and not self._gone:
            words = errors.of_event(chunk)
            if self._dead():
                await self._elsewhere(words, Reason.ENGINE_FAILED, "engine_dead")
                return
            if errors.queue_full(words):
                if await self._final():
                    self._cut = True
                    return
                await self._elsewhere(words, Reason.QUEUE_FULL, "engine_error")
                return
        self._sent = True
        await self._send(start)

    async def _streamed(self, message: Message, watch: StreamWatch) -> None:
        chunk = self._rename(message.get("body", b""))
        message = {**message, "body": chunk}
        if self._start is not None and (chunk or not message.get("more_body", False)):
            await self._begin(chunk)
        if self._cut or self._start is not None:
            return
        end = watch.abort_ends(chunk)
        watch.feed(chunk)
        if self._gone:
            await self._send(message)
        elif watch.aborted:
            await self._aborted(message, chunk, end)
        elif watch.error and not self._counted_error:
            await self._error_event(message, chunk)
        elif not message.get("more_body", False) and not watch.done:
            await self._send({**message, "more_body": True})
            await self._break(UNFINISHED, "unfinished", half_sent=not watch.between)
        else:
            await self._forward(message)

    async def _aborted(self, message: Message, chunk: bytes, end: int) -> None:
        """Sends the aborted event to its end, which may be in a later chunk, then breaks the stream."""
        last = not message.get("more_body", False)
        await self._send({**message, "body": chunk[:end] if end >= 0 else chunk, "more_body": True})
        if end >= 0 or last:
            await self._break(ABORTED, "abort", half_sent=end < 0)

    async def _error_event(self, message: Message, chunk: bytes) -> None:
        """vLLM's own error event: clients notice it, so it may end well, unless the whole engine is dead."""
        self._counted_error = True
        if chunk.startswith(b"data: "):
            chunk = errors.reshape_event(chunk)
        if self._dead():
            self._count("engine_dead")
            self._cut = True
            await self._send({**message, "body": before_done(chunk), "more_body": True})
            return
        self._count("engine_error")
        await self._forward({**message, "body": chunk})

    async def _break(self, words: str, reason: str, half_sent: bool) -> None:
        """Tells the client that its stream is broken, and sees to it that nothing follows."""
        self._count(reason)
        self._cut = True
        event = (EVENT_END if half_sent else b"") + errors.event(words, "engine_stopped")
        await self._send({"type": "http.response.body", "body": event, "more_body": True})
