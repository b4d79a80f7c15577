"""The launcher as a process, with a stand-in for vLLM: what makes it ready, how it leaves, when it fails."""

import asyncio
import json
import os
import re
import signal
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher import client
from launcher.contract import IMAGE_ROOT
from tests.ports import free_ports

FAKE = Path(__file__).with_name("fake_vllm.py")


def gone(process: int) -> bool:
    """Whether a process has ended (it may wait for its parent to look)."""
    try:
        return "zombie" in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


@dataclass
class Running:
    """A launcher and its ports."""

    process: asyncio.subprocess.Process
    api: int
    port: int
    context: ssl.SSLContext | None = None  # of a client of the launcher's port with TLS

    async def until(self, pattern: str) -> re.Match[str]:
        """Reads its log up to a line that matches."""
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            found = re.search(pattern, line.decode())
            if found:
                return found
        raise AssertionError(f"the log ended before {pattern!r}")

    async def get(self, path: str) -> client.Response:
        """Asks the launcher's port."""
        return await client.request(self.port, path, timeout=60.0, context=self.context)


@asynccontextmanager
async def launched(
    folder: Path, *args: str, role: str = "serve", runtime: str = "vllm", model: str = "m", **variables: str
) -> AsyncIterator[Running]:
    """A launcher with its own ports, state folder and a program for the runtime on its path; killed at the end."""
    api, port, nixl = free_ports(3)
    document = json.loads((IMAGE_ROOT / "contract.json").read_text())
    document["ports"] = {"api": api, "launcher": port, "nixl": nixl}
    document["paths"].update(state=str(folder / "state"), termination_message=str(folder / "said"))
    document["drain"].update(min_handover_seconds=0, quiet_seconds=0)
    (folder / "contract.json").write_text(json.dumps(document))
    command = folder / {"vllm": "vllm", "simulated": "python3"}[runtime]
    command.write_text(f"#!{sys.executable}\nimport runpy\nrunpy.run_path({str(FAKE)!r}, run_name='__main__')\n")
    command.chmod(0o755)
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(IMAGE_ROOT),
        "PLIMSOLL_CONTRACT": str(folder / "contract.json"),
        "PLIMSOLL_RUNTIME": runtime,
        "PLIMSOLL_ROLE": role,
        "PLIMSOLL_MODEL": model,
        "PLIMSOLL_ARGS": json.dumps(list(args)),
        **variables,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "launcher", env=environment, cwd=folder,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield Running(process, api, port)
    finally:
        if process.returncode is None:
            process.terminate()  # not killed: it must end its engine
        await process.communicate()


async def test_launcher_is_ready_after_warmup_and_exits_zero(tmp_path: Path) -> None:
    async with launched(tmp_path) as launcher:
        await launcher.until("ready after")
        assert (await launcher.get("/readyz")).status == 200
        metrics = (await launcher.get("/metrics")).body.decode()
        launcher.process.send_signal(signal.SIGTERM)
        assert await launcher.process.wait() == 0
    assert "vllm:num_requests_running 0" in metrics
    for phase in ("launch", "import", "init", "api", "warmup"):
        assert f'plimsoll_engine_startup_phase_seconds{{phase="{phase}"}}' in metrics
    assert (tmp_path / "state" / "draining").exists()
    assert (tmp_path / "state" / "stopping").exists()


async def test_launcher_logs_no_secret_of_the_command_line(tmp_path: Path) -> None:
    async with launched(tmp_path, "--hf-token", "s3cr3t", "--seed", "1") as launcher:
        started = (await launcher.until("starting: .*")).group()
        engine = (await launcher.until("non-default args.*")).group()
    assert "--hf-token *** --seed 1" in started
    assert engine == "non-default args: {'model': 'm', 'hf_token': ***}"


