"""GPU memory, processes and versions of the engines' machine."""

from __future__ import annotations

import importlib.metadata
import subprocess
import time
from pathlib import Path
from typing import Any, Final

from bench.hardware.engine import LaunchedEngine, descendants

FREED_MIB: Final = 1024  # above what was in use before: a driver keeps some
_FREE_S: Final = 15.0


def query_gpu(field: str) -> str | None:
    """One field of the first GPU; None without nvidia-smi or GPU."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = completed.stdout.strip().splitlines()
    return lines[0].strip() if lines else None


def used_mib() -> int | None:
    """GPU memory in use; None without a GPU."""
    text = query_gpu("memory.used")
    return int(text) if text and text.isdigit() else None


def wait_memory_freed(before_mib: int | None) -> tuple[bool, int | None]:
    """Whether GPU memory comes back to what it was before an engine, and what is in use then."""
    end = time.monotonic() + _FREE_S
    while True:
        now = used_mib()
        if now is None or before_mib is None or now <= before_mib + FREED_MIB:
            return True, now
        if time.monotonic() > end:
            return False, now
        time.sleep(0.3)


def versions() -> dict[str, Any]:
    """Driver, GPU and packages."""
    found: dict[str, Any] = {"gpu": query_gpu("name"), "driver": query_gpu("driver_version")}
    for name in ("vllm", "torch", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def core_pid(engine: LaunchedEngine) -> int:
    """The process that computes: vLLM's engine core; of an engine that is one process, that one.

    Raises LookupError where there is none.
    """
    commands = {}
    for pid in descendants(engine.process.pid):
        try:
            commands[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
    for mark in ("EngineCore", "simulated serve"):
        for pid, command in commands.items():
            if mark in command:
                return pid
    raise LookupError(f"no engine core among {commands}")
