"""The simulated engine as a process under the launcher: its start, a drain with a stream in flight, its ways to end."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import signal
import ssl
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from launcher import client
from launcher.contract import IMAGE_ROOT
from launcher.pod_state import PodState
from plimsoll.api.contract import engine_tls_name
from tests.engine_image.test_launcher import Running
from tests.ports import free_ports

pytestmark = pytest.mark.skipif(importlib.util.find_spec("uvicorn") is None, reason="uvicorn is not installed")
FLAGS = ("--start-seconds", "1", "--time-scale", "0.1")


@asynccontextmanager
async def engine(
    folder: Path,
    *flags: str,
    drain_s: int = 600,
    quiet_s: float = 0,
    progress: dict[str, float] | None = None,
    tls: Path | None = None,
) -> AsyncIterator[Running]:
    """A launcher with a simulated engine, ready; its last words are in the folder's `said`.

    `quiet_s`: without a request before it ends. `progress`: limits of the contract that are changed. `tls`: the mounted
    Secret of an engine of namespace `team` that requires mutual TLS.
    """
    api, port, nixl = free_ports(3)
    document = json.loads((IMAGE_ROOT / "contract.json").read_text())
    document["ports"] = {"api": api, "launcher": port, "nixl": nixl}
    document["paths"].update(state=str(folder / "state"), termination_message=str(folder / "said"))
    document["drain"].update(min_handover_seconds=quiet_s, quiet_seconds=quiet_s)
    document["progress"].update(progress or {})
    if tls is not None:
        document["paths"]["tls"] = str(tls)
    (folder / "contract.json").write_text(json.dumps(document))
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join((str(IMAGE_ROOT), str(IMAGE_ROOT.parent / "operator"))),
        "PLIMSOLL_CONTRACT": str(folder / "contract.json"),
        "PLIMSOLL_RUNTIME": "simulated",
        "PLIMSOLL_MODEL": "org/m",
        "PLIMSOLL_SHUTDOWN_TIMEOUT_SECONDS": str(drain_s),
        "PLIMSOLL_SERVED_NAMES": '["m"]',
        "PLIMSOLL_ARGS": json.dumps([*FLAGS, *flags]),
    }
    if tls is not None:
        document = {"secret": "team/engine-tls", "name": engine_tls_name("team"), "release": "plimsoll"}
        environment["PLIMSOLL_TLS"] = json.dumps(document)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "launcher", env=environment, cwd=folder,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    kubelet = ssl.create_default_context()
    kubelet.check_hostname, kubelet.verify_mode = False, ssl.CERT_NONE
    running = Running(process, api, port, None if tls is None else kubelet)
    try:
        await running.until("ready after")
        yield running
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


@asynccontextmanager
async def stream(api: int, tokens: int, context: ssl.SSLContext | None = None) -> AsyncIterator[aiohttp.StreamReader]:
    """A streamed completion whose first bytes have come. `context`: for an engine of namespace `team` with TLS."""
    body: dict[str, Any] = {"model": "m", "prompt": "a", "max_tokens": tokens, "stream": True}
    url = f"{'http' if context is None else 'https'}://127.0.0.1:{api}/v1/completions"
    tls: dict[str, Any] = {} if context is None else {"ssl": context, "server_hostname": engine_tls_name("team")}
    async with aiohttp.ClientSession() as session, session.post(url, json=body, **tls) as answer:
        await answer.content.readuntil(b"\n\n")
        yield answer.content


async def until_in_flight(folder: Path, requests: int) -> None:
    """Returns once the engine holds so many."""
    while PodState(folder / "state").in_flight != requests:
        await asyncio.sleep(0.01)


def pid(launcher: int) -> int:
    """The engine's process: the launcher's only child."""
    return int(Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()[0])


async def test_process_startup_phases_metrics_and_lossless_drain(tmp_path: Path) -> None:
    async with engine(tmp_path) as one:
        text = (await one.get("/metrics")).body.decode()
        for phase in ("launch", "import", "download", "load", "init", "api", "warmup"):
            assert re.search(rf'plimsoll_engine_startup_phase_seconds{{phase="{phase}"}} \d', text), phase
        assert 'vllm:num_requests_running{engine="0",model_name="m"} 0.0' in text
        assert 'plimsoll_engine_remote_prefills_total{outcome="remote"} 0.0' in text
        async with stream(one.api, 600) as content:
            one.process.send_signal(signal.SIGTERM)
            rest = await content.read()
        assert rest.count(b'"text"') == 599
        assert rest.endswith(b"data: [DONE]\n\n")
        assert await one.process.wait() == 0
    assert not (tmp_path / "said").exists()


async def test_process_short_drain_reports_aborted_requests(tmp_path: Path) -> None:
    whole = json.dumps({"model": "m", "prompt": "a", "max_tokens": 30_000}).encode()
    async with engine(tmp_path, drain_s=1) as one:
        async with stream(one.api, 30_000) as long, stream(one.api, 40) as short:
            assert (await short.read()).endswith(b"data: [DONE]\n\n")
            await until_in_flight(tmp_path, 1)  # the short one is let go a moment after its last byte
            request = asyncio.create_task(client.request(one.api, "/v1/completions", whole, 60.0))
            await until_in_flight(tmp_path, 2)
            one.process.send_signal(signal.SIGTERM)
            with pytest.raises(aiohttp.ClientPayloadError):
                await long.read()
            assert (await request).status == 503
        await one.process.wait()
    assert json.loads((tmp_path / "said").read_text()) == {"abortedRequests": 2, "drainSeconds": 1}


async def test_leaving_engine_serves_while_a_gateway_has_no_other(tmp_path: Path) -> None:
    whole = json.dumps({"model": "m", "prompt": "a", "max_tokens": 3}).encode()
    quiet_s = 3.0  # more than a busy machine keeps this process waiting between two of its requests
    async with engine(tmp_path, quiet_s=quiet_s) as one:
        one.process.send_signal(signal.SIGTERM)
        await one.until("leaving")
        leaving_at = time.monotonic()
        while time.monotonic() < leaving_at + 1.5 * quiet_s:
            assert (await client.request(one.api, "/plimsoll/handover", b"{}")).status == 200
            assert (await one.get("/readyz")).status == 200
            await asyncio.sleep(0.25)
        assert (await client.request(one.api, "/v1/completions", whole)).status == 200
        assert "plimsoll_engine_draining 1" in (await one.get("/metrics")).body.decode()
        assert await one.process.wait() == 0


async def test_leaving_engine_that_is_never_left_alone_ends(tmp_path: Path) -> None:
    """Its drain timeout of two seconds is handed over for two, and the rest of what the grace period has."""
    async with engine(tmp_path, quiet_s=60.0, drain_s=2) as one:
        one.process.send_signal(signal.SIGTERM)
        await one.until("no other engine is ready yet")
        assert (await one.get("/readyz")).status == 503
        assert (await client.request(one.api, "/plimsoll/handover", b"{}")).status == 503
        whole = json.dumps({"model": "m", "prompt": "a", "max_tokens": 3}).encode()
        assert (await client.request(one.api, "/v1/completions", whole)).status == 503
        assert await one.process.wait() == 0


async def test_process_request_with_named_model_is_rewritten(tmp_path: Path) -> None:
    body = json.dumps({"model": "busy/other", "prompt": "a", "max_tokens": 3}).encode()
    async with engine(tmp_path) as one:
        alone = await client.request(one.api, "/v1/completions", body)
        url, named = f"http://127.0.0.1:{one.api}/v1/completions", {"x-plimsoll-model": "m"}
        sent = {"content-type": "application/json", "x-plimsoll-response-model": "small", **named}
        async with aiohttp.ClientSession(headers=sent) as session, session.post(url, data=body) as answer:
            document = await answer.json()
    assert alone.status == 404
    assert (document["model"], document["usage"]["completion_tokens"]) == ("small", 3)


async def test_process_dead_engine_core_breaks_stream_and_fails_pod(tmp_path: Path) -> None:
    async with engine(tmp_path) as one:
        async with stream(one.api, 30_000) as content:
            os.kill(pid(one.process.pid), signal.SIGUSR1)
            with pytest.raises(aiohttp.ClientPayloadError):
                await content.read()
        assert (await client.request(one.api, "/health")).status == 503
        assert await one.process.wait() == 1


async def test_process_invalid_flags_end_the_pod_with_message(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ready after"):
        async with engine(tmp_path, "--profile", "gpu-9000"):
            pass
