"""A real SGLang server on the CPU, started by the adapter's own command line.

Needs an interpreter with SGLang, pytest, pytest-asyncio, pytest-timeout and hypothesis, and on a machine without a GPU
NVIDIA's libcuda in LD_LIBRARY_PATH, which SGLang's kernels are linked to. The last test takes the server down.

    PYTHONPATH=operator:engine-image:. PYTHON -m pytest -m sglang tests/engines/test_sglang.py
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plimsoll.adapters.engine_metrics import parse_metrics
from plimsoll.core.ports import EngineReading
from plimsoll.engines import conformance, sglang
from plimsoll.engines.conformance import OK, Server
from plimsoll.engines.engine import Launch
from plimsoll.engines.registry import ENGINES
from tests.ports import free_port

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("default"),  # of SGLang and its libraries
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]
ROOT = Path(__file__).parents[2]
ENGINE = ENGINES["sglang"]
HUB = Launch("org/m", True, "chat", "embed", 2, 9000, "v1")
ON_CPU = ("--device", "cpu", "--attention-backend", "torch_native")
CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
START_S = 1200.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, int]]:
    """The server, and its process."""
    folder, port = tmp_path_factory.mktemp("sglang"), free_port()
    maker = ROOT / "engine-image" / "image" / "make_tiny_model.py"
    subprocess.run([sys.executable, maker, folder / "model"], check=True, capture_output=True)
    launch = Launch(str(folder / "model"), False, "chat", "generate", 1, port)
    command = [sys.executable, *ENGINE.command[1:], *ENGINE.own_args(launch), *ON_CPU]
    environment = {**os.environ, **CPU_ENVIRONMENT, **dict(ENGINE.variables)}
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        server = Server(f"http://127.0.0.1:{port}", timeout_s=120.0)
        wait_until_healthy(server, process, log)
        yield server, process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_healthy(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            conformance.check_health(server)
            return
        except conformance.CheckFailed:
            time.sleep(1.0)
    pytest.fail(f"SGLang is not healthy: {log.read_text(errors='replace')[-3000:]}")


def reading(server: Server) -> EngineReading:
    status, page = server.request("GET", ENGINE.metrics_path)
    assert status == 200
    assert ENGINE.metrics is not None
    return parse_metrics(page, "pod", 1.0, ENGINE.metrics)


def scheduler_of(group: int) -> int:
    """The process that computes, of the server's process group."""
    lines = subprocess.run(["ps", "-eo", "pgid=,pid=,args="], check=True, capture_output=True, text=True).stdout
    rows = [line.split(None, 2) for line in lines.splitlines()]
    [found] = [int(pid) for pgid, pid, args in rows if int(pgid) == group and args.startswith("sglang::scheduler")]
    return found


def test_sglang_has_the_flags_of_the_adapter() -> None:
    """Its own parser takes what the adapter writes, and has what the adapter reads or reserves."""
    server_args: Any = importlib.import_module("sglang.srt.server_args")
    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    known = set(parser._option_string_actions)
    flags = {*sglang.RESERVED_FLAGS, sglang.MAX_RUNNING, sglang.MAX_QUEUED, sglang.CONTEXT}
    assert sorted(flags - known) == []
    parsed = parser.parse_args(ENGINE.own_args(HUB))
    assert (parsed.model_path, parsed.served_model_name, parsed.revision, parsed.tp_size) == ("org/m", "chat", "v1", 2)
    assert (parsed.port, parsed.enable_metrics, parsed.is_embedding) == (9000, True, True)


def test_sglang_server_has_all(running: tuple[Server, int]) -> None:
    server, _ = running
    results = conformance.run(server)
    print(*(result.line() for result in results), sep="\n")
    assert {result.check for result in results if result.outcome != OK} == {"embeddings"}  # the model has none
    details = {result.check: result.detail for result in results}
    assert details["metrics"].startswith("SGLang: has running, waiting, kv_used, ")
    assert "lacks" not in details["metrics"]
    assert "any model name is accepted" in details["model-name"]


def test_sglang_page_counts_a_request(running: tuple[Server, int]) -> None:
    server, _ = running
    before = reading(server)
    answer = server.post("/v1/chat/completions", server.chat(max_tokens=12, ignore_eos=True))
    after = reading(server)
    found = [after.generated_tokens, after.local_prompt_tokens, after.cached_prompt_tokens]
    was = [before.generated_tokens, before.local_prompt_tokens, before.cached_prompt_tokens]
    grown = [(new or 0.0) - (old or 0.0) for new, old in zip(found, was, strict=True)]
    assert grown[0] == answer["usage"]["completion_tokens"] - 1  # the prefill makes the first
    assert grown[1] + grown[2] == answer["usage"]["prompt_tokens"]
    for histogram, earlier in ((after.ttft_s, before.ttft_s), (after.tpot_s, before.tpot_s)):
        assert histogram is not None
        assert sum(histogram.counts) == (0.0 if earlier is None else sum(earlier.counts)) + 1.0


def test_sglang_health_computes_nothing(running: tuple[Server, int]) -> None:
    server, _ = running
    before = reading(server)
    for _ in range(3):
        conformance.check_health(server)
    assert reading(server).computed_tokens == before.computed_tokens


def test_sglang_progress_ends_with_a_stopped_scheduler(running: tuple[Server, int]) -> None:
    """Its health path still answers then, so only the other one finds an engine that hangs."""
    server, pid = running
    assert ENGINE.progress_path is not None
    scheduler = scheduler_of(pid)
    found = [server.request("GET", ENGINE.progress_path)[0]]
    os.kill(scheduler, signal.SIGSTOP)
    try:
        found.append(server.request("GET", ENGINE.progress_path)[0])
        conformance.check_health(server)
    finally:
        os.kill(scheduler, signal.SIGCONT)
    found.append(server.request("GET", ENGINE.progress_path)[0])
    assert found == [200, 503, 200]


def test_sglang_refusal_names_its_cause(running: tuple[Server, int]) -> None:
    """An error body is flat: the official client reads its message all the same."""
    server, _ = running
    status, body = server.request("POST", "/v1/chat/completions", server.chat(max_tokens=100_000))
    document = json.loads(body)
    assert (status, document["object"], document["code"]) == (400, "error", 400)
    assert "maximum context length" in document["message"]


def test_sglang_drains_on_sigterm(running: tuple[Server, int]) -> None:
    server, pid = running
    result = conformance.check_drain(server, lambda: os.kill(pid, signal.SIGTERM))
    assert (result.outcome, result.detail) == (OK, "a request that ran at SIGTERM got its end")
