"""The engine simulator's other APIs, as clients meet them behind the middleware."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine_image.simulated.api_harness import make_harness

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
POOLING = ("--runner", "pooling")


def events(body: bytes) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for part in body.decode().split("\n\n"):
        if part:
            kind, _, data = part.partition("\ndata: ")
            found.append((kind.removeprefix("event: "), json.loads(data)))
    return found


async def test_message_whole_and_streamed_are_equal(tmp_path: Path) -> None:
    ask = {"model": "m", "max_tokens": 5, "system": "Be brief", "messages": [{"role": "user", "content": "Hello"}]}
    async with make_harness(tmp_path) as one:
        whole = (await one.send(ask, MESSAGES)).json
        stream = events((await one.send(ask | {"stream": True}, MESSAGES)).body)
        count = (await one.send(ask, f"{MESSAGES}/count_tokens")).json
    text = "".join(data["delta"]["text"] for kind, data in stream if kind == "content_block_delta")
    assert whole["content"] == [{"type": "text", "text": text}]
    assert (whole["stop_reason"], whole["usage"]["output_tokens"]) == ("max_tokens", 5)
    assert count == {"input_tokens": whole["usage"]["input_tokens"]}
    kinds = [kind for kind, _ in stream]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


async def test_response_whole_and_streamed_are_equal(tmp_path: Path) -> None:
    ask = {"model": "m", "max_output_tokens": 5, "instructions": "Be brief", "input": "Hello"}
    async with make_harness(tmp_path) as one:
        whole = (await one.send(ask, RESPONSES)).json
        items = ask | {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
            "stream": True,
        }
        stream = events((await one.send(items, RESPONSES)).body)
    text = "".join(data["delta"] for kind, data in stream if kind == "response.output_text.delta")
    assert whole["output"][0]["content"][0]["text"] == text
    assert (whole["status"], whole["usage"]["output_tokens"]) == ("incomplete", 5)
    assert [data["sequence_number"] for _, data in stream] == list(range(len(stream)))
    assert stream[-1][0] == "response.completed"


async def test_response_echoes_metadata_and_is_complete(tmp_path: Path) -> None:
    metadata = {"status": "cancelled"}
    ask = {"model": "m", "max_output_tokens": 5, "input": "Hello", "metadata": metadata}
    async with make_harness(tmp_path) as one:
        whole = await one.send(ask, RESPONSES)
        stream = await one.send(ask | {"stream": True}, RESPONSES)
    assert (whole.status, whole.json["metadata"], whole.json["status"]) == (200, metadata, "incomplete")
    kind, last = events(stream.body)[-1]
    assert (kind, stream.complete) == ("response.completed", True)
    assert (last["response"]["metadata"], last["response"]["status"]) == (metadata, "incomplete")


@pytest.mark.parametrize(
    ("given", "count"), [("Hello", 1), (["Hello", "You"], 2), ([1, 2, 3], 1), ([[1, 2], [3, 4, 5]], 2)]
)
async def test_embedding_has_one_vector_per_input(tmp_path: Path, given: Any, count: int) -> None:
    async with make_harness(tmp_path, *POOLING) as one:
        got = (await one.send({"model": "m", "input": given}, "/v1/embeddings")).json
        again = (await one.send({"model": "m", "input": given}, "/v1/embeddings")).json
    assert [one["index"] for one in got["data"]] == list(range(count))
    assert got["data"] == again["data"]
    assert got["usage"]["completion_tokens"] == 0
    assert got["usage"]["prompt_tokens"] > 0


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_rerank_sorts_documents_by_score(tmp_path: Path, path: str) -> None:
    async with make_harness(tmp_path, *POOLING) as one:
        got = (await one.send({"model": "m", "query": "a", "documents": ["b", "c", "d"]}, path)).json
    scores = [result["relevance_score"] for result in got["results"]]
    assert sorted(result["index"] for result in got["results"]) == [0, 1, 2]
    assert scores == sorted(scores, reverse=True)


async def test_score_has_one_value_per_pair(tmp_path: Path) -> None:
    async with make_harness(tmp_path, *POOLING) as one:
        got = (await one.send({"model": "m", "text_1": "a", "text_2": ["b", "c"]}, "/v1/score")).json
        wrong = await one.send({"model": "m", "text_1": ["a", "b"], "text_2": ["b", "c", "d"]}, "/score")
    assert len(got["data"]) == 2
    assert wrong.status == 400


async def test_tokens_come_back_as_text(tmp_path: Path) -> None:
    async with make_harness(tmp_path) as one:
        got = (await one.send({"model": "m", "prompt": "Hello you"}, "/tokenize")).json
        back = (await one.send({"model": "m", "tokens": got["tokens"]}, "/detokenize")).json
    assert got["count"] == len(got["tokens"]) == 3
    assert back == {"prompt": "Hello you"}


@pytest.mark.parametrize(("flags", "path"), [((), "/v1/embeddings"), (POOLING, "/v1/chat/completions")])
async def test_engine_has_only_the_routes_of_its_runner(tmp_path: Path, flags: tuple[str, ...], path: str) -> None:
    async with make_harness(tmp_path, *flags) as one:
        assert (await one.send({"model": "m", "input": "a"}, path)).status == 404


@pytest.mark.parametrize(("path", "flags"), [(MESSAGES, ()), (RESPONSES, ()), ("/v1/embeddings", POOLING)])
@pytest.mark.parametrize("body", [{"model": "m"}, {"model": "nobody", "input": "a"}, b"{", [1]])
async def test_bad_request_is_a_client_error(tmp_path: Path, path: str, flags: tuple[str, ...], body: Any) -> None:
    async with make_harness(tmp_path, *flags) as one:
        got = await one.send(body, path)
    assert got.status in (400, 404)
    assert got.json["error"]["message"]
