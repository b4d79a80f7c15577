"""vLLM's HTTP API in front of the simulated engine: an ASGI application without a framework.

Problem: gateways, SDKs and the launcher's middleware must find what they find at vLLM, its faults included: while it
drains /health says 200 and a new request gets a 500; a stream that the engine ends says `abort` and then `[DONE]`; a
full queue is a 503, but inside a stream that has begun it is an event.
Idea: a table of paths, and one function for each of the two ways to answer.
"""

from __future__ import annotations

import asyncio
import importlib
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from types import SimpleNamespace
from typing import Any, Final

from simulated import answers, protocol
from simulated.driver import Driver
from simulated.exposition import CONTENT_TYPE
from simulated.options import Options
from simulated.protocol import Asked, Refused
from simulated.sequences import Sequence
from simulated.start import VERSION

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
JSON: Final = "application/json"
DEAD: Final = "EngineCore encountered an issue. See stack trace (above) for the root cause."
STOPPING: Final = "cannot schedule new futures after shutdown"
BUSY: Final = (
    "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
)
BACKLOG: Final = (
    "The engine has reached its prefill token backlog limit and cannot accept new requests. Please try again later or "
    "on a different instance."
)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class ClientGone(Exception):
    """The client closed its connection."""


class Generation:
    """The sequences of one request, and a way to wait for their news."""

    def __init__(self, driver: Driver, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.gone = False
        self._driver = driver
        self._news = asyncio.Event()
        for sequence in sequences:
            sequence.heard = self._news.set

    @property
    def over(self) -> bool:
        """Whether the last token has come out."""
        return all(sequence.outcome for sequence in self.sequences)

    async def news(self) -> None:
        """Waits for news; raises ClientGone, and Refused where the engine cannot go on."""
        await self._news.wait()
        self._news.clear()
        if self.gone:
            raise ClientGone
        if self._driver.dead and not self.over:
            raise protocol.internal(DEAD)
        if any(sequence.outcome == "error" for sequence in self.sequences):
            raise protocol.internal("Internal server error")

    def leave(self) -> None:
        """The client has gone."""
        self.gone = True
        self._news.set()

    def drop(self) -> None:
        """Nobody wants the answer any more."""
        for sequence in self.sequences:
            self._driver.drop(sequence)


class Api:
    """The application. `metrics` gives the text of /metrics."""

    def __init__(self, options: Options, driver: Driver, engine_id: str, metrics: Callable[[], bytes]) -> None:
        self.stopping = False
        self.state = SimpleNamespace(engine_client=self)
        self._options = options
        self._driver = driver
        self._engine_id = engine_id
        self._metrics = metrics
        self._created = int(time.time())
        self._get: dict[str, Callable[[], tuple[int, bytes, str]]] = {
            "/health": self._health,
            "/ping": self._health,
            "/metrics": self._scraped,
            "/version": self._version,
            "/v1/models": self._models,
        }
        self._post = {COMPLETIONS: False, CHAT: True}
        self._inner: App = self._serve
        for path in options.middleware:
            module, _, name = path.rpartition(".")
            self._inner = getattr(importlib.import_module(module), name)(self._inner)

    @property
    def errored(self) -> bool:
        """Whether the engine core has died; middleware asks by this name."""
        return self._driver.dead

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection event."""
        scope["app"] = self
        await self._inner(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path, method = scope["path"], scope["method"]
        try:
            if path in self._get and method in ("GET", "HEAD"):
                await respond(send, *self._get[path]())
            elif path in self._post and method == "POST":
                await self._generate(scope, receive, send, chat=self._post[path])
            else:
                known = path in self._get or path in self._post
                words = "Method Not Allowed" if known else "Not Found"
                await respond(send, 405 if known else 404, answers.dump({"detail": words}))
        except Refused as refused:
            await respond(send, refused.status, answers.dump(refused.document))
        except ClientGone:
            return

    def _health(self) -> tuple[int, bytes, str]:
        return (503 if self._driver.dead else 200), b"", JSON

    def _version(self) -> tuple[int, bytes, str]:
        """vLLM's version, and whose speed this engine has."""
        said = {"version": VERSION, "accelerator": self._options.profile.accelerator}
        return 200, answers.dump(said), JSON

    def _models(self) -> tuple[int, bytes, str]:
        options = self._options
        cards: list[dict[str, Any]] = [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "vllm",
                "root": options.model,
                "parent": None,
                "max_model_len": options.profile.max_model_len,
                "permission": [],
            }
            for name in options.names
        ]
        return 200, answers.dump({"object": "list", "data": cards}), JSON

    def _scraped(self) -> tuple[int, bytes, str]:
        self._driver.catch_up()
        return 200, self._metrics(), CONTENT_TYPE

    async def _generate(self, scope: Scope, receive: Receive, send: Send, chat: bool) -> None:
        arrived_s = self._driver.now()
        kind = _header(scope, b"content-type").split(";")[0].strip().lower()
        if kind != JSON:
            raise Refused(415, "Unsupported Media Type: Only 'application/json' is allowed", "Unsupported Media Type")
        body = await _body(receive)
        if self._driver.dead or self.stopping:
            raise protocol.internal(DEAD if self._driver.dead else STOPPING)
        asked = protocol.read(body, chat, self._options.names, self._options.profile.max_model_len)
        base = _header(scope, b"x-request-id") or asked.request_id or uuid.uuid4().hex
        name = f"{'chatcmpl' if chat else 'cmpl'}-{base}"
        generation = Generation(self._driver, self._sequences(asked, name, arrived_s))
        leaving = asyncio.ensure_future(_until_gone(receive, generation))
        try:
            await (self._stream if asked.stream else self._whole)(asked, name, generation, send)
        finally:
            leaving.cancel()
            generation.drop()

    def _sequences(self, asked: Asked, name: str, arrived_s: float) -> list[Sequence]:
        """The sequences of a request: each prompt `n` times."""
        prompts = [prompt for prompt in asked.prompts for _ in range(asked.n)]
        transfer = asked.transfer or {}
        return [
            Sequence(
                request_id=name if len(prompts) == 1 else f"{index}_{name}",
                prompt=prompt,
                max_tokens=asked.max_tokens,
                arrived_s=arrived_s,
                salt=asked.salt,
                streamed=asked.stream,
                remote=bool(transfer.get("do_remote_prefill")) and self._options.role in ("kv_consumer", "kv_both"),
                produce=bool(transfer.get("do_remote_decode")) and self._options.role in ("kv_producer", "kv_both"),
            )
            for index, prompt in enumerate(prompts)
        ]

    async def _begin(self, asked: Asked, generation: Generation) -> None:
        """Hands the sequences to the engine, unless it takes none."""
        options, driver = self._options, self._driver
        most, tokens = options.max_num_queued_reqs, options.max_num_queued_tokens
        if most is not None and len(driver.live) + len(generation.sequences) > most:
            raise self._rejected("max_num_queued_reqs", BUSY)
        asking = sum(sequence.prompt_tokens for sequence in generation.sequences)
        if tokens is not None and driver.backlog_tokens() + asking > tokens:
            raise self._rejected("max_num_queued_tokens", BACKLOG)
        profile = options.profile
        for sequence in generation.sequences:
            delay_s = (profile.frontend + profile.frontend_token * sequence.prompt_tokens) * options.time_scale
            if sequence.remote and asked.transfer is not None:
                await driver.submit_remote(sequence, asked.transfer, delay_s)
            else:
                driver.submit(sequence, delay_s)

    def _rejected(self, reason: str, words: str) -> Refused:
        self._driver.core.meters.rejected[reason] += 1
        return Refused(503, words, "Service Unavailable")

    async def _whole(self, asked: Asked, name: str, generation: Generation, send: Send) -> None:
        await self._begin(asked, generation)
        await generation.news()
        while not generation.over:
            await generation.news()
        self._finished(asked, generation)
        transfer = self._transfer(generation.sequences[0])
        await respond(send, 200, answers.whole(asked, name, int(time.time()), generation.sequences, transfer))

    async def _stream(self, asked: Asked, name: str, generation: Generation, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        events = answers.Stream(asked, name, int(time.time()), generation.sequences)
        end = b""
        try:
            await self._begin(asked, generation)
            while not end:
                await generation.news()
                body = events.news()
                if generation.over:
                    end = events.end()
                    self._finished(asked, generation)
                if body + end:
                    await send({"type": "http.response.body", "body": body + end, "more_body": True})
        except Refused as refused:
            await send({"type": "http.response.body", "body": answers.failure(refused), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _finished(self, asked: Asked, generation: Generation) -> None:
        seen = self._driver.core.meters.histograms
        seen["request_params_n"].observe(asked.n)
        seen["request_max_num_generation_tokens"].observe(max(one.emitted for one in generation.sequences))

    def _transfer(self, sequence: Sequence) -> dict[str, Any] | None:
        """What a decode engine needs to fetch the prompt's KV."""
        if not sequence.produce or sequence.outcome != "length":
            return None
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [self._driver.core.leases.blocks(sequence.request_id)],
            "remote_engine_id": self._engine_id,
            "remote_request_id": sequence.request_id,
            "remote_host": self._options.side_host,
            "remote_port": self._options.side_port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": sequence.prompt_tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }


async def respond(send: Send, status: int, body: bytes, kind: str = JSON) -> None:
    """Sends a whole answer."""
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _until_gone(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.leave()


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")
