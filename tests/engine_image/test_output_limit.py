"""The gateway's output limit in requests that state none, and the second try where it does not fit the context."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.asgi import Receive, Scope, Send, send_json
from tests.engine_image.middleware_harness import CHAT_PATH, COMPLETIONS, FakeEngine, completion_engine, make_harness

LIMIT = {"x-plimsoll-max-output-tokens": "40"}
RESPONSES, MESSAGES, EMBEDDINGS = "/v1/responses", "/v1/messages", "/v1/embeddings"


@pytest.mark.parametrize(
    ("path", "stated", "added"),
    [
        (CHAT_PATH, {}, {"max_tokens": 40}),
        (CHAT_PATH, {"max_tokens": None, "max_completion_tokens": None}, {"max_tokens": 40}),
        (CHAT_PATH, {"max_tokens": 5}, {}),
        (CHAT_PATH, {"max_completion_tokens": 5}, {}),
        (COMPLETIONS, {}, {}),  # 16, in every engine
        (COMPLETIONS, {"max_tokens": None}, {"max_tokens": 40}),
        (COMPLETIONS, {"max_completion_tokens": 5, "max_tokens": None}, {"max_tokens": 40}),
        (RESPONSES, {}, {"max_output_tokens": 40}),
        (RESPONSES, {"max_output_tokens": 7}, {}),
        (MESSAGES, {}, {}),
        (EMBEDDINGS, {}, {}),
    ],
)
async def test_limit_is_added_where_none_is_stated(
    tmp_path: Path, path: str, stated: dict[str, Any], added: dict[str, Any]
) -> None:
    body = {"model": "a", "input": "b", **stated}
    async with make_harness(completion_engine(), "serve", tmp_path) as one:
        got = await one.send(body, path, LIMIT)
        await one.send(body, path)
    assert got.status == 200
    assert one.engine.requests == [{**body, **added}, body]
    length = dict(one.engine.scopes[0]["headers"])[b"content-length"]
    assert int(length) == len(one.engine.raw[0])


async def test_completion_default_above_the_limit_is_lowered(tmp_path: Path) -> None:
    async with make_harness(completion_engine(), "serve", tmp_path) as one:
        await one.send({"prompt": "a"}, COMPLETIONS, {"x-plimsoll-max-output-tokens": "9"})
    assert one.engine.requests == [{"prompt": "a", "max_tokens": 9}]


def engine_with_room(tokens: int) -> FakeEngine:
    """An engine whose context has room for so many output tokens, which refuses a limit above it."""

    async def script(_: Scope, __: Receive, send: Send) -> None:
        body = engine.requests[-1]
        limit = body.get("max_tokens") or 0
        if "bad" in body or limit > tokens:
            await send_json(send, 400, json.dumps({"error": {"message": f"no: {limit}"}}).encode(), {})
        else:
            await send_json(send, 200, b'{"choices":[]}', {})

    engine = FakeEngine(script)
    return engine


async def test_limit_beyond_the_context_is_left_out(tmp_path: Path) -> None:
    async with make_harness(engine_with_room(10), "serve", tmp_path) as one:
        got = await one.send({"prompt": "a"}, CHAT_PATH, LIMIT)
    assert (got.status, got.complete) == (200, True)
    assert one.engine.requests == [{"prompt": "a", "max_tokens": 40}, {"prompt": "a"}]


async def test_engine_refuses_the_body_itself_in_its_own_words(tmp_path: Path) -> None:
    async with make_harness(engine_with_room(100), "serve", tmp_path) as one:
        got = await one.send({"bad": 1}, CHAT_PATH, LIMIT)
    assert (got.status, got.json["error"]["message"]) == (400, "no: 0")
    assert [message["type"] for message in got.messages].count("http.response.start") == 1
