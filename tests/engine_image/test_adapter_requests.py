"""Requests for adapters in the middleware: names, refusals that the gateway may take elsewhere, and who may load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.adapter_state import AdapterStates, State
from launcher.asgi import Receive, Scope, Send, send_json
from tests.engine_image.middleware_harness import CONTRACT, FakeEngine, make_harness

ADAPTER, MODEL, RETRY = (CONTRACT.headers[name] for name in ("adapter", "model", "retry"))
SENT = {ADAPTER: "sql", MODEL: "team/chat"}


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, 200, b'{"model":"sql@1"}', {})


def states(folder: Path, *found: tuple[str, State, str, str]) -> None:
    AdapterStates(folder / "state").write({name: (state, engine, error) for name, state, engine, error in found})


async def send_request(folder: Path, *found: tuple[str, State, str, str]) -> tuple[Any, FakeEngine]:
    engine = FakeEngine(answer)
    async with make_harness(engine, "serve", folder, names=("team/chat", "chat")) as harness:
        if found:
            states(folder, *found)
        return await harness.send({"model": "public/sql", "prompt": "x"}, headers=SENT), engine


async def test_adapter_answers_with_the_clients_name_for_it(tmp_path: Path) -> None:
    exchange, engine = await send_request(tmp_path, ("sql", State.LOADED, "sql@1", ""))
    assert engine.requests[0]["model"] == "sql@1"
    assert exchange.json == {"model": "public/sql"}


async def test_loading_adapter_is_for_another_engine(tmp_path: Path) -> None:
    exchange, engine = await send_request(tmp_path, ("sql", State.LOADING, "", ""))
    assert (exchange.status, exchange.json["error"]["code"]) == (503, "model_starting")
    assert exchange.headers[RETRY] == "1"
    assert exchange.headers["retry-after"] == "1"
    assert not engine.requests


async def test_failed_adapter_has_engines_words(tmp_path: Path) -> None:
    exchange, _ = await send_request(tmp_path, ("sql", State.FAILED, "", "rank 64 is above 16"))
    assert (exchange.status, exchange.json["error"]["code"]) == (503, "adapter_failed")
    assert exchange.json["error"]["message"] == "The adapter sql cannot be loaded: rank 64 is above 16"


async def test_unknown_adapter_never_gets_the_model(tmp_path: Path) -> None:
    for found in ((), (("law", State.LOADED, "law@1", ""),)):
        exchange, engine = await send_request(tmp_path, *found)
        assert (exchange.status, engine.requests) == (503, [])


async def test_only_the_pod_itself_loads_adapters(tmp_path: Path) -> None:
    engine = FakeEngine(answer)
    async with make_harness(engine, "serve", tmp_path) as harness:
        for method, path in (
            ("POST", "/v1/load_lora_adapter"),
            ("POST", "/v1/unload_lora_adapter"),
            ("POST", "/adapters"),
            ("DELETE", "/adapters/sql"),
        ):
            for address, status in (("10.1.2.3", 404), ("127.0.0.1", 200)):
                exchange = await harness.send({"lora_name": "a"}, path, client=(address, 1), method=method)
                assert (path, exchange.status) == (path, status)
    assert len(engine.requests) == 4
