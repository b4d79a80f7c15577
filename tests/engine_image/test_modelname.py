"""The model's name on its way through the middleware: the engine's own inside, the client's outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.modelname import renaming, unchanged
from tests.engine_image.middleware_harness import (
    CHAT_PATH,
    COMPLETIONS,
    DONE_EVENT,
    FakeEngine,
    event,
    make_harness,
    respond_with,
    streaming_engine,
)
from tests.engine_image.simulated.api_harness import make_harness as simulated_bench

NAMES = ("team/chat", "chat")
FROM_GATEWAY = {"x-plimsoll-model": "team/chat"}
ASKED = {"model": "renamed", "prompt": "a"}


def single_response() -> FakeEngine:
    """An engine that answers in one piece under its first name."""
    document = {"model": NAMES[0], "choices": [{"index": 0, "text": " a", "finish_reason": "length"}]}
    return respond_with(200, json.dumps(document, separators=(",", ":")).encode())


def tokens(*texts: str) -> FakeEngine:
    """An engine that streams one event for each text under its first name."""
    events = [event(model=NAMES[0], choices=[{"index": 0, "text": text, "finish_reason": None}]) for text in texts]
    return streaming_engine([*events, DONE_EVENT])


async def test_embedding_has_the_name_that_the_client_sent(tmp_path: Path) -> None:
    engine = respond_with(200, b'{"object":"list","model":"team/chat","data":[]}')
    async with make_harness(engine, "serve", tmp_path, names=("team/chat",)) as serve:
        got = await serve.send({"model": "alias", "input": "a"}, "/v1/embeddings", {"x-plimsoll-model": "team/chat"})
    assert got.json["model"] == "alias"
    assert got.headers["content-length"] == str(len(got.body))


async def test_middleware_unknown_name_reaches_engine_as_own(tmp_path: Path) -> None:
    async with make_harness(single_response(), "serve", tmp_path, names=NAMES) as one:
        got = await one.send(ASKED, headers=FROM_GATEWAY)
    assert one.engine.requests == [{"model": "team/chat", "prompt": "a"}]
    assert (got.status, got.json["model"]) == (200, "renamed")
    assert int(got.headers["content-length"]) == len(got.body)


@pytest.mark.parametrize("requested", ["chat", "team/chat"])
async def test_middleware_without_gateway_keeps_requested_name(tmp_path: Path, requested: str) -> None:
    async with make_harness(single_response(), "serve", tmp_path, names=NAMES) as one:
        got = await one.send({"model": requested, "prompt": "a"})
    assert one.engine.requests == [{"model": requested, "prompt": "a"}]
    assert got.json["model"] == requested


async def test_middleware_stream_has_the_clients_name(tmp_path: Path) -> None:
    async with make_harness(tokens(" a", " b"), "decode", tmp_path, names=NAMES) as one:
        got = await one.send({**ASKED, "stream": True}, headers=FROM_GATEWAY)
    assert [json.loads(data)["model"] for data in got.events[:-1]] == ["renamed", "renamed"]
    assert got.events[-1] == "[DONE]"
    assert got.complete


async def test_middleware_response_name_wins_over_requested(tmp_path: Path) -> None:
    named = {**FROM_GATEWAY, "x-plimsoll-response-model": "small"}
    async with make_harness(single_response(), "serve", tmp_path, names=NAMES) as one:
        got = await one.send(ASKED, headers=named)
    assert got.json["model"] == "small"


async def test_middleware_generated_text_is_not_renamed(tmp_path: Path) -> None:
    text = '{"model":"team/chat"}'
    async with make_harness(tokens(text), "serve", tmp_path, names=NAMES) as one:
        got = await one.send({**ASKED, "stream": True}, headers=FROM_GATEWAY)
    first = json.loads(got.events[0])
    assert (first["model"], first["choices"][0]["text"]) == ("renamed", text)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT_PATH])
async def test_middleware_other_services_request_is_refused(tmp_path: Path, path: str) -> None:
    async with make_harness(single_response(), "serve", tmp_path, names=NAMES) as one:
        got = await one.send(ASKED, path, {"x-plimsoll-model": "team/other"})
    assert one.engine.requests == []
    assert (got.status, got.headers["x-plimsoll-retry"]) == (503, "1")
    assert got.headers["x-plimsoll-reason"] == got.json["error"]["code"] == "wrong_engine"


@pytest.mark.parametrize(("own", "public"), [("", "a"), ("a", ""), ("a", "a")])
def test_renaming_without_two_names_changes_nothing(own: str, public: str) -> None:
    assert renaming(own, public) is unchanged


def test_renaming_replaces_only_the_own_name() -> None:
    rename = renaming("team/chat", "renamed")
    assert rename(b'{"model":"team/chat"}') == b'{"model":"renamed"}'
    assert rename(b'{"model":"team/chat-2"}') == b'{"model":"team/chat-2"}'


@pytest.mark.parametrize("stream", [False, True])
async def test_simulated_engine_answers_under_requested_name(tmp_path: Path, stream: bool) -> None:
    async with simulated_bench(tmp_path, "--served-model-name", *NAMES) as one:
        got = await one.send({**ASKED, "max_tokens": 3, "stream": stream}, headers=FROM_GATEWAY)
    assert got.status == 200
    documents: list[Any] = [json.loads(data) for data in got.events[:-1]] if stream else [got.json]
    assert {document["model"] for document in documents} == {"renamed"}
