"""The ASGI middleware inside vLLM's API server: every request to an engine passes here first, every answer last.

What it decides, in this order, for each request with a body:
1. an engine that is leaving or dead refuses, before vLLM sees the request, with the mark that lets the gateway try
   another engine (vLLM itself would say 500);
2. transfer parameters that the sender had no right to set are dropped: only a prefill engine takes them, and only from
   a decode engine's leg;
3. the gateway, which lets no client set its headers, names this engine's model: a request that was meant for another
   service's engine is refused with the same mark, any other asks for that model, and its answer has the client's name;
4. a decode engine that was told of a prefill engine has the prompt computed there, if it can be had in time.
What comes back is watched by `guard`.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Any

from launcher import body as bodies
from launcher import command, errors, pd, settings
from launcher import contract as contracts
from launcher.asgi import App, Message, Receive, Scope, Send, first_of, header, replaced, respond
from launcher.errors import Reason
from launcher.guard import AnswerGuard
from launcher.meters import Meters
from launcher.modelname import Rename, renaming, unchanged
from launcher.state import State

CHAT = "/v1/chat/completions"
GENERATION = ("/v1/completions", CHAT)
LEAVING = "This engine is shutting down. Please try again on a different instance."
DEAD = "This engine has failed. Please try again on a different instance."
STRAYED = "This engine does not serve the model that was asked for. Please try again."
TOO_LARGE = "The request body is longer than {} bytes."


@dataclass(frozen=True)
class Config:
    """What the middleware needs to know; `from_environment` is the real one.

    `served_names`: what the engine answers to, the one that it writes into its answers first; empty if not known.
    """

    role: str
    address: str  # host:port by which the gateway knows this engine; empty outside a pod
    leg_deadline: float
    max_body_bytes: int
    contract: contracts.Contract
    state: State
    meters: Meters
    served_names: tuple[str, ...] = ()
    queue_limit: int | None = None  # sequences that the engine accepts at once

    @classmethod
    def from_environment(cls) -> Config:
        """Reads contract and settings as the launcher did, in the environment that it passed on."""
        contract = contracts.load()
        own = settings.read(os.environ, contract)
        state = State(contract.paths["state"])
        host = f"[{own.pod_ip}]" if ":" in own.pod_ip else own.pod_ip
        address = f"{host}:{contract.ports['api']}" if host else ""
        limits = own.leg_deadline, own.max_body_bytes
        queue_limit = command.queue_limit((*own.default_args, *own.args), contract)
        return cls(own.role, address, *limits, contract, state, Meters(contract), own.served_names, queue_limit)


def engine_dead(scope: Scope) -> bool:
    """Whether vLLM knows that its engine core has died; it serves on for some seconds then."""
    state = getattr(scope.get("app"), "state", None)
    return bool(getattr(getattr(state, "engine_client", None), "errored", False))


class Plimsoll:
    """The middleware, as vLLM's `--middleware` takes it."""

    def __init__(self, app: App, config: Config | None = None) -> None:
        self._app = app
        self._config = config or Config.from_environment()
        headers = self._config.contract.headers
        self._headers = headers
        self._prefill_header, self._endpoint_header = headers["prefill"], headers["endpoint"]
        self._leg_header = headers["leg"]
        self._model_header, self._response_model_header = headers["model"], headers["response_model"]
        self._client = pd.PrefillClient(self._config.leg_deadline, self._leg_header)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection event of the API server."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["method"] != "POST" or header(scope, "content-type").startswith("multipart/"):
            await self._engine(scope, receive, send)
        else:
            await self._posted(scope, receive, send)

    async def close(self) -> None:
        """Closes connections to prefill engines."""
        await self._client.close()

    async def _posted(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await bodies.read(receive, self._config.max_body_bytes)
        except bodies.ClientGone:
            return
        except bodies.TooLarge:
            words = TOO_LARGE.format(self._config.max_body_bytes)
            reason = Reason.BODY_TOO_LARGE
            told = {b"x-should-retry": b"false", self._headers["reason"].encode(): reason.value.encode()}
            document = errors.error(words, 413, code=reason)
            await respond(send, 413, errors.dump(document), {b"connection": b"close", **told})
            return
        if self._config.state.draining or engine_dead(scope):
            await self._refuse(scope, send)
            return
        self._config.state.mark_request()
        if not self._is_leg(scope):
            body = bodies.strip(body, deep=scope["path"] not in GENERATION)
        await self._named(scope, receive, send, body)

    async def _named(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        """Serves a request under the name that the gateway gives it, and answers under the client's."""
        model, own = header(scope, self._model_header), self._config.served_names
        if model and own and model not in own:
            await self._elsewhere(send, STRAYED, Reason.WRONG_ENGINE)
            return
        body, asked = bodies.asking(body, model)
        rename = renaming(own[0], header(scope, self._response_model_header) or asked) if own else unchanged
        address = header(scope, self._prefill_header)
        if address and self._config.role == "decode" and scope["path"] in GENERATION:
            await self._decode(scope, receive, send, body, address, rename)
        else:
            await self._engine(scope, bodies.replay(body, receive), send, body, rename)

    def _is_leg(self, scope: Scope) -> bool:
        return self._config.role == "prefill" and header(scope, self._leg_header) == "prefill"

    async def _refuse(self, scope: Scope, send: Send) -> None:
        """A 503 that the gateway may take to another engine; the connection is not used again."""
        words, reason = (DEAD, Reason.ENGINE_FAILED) if engine_dead(scope) else (LEAVING, Reason.DRAINING)
        await self._elsewhere(send, words, reason)

    async def _elsewhere(self, send: Send, words: str, reason: Reason) -> None:
        """Refuses with the mark that lets the gateway try another engine."""
        marks = errors.marks(self._headers, reason, elsewhere=True) | {b"connection": b"close"}
        await respond(send, 503, errors.dump(errors.error(words, 503, code=reason)), marks)

    async def _decode(
        self, scope: Scope, receive: Receive, send: Send, body: bytes, address: str, rename: Rename
    ) -> None:
        """Runs the prefill leg, then the engine with or without its result."""
        end = asyncio.ensure_future(receive())  # the body is in: what comes next is the client's end
        leg = await self._leg(scope, body, address, end)
        self._config.meters.leg(leg.outcome, leg.seconds)
        if leg.outcome == "cancelled":
            return
        if self._config.state.stopping:  # the leg outlasted the drain: vLLM would say 500
            end.cancel()
            await self._refuse(scope, send)
            return
        if leg.params is not None:
            body = pd.with_params(body, leg.params)

        async def ending() -> Message:
            return await asyncio.shield(end)

        try:
            await self._engine(scope, bodies.replay(body, ending), send, body, rename)
        finally:
            end.cancel()

    def _strayed(self, scope: Scope) -> bool:
        """Whether the gateway meant other engines: Envoy went past its list, maybe to an engine of another revision.

        KV blocks of another revision's prefill engine would be read as if they were ours.
        """
        meant = header(scope, self._endpoint_header)
        return bool(meant and self._config.address) and self._config.address not in meant.split(",")

    async def _leg(self, scope: Scope, body: bytes, address: str, end: asyncio.Future[Message]) -> pd.Leg:
        """The leg's outcome; `cancelled` where the client went away first."""
        if self._strayed(scope):
            return pd.Leg("strayed")
        request = bodies.parse(body)
        if not pd.suited(request):
            return pd.Leg("unsuited")
        path = scope["path"]
        sent = pd.leg_body(body, request, chat=path == CHAT)
        leg = asyncio.create_task(self._client.run(address, path, sent, pd.forwarded(scope["headers"])))
        try:
            await first_of(leg, end)
            return leg.result() if leg.done() else pd.Leg("cancelled")
        finally:
            leg.cancel()  # closes its connection; nothing where it is done

    def _impossible(self, body: bytes) -> dict[str, Any] | None:
        """The error of a request for more sequences than the engine ever accepts; None for others."""
        n, prompts = bodies.sequences(body)
        limit = self._config.queue_limit
        return errors.too_many(n, prompts, limit) if limit is not None and n * prompts > limit else None

    async def _engine(
        self, scope: Scope, receive: Receive, send: Send, body: bytes | None = None, rename: Rename = unchanged
    ) -> None:
        """Passes a request on to vLLM and watches the answer."""
        if body is not None:
            headers = [(key, value) for key, value in scope["headers"] if key != b"transfer-encoding"]
            scope = {**scope, "headers": replaced(headers, {b"content-length": str(len(body)).encode()})}
        guard = AnswerGuard(
            send,
            self._headers,
            self._config.meters.stream_error,
            lambda: engine_dead(scope),
            scope["path"] in GENERATION,
            rename,
            lambda: None if body is None else self._impossible(body),
        )
        state = self._config.state
        state.hold()
        try:
            await self._app(scope, guard.watching(receive), guard.send)
        except Exception:  # the boundary to vLLM: the client gets an error, the server's own handler the exception
            await guard.failed()
            raise
        finally:
            if guard.finished or not state.stopping:  # else it was cut off: it stays among those that are held
                state.let_go()
