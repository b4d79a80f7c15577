"""Compilers' caches filled while parts still travel, by an engine outside the cluster; and a first check of vLLM there.

Problem: an engine with empty caches starts in three minutes, on a machine whose time is short; and a vLLM that does not
run is found out only after everything has travelled.
Idea: as soon as the engine's archive is unpacked, engines start with the paths, the sets of arguments and the user of
the pods, so that their compilers find what these compiled. They are ended before the first pod starts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from bench.hardware import dummy_models
from e2e.gpu import scenarios
from e2e.gpu.processes import log_line
from e2e.gpu.settings import CACHES, ENGINE, ENVIRONMENT, HUB_MODEL, LOGS, MODELS, OFFLINE, PARTS, ROOT

_PIDS: Final = ROOT / "run" / "fill-caches"  # a file for each engine
_MEMORY_SHARE: Final = 0.3  # of a GPU: three engines may share one
_COMPILED: Final = ("Graph capturing finished", "Application startup complete")
_USER: Final = 1000  # of the engine's pods
_PORT: Final = 18000
_LOAD: Final = ("--load-format", "dummy")
_started: Final[list[subprocess.Popen[bytes]]] = []  # the program outlives this command


def make_folder() -> None:
    """The folder that pods mount, for any user."""
    CACHES.mkdir(parents=True, exist_ok=True)
    CACHES.chmod(0o777)


def begin(model: str, names: Iterable[str]) -> None:
    """Start engines for these scenarios once their archive is unpacked; returns at once."""
    make_folder()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = ENVIRONMENT / "lib" / version / "site-packages"
    _link(packages, ENGINE / "site")
    _link(scenarios.CACHE_MOUNT, CACHES)
    dummy_models.write_model(MODELS, model)
    _link(MODELS / HUB_MODEL, MODELS / model)
    gpus = max(1, len(list(Path("/dev").glob("nvidia[0-9]"))))
    for number, arguments in enumerate(scenarios.compiled(names)):
        profiled = [] if number else ["-X", "importtime"]  # imports are the second longest phase of a start
        words = [sys.executable, *profiled, "-m", "vllm.entrypoints.cli.main", "serve", HUB_MODEL, *_LOAD, *arguments]
        words += ["--host", "127.0.0.1", "--port", str(_PORT + number), "--gpu-memory-utilization", str(_MEMORY_SHARE)]
        variables = {
            **dict(one.split("=", 1) for one in OFFLINE),
            **scenarios.cache_variables(),
            "PYTHONPATH": str(packages),
            "PYTHONDONTWRITEBYTECODE": "1",  # the packages are copied meanwhile
            "HOME": "/tmp",
            "CUDA_VISIBLE_DEVICES": str(gpus - 1 - number % gpus),
            "VLLM_WORKER_MULTIPROC_METHOD": "fork",  # as in cuda.Dockerfile
        }
        start(words, variables, PARTS / "engine.done", name=str(number), folder=MODELS, user=_USER)


def start(
    words: Sequence[str],
    variables: dict[str, str],
    after: Path,
    *,
    name: str = "0",
    folder: Path = Path("/tmp"),
    user: int | None = None,
) -> None:
    """Run a program in a session of its own as soon as the file `after` is there."""
    log = _log(name)
    for path in (_PIDS, log.parent):
        path.mkdir(parents=True, exist_ok=True)
    waiting = f'until [ -e {after} ]; do sleep 0.2; done; cd {folder}; exec "$@"'
    with log.open("wb") as file:
        _started.append(
            subprocess.Popen(
                ["sh", "-c", waiting, "sh", *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env={**os.environ, **variables},
                user=user,
                group=user,
            )
        )
    (_PIDS / name).write_text(str(_started[-1].pid))


def finish(seconds: float) -> None:
    """Wait up to `seconds` until the engines have compiled, and end them. Nothing happens if none was started."""
    deadline = time.monotonic() + seconds
    for path in sorted(_PIDS.glob("*")):
        pid, name = int(path.read_text()), path.name
        while _alive(pid) and time.monotonic() < deadline and not _has_compiled(name):
            time.sleep(0.2)
        log_line(f"caches {name}: {'filled' if _has_compiled(name) else 'not filled in time'}; {_last_line(name)}")
    for path in _PIDS.glob("*"):
        while _alive(int(path.read_text())):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(path.read_text()), signal.SIGKILL)
            time.sleep(0.1)
        path.unlink()


def _log(name: str) -> Path:
    return LOGS / f"fill-caches.{name}.log"


def _has_compiled(name: str) -> bool:
    text = _log(name).read_text(errors="replace")
    return any(mark in text for mark in _COMPILED)


def _last_line(name: str) -> str:
    lines = _log(name).read_text(errors="replace").strip().splitlines()
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
