"""The ASGI middleware inside vLLM's API server, which every request and every response of an engine passes.

It decides, in this order, for each request with a body:
1. A draining or dead engine rejects it before vLLM gets it, with the mark that lets the gateway try another engine
   (vLLM itself would respond with 500).
2. Transfer parameters from an unauthorised sender are dropped: only a prefill engine accepts them, and only from a
   decode engine's remote prefill.
3. The gateway, which lets no client set its headers, names this engine's model. A request for another service's engine
   is rejected with the same mark. Any other gets that model, and its response the client's name. The gateway also sets
   the output limit of a request without one, the salt of its tenant for the prefix cache, and its class's priority.
4. A decode engine with the address of a prefill engine has the prompt computed there, if that is possible in time.
   If not, it computes the prompt itself, or rejects the request with the same mark if the gateway says so.
`response_guard` checks the response.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from typing import Any

from launcher import api_formats, command, contract, errors, output_limit, remote_prefill, request_body, settings, vllm
from launcher.adapter_state import AdapterStates, State
from launcher.api_formats import CHAT_PATH, COMPLETIONS_PATH, MESSAGES_PATH, RESPONSES_PATH
from launcher.asgi import App, Message, Receive, Scope, Send, header, replace_headers, send_json, wait_first
from launcher.core_probe import CoreProbe
from launcher.errors import RejectionReason
from launcher.middleware_metrics import MiddlewareMetrics
from launcher.modelname import Rename, renaming, unchanged
from launcher.pod_state import PodState
from launcher.response_guard import ResponseGuard
from launcher.tls import EngineTls

# Paths whose bodies take transfer parameters at the top, and of whose prompts another engine can make the KV cache.
TRANSFER_PATHS = (COMPLETIONS_PATH, CHAT_PATH, MESSAGES_PATH, RESPONSES_PATH)
DRAINING_MESSAGE = "This engine is shutting down. Please try again on a different instance."
ENGINE_FAILED_MESSAGE = "This engine has failed. Please try again on a different instance."
MISROUTED = "This engine does not serve the model that was asked for. Please try again."
ADAPTER_LOADING_MESSAGE = "The adapter {} is being loaded. Please try again."
PREFILL_UNAVAILABLE_MESSAGE = (
    "No prefill engine can take the prompt, and this engine may not compute it. Please try again."
)
ADAPTER_FAILED_MESSAGE = "The adapter {} cannot be loaded: {}"
# Only the launcher, which is in the same pod, loads adapters.
ADMIN_PATHS = (vllm.LOAD_LORA_PATH, vllm.UNLOAD_LORA_PATH, vllm.SAGEMAKER_LORA_PATH)
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
BODY_TOO_LARGE_MESSAGE = "The request body is longer than {} bytes."


@dataclass(frozen=True)
class MiddlewareConfig:
    """Configuration of the middleware; `from_environment` reads it.

    `served_names`: model names of the engine, first the one in its responses; empty if unknown.
    """

    role: str
    address: str  # host:port by which the gateway knows this engine; empty outside a pod
    remote_prefill_deadline: float
    max_body_bytes: int
    contract: contract.Contract
    state: PodState
    metrics: MiddlewareMetrics
    served_names: tuple[str, ...] = ()
    queue_limit: int | None = None  # sequences that the engine accepts at once
    tls: EngineTls | None = None  # by which prefill engines know this one
    by_priority: bool = False  # the engine schedules by priority, and rejects one otherwise

    @classmethod
    def from_environment(cls) -> MiddlewareConfig:
        """Read contract and settings as the launcher does, from the environment that it passed on."""
        engine_contract = contract.load()
        engine_settings = settings.read(os.environ, engine_contract)
        state = PodState(engine_contract.paths["state"])
        host = f"[{engine_settings.pod_ip}]" if ":" in engine_settings.pod_ip else engine_settings.pod_ip
        address = f"{host}:{engine_contract.ports['api']}" if host else ""
        limits = engine_settings.remote_prefill_deadline, engine_settings.max_body_bytes
        arguments = (*engine_settings.default_args, *engine_settings.args)
        queue_limit = command.queue_limit(arguments, engine_contract)
        return cls(
            engine_settings.role,
            address,
            *limits,
            engine_contract,
            state,
            MiddlewareMetrics(engine_contract),
            engine_settings.served_names,
            queue_limit,
            EngineTls.of(engine_settings.tls, engine_contract),
            vllm.schedules_by_priority(arguments),
        )


def is_engine_dead(scope: Scope) -> bool:
    """Whether vLLM reports that its engine core has died; its server then continues for some seconds."""
    return bool(getattr(engine_client(scope), "errored", False))


def engine_client(scope: Scope) -> object:
    """Return vLLM's client of the engine core; None if the application has none."""
    return getattr(getattr(scope.get("app"), "state", None), "engine_client", None)


