"""vLLM's HTTP API in front of the simulated engine: an ASGI application without a framework.

Problem: gateways, SDKs and the launcher's middleware need vLLM's behaviour, its faults included: while it drains,
/health is 200 and a new request gets a 500; a stream that the engine ends says `abort` and then `[DONE]`; a full queue
is a 503, but an event inside a stream that has begun. Idea: a table of paths, and one function for each of the two
kinds of response.
"""

from __future__ import annotations

import asyncio
import importlib
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final

from plimsoll.engines import vllm
from simulated import protocol, responses, task_dialects
from simulated.cold_start import VERSION
from simulated.dialects import CHAT_PATH, MESSAGES_PATH, Dialect
from simulated.exposition import CONTENT_TYPE
from simulated.lora import PATHS as LORA_PATHS
from simulated.lora import LoadedAdapters
from simulated.options import EngineOptions
from simulated.protocol import GenerationRequest, RequestError
from simulated.real_time_driver import RealTimeDriver
from simulated.sequence import ServedSequence

JSON_CONTENT_TYPE: Final = "application/json"
TEXT_TYPE: Final = "text/plain; charset=utf-8"
ENGINE_DEAD_MESSAGE: Final = "EngineCore encountered an issue. See stack trace (above) for the root cause."
STOPPING_MESSAGE: Final = "cannot schedule new futures after shutdown"
QUEUE_FULL_MESSAGE: Final = (
    "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
)
BACKLOG_FULL_MESSAGE: Final = (
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
    """The sequences of one request, and a way to wait for their updates."""

    def __init__(self, driver: RealTimeDriver, sequences: list[ServedSequence]) -> None:
        self.sequences = sequences
        self.client_gone = False
        self._driver = driver
        self._updated = asyncio.Event()
        for sequence in sequences:
            sequence.on_update = self._updated.set

    @property
    def is_complete(self) -> bool:
        """Whether the last token has been generated."""
        return all(sequence.outcome for sequence in self.sequences)

    async def wait_for_update(self) -> None:
        """Wait for an update; raises ClientGone, and RequestError if the engine cannot continue."""
        await self._updated.wait()
        self._updated.clear()
        if self.client_gone:
            raise ClientGone
        if self._driver.dead and not self.is_complete:
            raise protocol.internal_error(ENGINE_DEAD_MESSAGE)
        if any(sequence.outcome == "error" for sequence in self.sequences):
            raise protocol.internal_error("Internal server error")

    def on_disconnect(self) -> None:
        """Handle a disconnect of the client."""
        self.client_gone = True
        self._updated.set()

    def abort(self) -> None:
        """Abort all sequences."""
        for sequence in self.sequences:
            self._driver.abort_sequence(sequence)


class OpenAiApi:
    """The application. `metrics` gives the text of /metrics."""

    def __init__(
        self, options: EngineOptions, driver: RealTimeDriver, engine_id: str, metrics: Callable[[], bytes]
    ) -> None:
        self.stopping = False
        self.state = SimpleNamespace(engine_client=self)
        self._options = options
        self._driver = driver
        self._engine_id = engine_id
        self._metrics = metrics
        self._created = int(time.time())
        self._adapters = LoadedAdapters(options.lora)
        self._get_routes: dict[str, Callable[[], tuple[int, bytes, str]]] = {
            "/health": self._health,
            "/ping": self._health,
            "/metrics": self._metrics_response,
            "/version": self._version,
            "/v1/models": self._models,
        }
        self._post_routes = task_dialects.POOLING if options.is_pooling else task_dialects.GENERATION
        self._app: App = self._serve
        for path in options.middleware:
            module, _, name = path.rpartition(".")
            self._app = getattr(importlib.import_module(module), name)(self._app)

    @property
    def errored(self) -> bool:
        """Whether the engine core has died; middleware asks by this name."""
        return self._driver.dead

    async def is_sleeping(self) -> bool:
        """False, and between two steps as in vLLM: middleware asks the core by this name."""
        await self._driver.wait_for_core()
        return False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection event."""
        scope["app"] = self
        await self._app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path, method = scope["path"], scope["method"]
        dialect = self._post_routes.get(path)
        try:
            if path in self._get_routes and method in ("GET", "HEAD"):
                await send_response(send, *self._get_routes[path]())
            elif dialect is not None and method == "POST":
                await self._generate(scope, receive, send, dialect)
            elif path in LORA_PATHS and method == "POST" and self._adapters.enabled:
                await send_response(send, 200, await self._adapters.respond(path, await _body(receive)), TEXT_TYPE)
            elif path in task_dialects.TOKEN_PATHS and method == "POST":
                options = self._options
                names, context = options.served_names, options.profile.max_model_len
                await send_response(
                    send, 200, task_dialects.tokens_response(path, await _body(receive), names, context)
                )
            else:
                known = path in self._get_routes or dialect is not None or path in task_dialects.TOKEN_PATHS
                detail = "Method Not Allowed" if known else "Not Found"
                await send_response(send, 405 if known else 404, responses.to_json({"detail": detail}))
        except RequestError as error:
            is_message = path.startswith(MESSAGES_PATH)
            shape = task_dialects.GENERATION[MESSAGES_PATH if is_message else CHAT_PATH]
            await send_response(send, error.status, shape.error_body(error))
        except ClientGone:
            return

    def _health(self) -> tuple[int, bytes, str]:
        return (503 if self._driver.dead else 200), b"", JSON_CONTENT_TYPE

    def _version(self) -> tuple[int, bytes, str]:
        """Return vLLM's version, and the hardware profile of this engine."""
        document = {"version": VERSION, "accelerator": self._options.profile.accelerator}
        return 200, responses.to_json(document), JSON_CONTENT_TYPE

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
            for name in options.served_names
        ]
        cards += self._adapters.cards(options.served_names[0], self._created)
        return 200, responses.to_json({"object": "list", "data": cards}), JSON_CONTENT_TYPE

    def _metrics_response(self) -> tuple[int, bytes, str]:
        self._driver.catch_up()
        return 200, self._metrics(), CONTENT_TYPE

    async def _generate(self, scope: Scope, receive: Receive, send: Send, dialect: Dialect) -> None:
        arrived_s = self._driver.now()
        content_type = _header(scope, b"content-type").split(";")[0].strip().lower()
        if content_type != JSON_CONTENT_TYPE and scope["path"] not in task_dialects.AUDIO_PATHS:
            raise RequestError(
                415, "Unsupported Media Type: Only 'application/json' is allowed", "Unsupported Media Type"
            )
        body = await _body(receive)
        if self._driver.dead or self.stopping:
            raise protocol.internal_error(ENGINE_DEAD_MESSAGE if self._driver.dead else STOPPING_MESSAGE)
        adapter = self._adapters.named_in(body)
        names = (adapter,) if adapter else self._options.served_names
        request = dialect.parse(body, names, self._options.profile.max_model_len)
        if adapter:
            request = replace(request, salt=f"{adapter}\n{request.salt}", adapter=adapter)
        base = _header(scope, b"x-request-id") or request.request_id or uuid.uuid4().hex
        name = f"{dialect.prefix}-{base}"
        generation = Generation(self._driver, self._sequences(request, name, arrived_s))
        disconnect_watch = asyncio.ensure_future(_until_gone(receive, generation))
        try:
            await (self._stream if request.stream else self._respond_complete)(dialect, request, name, generation, send)
        finally:
            disconnect_watch.cancel()
            generation.abort()

    def _sequences(self, request: GenerationRequest, name: str, arrived_s: float) -> list[ServedSequence]:
        """Return the sequences of a request: each prompt `n` times."""
        prompts = [prompt for prompt in request.prompts for _ in range(request.n)]
        transfer = request.transfer or {}
        return [
            ServedSequence(
                request_id=name if len(prompts) == 1 else f"{index}_{name}",
                prompt=prompt,
                max_tokens=request.max_tokens,
                arrived_s=arrived_s,
                salt=request.salt,
                streamed=request.stream,
                remote=bool(transfer.get("do_remote_prefill"))
                and self._options.kv_role in (vllm.KV_CONSUMER, vllm.KV_BOTH),
                keeps_kv=bool(transfer.get("do_remote_decode"))
                and self._options.kv_role in (vllm.KV_PRODUCER, vllm.KV_BOTH),
                adapter=request.adapter,
            )
            for index, prompt in enumerate(prompts)
        ]

    async def _submit(self, request: GenerationRequest, generation: Generation) -> None:
        """Submit the sequences to the engine; raises RequestError if it accepts none."""
        options, driver = self._options, self._driver
        max_requests, max_tokens = options.max_num_queued_reqs, options.max_num_queued_tokens
        if max_requests is not None and len(driver.live) + len(generation.sequences) > max_requests:
            raise self._rejected("max_num_queued_reqs", QUEUE_FULL_MESSAGE)
        new_tokens = sum(sequence.prompt_tokens for sequence in generation.sequences)
        if max_tokens is not None and driver.backlog_tokens() + new_tokens > max_tokens:
            raise self._rejected("max_num_queued_tokens", BACKLOG_FULL_MESSAGE)
        profile = options.profile
        for sequence in generation.sequences:
            delay_s = (profile.frontend + profile.frontend_token * sequence.prompt_tokens) * options.time_scale
            if sequence.remote and request.transfer is not None:
                await driver.submit_remote(sequence, request.transfer, delay_s)
            else:
                driver.submit(sequence, delay_s)

    def _rejected(self, reason: str, message: str) -> RequestError:
        self._driver.core.metrics.rejected[reason] += 1
        return RequestError(503, message, "Service Unavailable")

    async def _respond_complete(
        self, dialect: Dialect, request: GenerationRequest, name: str, generation: Generation, send: Send
    ) -> None:
        await self._submit(request, generation)
        await generation.wait_for_update()
        while not generation.is_complete:
            await generation.wait_for_update()
        self._record_request(request, generation)
        transfer = self._transfer_params(generation.sequences[0])
        await send_response(
            send, 200, dialect.complete(request, name, int(time.time()), generation.sequences, transfer)
        )

    async def _stream(
        self, dialect: Dialect, request: GenerationRequest, name: str, generation: Generation, send: Send
    ) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        events = dialect.stream(request, name, int(time.time()), generation.sequences)
        end = b""
        try:
            await self._submit(request, generation)
            while not end:
                await generation.wait_for_update()
                body = events.new_events()
                if generation.is_complete:
                    end = events.final_events()
                    self._record_request(request, generation)
                if body + end:
                    await send({"type": "http.response.body", "body": body + end, "more_body": True})
        except RequestError as error:
            await send({"type": "http.response.body", "body": dialect.error_events(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _record_request(self, request: GenerationRequest, generation: Generation) -> None:
        histograms = self._driver.core.metrics.histograms
        histograms["request_params_n"].observe(request.n)
        histograms["request_max_num_generation_tokens"].observe(max(one.emitted_tokens for one in generation.sequences))

    def _transfer_params(self, sequence: ServedSequence) -> dict[str, Any] | None:
        """Return the parameters with which a decode engine fetches the prompt's KV."""
        if not sequence.keeps_kv or sequence.outcome != "length":
            return None
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[*range(self._driver.core.kv_cache.blocks_for(sequence.prompt_tokens))]],
            "remote_engine_id": self._engine_id,
            "remote_request_id": sequence.request_id,
            "remote_host": self._options.side_channel_host,
            "remote_port": self._options.side_channel_port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": sequence.prompt_tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }


async def send_response(send: Send, status: int, body: bytes, content_type: str = JSON_CONTENT_TYPE) -> None:
    """Send a complete response."""
    headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
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
    generation.on_disconnect()


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")
