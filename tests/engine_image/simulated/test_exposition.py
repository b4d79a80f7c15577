"""The text of /metrics: real vLLM's families, and sums that must agree."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from launcher.engine_info import parse_cache_config
from plimsoll.adapters import engine_metrics
from plimsoll.engines import launched
from plimsoll.sim.engine.engine_metrics import MetricHistogram, token_bounds
from simulated.exposition import format_labels
from tests.engine_image.middleware_harness import CHAT_PATH
from tests.engine_image.simulated.api_harness import SLOW_ARGS, ApiHarness, make_harness

# What vLLM 0.32 exports without optional features, each with its labels beside engine and model_name.
FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "num_requests_running": ("gauge", ()),
    "num_requests_waiting": ("gauge", ()),
    "num_requests_waiting_by_reason": ("gauge", ("reason",)),
    "engine_sleep_state": ("gauge", ("sleep_state",)),
    "kv_cache_usage_perc": ("gauge", ()),
    "prefix_cache_queries": ("counter", ()),
    "prefix_cache_hits": ("counter", ()),
    "external_prefix_cache_queries": ("counter", ()),
    "external_prefix_cache_hits": ("counter", ()),
    "num_preemptions": ("counter", ()),
    "prompt_tokens": ("counter", ()),
    "prompt_tokens_by_source": ("counter", ("source",)),
    "prompt_tokens_cached": ("counter", ()),
    "prompt_tokens_cached_by_source": ("counter", ("source",)),
    "generation_tokens": ("counter", ()),
    "request_success": ("counter", ("finished_reason",)),
    "request_prompt_tokens": ("histogram", ()),
    "request_generation_tokens": ("histogram", ()),
    "iteration_tokens_total": ("histogram", ()),
    "request_max_num_generation_tokens": ("histogram", ()),
    "request_params_n": ("histogram", ()),
    "request_params_max_tokens": ("histogram", ()),
    "time_to_first_token_seconds": ("histogram", ()),
    "inter_token_latency_seconds": ("histogram", ()),
    "request_time_per_output_token_seconds": ("histogram", ()),
    "e2e_request_latency_seconds": ("histogram", ()),
    "request_queue_time_seconds": ("histogram", ()),
    "request_inference_time_seconds": ("histogram", ()),
    "request_prefill_time_seconds": ("histogram", ()),
    "request_decode_time_seconds": ("histogram", ()),
    "request_num_preemptions": ("histogram", ()),
    "request_prefill_kv_computed_tokens": ("histogram", ()),
}
NIXL = {
    "nixl_xfer_time_seconds": "histogram",
    "nixl_post_time_seconds": "histogram",
    "nixl_bytes_transferred": "histogram",
    "nixl_num_descriptors": "histogram",
    "nixl_num_failed_transfers": "counter",
    "nixl_num_failed_notifications": "counter",
    "nixl_num_kv_expired_reqs": "counter",
    "nixl_num_notifications_after_expiry": "counter",
    "num_requests_kv_fetch_by_stage": "gauge",
}


async def families(one: ApiHarness) -> dict[str, Any]:
    """The families of a scrape by name."""
    text = (await one.send(path="/metrics")).body.decode()
    return {family.name.removeprefix("vllm:"): family for family in text_string_to_metric_families(text)}


async def test_exposition_families_and_labels_match_vllm(tmp_path: Path) -> None:
    async with make_harness(tmp_path) as one:
        found = await families(one)
        for name, (kind, extra) in FAMILIES.items():
            assert found[name].type == kind, name
            for sample in found[name].samples:
                assert set(sample.labels) - {"le"} == {"engine", "model_name", *extra}, name
                assert (sample.labels["engine"], sample.labels["model_name"]) == ("0", "m")
        assert not any(name.startswith("nixl") for name in found)
        assert set(found["admission_rejections"].samples[0].labels) == {"model_name", "reason"}
        (info,) = found["cache_config_info"].samples
        assert (info.labels["num_gpu_blocks"], info.labels["block_size"]) == ("45000", "16")
        assert found["process_start_time_seconds"].samples[0].value > 0


async def test_exposition_transfer_metrics_require_connector(tmp_path: Path) -> None:
    async with make_harness(tmp_path, role="decode") as one:
        found = await families(one)
        assert {name: found[name].type for name in NIXL} == NIXL


SIGNALS = [  # one of a gauge, a counter and a histogram, and what the operator reads of it
    ("serve", "kv_cache_usage_perc", "kv_used"),
    ("serve", "num_requests_waiting", "waiting"),
    ("serve", "num_preemptions", "preemptions"),
    ("prefill", "time_to_first_token_seconds", "ttft_s"),
    ("decode", "request_time_per_output_token_seconds", "tpot_s"),
]


@pytest.mark.parametrize(("role", "name", "field"), SIGNALS)
async def test_exposition_exported_family_yields_only_its_reading(
    tmp_path: Path, role: str, name: str, field: str
) -> None:
    """What the engine is, and its process, are there all the same."""
    async with make_harness(tmp_path, "--export", f"vllm:{name}", role=role) as one:
        await one.send({"prompt": "word " * 40, "max_tokens": 20})
        text = (await one.send(path="/metrics")).body
        reading = engine_metrics.parse_metrics(text, "pod", 1.0, launched.METRICS)
        reported = {known.name for known in fields(reading) if getattr(reading, known.name) is not None}
        assert reported == {"pod", "at_s", "instance_id", field}
        assert parse_cache_config(text) == (720_000, one.options.profile.block_size)
        exported = {line.split("{")[0] for line in text.decode().splitlines() if line.startswith("vllm:")}
        ends = "(_total|_created|_bucket|_sum|_count)?"
        assert all(re.fullmatch(f"vllm:({name}{ends}|cache_config_info)", found) for found in exported)


def test_token_bounds_match_vllm() -> None:
    assert token_bounds(4096) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
    assert token_bounds(40_960)[-3:] == (5000, 10_000, 20_000)


def test_histogram_value_on_bound_is_within_it() -> None:
    histogram = MetricHistogram((1.0, 2.0))
    for value, times in ((1.0, 1), (1.5, 2), (9.0, 1)):
        histogram.observe(value, times)
    assert (histogram.cumulative(), histogram.total) == ([1, 3, 4], 13.0)


def test_labels_are_escaped() -> None:
    assert format_labels({"b": 'x"y\\z\n', "a": "1"}) == '{a="1",b="x\\"y\\\\z\\n"}'


async def test_exposition_sums_agree_after_mixed_load(tmp_path: Path) -> None:
    async with make_harness(tmp_path, "--num-gpu-blocks-override", "80", "--max-num-seqs", "6") as one:
        gone = asyncio.Event()
        requests = []
        for number in range(24):
            body: dict[str, Any] = {"prompt": f"{number % 5} " + "word " * (7 * number), "max_tokens": 3 + 2 * number}
            requests.append(one.send({**body, "stream": number % 2 == 0}, gone=gone if number % 8 == 7 else None))
        talk = {"messages": [{"role": "user", "content": "x" * 300}], "max_tokens": 9}
        requests.append(one.send(talk, CHAT_PATH))
        trace_requests = asyncio.gather(*requests)
        while not one.driver.core.running:
            await asyncio.sleep(0)
        gone.set()
        await trace_requests
        metrics = await one.metrics()
        sources = {
            source: metrics["vllm:prompt_tokens_by_source_total", source]
            for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
        }
        generated = metrics["vllm:generation_tokens_total",]
        assert sum(sources.values()) == metrics["vllm:prompt_tokens_total",] > 0
        assert metrics["vllm:iteration_tokens_total_sum",] == sources["local_compute"] + generated
        assert metrics["vllm:prompt_tokens_cached_total",] == sources["local_cache_hit"]
        firsts = metrics["vllm:time_to_first_token_seconds_count",]
        assert metrics["vllm:inter_token_latency_seconds_count",] == generated - firsts
        done = metrics["vllm:request_success_total", "length"]
        for name in ("e2e_request_latency_seconds", "request_prompt_tokens", "request_time_per_output_token_seconds"):
            assert metrics[f"vllm:{name}_count",] == done
        assert done >= 22
        assert (metrics["vllm:num_requests_running",], metrics["vllm:num_requests_waiting",]) == (0, 0)
        assert metrics["vllm:kv_cache_usage_perc",] == 0


async def test_exposition_scrape_shows_current_running_and_waiting(tmp_path: Path) -> None:
    async with make_harness(tmp_path, *SLOW_ARGS, "--max-num-seqs", "2") as one:
        gone = asyncio.Event()
        requests = [asyncio.create_task(one.send({"prompt": "a", "max_tokens": 9000}, gone=gone)) for _ in range(5)]
        while (one.driver.core.running, one.driver.core.waiting) != (2, 3):
            await asyncio.sleep(0)
        metrics = await one.metrics()
        assert (metrics["vllm:num_requests_running",], metrics["vllm:num_requests_waiting",]) == (2, 3)
        assert metrics["vllm:num_requests_waiting_by_reason", "capacity"] == 3
        assert metrics["vllm:kv_cache_usage_perc",] == pytest.approx(one.driver.core.kv_cache.used / 45_000)
        gone.set()
        await asyncio.gather(*requests)


async def test_exposition_help_texts_are_one_line(tmp_path: Path) -> None:
    async with make_harness(tmp_path, role="decode") as one:
        text = (await one.send(path="/metrics")).body.decode()
        assert all(line.startswith(("#", "vllm:", "python_", "process_")) for line in text.splitlines())
        assert json.dumps(text).count("\\n\\n") == 0
