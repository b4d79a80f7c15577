"""An engine that hangs below a real launcher: unready, ready again where it goes on, else restarted with its cause.

The bounds are a fifth of the contract's, so that a test takes seconds; `test_progress` has the contract's.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from launcher import client
from tests.engine_image.simulated.test_process import engine, pid, stream, until_in_flight
from tests.engine_image.test_launcher import Running, gone

pytestmark = pytest.mark.skipif(importlib.util.find_spec("uvicorn") is None, reason="uvicorn is not installed")
LIMITS = {
    "poll_seconds": 0.4, "answer_seconds": 0.4, "unready_seconds": 2.0, "restart_seconds": 8.0, "step_multiple": 0.0,
}  # 0: a machine that is busy with other tests does not stretch the bounds  # fmt: skip
WAIT_SECONDS = 60.0  # a guard against a hang
LONG = 30_000  # tokens: more than a test lasts
STALLED = client.Response(503, b"stalled")


@asynccontextmanager
async def stoppable(folder: Path, *flags: str, **limits: float) -> AsyncIterator[Running]:
    """A launcher with a simulated engine that is not stopped at the end, so that it drains."""
    async with engine(folder, *flags, progress=LIMITS | limits) as one:
        try:
            yield one
        finally:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, IndexError):
                os.kill(pid(one.process.pid), signal.SIGCONT)


async def until_ready_is(launcher: Running, expected: client.Response) -> None:
    """Waits for an answer of /readyz."""
    async with asyncio.timeout(WAIT_SECONDS):
        while await launcher.get("/readyz") != expected:
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGUSR2], ids=["engine", "core"])
async def test_hung_engine_is_unready_then_killed_with_cause(number: signal.Signals, tmp_path: Path) -> None:
    async with stoppable(tmp_path) as one, stream(one.api, LONG) as content:
        hung = pid(one.process.pid)
        os.kill(hung, number)
        await until_ready_is(one, STALLED)
        assert (await one.get("/livez")).status == 200, "it may still go on"
        metrics = (await one.get("/metrics")).body.decode()
        with pytest.raises(aiohttp.ClientError):
            await content.read()
        async with asyncio.timeout(WAIT_SECONDS):
            assert await one.process.wait() == 1
        assert gone(hung)
    assert "plimsoll_engine_ready 0\n" in metrics
    silent = re.search(r"^plimsoll_engine_no_progress_seconds ([0-9.]+)$", metrics, re.MULTILINE)
    assert silent
    assert float(silent[1]) >= LIMITS["unready_seconds"]
    said = (tmp_path / "said").read_text()
    assert re.fullmatch(r"the engine made no progress for \d+ s with 1 requests running", said), said


async def test_hung_core_of_idle_engine_is_found(tmp_path: Path) -> None:
    async with stoppable(tmp_path) as one:
        await until_in_flight(tmp_path, 0)  # the warm-up's last request has its answer a moment before it ends
        os.kill(pid(one.process.pid), signal.SIGUSR2)
        await until_ready_is(one, STALLED)
        assert (await client.request(one.api, "/health")).status == 200, "vLLM's own health does not show it"
        async with asyncio.timeout(WAIT_SECONDS):
            assert await one.process.wait() == 1
    assert (tmp_path / "said").read_text().endswith(" with 0 requests running")


async def test_engine_that_goes_on_is_ready_again(tmp_path: Path) -> None:
    async with stoppable(tmp_path) as one, stream(one.api, 300) as content:
        os.kill(pid(one.process.pid), signal.SIGSTOP)
        await until_ready_is(one, STALLED)
        os.kill(pid(one.process.pid), signal.SIGCONT)
        await until_ready_is(one, client.Response(200, b"ready"))
        assert (await content.read()).endswith(b"data: [DONE]\n\n")
        one.process.send_signal(signal.SIGTERM)
        assert await one.process.wait() == 0
    assert not (tmp_path / "said").exists()


async def test_busy_engine_with_long_steps_stays_ready(tmp_path: Path) -> None:
    unready_s = 1.0
    flags = ("--time-scale", "1", "--profile-scale", "12", "--max-num-batched-tokens", "8192")
    body = {"model": "m", "prompt": [7] * 8000, "max_tokens": 1}
    async with stoppable(tmp_path, *flags, unready_seconds=unready_s, restart_seconds=4.0, step_multiple=20.0) as one:
        request = [
            asyncio.create_task(
                client.request(one.api, "/v1/completions", json.dumps(body | {"cache_salt": str(n)}).encode(), 90)
            )
            for n in range(2)
        ]
        answers, longest_s = set(), 0.0
        while not all(task.done() for task in request):
            answers.add((await one.get("/readyz")).body)
            metrics = (await one.get("/metrics")).body.decode()
            silent = re.search(r"^plimsoll_engine_no_progress_seconds ([0-9.]+)$", metrics, re.MULTILINE)
            longest_s = max(longest_s, float(silent[1]) if silent else 0.0)
            await asyncio.sleep(0.1)
        assert {(await task).status for task in request} == {200}
    assert answers == {b"ready"}
    assert longest_s > unready_s, "the steps were no longer than the bound"


async def test_drain_outlasts_a_hang(tmp_path: Path) -> None:
    restart_s = 4.0
    async with stoppable(tmp_path, restart_seconds=restart_s) as one, stream(one.api, 300) as content:
        await until_in_flight(tmp_path, 1)
        one.process.send_signal(signal.SIGTERM)
        while not (tmp_path / "state" / "stopping").exists():
            await asyncio.sleep(0.02)
        stopped = time.monotonic()
        os.kill(pid(one.process.pid), signal.SIGSTOP)
        while time.monotonic() < stopped + restart_s + 2:
            assert await one.get("/livez") == client.Response(200, b"draining")
            await asyncio.sleep(0.2)
        os.kill(pid(one.process.pid), signal.SIGCONT)
        assert (await content.read()).endswith(b"data: [DONE]\n\n")
        assert await one.process.wait() == 0
