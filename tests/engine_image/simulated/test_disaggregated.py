"""A prefill and a decode engine with the project's middleware: prompts move, and nothing breaks where they cannot."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from plimsoll.adapters.engine_metrics import parse_metrics
from plimsoll.core.engine_model.observed_benchmark import observed_benchmark
from plimsoll.core.engine_model.self_benchmark import fit_step_model
from plimsoll.core.ports import EngineReading
from plimsoll.core.types import Role
from plimsoll.engines.launched import METRICS
from tests.engine_image.middleware_harness import CHAT_PATH, COMPLETIONS
from tests.engine_image.simulated.api_harness import ApiHarness, make_harness, serve_engine, wait_idle
from tests.ports import free_ports

PROMPT = "The quick brown fox jumps over the lazy dog. " * 40  # 450 tokens
REMOTE = {"do_remote_decode": True, "do_remote_prefill": False}


def completion_body(**more: Any) -> dict[str, Any]:
    """A completion of 24 tokens."""
    return {"model": "m", "prompt": PROMPT, "max_tokens": 24, **more}


def to(address: str) -> dict[str, str]:
    """The header by which the gateway names a prefill engine."""
    return {"x-plimsoll-prefill": address}


async def remote_prefill(one: ApiHarness, **more: Any) -> Any:
    """A prefill engine's answer to a decode engine."""
    got = await one.send(
        completion_body(max_tokens=1, kv_transfer_params=REMOTE, **more),
        headers={"x-plimsoll-remote-prefill": "prefill"},
    )
    return got.json["kv_transfer_params"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT_PATH])
async def test_remote_prefill_transfers_prompt_and_keeps_text(tmp_path: Path, path: str) -> None:
    async with make_harness(tmp_path, role="prefill") as prefill, make_harness(tmp_path, role="decode") as decode:
        body: dict[str, Any] = (
            completion_body()
            if path == COMPLETIONS
            else {"model": "m", "messages": [{"role": "user", "content": PROMPT}]}
        )
        body["max_tokens"] = 24
        async with serve_engine(prefill) as address:
            split = (await decode.send(body, path, to(address))).json
        alone = (await prefill.send(body, path)).json
        words = [json.dumps(got["choices"][0]).split('"logprobs"')[0] for got in (split, alone)]
        assert words[0] == words[1]
        assert decode.remote_prefill_count("remote") == 1
        metrics, tokens = await decode.metrics(), split["usage"]["prompt_tokens"]
        assert metrics["vllm:prompt_tokens_by_source_total", "external_kv_transfer"] == tokens
        assert metrics["vllm:prompt_tokens_by_source_total", "local_compute"] == 0
        assert metrics["vllm:prompt_tokens_cached_by_source_total", "p2p"] == tokens
        assert metrics["vllm:external_prefix_cache_hits_total",] == tokens
        assert metrics["vllm:nixl_xfer_time_seconds_count",] == 1
        assert metrics["vllm:nixl_num_descriptors_sum",] == -(-tokens // 16) * 32
        assert metrics["vllm:iteration_tokens_total_sum",] == 24
        assert (await prefill.metrics())["vllm:kv_cache_usage_perc",] == 0


async def test_prefill_response_names_block_location(tmp_path: Path) -> None:
    async with make_harness(tmp_path, role="prefill") as one:
        params = await remote_prefill(one)
        assert params["do_remote_prefill"]
        assert (params["remote_port"], params["remote_host"]) == (one.options.side_channel_port, "127.0.0.1")
        assert (len(params["remote_block_ids"][0]), params["remote_num_tokens"]) == (29, 450)
        metrics = await one.metrics()
        assert metrics["vllm:kv_cache_usage_perc",] == pytest.approx(29 / 45_000)
        assert metrics["vllm:num_requests_running",] == 0


async def test_only_remote_prefill_on_prefill_engine_keeps_blocks(tmp_path: Path) -> None:
    async with make_harness(tmp_path, role="prefill") as prefill, make_harness(tmp_path, role="serve") as serve:
        assert (await prefill.send(completion_body(kv_transfer_params=REMOTE))).json["kv_transfer_params"] is None
        assert await remote_prefill(serve) is None


async def test_lost_prefill_engine_falls_back_to_local_prefill(tmp_path: Path) -> None:
    async with make_harness(tmp_path, role="prefill") as prefill, make_harness(tmp_path, role="decode") as decode:
        params = await remote_prefill(prefill)
        (params["remote_port"],) = free_ports(1)
        got = await decode.api_direct(completion_body(kv_transfer_params=params))
        assert (got.status, got.json["usage"]["completion_tokens"]) == (200, 24)
        metrics = await decode.metrics()
        assert metrics["vllm:nixl_num_failed_transfers_total",] == 1
        assert metrics["vllm:prompt_tokens_by_source_total", "local_compute"] == 450


@pytest.mark.parametrize(
    "change",
    [{"remote_engine_id": "another"}, {"remote_request_id": "another"}, {"remote_port": "x"}, {"remote_host": 7}],
)
async def test_invalid_transfer_params_fall_back_to_local_prefill(tmp_path: Path, change: dict[str, Any]) -> None:
    async with make_harness(tmp_path, role="prefill") as prefill, make_harness(tmp_path, role="decode") as decode:
        params = {**await remote_prefill(prefill), **change}
        got = await decode.api_direct(completion_body(kv_transfer_params=params))
        assert got.json["usage"]["completion_tokens"] == 24
        assert (await decode.metrics())["vllm:nixl_num_failed_transfers_total",] == 1


async def test_default_vllm_load_failure_policy_returns_error(tmp_path: Path) -> None:
    config = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}
    async with make_harness(tmp_path, "--kv-transfer-config", json.dumps(config), role="decode") as decode:
        params = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": free_ports(1)[0]}
        got = await decode.api_direct(completion_body(kv_transfer_params=params))
        assert (got.status, got.json["error"]["message"]) == (500, "Internal server error")
        assert (await decode.metrics())["vllm:request_success_total", "error"] == 1


