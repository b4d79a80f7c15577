"""A bench for the middleware: a client, an engine that says what the test wants, and prefill engines on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry

from launcher import contract
from launcher.asgi import Message, Receive, Scope, Send
from launcher.middleware import MiddlewareConfig, Plimsoll
from launcher.middleware_metrics import MiddlewareMetrics
from launcher.pod_state import PodState

CONTRACT = contract.load({})
COMPLETIONS = "/v1/completions"
CHAT_PATH = "/v1/chat/completions"
PARAMS = {"do_remote_prefill": True, "remote_block_ids": [[2, 3]], "remote_engine_id": "e-1", "remote_port": 5600}
DONE_EVENT = b"data: [DONE]\n\n"


def event(**fields: Any) -> bytes:
    """A stream event as vLLM writes it: compact JSON."""
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


def token_event(text: str = " a", finish: str | None = None) -> bytes:
    """A stream event with one token."""
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish}])


@dataclass
class FakeEngine:
    """An ASGI application in vLLM's place; `script` answers, `requests` are the bodies that reached it."""

    script: Callable[[Scope, Receive, Send], Awaitable[None]]
    requests: list[Any] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    scopes: list[Scope] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reads the request and answers it."""
        message = await receive()
        self.scopes.append(scope)
        self.raw.append(message.get("body", b""))
        try:
            self.requests.append(json.loads(self.raw[-1]))
        except (ValueError, RecursionError):
            self.requests.append(None)
        await self.script(scope, receive, send)


def respond_with(status: int, body: bytes, kind: str = "application/json") -> FakeEngine:
    """An engine with one whole answer."""

    async def script(_: Scope, __: Receive, send: Send) -> None:
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    return FakeEngine(script)


def completion_engine(finish: str = "length") -> FakeEngine:
    """An engine that answers a completion in one piece."""
    choice = {"index": 0, "text": " a", "finish_reason": finish}
    return respond_with(200, json.dumps({"choices": [choice]}, separators=(",", ":")).encode())


def streaming_engine(chunks: Iterable[bytes], end: Exception | None = None) -> FakeEngine:
    """An engine that streams chunks and ends, or raises."""

    async def script(_: Scope, __: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        if end is not None:
            raise end
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return FakeEngine(script)


@dataclass
class Exchange:
    """What a client got: `complete` only if the last chunk came."""

    messages: list[Message] = field(default_factory=list)

    @property
    def status(self) -> int:
        """The status code; 0 where no answer was begun."""
        return int(self.messages[0]["status"]) if self.messages else 0

    @property
    def headers(self) -> dict[str, str]:
        """The answer's headers."""
        return {key.decode(): value.decode() for key, value in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        """All bytes that came."""
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def events(self) -> list[str]:
        """The data of the stream's events."""
        return [part.removeprefix("data: ") for part in self.body.decode().split("\n\n") if part]

    @property
    def complete(self) -> bool:
        """Whether the answer ended with its last chunk."""
        return bool(self.messages) and not self.messages[-1].get("more_body", True)


@dataclass
class MiddlewareHarness:
    """The middleware in front of an engine; `is_sleeping` is what the engine core is asked."""

    engine: FakeEngine
    config: MiddlewareConfig
    registry: CollectorRegistry
    app: Plimsoll
    errored: bool = False
    is_sleeping: Callable[[], Awaitable[bool]] | None = None

    async def send(
        self,
        body: Any,
        path: str = COMPLETIONS,
        headers: dict[str, str] | None = None,
        gone: asyncio.Event | None = None,
        method: str = "POST",
        pieces: int = 1,
        client: tuple[str, int] | None = None,
    ) -> Exchange:
        """One request; `gone` is when the client closes its connection (never, if not given)."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        exchange, left = Exchange(), gone or asyncio.Event()
        size = -(-len(raw) // pieces) or 1
        parts = [raw[start : start + size] for start in range(0, len(raw), size)] or [b""]
        pending: list[Message] = [
            {"type": "http.request", "body": part, "more_body": number < len(parts) - 1}
            for number, part in enumerate(parts)
        ]

        async def receive() -> Message:
            if pending:
                return pending.pop(0)
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            exchange.messages.append(message)

        sent = {"content-type": "application/json", **(headers or {})}
        engine_client = SimpleNamespace(errored=self.errored, is_sleeping=self.is_sleeping)
        app = SimpleNamespace(state=SimpleNamespace(engine_client=engine_client))
        scope: Scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [(key.encode(), value.encode()) for key, value in sent.items()],
            "app": app,
            "client": client,
        }
        await self.app(scope, receive, send)
        return exchange

    def count(self, metric: str, **labels: str) -> float:
        """A counter of the middleware."""
        return self.registry.get_sample_value(CONTRACT.metrics[metric], labels) or 0.0


ADDRESS = "10.0.0.7:8000"  # of the engine under test, as the gateway knows it


@asynccontextmanager
async def make_harness(
    engine: FakeEngine,
    role: str,
    folder: Path,
    deadline: float = 5.0,
    names: tuple[str, ...] = (),
    queue_limit: int | None = None,
    by_priority: bool = False,
) -> AsyncIterator[MiddlewareHarness]:
    """The middleware of a role, with its own registry and state folder."""
    registry = CollectorRegistry()
    state = PodState(folder / "state")
    state.reset()
    config = MiddlewareConfig(
        role,
        ADDRESS,
        deadline,
        1 << 20,
        CONTRACT,
        state,
        MiddlewareMetrics(CONTRACT, registry),
        names,
        queue_limit,
        by_priority=by_priority,
    )
    app = Plimsoll(engine, config)
    yield MiddlewareHarness(engine, config, registry, app)
    await app.close()


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class PrefillPeer:
    """A prefill engine on loopback: its address, and the requests it got (path, headers, body)."""

    address: str
    requests: list[tuple[str, dict[str, str], Any]]


@asynccontextmanager
async def prefill_peer(handler: Handler) -> AsyncIterator[PrefillPeer]:
    """A prefill engine that answers as the test says."""
    requests: list[tuple[str, dict[str, str], Any]] = []

    async def serve(request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        requests.append((request.path, headers, await request.json()))
        return await handler(request)

    app = web.Application()
    app.router.add_post("/{path:.*}", serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield PrefillPeer(f"127.0.0.1:{port}", requests)
    await runner.cleanup()


def respond_json(status: int, body: Any) -> Handler:
    """A prefill engine's answer, always the same; bytes are sent as they are."""

    async def handler(_: web.Request) -> web.StreamResponse:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return web.Response(status=status, body=raw, content_type="application/json")

    return handler


def healthy_prefill() -> Handler:
    """A prefill engine that has done its part."""
    return respond_json(200, {"choices": [{"finish_reason": "length"}], "kv_transfer_params": PARAMS})
