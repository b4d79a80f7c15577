"""The launcher as a process, with a stand-in for vLLM: what makes it ready, how it leaves, when it fails."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher import client
from launcher.contract import ROOT

FAKE = Path(__file__).with_name("fake_vllm.py")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def gone(process: int) -> bool:
    """Whether a process has ended (it may wait for its parent to look)."""
    status = Path(f"/proc/{process}/status")
    return not status.exists() or "zombie" in status.read_text()


@dataclass
class Running:
    """A launcher and its ports."""

    process: asyncio.subprocess.Process
    api: int
    port: int

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
        return await client.request(self.port, path)


@asynccontextmanager
async def launched(folder: Path, *args: str, role: str = "serve") -> AsyncIterator[Running]:
    """A launcher with its own ports, state folder and a `vllm` on its path; killed at the end."""
    api, port, nixl = free_ports(3)
    document = json.loads((ROOT / "contract.json").read_text())
    document["ports"] = {"api": api, "launcher": port, "nixl": nixl}
    document["paths"]["state"] = str(folder / "state")
    document["drain"].update(min_unready_seconds=0, quiet_seconds=0)
    (folder / "contract.json").write_text(json.dumps(document))
    command = folder / "vllm"
    command.write_text(f"#!{sys.executable}\nimport runpy\nrunpy.run_path({str(FAKE)!r}, run_name='__main__')\n")
    command.chmod(0o755)
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PLIMSOLL_CONTRACT": str(folder / "contract.json"),
        "PLIMSOLL_ROLE": role,
        "PLIMSOLL_MODEL": "m",
        "PLIMSOLL_ARGS": json.dumps(list(args)),
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


async def test_ready_after_warm_up_and_gone_with_zero(tmp_path: Path) -> None:
    async with launched(tmp_path) as launcher:
        await launcher.until("ready after")
        assert (await launcher.get("/readyz")).status == 200
        metrics = (await launcher.get("/metrics")).body.decode()
        launcher.process.send_signal(signal.SIGTERM)
        assert await launcher.process.wait() == 0
    assert "vllm:num_requests_running 0" in metrics
    for phase in ("launch", "import", "init", "api", "warmup"):
        assert f'plimsoll_engine_start_phase_seconds{{phase="{phase}"}}' in metrics
    assert (tmp_path / "state" / "draining").exists()
    assert (tmp_path / "state" / "stopping").exists()


async def test_an_engine_that_exits_0_by_itself_is_a_failure(tmp_path: Path) -> None:
    async with launched(tmp_path) as launcher:
        await launcher.until("ready after")
        with pytest.raises((OSError, ValueError)):
            await client.request(launcher.api, "/exit0", b"{}")
        assert await launcher.process.wait() == 1


async def test_an_engine_that_cannot_start_passes_its_code_on(tmp_path: Path) -> None:
    async with launched(tmp_path, "broken") as launcher:
        assert await launcher.process.wait() == 3


async def test_a_dead_engine_core_makes_the_pod_unready(tmp_path: Path) -> None:
    async with launched(tmp_path) as launcher:
        await launcher.until("ready after")
        await client.request(launcher.api, "/dead", b"{}")
        await launcher.until("the engine is dead")
        assert await launcher.get("/readyz") == client.Response(503, b"dead")


async def test_what_the_engine_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    async with launched(tmp_path, "orphan") as launcher:
        orphan = int((await launcher.until(r"orphan (\d+)"))[1])
        await launcher.until("ready after")
        launcher.process.send_signal(signal.SIGTERM)
        assert await launcher.process.wait() == 0
    assert gone(orphan)


async def test_a_start_that_is_broken_off_is_no_failure(tmp_path: Path) -> None:
    async with launched(tmp_path) as launcher:
        await launcher.until("Initializing")
        launcher.process.send_signal(signal.SIGTERM)
        assert await launcher.process.wait() == 0


async def test_orders_that_make_no_sense_are_told(tmp_path: Path) -> None:
    async with launched(tmp_path, "--port", "1") as launcher:
        await launcher.until("PLIMSOLL_ARGS: --port is set by Plimsoll")
        assert await launcher.process.wait() == 2