async def test_prefill_engine_lost_during_transfer_falls_back(tmp_path: Path) -> None:
    flags = ("--num-gpu-blocks-override", "60", "--max-model-len", "900")
    async with make_harness(tmp_path, *flags, role="decode") as decode:
        requested = asyncio.Event()

        async def dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.write(b'{"tokens": 450}\n')
            requested.set()
            await stopped.wait()
            writer.close()

        stopped = asyncio.Event()
        server = await asyncio.start_server(dies, "127.0.0.1", 0)
        params = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_engine_id": "e"}
        params["remote_port"] = server.sockets[0].getsockname()[1]
        begun, gone = asyncio.Event(), asyncio.Event()
        full = asyncio.create_task(
            decode.send(completion_body(prompt="x" * 2400, stream=True, max_tokens=250), begun=begun, gone=gone)
        )
        await begun.wait()
        request = asyncio.create_task(decode.api_direct(completion_body(kv_transfer_params=params)))
        await requested.wait()
        stopped.set()
        assert (await request).json["usage"]["completion_tokens"] == 24
        gone.set()
        await full
        await wait_idle(decode)
        assert (await decode.metrics())["vllm:kv_cache_usage_perc",] == 0
        server.close()
        await server.wait_closed()


async def test_disconnect_during_transfer_frees_remote_blocks(tmp_path: Path) -> None:
    async with (
        make_harness(tmp_path, role="prefill") as prefill,
        make_harness(tmp_path, "--transfer-rate", "1000", role="decode") as decode,
    ):
        params, gone = await remote_prefill(prefill), asyncio.Event()
        request = asyncio.create_task(decode.api_direct(completion_body(kv_transfer_params=params), gone))
        while not decode.driver.core.loading:
            await asyncio.sleep(0)
        gone.set()
        await request
        while prefill.driver.core.kv_cache.used:
            await asyncio.sleep(0)
        assert decode.driver.core.kv_cache.used == 0


@pytest.mark.parametrize("said", [b"", b"{}\n", b"[]\n", b"\xff\n", b'{"request_id": 1}\n', b"x" * 5000])
async def test_side_channel_survives_invalid_messages(tmp_path: Path, said: bytes) -> None:
    async with make_harness(tmp_path, role="prefill") as prefill:
        reader, writer = await asyncio.open_connection("127.0.0.1", prefill.options.side_channel_port)
        writer.write(said)
        writer.write_eof()
        assert b"tokens" not in await reader.read()
        writer.close()
        await writer.wait_closed()
        assert (await remote_prefill(prefill))["remote_num_tokens"] == 450


async def test_metrics_of_a_pair_are_a_benchmark_of_each_role(tmp_path: Path) -> None:
    """As the engines of a foreign router, which knows no header of the project."""
    async with make_harness(tmp_path, role="prefill") as prefill, make_harness(tmp_path, role="decode") as decode:
        first = [await _reading(one) for one in (prefill, decode)]
        for number in range(21):
            body = completion_body(prompt=f"{number} {PROMPT}")
            got = await prefill.api_direct({**body, "max_tokens": 1, "kv_transfer_params": REMOTE})
            answer = await decode.api_direct({**body, "kv_transfer_params": got.json["kv_transfer_params"]})
            assert answer.json["usage"]["completion_tokens"] == 24
        for one, role, before in zip((prefill, decode), (Role.PREFILL, Role.DECODE), first, strict=True):
            found = observed_benchmark(await _reading(one), before, role)
            assert found is not None
            model = fit_step_model(found)
            assert 0.0 < model.base_s < 0.2
            assert (await _reading(one)).ttft_s is not None


async def _reading(one: ApiHarness) -> EngineReading:
    return parse_metrics((await one.send(path="/metrics")).body, "p", time.monotonic(), METRICS)