def _is_admin(path: str) -> bool:
    """Whether a path of vLLM's API loads or unloads adapters."""
    return path in ADMIN_PATHS or path.startswith(f"{vllm.SAGEMAKER_LORA_PATH}/")


def _is_local(scope: Scope) -> bool:
    """Whether a request comes from this pod; a request over a socket without an address does too."""
    client = scope.get("client")
    return not client or client[0] in LOOPBACK


class Plimsoll:
    """The middleware, as vLLM's `--middleware` takes it."""

    def __init__(self, app: App, config: MiddlewareConfig | None = None) -> None:
        self._app = app
        self._config = config or MiddlewareConfig.from_environment()
        headers = self._config.contract.headers
        self._headers = headers
        self._prefill_header, self._endpoint_header = headers["prefill"], headers["endpoint"]
        self._remote_prefill_header, self._next_engine_header = headers["remote_prefill"], headers["next_engine"]
        self._max_output_header = headers["max_output_tokens"]
        self._model_header, self._response_model_header = headers["model"], headers["response_model"]
        self._adapter_header, self._cache_salt_header = headers["adapter"], headers["cache_salt"]
        self._priority_header = headers["priority"]
        self._adapters = AdapterStates(self._config.state.folder)
        self._progress_path, self._core_probe = self._config.contract.paths["progress"], CoreProbe()
        self._handover_path = self._config.contract.paths["handover"]
        self._prefill_client = remote_prefill.RemotePrefillClient(
            self._config.remote_prefill_deadline, self._remote_prefill_header, self._config.tls
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection event of the API server."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] == self._progress_path:
            await self._answer_progress(scope, send)
        elif scope["path"] == self._handover_path and scope["method"] == "POST":
            await self._answer_handover(send)
        elif _is_admin(scope["path"]) and not _is_local(scope):
            await send_json(send, 404, b'{"detail":"Not Found"}', {})
        elif scope["method"] != "POST" or _is_admin(scope["path"]):
            await self._forward_to_engine(scope, receive, send)
        else:
            await self._handle_post(scope, receive, send)

    async def close(self) -> None:
        """Closes connections to prefill engines."""
        await self._prefill_client.close()

    async def _answer_progress(self, scope: Scope, send: Send) -> None:
        """Respond to the launcher's probe: 200 once the engine core has responded, 503 if it has not in time."""
        answer = await self._core_probe.wait_answer(engine_client(scope), self._config.contract.progress.answer_seconds)
        body = json.dumps({"step_seconds": round(answer.seconds, 3)}).encode()
        await send_json(send, 200 if answer.answered else 503, body, {b"connection": b"close"})

    async def _answer_handover(self, send: Send) -> None:
        """Respond to a gateway that has no other engine: 200 if this one, which is leaving, still takes requests."""
        self._config.state.mark_needed()
        await send_json(send, 503 if self._config.state.draining else 200, b"{}", {})

    async def _handle_post(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await request_body.read(receive, self._config.max_body_bytes)
        except request_body.ClientGone:
            return
        except request_body.TooLarge:
            message = BODY_TOO_LARGE_MESSAGE.format(self._config.max_body_bytes)
            reason = RejectionReason.BODY_TOO_LARGE
            rejection_headers = {b"x-should-retry": b"false", self._headers["reason"].encode(): reason.value.encode()}
            document = errors.error_document(message, 413, code=reason)
            body_413 = api_formats.error_body(document, 413, scope["path"])
            await send_json(send, 413, body_413, {b"connection": b"close", **rejection_headers})
            return
        if self._config.state.draining or is_engine_dead(scope):
            await self._reject(scope, send)
            return
        self._config.state.mark_request()
        if not self._is_remote_prefill(scope) and scope["path"] not in api_formats.AUDIO_PATHS:
            body = request_body.strip_transfer_params(body, nested=scope["path"] not in TRANSFER_PATHS)
        await self._named(scope, receive, send, body)

    async def _named(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        """Serve a request under the name in the gateway's header, with the client's name in the response."""
        model, own = header(scope, self._model_header), self._config.served_names
        if model and own and model not in own:
            await self._elsewhere(scope, send, MISROUTED, RejectionReason.WRONG_ENGINE)
            return
        if adapter := header(scope, self._adapter_header):
            found = self._adapters.get(adapter)
            if found is None or found.state is not State.LOADED:
                await self._without_adapter(scope, send, adapter, "" if found is None else found.error)
                return
            model, own = found.engine_name, (found.engine_name,)
        if scope["path"] in api_formats.AUDIO_PATHS:
            body, requested_model = request_body.rewrite_form_model(body, header(scope, "content-type"), model)
        else:
            body, requested_model = request_body.rewrite_model(body, model)
            body = self._prioritized(scope, self._salted(scope, body))
        rename = renaming(own[0], header(scope, self._response_model_header) or requested_model) if own else unchanged
        address = header(scope, self._prefill_header)
        if address and self._config.role == "decode" and scope["path"] in TRANSFER_PATHS:
            await self._decode_with_prefill(scope, receive, send, body, address, rename)
        else:
            await self._forward_within_limit(scope, receive, send, body, rename)

    def _salted(self, scope: Scope, body: bytes) -> bytes:
        """Return the body with the salt in the gateway's header, if there is one."""
        if not (salt := header(scope, self._cache_salt_header)):
            return body
        self._config.metrics.count_salted_request()
        return request_body.with_cache_salt(body, salt)

    def _prioritized(self, scope: Scope, body: bytes) -> bytes:
        """Return the body with the priority in the gateway's header, if the engine schedules by it.

        Without the header the client's own priority is removed. A decode engine's request for prefill keeps what is in
        its body.
        """
        if not self._config.by_priority or self._is_remote_prefill(scope):
            return body
        if not (priority := header(scope, self._priority_header)):
            return request_body.without_priority(body)
        self._config.metrics.count_prioritized_request()
        return request_body.with_priority(body, int(priority))

    async def _without_adapter(self, scope: Scope, send: Send, adapter: str, error: str) -> None:
        """Reject a request for an adapter that is not loaded here; another engine may have it."""
        if error:
            message, reason = ADAPTER_FAILED_MESSAGE.format(adapter, error), RejectionReason.ADAPTER_FAILED
        else:
            message, reason = ADAPTER_LOADING_MESSAGE.format(adapter), RejectionReason.ADAPTER_LOADING
        await self._elsewhere(scope, send, message, reason)

    def _is_remote_prefill(self, scope: Scope) -> bool:
        return self._config.role == "prefill" and header(scope, self._remote_prefill_header) == "prefill"

    async def _reject(self, scope: Scope, send: Send) -> None:
        """Respond with a 503 after which the gateway may try another engine; the connection is closed."""
        message, reason = (
            (ENGINE_FAILED_MESSAGE, RejectionReason.ENGINE_FAILED)
            if is_engine_dead(scope)
            else (DRAINING_MESSAGE, RejectionReason.DRAINING)
        )
        await self._elsewhere(scope, send, message, reason)

    async def _elsewhere(self, scope: Scope, send: Send, words: str, reason: RejectionReason) -> None:
        """Reject with the mark that lets the gateway try another engine."""
        next_engine = header(scope, self._next_engine_header)
        marks = errors.rejection_headers(self._headers, reason, True, next_engine) | {b"connection": b"close"}
        document = errors.error_document(words, 503, code=reason)
        await send_json(send, 503, api_formats.error_body(document, 503, scope["path"]), marks)

    async def _decode_with_prefill(
        self, scope: Scope, receive: Receive, send: Send, body: bytes, address: str, rename: Rename
    ) -> None:
        """Run the remote prefill, then the engine with or without its result."""
        client_disconnect = asyncio.ensure_future(receive())  # the body is in: what comes next is the client's end
        result = await self._prefill_remotely(scope, body, address, client_disconnect)
        self._config.metrics.count_remote_prefill(result.outcome, result.seconds)
        if result.outcome == "cancelled":
            return
        if self._config.state.stopping:  # the remote prefill outlasted the drain: vLLM would respond with 500
            client_disconnect.cancel()
            await self._reject(scope, send)
            return
        is_lost = result.params is None and result.outcome != "ineligible"
        if is_lost and header(scope, self._headers["prefill_required"]):
            client_disconnect.cancel()
            await self._elsewhere(scope, send, PREFILL_UNAVAILABLE_MESSAGE, RejectionReason.PREFILL_UNAVAILABLE)
            return
        if result.params is not None:
            body = remote_prefill.with_transfer_params(body, result.params)

        async def wait_disconnect() -> Message:
            return await asyncio.shield(client_disconnect)

        try:
            await self._forward_within_limit(scope, wait_disconnect, send, body, rename)
        finally:
            client_disconnect.cancel()

    def _is_misrouted(self, scope: Scope) -> bool:
        """Whether the gateway chose other engines: Envoy left its list, perhaps for an engine of another revision.

        KV blocks of another revision's prefill engine would be read as this one's.
        """
        intended = header(scope, self._endpoint_header)
        return bool(intended and self._config.address) and self._config.address not in intended.split(",")

    async def _prefill_remotely(
        self, scope: Scope, body: bytes, address: str, client_disconnect: asyncio.Future[Message]
    ) -> remote_prefill.RemotePrefillResult:
        """Return the outcome of the remote prefill; `cancelled` if the client disconnected first."""
        if self._is_misrouted(scope):
            return remote_prefill.RemotePrefillResult("misrouted")
        request = request_body.parse(body)
        if not remote_prefill.is_eligible(request):
            return remote_prefill.RemotePrefillResult("ineligible")
        path = scope["path"]
        prefill_body = remote_prefill.prefill_request_body(body, request, path)
        prefill = asyncio.create_task(
            self._prefill_client.run(
                address,
                path,
                prefill_body,
                remote_prefill.forwarded_headers(scope["headers"]),
                remote_prefill.deadline_of(header(scope, self._headers["prefill_seconds"])),
            )
        )
        try:
            await wait_first(prefill, client_disconnect)
            return prefill.result() if prefill.done() else remote_prefill.RemotePrefillResult("cancelled")
        finally:
            prefill.cancel()  # closes its connection; nothing where it is done

    def _impossible(self, body: bytes) -> dict[str, Any] | None:
        """Return the error of a request for more sequences than the engine ever accepts; None for others."""
        n, prompts, field = request_body.sequences(body)
        limit = self._config.queue_limit
        return errors.too_many(n, prompts, field, limit) if limit is not None and n * prompts > limit else None

    async def _forward_within_limit(
        self, scope: Scope, receive: Receive, send: Send, body: bytes, rename: Rename
    ) -> None:
        """Forward a request, with the gateway's output limit if it has none."""
        limited = output_limit.with_output_limit(body, scope["path"], header(scope, self._max_output_header))
        if limited is not body:
            buffered = output_limit.BufferedRejection(send)
            replayed = request_body.replay_body(limited, receive)
            await self._forward_to_engine(scope, replayed, buffered.send, limited, rename)
            if not buffered.rejected:
                return
        await self._forward_to_engine(scope, request_body.replay_body(body, receive), send, body, rename)

    async def _forward_to_engine(
        self, scope: Scope, receive: Receive, send: Send, body: bytes | None = None, rename: Rename = unchanged
    ) -> None:
        """Forward a request to vLLM and check the response.

        Without a body it is a question to the server itself, such as the launcher's probe of its health. It does not
        count as a request that runs.
        """
        if body is not None:
            headers = [(key, value) for key, value in scope["headers"] if key != b"transfer-encoding"]
            scope = {**scope, "headers": replace_headers(headers, {b"content-length": str(len(body)).encode()})}
        guard = ResponseGuard(
            send,
            self._headers,
            self._config.metrics.count_stream_error,
            lambda: is_engine_dead(scope),
            scope["path"],
            rename,
            lambda: None if body is None else self._impossible(body),
            header(scope, self._next_engine_header),
        )
        state, is_counted = self._config.state, body is not None
        if is_counted:
            state.begin_request()
        try:
            await self._app(scope, guard.watch_disconnect(receive), guard.send)
        except Exception:  # the boundary to vLLM: the client gets an error, the server's own handler the exception
            await guard.on_exception()
            raise
        finally:
            if is_counted and (guard.finished or not state.stopping):  # else it was cut off, and stays counted
                state.end_request()
