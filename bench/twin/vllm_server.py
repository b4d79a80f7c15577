"""vLLM with the executor that sleeps (`engine-image/simulated/twin`), on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.hardware.engine import IMAGE, descendants
from plimsoll.sim.profile import HardwareProfile

HOST: Final = "127.0.0.1"
EXECUTOR: Final = "simulated.twin.executor.TwinExecutor"
# As in the image for the CPU: one import of everything, no compiler, no binding to cores, no network.
ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": HOST,
}
_START_S: Final = 300.0
_STOP_S: Final = 20.0


def arguments(model: Path, profile: HardwareProfile, name: str, scale: float, port: int) -> list[str]:
    """vLLM's command line for a profile, which is read again there by its name."""
    settings = {"twin": {"profile": name, "time_scale": scale}}
    return [
        "serve",
        str(model),
        *("--load-format", "dummy", "--served-model-name", "m", "--disable-uvicorn-access-log"),
        *("--host", HOST, "--port", str(port)),
        *("--distributed-executor-backend", EXECUTOR, "--additional-config", json.dumps(settings)),
        *("--max-model-len", str(profile.max_model_len), "--max-num-seqs", str(profile.max_num_seqs)),
        *("--max-num-batched-tokens", str(profile.budget), "--block-size", str(profile.block_size)),
    ]


def version(url: str) -> str:
    """What vLLM says it is."""
    with urllib.request.urlopen(f"{url}/version", timeout=5) as answer:
        return str(json.load(answer)["version"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def running(vllm: Path, arguments_given: list[str], port: int, log: Path) -> Iterator[str]:
    """The engine's address while it runs. Raises RuntimeError with the end of its log where it does not come up.

    It stays in this session: a kernel that shares cores by session would let a lonely engine starve.
    """
    profile = os.environ | ENVIRONMENT
    profile["PYTHONPATH"] = f"{IMAGE}:{IMAGE.parent / 'operator'}"
    with log.open("wb") as file:
        process = subprocess.Popen([str(vllm), *arguments_given], env=profile, stdout=file, stderr=subprocess.STDOUT)
    try:
        url = f"http://{HOST}:{port}"
        if not _wait_healthy(url, process):
            raise RuntimeError(f"vLLM did not start:\n{log.read_text(errors='replace')[-4000:]}")
        yield url
    finally:
        _stop(process)


def _wait_healthy(url: str, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            if answer.status == 200:
                return True
        time.sleep(0.5)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Asks it to end, and ends what is left of it."""
    remaining = descendants(process.pid)
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_STOP_S)
    for pid in remaining:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
