"""Phases of a start, the plan of a warm-up, when a leaving engine stops, and what the launcher's port says."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher import client, contract, drain, health, warmup
from launcher.contract import Drain, Warmup
from launcher.health import EngineStatus, HealthServer, render_metrics
from launcher.pod_state import PodState
from launcher.prompts import COMPLETIONS_PATH, PromptFactory
from launcher.startup_phases import StartupPhases
from tests.engine_image.middleware_harness import CONTRACT

LOG = {
    "import": b"(EngineCore pid=7) INFO [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: x\n",
    "download": b"INFO [weight_utils.py:4] Time spent downloading weights for m: 1.5 seconds\n",
    "load": b"INFO [default_loader.py:501] Loading weights took 0.08 seconds\n",
    "init": b"INFO [core.py:402] init engine (profile, create kv cache, warmup model) took 0.08 s (compilation: 3 s)\n",
}


def phases() -> StartupPhases:
    return StartupPhases(CONTRACT.startup_phases, 100.0)


def test_startup_phases_add_up() -> None:
    times = phases()
    times.end("launch", 101.0)
    for at, line in zip((105.0, 106.0, 110.0, 120.0), LOG.values(), strict=True):
        times.observe(line, at)
    times.end("api", 121.0)
    times.end("warmup", 124.0)
    assert times.seconds() == {
        "launch": 1.0, "import": 4.0, "download": 1.0, "load": 4.0, "init": 10.0, "api": 1.0, "warmup": 3.0,
    }  # fmt: skip


def test_startup_phases_missing_line_counts_for_next_phase() -> None:
    times = phases()
    times.observe(LOG["import"], 105.0)
    times.observe(LOG["init"], 120.0)
    assert times.seconds() == {"import": 5.0, "init": 15.0}


def test_startup_phases_late_and_repeated_lines_are_ignored() -> None:
    times = phases()
    times.observe(LOG["import"], 105.0)
    times.observe(LOG["load"], 110.0)
    times.observe(LOG["import"], 111.0)
    times.observe(LOG["load"], 112.0)
    times.observe(b"anything else", 113.0)
    assert times.seconds() == {"import": 5.0, "load": 5.0}


def test_startup_phases_current_phase_and_elapsed_time() -> None:
    times = phases()
    assert times.current(100.5) == ("launch", 0.5)
    times.end("launch", 101.0)
    assert times.current(103.0) == ("import", 2.0)
    times.observe(LOG["load"], 104.0)
    assert times.current(104.0) == ("init", 0.0)
    times.end("warmup", 110.0)
    assert times.current(999.0) is None


def test_startup_phases_skipped_phase_is_never_current() -> None:
    times = StartupPhases(CONTRACT.startup_phases, 100.0, skipped=("download",))
    times.observe(LOG["import"], 105.0)
    assert times.current(107.0) == ("load", 2.0)
    times.observe(LOG["download"], 108.0)
    assert times.seconds() == {"import": 5.0, "download": 3.0}


DRAIN = Drain(5, 2, 0.5, 10, 600, 15)


@pytest.mark.parametrize(
    ("now", "last", "needed", "quiet"),
    [
        (104.9, None, None, False),
        (105.0, None, None, True),
        (105.0, 102.9, None, True),
        (105.0, 103.1, None, False),
        (107.0, 105.1, None, False),
        (107.2, 105.1, None, True),
        (400.0, 399.9, None, False),
        (110.0, None, 105.1, False),
        (110.2, None, 105.1, True),
    ],
)
def test_leaving_engine_is_quiet_when_nobody_needs_it(
    now: float, last: float | None, needed: float | None, quiet: bool
) -> None:
    assert drain.is_quiet(now, 100.0, last, needed, DRAIN) is quiet


async def test_wait_until_quiet_ends_quiet_or_at_the_limit(tmp_path: Path) -> None:
    state, began = PodState(tmp_path), time.time()
    assert await drain.wait_until_quiet(state, Drain(0.3, 0, 0.5, 5, 1, 1), began, 60.0)
    assert time.time() - began >= 0.3
    state.mark_request()
    assert not await drain.wait_until_quiet(state, Drain(0, 60, 0.5, 5, 1, 1), began, 0.2)


@pytest.mark.parametrize("timeout", [1, 5, 10, 20, 600, 2700])
def test_longest_drain_fits_grace_period(timeout: int) -> None:
    """An engine that gets requests until the end: handed over, rejecting, and the last responses."""
    limits = CONTRACT.drain
    leaving = drain.handover_limit_seconds(limits, timeout) + limits.max_rejecting_seconds
    longest = leaving + drain.left_seconds(limits, timeout, leaving) + 5
    assert longest <= limits.max_rejecting_seconds + timeout + limits.grace_margin_seconds
    assert drain.left_seconds(limits, timeout, limits.min_handover_seconds + limits.quiet_seconds) == timeout


def test_pod_state_marks_are_cleared_by_reset(tmp_path: Path) -> None:
    state = PodState(tmp_path / "a")
    state.reset()
    state.mark_draining()
    state.mark_stopping()
    state.mark_request()
    state.mark_request()
    assert (state.draining, state.stopping, state.last_request() is None) == (True, True, False)
    state.reset()
    assert (state.draining, state.stopping, state.last_request()) == (False, False, None)


def test_pod_state_counts_requests_of_crashed_processes(tmp_path: Path) -> None:
    launcher = PodState(tmp_path)
    launcher.reset()
    own = PodState(tmp_path)
    own.begin_request()
    own.begin_request()
    own.end_request()
    held = (
        "from launcher.pod_state import PodState; import os; s = PodState(os.environ['AT']); "
        "s.begin_request(); s.begin_request(); os._exit(9)"
    )
    environment = {"AT": str(tmp_path), "PYTHONPATH": str(contract.IMAGE_ROOT)}
    assert subprocess.run([sys.executable, "-c", held], env=environment, check=False).returncode == 9
    assert launcher.in_flight == 1 + 2
    own.end_request()
    assert launcher.in_flight == 2
    launcher.reset()
    assert launcher.in_flight == 0


WARMUP = Warmup((16, 128, 1024), (1, 4), 8, 5.0)


def test_warmup_plan_has_each_length_and_batch() -> None:
    plan = warmup.plan_batches(WARMUP, 4096)
    assert [(batch.size, batch.prompt_tokens) for batch in plan] == [(1, 16), (1, 128), (1, 1024), (4, 16)]


@pytest.mark.parametrize(
    ("task", "path", "field"),
    [
        ("generate", "/v1/completions", "prompt"),
        ("embed", "/v1/embeddings", "input"),
        ("score", "/score", "text_2"),
        ("transcribe", "/v1/audio/transcriptions", "model"),
    ],
)
async def test_warmup_asks_the_path_of_the_task(task: str, path: str, field: str) -> None:
    requested: list[tuple[str, bytes]] = []

    async def send(to: str, body: bytes | None) -> client.Response:
        requested.append((to, body or b""))
        return client.Response(200, b'{"data": [{"max_model_len": 4096}]}')

    await warmup.run(send, WARMUP, PromptFactory("m"), task)
    assert {to for to, _ in requested[1:]} == {path} | ({"/v1/chat/completions"} if task == "generate" else set())
    assert all(field in json.loads(body) for to, body in requested if to == path)


@pytest.mark.parametrize("task", ["generate", "embed", "score", "transcribe"])
async def test_warmup_without_the_tasks_path_names_it(task: str) -> None:
    async def send(to: str, body: bytes | None) -> client.Response:
        return client.Response(200 if body is None else 404, b'{"data": [{"max_model_len": 4096}]}')

    with pytest.raises(warmup.TaskNotServed, match=rf"does not serve {warmup.TASK_PATHS[task]}.*spec\.model\.task"):
        await warmup.run(send, WARMUP, PromptFactory("m"), task)


async def test_refused_warmup_is_no_failure() -> None:
    async def send(to: str, body: bytes | None) -> client.Response:
        return client.Response(200 if body is None else 400, b'{"data": [{"max_model_len": 4096}]}')

    await warmup.run(send, WARMUP, PromptFactory("m"), "embed")


def test_warmup_plan_fits_max_model_len() -> None:
    assert [batch.prompt_tokens for batch in warmup.plan_batches(WARMUP, 200)] == [16, 128, 16]
    assert [batch.prompt_tokens for batch in warmup.plan_batches(WARMUP, 12)] == [4, 4]


def test_warmup_prompts_have_distinct_prefixes() -> None:
    batches = warmup.request_bodies(warmup.plan_batches(WARMUP, 4096), PromptFactory("m"), 8)
    requests = [json.loads(raw) for batch in batches for raw in batch]
    assert len({tuple(request["prompt"][:4]) for request in requests}) == len(requests) == 7


def test_prompts_ten_thousand_have_distinct_prefixes_and_length() -> None:
    prompts = PromptFactory("m")
    begun = {tuple(prompts.new_prompt(16)[:2]) for _ in range(10_000)}
    assert len(begun) == 10_000
    assert [len(prompts.new_prompt(tokens)) for tokens in (1, 2, 3, 500)] == [1, 2, 3, 500]


async def test_warmup_rejecting_model_still_completes() -> None:
    requested: list[str] = []

    async def ask(path: str, _: bytes | None) -> client.Response:
        requested.append(path)
        if path == warmup.MODELS_PATH:
            return client.Response(200, b'{"data":[{"max_model_len":4096}]}')
        return client.Response(400, b"no")

    await warmup.run(ask, WARMUP, PromptFactory("m"))
    assert requested.count(COMPLETIONS_PATH) == 7
    assert requested.count(warmup.CHAT_PATH) == 1


@pytest.mark.parametrize("error", [OSError("gone"), TimeoutError(), ValueError("not HTTP")])
async def test_warmup_failing_engine_ends_warmup(error: Exception) -> None:
    requested = []

    async def ask(*what: object) -> client.Response:
        requested.append(what)
        raise error

    await warmup.run(ask, WARMUP, PromptFactory("m"))
    assert requested


@pytest.mark.parametrize(
    "models", [b"", b"[]", b'{"data":[]}', b'{"data":[{}]}', b'{"data":[{"max_model_len":null}]}', b"[" * 9999]
)
def test_max_model_len_missing_is_reported(models: bytes) -> None:
    with pytest.raises(ValueError, match="/v1/models names no max_model_len"):
        warmup.parse_max_model_len(models)


def about() -> bytes:
    return b"{}"


async def no_metrics() -> bytes:
    return b""


def port_of(server: asyncio.Server) -> int:
    """The IPv4 port: with port 0 each address family has its own."""
    return next(int(one.getsockname()[1]) for one in server.sockets if one.family == socket.AF_INET)


@pytest.mark.parametrize(
    ("status", "ready", "word"),
    [
        (EngineStatus(), 503, b"starting"),
        (EngineStatus(warm=True), 200, b"ready"),
        (EngineStatus(warm=True, draining=True), 503, b"draining"),
        (EngineStatus(warm=True, dead=True), 503, b"unreachable"),
        (EngineStatus(warm=True, scaling=True), 503, b"scaling"),
    ],
)
async def test_health_server_paths_reflect_status(status: EngineStatus, ready: int, word: bytes) -> None:
    async def scrape() -> bytes:
        return b"vllm:x 1\n"

    server = await HealthServer(CONTRACT, status, phases(), scrape, about).start(0)
    port = port_of(server)
    async with server:
        assert await client.request(port, "/readyz") == client.Response(ready, word)
        assert (await client.request(port, "/livez?verbose")).status == 200
        assert (await client.request(port, "/other")).status == 404
        assert await client.request(port, "/about?x") == client.Response(200, b"{}")
        metrics = (await client.request(port, "/metrics")).body
    assert metrics.endswith(b"vllm:x 1\n")
    assert b"plimsoll_engine_ready %d\n" % (ready == 200) in metrics


async def test_health_server_survives_malformed_requests() -> None:
    async def scrape() -> bytes:
        return b""

    server = await HealthServer(CONTRACT, EngineStatus(), phases(), scrape, about).start(0)
    port = port_of(server)
    async with server:
        for raw in (b"\r\n\r\n", b"x" * (health.MAX_HEADER_BYTES + 9), b"\xff\xfe\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(raw)
            await writer.drain()
            try:
                await reader.read()
            except ConnectionResetError:
                pass
            writer.close()
        assert (await client.request(port, "/livez")).status == 200


@pytest.mark.parametrize("sent", [b"", b"GET /readyz HT"])
async def test_health_server_cuts_unfinished_request(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(health, "REQUEST_SECONDS", 0.2)
    server = await HealthServer(CONTRACT, EngineStatus(), phases(), no_metrics, about).start(0)
    async with server, asyncio.timeout(5.0):
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
        writer.write(sent)
        assert await reader.read() == b""
        writer.close()


async def test_health_server_cuts_response_that_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 64 << 20  # more than the kernel takes

    async def scrape() -> bytes:
        return bytes(size)

    monkeypatch.setattr(health, "REQUEST_SECONDS", 0.2)
    server = HealthServer(CONTRACT, EngineStatus(), phases(), scrape, about)
    async with await server.start(0) as listener, asyncio.timeout(20.0):
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(listener))
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(1.0)
        received = 0
        with contextlib.suppress(ConnectionResetError):
            while data := await reader.read(1 << 20):
                received += len(data)
        assert received < size
        writer.close()


async def test_health_server_replaces_oldest_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MAX_CONNECTIONS", 3)
    server = await HealthServer(CONTRACT, EngineStatus(), phases(), no_metrics, about).start(0)
    async with server, asyncio.timeout(3.0):
        silent = [await asyncio.open_connection("127.0.0.1", port_of(server)) for _ in range(3)]
        assert (await client.request(port_of(server), "/livez")).status == 200
        with contextlib.suppress(ConnectionResetError):
            assert await silent[0][0].read() == b""
        assert (await client.request(port_of(server), "/livez")).status == 200
        for reader, writer in silent[1:]:
            writer.write(b"GET /livez HTTP/1.1\r\n\r\n")
            assert b" 200 " in await reader.readline()
        for _, writer in silent:
            writer.close()


def test_exposition_has_startup_phase_seconds() -> None:
    times = phases()
    times.end("launch", 100.25)
    assert 'plimsoll_engine_startup_phase_seconds{phase="launch"} 0.250\n' in render_metrics(
        CONTRACT, EngineStatus(), times
    )


def test_contract_can_be_overridden_by_environment(tmp_path: Path) -> None:
    document = json.loads((contract.IMAGE_ROOT / "contract.json").read_text())
    document["ports"]["api"] = 9000
    path = tmp_path / "contract.json"
    path.write_text(json.dumps(document))
    assert contract.load({contract.CONTRACT_PATH_VARIABLE: str(path)}).ports["api"] == 9000
    assert contract.load({}).ports["api"] == 8000
