"""Properties of an engine without a launcher, from a page of vLLM's metrics and its pod."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plimsoll.adapters.engine_metrics import parse_metrics
from plimsoll.adapters.engine_of_pod import command_line
from plimsoll.adapters.unlaunched_engine import engine_info
from plimsoll.api import labels
from plimsoll.core.engine_model.observed_benchmark import MIN_REQUESTS, observed_benchmark
from plimsoll.core.engine_model.self_benchmark import choose_prior
from plimsoll.core.ports import EngineInfo, EngineReading
from plimsoll.core.types import Role, Unavailable
from plimsoll.engines.launched import METRICS
from plimsoll.engines.registry import ENGINES

PAGES = Path(__file__).parents[1] / "engines" / "pages"
REQUESTS = 200
PAGE = f"""
vllm:num_requests_running{{engine="0"}} 3.0
vllm:num_requests_waiting{{engine="0"}} 0.0
vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="4000"}} 1.0
vllm:iteration_tokens_total_count{{engine="0"}} 5000
vllm:iteration_tokens_total_sum{{engine="0"}} 120000
vllm:generation_tokens_total{{engine="0"}} 20000
vllm:prompt_tokens_by_source_total{{source="local_compute"}} 80000
vllm:request_prefill_time_seconds_sum{{engine="0"}} 12.0
vllm:request_prefill_time_seconds_count{{engine="0"}} {REQUESTS}
vllm:request_prompt_tokens_bucket{{le="1000"}} {REQUESTS}
vllm:request_prompt_tokens_bucket{{le="+Inf"}} {REQUESTS}
vllm:request_prompt_tokens_sum 100000
vllm:request_generation_tokens_bucket{{le="1000"}} {REQUESTS}
vllm:request_generation_tokens_bucket{{le="+Inf"}} {REQUESTS}
vllm:request_generation_tokens_sum 20000
vllm:request_time_per_output_token_seconds_bucket{{le="0.1"}} {REQUESTS}
vllm:request_time_per_output_token_seconds_bucket{{le="+Inf"}} {REQUESTS}
vllm:request_time_per_output_token_seconds_sum 4.0
"""


def pod(model: str = "hf://acme/own", **container: Any) -> dict[str, Any]:
    spec = {"containers": [{"name": "sidecar", "image": "proxy:1"}, {"name": "main", "image": "vllm:1", **container}]}
    return {"metadata": {}, "spec": spec, labels.ADOPTED: {"metricsPort": 8000, "gpus": 2, "model": model}}


def info(page: str = PAGE, accelerator: str | None = None, **changes: Any) -> EngineInfo:
    raw = page.encode()
    reading = parse_metrics(raw, "p", 0.0, METRICS)
    return engine_info(raw, reading, reading, pod(**changes), accelerator)


def test_limits_come_from_arguments_and_cache() -> None:
    found = info(args=["serve", "m", "--max-num-seqs", "64", "--max-num-batched-tokens=4k", "--max-model-len", "8192"])
    assert (found.max_sequences, found.token_budget, found.max_model_len) == (64, 4000, 8192)
    assert (found.block_tokens, found.kv_tokens, found.gpus) == (16, 64_000, 2)
    assert (found.engine_version, found.accelerator, found.config) == ("vllm:1", "unknown", None)


def test_lifetime_means_are_the_benchmark_and_give_a_prior() -> None:
    found = info()
    assert found.self_benchmark is not None
    assert found.self_benchmark.prefill == ((400, 0.06),)
    ((batch, context, decode_s),) = found.self_benchmark.decode
    assert (batch, context) == (4, 550)
    assert decode_s == pytest.approx(0.02 - 16 * 0.04 / 384)  # without the 16 prompt tokens of a step
    prior = choose_prior(found)
    assert not isinstance(prior, Unavailable)
    assert 0.0 < prior[0].base_s <= 0.02


def test_known_model_on_a_named_accelerator_has_its_roofline() -> None:
    found = info(model="hf://Qwen/Qwen3-8B", accelerator="H200")
    assert found.config is not None
    assert found.config["num_hidden_layers"] == 36
    assert choose_prior(found) != choose_prior(info())


@pytest.mark.parametrize(
    "page",
    [
        PAGE.replace(f" {REQUESTS}", f" {int(MIN_REQUESTS) - 1}"),
        PAGE.replace("request_prefill_time_seconds", "request_other_seconds"),
        PAGE.replace("iteration_tokens_total_count", "iteration_other"),
    ],
)
def test_too_few_requests_or_missing_metrics_give_no_benchmark(page: str) -> None:
    reading = parse_metrics(page.encode(), "p", 0.0, METRICS)
    assert observed_benchmark(reading, reading, Role.SERVE) is None


def test_shell_command_is_split() -> None:
    assert command_line({"command": ["sh", "-c", "vllm serve m --port 1"]})[2:] == ["vllm", "serve", "m", "--port", "1"]


def own_pod(engine: str, *args: str, model: str = "Qwen/Qwen3-8B") -> dict[str, Any]:
    container = {
        "name": "engine",
        "image": f"{engine}:1",
        "args": list(args),
        "env": [{"name": "PLIMSOLL_MODEL", "value": model}],
        "resources": {"limits": {"nvidia.com/gpu": "2", "memory": "8Gi"}},
    }
    sidecar = {"name": "vllm-proxy", "image": "vllm:1"}
    return {"metadata": {"labels": {labels.ENGINE: engine}}, "spec": {"containers": [sidecar, container]}}


@pytest.mark.parametrize(
    ("engine", "args", "limits"),
    [
        ("sglang", (), (256, 471258, 8192, None)),
        ("sglang", ("--max-running-requests", "64", "--chunked-prefill-size=2048"), (64, 471258, 2048, None)),
        ("tensorrt-llm", ("--max_batch_size=32", "--max_num_tokens", "4096"), (32, 64_000, 4096, 64)),
        ("llama-cpp", ("--ctx-size", "16384", "--parallel", "8"), (8, 16384, 2048, None)),
    ],
)
def test_limits_of_own_engine_come_from_its_contract(engine: str, args: tuple[str, ...], limits: object) -> None:
    page = (PAGES / f"{engine.replace('-', '_')}.txt").read_bytes()
    metric_map = ENGINES[engine].metrics
    assert metric_map is not None
    reading = parse_metrics(page, "p", 0.0, metric_map)
    found = engine_info(page, reading, reading, own_pod(engine, *args), None)
    assert (found.max_sequences, found.kv_tokens, found.token_budget, found.block_tokens) == limits
    assert (found.engine, found.engine_version, found.gpus) == (engine, f"{engine}:1", 2)
    assert found.config is not None
    assert found.self_benchmark is None  # nothing was served since the first reading, or too little


def test_kv_cache_of_known_gpu_is_estimated_where_unknown() -> None:
    reading = EngineReading("p", 0.0, "1")
    found = engine_info(b"", reading, reading, own_pod("sglang"), "H200")
    assert found.kv_tokens is not None
    assert found.kv_tokens > 100_000
    assert not isinstance(choose_prior(found), Unavailable)
    path = engine_info(b"", reading, reading, own_pod("sglang", model="/models/claim/m"), "H200")
    assert (path.kv_tokens, path.config) == (None, None)
