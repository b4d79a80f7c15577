"""vLLM's HTTP as clients meet it behind the middleware."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine_image.middleware_harness import CHAT_PATH, COMPLETIONS
from tests.engine_image.simulated.api_harness import SLOW_ARGS, make_harness, wait_idle


def completion_body(**more: Any) -> dict[str, Any]:
    """A completion of five tokens."""
    return {"model": "m", "prompt": "What is it?!", "max_tokens": 5, **more}


def chat_body(**more: Any) -> dict[str, Any]:
    """A chat of five tokens."""
    return {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, **more}


async def test_completion_has_vllm_shape_and_requested_tokens(tmp_path: Path) -> None:
    async with make_harness(tmp_path) as one:
        got = (await one.send(completion_body(), headers={"x-request-id": "abc"})).json
        assert got["usage"] == {
            "prompt_tokens": 3, "total_tokens": 8, "completion_tokens": 5,
            "prompt_tokens_details": None, "completion_tokens_details": None,
        }  # fmt: skip
        assert (got["id"], got["object"], got["model"]) == ("cmpl-abc", "text_completion", "m")
        assert (got["choices"][0]["finish_reason"], len(got["choices"][0]["text"].split())) == ("length", 5)
        assert got["kv_transfer_params"] is None
        again = (await one.send(completion_body())).json
        assert again["choices"][0]["text"] == got["choices"][0]["text"]
        assert (await one.send(completion_body(prompt="What else?"))).json["choices"][0]["text"] != got["choices"][0][
            "text"
        ]


async def test_stream_has_one_event_per_token_and_same_text(tmp_path: Path) -> None:
    async with make_harness(tmp_path) as one:
        stream = await one.send(completion_body(stream=True, stream_options={"include_usage": True}))
        *events, usage, done = stream.events
        choices = [json.loads(event)["choices"][0] for event in events]
        assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["length"]
        text = "".join(choice["text"] for choice in choices)
        assert text == (await one.send(completion_body())).json["choices"][0]["text"]
        assert (json.loads(usage)["usage"]["completion_tokens"], done, stream.complete) == (5, "[DONE]", True)


async def test_chat_stream_opens_with_role(tmp_path: Path) -> None:
    async with make_harness(tmp_path) as one:
        opening, *events, done = (await one.send(chat_body(stream=True), CHAT_PATH)).events
        assert json.loads(opening)["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        said = "".join(json.loads(event)["choices"][0]["delta"]["content"] for event in events)
        whole = (await one.send(chat_body(), CHAT_PATH)).json
        assert (whole["choices"][0]["message"]["content"], done) == (said, "[DONE]")
        assert whole["usage"]["prompt_tokens"] == 1 + 2 + 1


async def test_stream_usage_is_reported_with_each_event(tmp_path: Path) -> None:
    async with make_harness(tmp_path) as one:
        options = {"include_usage": True, "continuous_usage_stats": True}
        for path, body, first in (
            (COMPLETIONS, completion_body, 1),
            (CHAT_PATH, chat_body, 0),
        ):  # a chat's first event has no token
            got = (await one.send(body(stream=True, stream_options=options), path)).events
            numbers = [json.loads(event)["usage"] for event in got[:-2]]
            assert [number["completion_tokens"] for number in numbers] == list(range(first, 6))


@pytest.mark.parametrize(
    ("prompt", "choices", "tokens"),
    [
        ("", 1, 1),
        ("äöüß", 1, 2),
        ([1, 2, 3], 1, 3),
        (["one", "another"], 2, 3),
        ([[1], [2, 3]], 2, 3),
    ],
)
async def test_prompt_may_be_text_ids_or_lists(tmp_path: Path, prompt: Any, choices: int, tokens: int) -> None:
    async with make_harness(tmp_path) as one:
        got = (await one.send(completion_body(prompt=prompt))).json
        assert (len(got["choices"]), got["usage"]["prompt_tokens"]) == (choices, tokens)
        assert got["usage"]["completion_tokens"] == 5 * choices


async def test_n_choices_are_returned_for_one_prompt(tmp_path: Path) -> None:
    async with make_harness(tmp_path) as one:
        got = (await one.send(completion_body(n=3))).json
        assert [choice["index"] for choice in got["choices"]] == [0, 1, 2]
        events = (await one.send(completion_body(n=3, stream=True))).events
        assert len(events) == 3 * 5 + 1
        assert (await one.metrics())["vllm:request_params_n_sum",] == 6


async def test_max_tokens_default_for_chat_and_completion(tmp_path: Path) -> None:
    async with make_harness(tmp_path, "--max-model-len", "60") as one:
        chat = await one.send({"model": "m", "messages": [{"role": "user", "content": "x" * 40}]}, CHAT_PATH)
        assert chat.json["usage"]["completion_tokens"] == 60 - 12
        assert (await one.send({"model": "m", "prompt": "x"})).json["usage"]["completion_tokens"] == 16
        longer = await one.send({"model": "m", "prompt": "x" * 40, "max_tokens": 60})
        assert (longer.status, longer.json["usage"]["completion_tokens"]) == (200, 60 - 10)
        newer = chat_body(max_completion_tokens=7)
        assert (await one.send(newer, CHAT_PATH)).json["usage"]["completion_tokens"] == 7


async def test_other_paths_behave_like_vllm(tmp_path: Path) -> None:
    async with make_harness(tmp_path, "--served-model-name", "a", "b") as one:
        assert ((await one.send(path="/health")).status, (await one.send(path="/health")).body) == (200, b"")
        version = (await one.send(path="/version")).json
        assert ("0.32" in version["version"], version["accelerator"]) == (True, "NVIDIA H200")
        models = (await one.send(path="/v1/models")).json["data"]
        assert [(model["id"], model["max_model_len"], model["root"]) for model in models] == [
            ("a", 40960, "m"),
            ("b", 40960, "m"),
        ]
        assert (await one.send(path="/nowhere")).status == 404
        assert (await one.send({}, "/health")).status == 405
        assert (await one.send(completion_body(model="b"))).status == 200
        assert (await one.send({"prompt": "x"})).json["model"] == "a"


REFUSALS: list[tuple[dict[str, Any], int, str | None, str]] = [
    (completion_body(model="other"), 404, "model_not_found", "The model `other` does not exist."),
    (completion_body(prompt="x" * 400), 400, "context_length_exceeded", "maximum context length is 64 tokens"),
    (completion_body(prompt=[1] * 70), 400, "context_length_exceeded", "your prompt contains 70 input tokens"),
    (completion_body(prompt=[1] * 64), 400, None, "max_tokens must be at least 1, got 0."),
    (completion_body(max_tokens=65), 400, None, "max_tokens=65 cannot be greater than max_model_len=64."),
    (completion_body(max_tokens=0), 400, None, "max_tokens must be at least 1, got 0."),
    (completion_body(max_tokens="5"), 400, None, "valid integer"),
    (completion_body(min_tokens=6), 400, None, "min_tokens must be less than or equal to max_tokens=5, got 6."),
    (completion_body(min_tokens=-1), 400, None, "min_tokens"),
    (completion_body(n=0), 400, None, "n must be at least 1, got 0."),
    (completion_body(prompt=[]), 400, None, "You must pass at least one prompt"),
    (completion_body(prompt=None), 400, None, "prompt"),
    (completion_body(prompt=[1, "a"]), 400, None, "prompt"),
    (completion_body(stream_options={"include_usage": True}), 400, None, "stream=True"),
]


@pytest.mark.parametrize(("body", "status", "code", "words"), REFUSALS)
async def test_invalid_request_is_rejected_with_vllm_message(
    tmp_path: Path, body: dict[str, Any], status: int, code: str | None, words: str
) -> None:
    async with make_harness(tmp_path, "--max-model-len", "64") as one:
        got = await one.send(body)
        error = got.json["error"]
        assert (got.status, error["type"], error["code"]) == (status, "invalid_request_error", code)
        assert words in error["message"]


@pytest.mark.parametrize("body", [b"{", b"[]", b"7", b'{"messages": [1]}', b'{"messages": []}', b"\xff", b"[" * 9999])
async def test_hostile_body_is_rejected(tmp_path: Path, body: bytes) -> None:
    async with make_harness(tmp_path) as one:
        assert (await one.send(body, CHAT_PATH)).status == 400
        assert (await one.send(path="/health")).status == 200


async def test_request_other_than_json_is_rejected(tmp_path: Path) -> None:
    async with make_harness(tmp_path) as one:
        assert (await one.send(completion_body(), headers={"content-type": "text/plain"})).status == 415


async def test_full_queue_rejects_with_retry_header(tmp_path: Path) -> None:
    async with make_harness(tmp_path, *SLOW_ARGS, "--max-num-queued-reqs", "2") as one:
        long = completion_body(max_tokens=2000, stream=True)
        gone, begun = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(one.send(long, gone=gone, begun=begun))
        second = asyncio.create_task(one.send(long, gone=gone))
        await begun.wait()
        for stream in (False, True):
            refused = await one.send(completion_body(stream=stream))
            assert (refused.status, refused.json["error"]["code"]) == (503, "queue_full")
            assert refused.headers["x-plimsoll-retry"] == "1"
        assert (await one.metrics())["vllm:admission_rejections_total", "max_num_queued_reqs"] == 2
        gone.set()
        await asyncio.gather(first, second)
        assert (await one.send(completion_body(max_tokens=1))).status == 200


async def test_prompt_token_backlog_rejects(tmp_path: Path) -> None:
    async with make_harness(tmp_path, "--max-num-queued-tokens", "100") as one:
        refused = await one.send(completion_body(prompt="x" * 404))
        assert (refused.status, refused.json["error"]["code"]) == (503, "queue_full")
        assert (await one.send(completion_body())).status == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_client_disconnect_frees_slot_and_is_not_counted(tmp_path: Path, stream: bool) -> None:
    async with make_harness(tmp_path, *SLOW_ARGS) as one:
        gone = asyncio.Event()
        request = asyncio.create_task(one.send(completion_body(max_tokens=4000, stream=stream), gone=gone))
        while not one.driver.core.running:
            await asyncio.sleep(0)
        gone.set()
        await request
        metrics = await one.metrics()
        assert (one.driver.live, metrics["vllm:num_requests_running",], metrics["vllm:kv_cache_usage_perc",]) == (
            set(),
            0,
            0,
        )
        assert sum(value for key, value in metrics.items() if key[0] == "vllm:request_success_total") == 0


async def test_drain_finishes_running_and_rejects_new_requests(tmp_path: Path) -> None:
    async with make_harness(tmp_path) as one:
        begun = asyncio.Event()
        request = asyncio.create_task(one.send(completion_body(max_tokens=300, stream=True), begun=begun))
        await begun.wait()
        one.api.stopping = True
        late = await one.send(completion_body())
        assert (late.status, late.json["error"]["message"]) == (500, "cannot schedule new futures after shutdown")
        assert (await one.send(path="/health")).status == 200
        assert await one.driver.wait_drained(60.0)
        assert len((await request).events) == 301


async def test_drain_timeout_aborts_requests_visibly(tmp_path: Path) -> None:
    async with make_harness(tmp_path, *SLOW_ARGS) as one:
        begun = asyncio.Event()
        stream = asyncio.create_task(one.send(completion_body(max_tokens=30_000, stream=True), begun=begun))
        whole = asyncio.create_task(one.send(completion_body(max_tokens=30_000)))
        await begun.wait()
        assert not await one.driver.wait_drained(0.0)
        one.driver.abort_all()
        assert '"finish_reason":"abort"' in (await stream).body.decode()
        assert not (await stream).complete
        assert (await whole).status == 503
        assert (await one.metrics())["vllm:request_success_total", "abort"] == 2


async def test_dead_engine_core_breaks_streams_and_fails_health(tmp_path: Path) -> None:
    async with make_harness(tmp_path, *SLOW_ARGS) as one:
        begun = asyncio.Event()
        stream = asyncio.create_task(one.send(completion_body(max_tokens=30_000, stream=True), begun=begun))
        whole = asyncio.create_task(one.send(completion_body(max_tokens=30_000)))
        await begun.wait()
        one.driver.kill_core()
        assert '"error"' in (await stream).events[-1]
        assert not (await stream).complete
        assert ((await whole).status, (await whole).json["error"]["code"]) == (503, "engine_failed")
        assert (await one.send(path="/health")).status == 503
        assert (await one.send(completion_body())).status == 503
        await wait_idle(one)
