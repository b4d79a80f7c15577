"""A small server on loopback that answers like an engine, or goes wrong in a named way."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class FakeEngineServer:
    """Answers by the prompt's first word: `whole`, `cut`, `clean` (no [DONE]), `error`, `busy`, `hang`, `drop`."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[dict[str, str]] = []
        self.at_once = 0
        self.most_at_once = 0

    @contextmanager
    def running(self) -> Iterator[str]:
        """The URL while it runs, in a thread of its own."""
        urls: queue.Queue[str] = queue.Queue()
        thread = threading.Thread(target=lambda: asyncio.run(self._run(urls)), daemon=True)
        thread.start()
        yield urls.get(timeout=60)
        self._loop.call_soon_threadsafe(self._end.set)
        thread.join(10)

    async def _run(self, urls: queue.Queue[str]) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            urls.put(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            await self._end.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(
                    int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
                )
                lines = (line.split(": ", 1) for line in head.decode().splitlines() if ": " in line)
                self.heads.append({name.lower(): value for name, value in lines})
                body = json.loads(await reader.readexactly(length))
                self.bodies.append(body)
                self.at_once += 1
                self.most_at_once = max(self.at_once, self.most_at_once)
                goes_on = await self._respond(body, writer)
                self.at_once -= 1
                if not goes_on:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _respond(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        text = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        kind = text.split()[0]
        if kind == "drop":
            return False
        if kind == "hang":
            await asyncio.Event().wait()
        if kind == "busy":
            writer.write(
                b"HTTP/1.1 503 Busy\r\nretry-after: 1\r\nx-plimsoll-reason: overloaded\r\ncontent-length: 4\r\n\r\nbusy"
            )
            await writer.drain()
            return True
        if not body.get("stream"):
            writer.write(_whole(body["max_tokens"], cut=kind == "cut"))
            await writer.drain()
            return kind != "cut"
        writer.write(_OK)
        await asyncio.sleep(0)
        for event in _events(kind, body["max_tokens"]):
            writer.write(b"%x\r\n%s\r\n" % (len(event), event))
        if kind == "cut":
            await writer.drain()
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def _whole(tokens: int, *, cut: bool) -> bytes:
    """A response that is not streamed, with its head; cut in its middle if so."""
    choice = {"message": {"content": "a" * tokens}, "finish_reason": "length"}
    body = json.dumps(
        {"model": "m", "choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}}
    ).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    return head + (body[: len(body) // 2] if cut else body)


def _events(kind: str, tokens: int) -> list[bytes]:
    said = [
        {"choices": [{"delta": {"content": "a"}, "finish_reason": "length" if n == tokens - 1 else None}]}
        for n in range(tokens)
    ]
    usage: dict[str, Any] = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}}
    events = [_data(e) for e in [*said, usage]]
    if kind == "cut":
        return events[:1]
    if kind == "error":
        return [events[0], _data({"error": {"message": "dead"}}), b"data: [DONE]\n\n"]
    return events if kind == "clean" else [*events, b"data: [DONE]\n\n"]


def _data(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"
