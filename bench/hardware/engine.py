"""One engine as in its pod: the launcher around vLLM, observed from its first second to its exit.

Problem: tests with small engines on a CPU show that a start has phases, that warm-up runs the self-benchmark and that a
drain loses no request. A GPU has other drivers, compilers and times.

Idea: the launcher is started with the environment that the operator sets, `/about` is read ten times a second, and
every change is recorded. During the drain there are streams to finish and late requests to reject.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.hardware import client

IMAGE: Final = Path(__file__).resolve().parents[2] / "engine-image"
STEPLOG: Final = Path(__file__).resolve().parent / "steplog"  # a plugin of vLLM
_POLL_S: Final = 0.1
_OWN_METRIC_PREFIX: Final = "plimsoll_engine_"


@dataclass
class LaunchedEngine:
    """A launcher's process; ports and state of its own, so that several share a machine."""

    name: str
    process: subprocess.Popen[bytes]
    api: int
    port: int
    started_s: float
    last_documents: dict[str, Any] = field(default_factory=dict)
    timeline: list[dict[str, Any]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.api}"

    def get(self, path: str, *, port: int | None = None) -> tuple[int, bytes]:
        """Status and body from the launcher; 0 where nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port or self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError:
            return 0, b""

    def poll(self) -> None:
        """Reads /about and /readyz once and keeps what changed, with the seconds since the process began."""
        at_s = time.monotonic() - self.started_s
        status, raw = self.get("/about")
        if status != 200:
            return
        self.last_documents = json.loads(raw)
        ready, _ = self.get("/readyz")
        seen = {key: self.last_documents[key] for key in ("phase", "ready", "draining")} | {"readyz": ready}
        if not self.timeline or any(self.timeline[-1][key] != value for key, value in seen.items()):
            self.timeline.append({"at_s": round(at_s, 2), **seen})

    def wait_ready(self, seconds: float) -> bool:
        """Watches the start until it is ready or over; False if it never is."""
        while time.monotonic() < self.started_s + seconds and self.process.poll() is None:
            self.poll()
            if self.timeline and self.timeline[-1]["readyz"] == 200:
                return True
            time.sleep(_POLL_S)
        return False

    def metrics(self) -> str:
        return self.get("/metrics")[1].decode("utf-8", "replace")

    def own_metrics(self) -> list[str]:
        """The launcher's own lines of /metrics."""
        return [line for line in self.metrics().splitlines() if line.startswith(_OWN_METRIC_PREFIX)]

    def kill(self) -> None:
        """Ends what `start` began with all its descendants: vLLM leads a process group of its own."""
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


def descendants(pid: int) -> list[int]:
    """Children of a process, theirs, and so on; nobody's where there is no /proc."""
    processes, frontier = [], [pid]
    while frontier:
        parent = frontier.pop()
        for file in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                frontier += [int(child) for child in file.read_text().split()]
        if parent != pid:
            processes.append(parent)
    return processes


def launch(
    name: str,
    model: Path,
    out: Path,
    *,
    role: str = "serve",
    api: int = 8000,
    gpus: str = "",
    args: Sequence[str] = (),
    default_args: Sequence[str] = (),
    runtime: str = "vllm",
    variables: Mapping[str, str] | None = None,
) -> LaunchedEngine:
    """Starts the launcher as the operator would, with a log of its steps.

    gpus: CUDA_VISIBLE_DEVICES, empty for all. variables: more of the environment, such as the folders of caches.
    """
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", api)) == 0:
            raise RuntimeError(f"port {api} is taken: another engine would be measured")
    contract = json.loads((IMAGE / "contract.json").read_text())
    contract["ports"] = {"api": api, "launcher": api + 1, "nixl": api + 1000}
    contract["paths"]["state"] = str(out / f"{name}.state")
    contract["paths"]["termination_message"] = str(out / f"{name}.termination")
    file = out / f"{name}.contract.json"
    file.write_text(json.dumps(contract))
    environment = dict(os.environ) | dict(variables or {})
    environment["PYTHONPATH"] = ":".join(filter(None, [str(IMAGE), str(STEPLOG), environment.get("PYTHONPATH", "")]))
    environment |= {
        "PLIMSOLL_CONTRACT": str(file),
        "PLIMSOLL_ROLE": role,
        "PLIMSOLL_MODEL": str(model),
        "PLIMSOLL_SERVED_NAMES": '["m"]',
        "PLIMSOLL_DEFAULT_ARGS": json.dumps(list(default_args)),
        "PLIMSOLL_ARGS": json.dumps(list(args)),
        "PLIMSOLL_POD_IP": "127.0.0.1",
        "PLIMSOLL_SHUTDOWN_TIMEOUT_SECONDS": "60",
        "PLIMSOLL_RUNTIME": runtime,
        "STEPLOG_PATH": str(out / f"{name}.steps.csv"),
        "STEPLOG_WEIGHTS": "1",
    }
    environment |= {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
    log = (out / f"{name}.log").open("wb")
    started_s = time.monotonic()
    command = ["sh", str(IMAGE / "launcher" / "start.sh")]
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    return LaunchedEngine(name, process, api, api + 1, started_s)


def command_line(out: Path, name: str) -> str:
    """The engine's command line, from the launcher's first line."""
    for line in (out / f"{name}.log").read_text(errors="replace").splitlines():
        if "starting: " in line:
            return line.split("starting: ", 1)[1]
    return ""


async def check_drain(engine: LaunchedEngine, streams: int = 4, tokens: int = 400) -> dict[str, Any]:
    """SIGTERM with streams under way: they must end well, what comes later must be refused with the mark to retry."""
    async with client.session() as http:
        in_flight = [
            asyncio.create_task(
                client.send_streamed(
                    http, engine.url, client.request_body(client.prompt((7, row), 200), tokens, stream=True)
                )
            )
            for row in range(streams)
        ]
        await asyncio.sleep(0.5)
        started_s = time.monotonic()
        engine.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.4)
        await asyncio.to_thread(engine.poll)
        late_response = await client.send_streamed(
            http, engine.url, client.request_body(client.prompt((8,), 50), 5, stream=True)
        )
        finished = await asyncio.gather(*in_flight)
        code = await asyncio.to_thread(engine.process.wait, 90)
    return {
        "streams": [{key: result[key] for key in ("status", "tokens", "ok", "last_s")} for result in finished],
        "late": {key: late_response.get(key) for key in ("status", "headers", "error")},
        "exit_code": code,
        "seconds": round(time.monotonic() - started_s, 2),
        "timeline": engine.timeline[-3:],
    }
