"""What a real vLLM 0.32 on a CPU counted and answered, and what the light engine does at the same requests."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.engine_image.middleware_harness import CHAT_PATH, COMPLETIONS
from tests.engine_image.simulated.api_harness import make_harness

LIMITS = ("--max-model-len", "4096", "--max-num-seqs", "16", "--max-num-batched-tokens", "512")
CACHE = ("--block-size", "128", "--num-gpu-blocks-override", "128")

RECORDED: dict[tuple[str, ...], float] = {
    ("prompt_tokens_total",): 2537,
    ("generation_tokens_total",): 91,
    ("prompt_tokens_by_source_total", "local_compute"): 2025,
    ("prompt_tokens_by_source_total", "local_cache_hit"): 512,
    ("prompt_tokens_by_source_total", "external_kv_transfer"): 0,
    ("prompt_tokens_cached_total",): 512,
    ("prefix_cache_queries_total",): 2537,
    ("prefix_cache_hits_total",): 512,
    ("external_prefix_cache_queries_total",): 0,
    ("external_prefix_cache_hits_total",): 0,
    ("num_preemptions_total",): 0,
    ("iteration_tokens_total_sum",): 2116,
    ("request_success_total", "length"): 11,
    ("request_success_total", "stop"): 0,
    ("request_success_total", "abort"): 0,
    ("request_success_total", "error"): 0,
    ("request_success_total", "repetition"): 0,
    ("request_prompt_tokens_sum",): 2537,
    ("request_generation_tokens_sum",): 91,
    ("request_params_max_tokens_sum",): 91,
    ("time_to_first_token_seconds_count",): 11,
    ("inter_token_latency_seconds_count",): 80,
    ("request_time_per_output_token_seconds_count",): 11,
    ("e2e_request_latency_seconds_count",): 11,
    ("request_queue_time_seconds_count",): 11,
    ("request_prefill_time_seconds_count",): 11,
    ("request_decode_time_seconds_count",): 11,
}
EDGES = ("1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "200.0", "500.0", "1000.0", "2000.0", "+Inf")
PROMPTS = (1, 1, 1, 1, 2, 2, 3, 5, 10, 11, 11, 11)  # requests with at most so many tokens
OUTPUTS = (1, 1, 3, 8, 11, 11, 11, 11, 11, 11, 11, 11)


def _ask(seed: int, tokens: int, outputs: int, **more: Any) -> dict[str, Any]:
    """Prompts of one seed begin alike; those of others share nothing."""
    draw = random.Random(seed)
    return {"prompt": [draw.randrange(5, 4096) for _ in range(tokens)], "max_tokens": outputs, **more}


async def test_recorded_requests_yield_recorded_metrics(tmp_path: Path) -> None:
    """Prompts that are new, in the cache in part and whole, one in two chunks; then several at once."""
    in_turn = [_ask(1, 300, 9), _ask(1, 300, 7), _ask(1, 420, 5), _ask(2, 16, 1), _ask(3, 700, 16, stream=True)]
    in_turn.append(_ask(4, 1, 3))
    at_once = [_ask(10 + n, 60 + 50 * n, 8 + n) for n in range(5)]
    async with make_harness(tmp_path, *LIMITS, *CACHE) as one:
        statuses = [(await one.send(body)).status for body in in_turn]
        statuses += [got.status for got in await asyncio.gather(*(one.send(body) for body in at_once))]
        metrics = await one.metrics()
    assert statuses == [200] * 11
    assert {key: metrics[f"vllm:{key[0]}", *key[1:]] for key in RECORDED} == RECORDED
    for name, below in (("request_prompt_tokens", PROMPTS), ("request_generation_tokens", OUTPUTS)):
        assert tuple(metrics[f"vllm:{name}_bucket", edge] for edge in EDGES) == below


ANSWERS = json.loads(Path(__file__).with_name("answers_recorded.json").read_text())
BODIES = {
    "completion": (COMPLETIONS, {"prompt": [7] * 40, "max_tokens": 6}),
    "chat": (CHAT_PATH, {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6}),
}
STREAMS = {
    "stream": {"stream": True},
    "usage": {"stream": True, "stream_options": {"include_usage": True}},
    "continuous": {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
}


def _shape(value: Any) -> Any:
    """A document with the kinds of its values in their places; a list is the different shapes in it."""
    if isinstance(value, dict):
        return {key: _shape(one) for key, one in sorted(value.items())}
    if isinstance(value, list):
        return _distinct(map(_shape, value))
    return type(value).__name__


def _distinct(shapes: Iterable[Any]) -> list[Any]:
    return [json.loads(one) for one in dict.fromkeys(json.dumps(one) for one in shapes)]


@pytest.mark.parametrize("kind", BODIES)
async def test_recorded_responses_have_vllm_fields(tmp_path: Path, kind: str) -> None:
    path, body = BODIES[kind]
    async with make_harness(tmp_path) as one:
        assert _shape((await one.send(body, path)).json) == ANSWERS[kind]["whole"]
        for name, requested in STREAMS.items():
            *events, done = (await one.send({**body, **requested}, path)).events
            assert (_distinct(_shape(json.loads(event)) for event in events), done) == (ANSWERS[kind][name], "[DONE]")


REFUSALS: list[tuple[dict[str, Any], int, dict[str, Any]]] = [
    (
        {"model": "nobody", "prompt": [7]},
        404,
        {
            "message": "The model `nobody` does not exist. Valid aliases: m.",
            "param": "model",
            "code": "model_not_found",
        },
    ),
    (
        {"prompt": [7] * 5000},
        400,
        {
            "message": "This model's maximum context length is 4096 tokens. However, your prompt contains 5000 input "
            "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input "
            "prompt. (parameter=input_tokens, value=5000)",
            "param": "input_tokens",
            "code": "context_length_exceeded",
        },
    ),
    (
        {"prompt": [7] * 60, "max_tokens": 4097},
        400,
        {
            "message": "max_tokens=4097 cannot be greater than max_model_len=4096. Please request fewer output tokens. "
            "(parameter=max_tokens, value=4097)",
            "param": "max_tokens",
            "code": None,
        },
    ),
    (
        {"prompt": [7] * 4096, "max_tokens": 1},
        400,
        {
            "message": "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)",
            "param": "max_tokens",
            "code": None,
        },
    ),
    ({"prompt": [7], "n": 0}, 400, {"message": "n must be at least 1, got 0.", "param": None, "code": None}),
    ({"prompt": []}, 400, {"message": "You must pass at least one prompt", "param": None, "code": None}),
    (
        {"max_tokens": 5},
        400,
        {
            "message": "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)",
            "param": "prompt",
            "code": None,
        },
    ),
    (
        {"prompt": [7], "max_tokens": 5, "min_tokens": 6},
        400,
        {
            "message": "min_tokens must be less than or equal to max_tokens=5, got 6.",
            "param": None,
            "code": None,
        },
    ),
    (
        {"prompt": [7], "stream_options": {"include_usage": True}},
        400,
        {
            "message": "Stream options can only be defined when `stream=True`. (parameter=stream_options)",
            "param": "stream_options",
            "code": None,
        },
    ),
]


@pytest.mark.parametrize(("body", "status", "error"), REFUSALS)
async def test_recorded_rejections_have_vllm_messages(
    tmp_path: Path, body: dict[str, Any], status: int, error: dict[str, Any]
) -> None:
    async with make_harness(tmp_path, *LIMITS, *CACHE) as one:
        got = await one.send(body)
    assert (got.status, got.json["error"]) == (status, {"type": "invalid_request_error", **error})


async def test_response_ends_at_context_length(tmp_path: Path) -> None:
    async with make_harness(tmp_path, *LIMITS, *CACHE) as one:
        got = await one.send({"prompt": [7] * 4095, "max_tokens": 5})
    assert (got.status, got.json["usage"]["completion_tokens"]) == (200, 1)