async def test_launcher_serves_engine_info_and_self_benchmark(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "architectures": ["x"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    async with launched(tmp_path, "--max-num-seqs", "8", model=str(tmp_path)) as launcher:
        await launcher.until("ready after")
        said = json.loads((await launcher.get("/about")).body)
    assert (said["engine"], said["role"], said["phase"], said["ready"]) == ("vllm", "serve", None, True)
    assert said["limits"] == {
        "max_sequences": 8, "kv_tokens": 1600, "token_budget": None, "block_tokens": 16, "max_model_len": 64,
    }  # fmt: skip
    assert said["config"] == {"model_type": "llama", "hidden_size": 64}
    assert [name for name, _ in said["phases"]] == ["launch", "import", "init", "api", "warmup"]
    ((tokens, seconds),) = said["self_benchmark"]["prefill"]
    assert tokens == 16
    assert seconds > 0


async def test_launcher_startup_reports_current_phase(tmp_path: Path) -> None:
    async with launched(tmp_path, "unhealthy", model=str(tmp_path)) as launcher:
        await launcher.until("init engine")
        said = json.loads((await launcher.get("/about")).body)
    assert said["phase"] in ("load", "api")  # the line that ends the former may be read later
    assert (said["ready"], said["self_benchmark"], said["limits"]["kv_tokens"]) == (False, None, None)


async def test_launcher_simulated_runtime_behaves_like_vllm(tmp_path: Path) -> None:
    async with launched(tmp_path, runtime="simulated") as launcher:
        argv = (await launcher.until(r"starting: (.*)"))[1].split()
        await launcher.until("ready after")
        said = json.loads((await launcher.get("/about")).body)
        launcher.process.send_signal(signal.SIGTERM)
        assert await launcher.process.wait() == 0
    assert argv[:5] == ["python3", "-m", "simulated", "serve", "m"]
    assert (said["engine"], said["engine_version"]) == ("simulated", "simulated")
    assert said["accelerator"] == {"name": "H200", "count": 1}


async def test_launcher_unrequested_engine_exit_zero_is_failure(tmp_path: Path) -> None:
    async with launched(tmp_path) as launcher:
        await launcher.until("ready after")
        with pytest.raises((OSError, ValueError)):
            await client.request(launcher.api, "/exit0", b"{}")
        assert await launcher.process.wait() == 1


async def test_launcher_engine_startup_failure_passes_exit_code(tmp_path: Path) -> None:
    async with launched(tmp_path, "broken") as launcher:
        assert await launcher.process.wait() == 3


async def test_failed_start_leaves_its_cause_in_termination_message(tmp_path: Path) -> None:
    async with launched(tmp_path, "failing-core") as launcher:
        assert await launcher.process.wait() == 1
    assert (tmp_path / "said").read_text() == "ValueError: no room for the KV cache"


async def test_launcher_task_not_served_is_the_cause_of_the_end(tmp_path: Path) -> None:
    async with launched(tmp_path, "other-task") as launcher:
        await launcher.until("ImportError")
        error = (await launcher.until("ERROR .*")).string
        assert launcher.process.stdout is not None
        rest = (await launcher.process.stdout.read()).decode()
        assert await launcher.process.wait() == 1
    assert "set spec.model.task to what the model does: it is killed" in error
    assert "ended by itself" not in rest
    assert (tmp_path / "said").read_text().endswith("set spec.model.task to what the model does")


async def test_launcher_failure_without_an_error_leaves_the_log(tmp_path: Path) -> None:
    async with launched(tmp_path, "broken") as launcher:
        await launcher.process.wait()
    assert not (tmp_path / "said").exists(), "Kubernetes keeps the end of the log where no message is written"


async def test_launcher_ends_a_server_without_its_core(tmp_path: Path) -> None:
    async with launched(tmp_path) as launcher:
        await launcher.until("ready after")
        await client.request(launcher.api, "/dead", b"{}")
        await launcher.until("the engine is dead")
        await launcher.until("the engine ended only when it was killed")
        assert await launcher.process.wait() == 137


async def test_launcher_keeps_an_engine_that_scales(tmp_path: Path) -> None:
    async with launched(tmp_path) as launcher:
        await launcher.until("ready after")
        await client.request(launcher.api, "/scaling", b"{}")
        await launcher.until("the engine says that it is scaling")
        assert await launcher.get("/readyz") == client.Response(503, b"scaling")
        assert (await launcher.get("/livez")).status == 200
        await client.request(launcher.api, "/scaled", b"{}")
        await launcher.until("not scaling any more")
        assert (await launcher.get("/readyz")).status == 200


async def test_launcher_exit_kills_orphaned_engine_processes(tmp_path: Path) -> None:
    async with launched(tmp_path, "orphan") as launcher:
        orphan = int((await launcher.until(r"orphan (\d+)"))[1])
        await launcher.until("ready after")
        launcher.process.send_signal(signal.SIGTERM)
        assert await launcher.process.wait() == 0
    while not gone(orphan):  # it was killed, and dies when it next has a turn
        await asyncio.sleep(0.01)


async def test_launcher_sigterm_during_startup_exits_zero(tmp_path: Path) -> None:
    async with launched(tmp_path) as launcher:
        await launcher.until("Initializing")
        launcher.process.send_signal(signal.SIGTERM)
        assert await launcher.process.wait() == 0


async def test_launcher_invalid_settings_are_reported(tmp_path: Path) -> None:
    async with launched(tmp_path, "--port", "1") as launcher:
        await launcher.until("PLIMSOLL_ARGS: --port is set by Plimsoll")
        assert await launcher.process.wait() == 2


WORKER = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "leader.invalid"}


async def test_launcher_worker_is_ready_and_ends_after_leader(tmp_path: Path) -> None:
    async with launched(tmp_path, **WORKER) as launcher:
        await launcher.until("this pod is a worker")
        assert (await launcher.get("/readyz")).status == 200
        launcher.process.send_signal(signal.SIGTERM)
        assert await launcher.process.wait() == 0


async def test_launcher_worker_whose_engine_ends_fails(tmp_path: Path) -> None:
    async with launched(tmp_path, "broken", **WORKER) as launcher:
        assert await launcher.process.wait() == 3
