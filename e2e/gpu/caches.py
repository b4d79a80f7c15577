"""Compilers' caches filled while parts still travel, by an engine outside the cluster; and a first check of vLLM there.

Problem: an engine with empty caches starts in three minutes, on a machine whose time is short; and a vLLM that does not
run is found out only after everything has travelled.
Idea: as soon as the engine's archive is unpacked, an engine starts on the last GPU with the paths, the arguments and
the user of the pods, so that their compilers find what it compiled. It is ended before the first pod starts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.hardware import dummy_models
from e2e.gpu import scenarios
from e2e.gpu.processes import log_line
from e2e.gpu.settings import CACHES, ENGINE, ENVIRONMENT, LOGS, MODELS, OFFLINE, PARTS, ROOT

_PID: Final = ROOT / "run" / "fill-caches.pid"
_LOG: Final = LOGS / "fill-caches.log"
_COMPILED: Final = ("Graph capturing finished", "Application startup complete")
_USER: Final = 1000  # of the engine's pods
_PORT: Final = 18000
_started: Final[list[subprocess.Popen[bytes]]] = []  # the program outlives this command


def make_folders() -> None:
    """The folders that pods mount, for any user."""
    for folder in (CACHES, *(CACHES / name for name in ("vllm", "inductor", "triton"))):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o777)


def begin(model: str) -> None:
    """Start the engine once its archive is unpacked; returns at once."""
    make_folders()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = ENVIRONMENT / "lib" / version / "site-packages"
    _link(packages, ENGINE / "site")
    _link(scenarios.CACHE_MOUNT, CACHES)
    dummy_models.write_model(MODELS, model)
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(MODELS / model)]
    words += [*scenarios.engine_arguments(simulated=False), "--host", "127.0.0.1", "--port", str(_PORT)]
    variables = {
        **dict(one.split("=", 1) for one in OFFLINE),
        **scenarios.cache_variables(),
        "PYTHONPATH": str(packages),
        "PYTHONDONTWRITEBYTECODE": "1",  # the packages are copied meanwhile
        "HOME": "/tmp",
        "CUDA_VISIBLE_DEVICES": str(max(0, len(list(Path("/dev").glob("nvidia[0-9]"))) - 1)),
    }
    start(words, variables, PARTS / "engine.done", user=_USER)


def start(words: Sequence[str], variables: dict[str, str], after: Path, user: int | None = None) -> None:
    """Run a program in a session of its own as soon as the file `after` is there."""
    for path in (_PID, _LOG):
        path.parent.mkdir(parents=True, exist_ok=True)
    waiting = f'until [ -e {after} ]; do sleep 0.2; done; cd /tmp; exec "$@"'
    with _LOG.open("wb") as log:
        _started.append(
            subprocess.Popen(
                ["sh", "-c", waiting, "sh", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **variables},
                user=user,
                group=user,
            )
        )
    _PID.write_text(str(_started[-1].pid))


def finish(seconds: float) -> None:
    """Wait until the engine has compiled, at most so long, and end it. Nothing happens if none was started."""
    if not _PID.exists():
        return
    pid, deadline = int(_PID.read_text()), time.monotonic() + seconds
    while _alive(pid) and time.monotonic() < deadline and not _has_compiled():
        time.sleep(0.2)
    log_line(f"caches: {'filled' if _has_compiled() else 'not filled in time'}; {_last_line()}")
    while _alive(pid):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.1)
    _PID.unlink()


def _has_compiled() -> bool:
    text = _LOG.read_text(errors="replace")
    return any(mark in text for mark in _COMPILED)


def _last_line() -> str:
    lines = _LOG.read_text(errors="replace").strip().splitlines()
    return lines[-1][-200:] if lines else "it said nothing"


def _alive(pid: int) -> bool:
    """Whether a process of the group is there that is not a zombie."""
    for process in _started:
        process.poll()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, group = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:3]
            if int(group) == pid and state != "Z":
                return True
    return False


def _link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_symlink():
        path.symlink_to(target)
