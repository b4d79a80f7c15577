"""The node's programs as plain processes: started in sessions of their own, so that they outlive the command."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from e2e.gpu.settings import BIN, KUBECONFIG, LOGS, ROOT

_PIDS = ROOT / "run" / "pids.json"
_TAIL_LINES = 15


class StepFailed(Exception):
    """A step cannot go on; the message is what the user reads."""


def log_line(text: str) -> None:
    """One line with the seconds since the node's first step."""
    began = ROOT / "run" / "began"
    if not began.exists():
        began.parent.mkdir(parents=True, exist_ok=True)
        began.write_text(str(time.time()))
    print(f"{time.time() - float(began.read_text()):7.1f} s  {text}", flush=True)


def environment() -> dict[str, str]:
    """With the node's programs first on the path."""
    return {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "KUBECONFIG": str(KUBECONFIG)}


def start(
    name: str, argv: Sequence[str | Path], variables: Mapping[str, str] | None = None, *, ends: bool = False
) -> None:
    """Start a program that outlives this command; its output is in its log. `ends`: it is done some time, if well."""
    LOGS.mkdir(parents=True, exist_ok=True)
    with (LOGS / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [str(word) for word in argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**environment(), **(variables or {})},
        )
    if ends:
        return
    _keep(started() | {name: process.pid})


def forget(name: str) -> None:
    """A program that has ended, as it should, is not missed."""
    _keep({other: pid for other, pid in started().items() if other != name})


def _keep(pids: Mapping[str, int]) -> None:
    _PIDS.parent.mkdir(parents=True, exist_ok=True)
    written = _PIDS.with_suffix(".new")
    written.write_text(json.dumps(pids))
    written.replace(_PIDS)  # at once: others read it meanwhile


def started() -> dict[str, int]:
    """Process ids of what was started, by name."""
    return dict(json.loads(_PIDS.read_text())) if _PIDS.exists() else {}


def ended() -> list[str]:
    """Names of programs that were started and are gone."""
    return [name for name, pid in started().items() if not _alive(pid)]


def _alive(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def stop_all() -> None:
    """End what was started, kubelet before containerd."""
    for name, pid in reversed(started().items()):
        if _alive(pid):
            log_line(f"ends {name}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + 10
            while _alive(pid) and time.monotonic() < deadline:
                time.sleep(0.05)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    _PIDS.unlink(missing_ok=True)


def wait_for(question: Callable[[], bool], what: str, seconds: float) -> None:
    """Ask until the answer is yes; raises StepFailed when the time is up or a program has ended."""
    deadline = time.monotonic() + seconds
    while not question():
        if gone := ended():
            raise StepFailed(f"{', '.join(gone)} ended while {what} was awaited\n" + "\n".join(map(tail, gone)))
        if time.monotonic() > deadline:
            raise StepFailed(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.2)


def tail(name: str) -> str:
    """The last lines of a program's log."""
    path = LOGS / f"{name}.log"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "\n".join([f"--- {name}", *lines[-_TAIL_LINES:]])


def run(*argv: str | Path, stdin: str | None = None, timeout_s: float = 120) -> str:
    """Run to the end; standard output. Raises StepFailed with the standard error."""
    try:
        done = subprocess.run(
            [str(word) for word in argv],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=environment(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StepFailed(f"{' '.join(map(str, argv))}: {error}") from error
    if done.returncode != 0:
        raise StepFailed(f"{' '.join(map(str, argv))}: {done.returncode}\n{done.stderr.strip()[-2000:]}")
    return done.stdout


def succeeds(*argv: str | Path) -> bool:
    """Whether a program ends well."""
    try:
        run(*argv, timeout_s=20)
    except StepFailed:
        return False
    return True


def kubectl(*words: str | Path, stdin: str | None = None, timeout_s: float = 60) -> str:
    """Ask the cluster. Raises StepFailed."""
    return run(BIN / "kubectl", *words, stdin=stdin, timeout_s=timeout_s)


def get(*words: str) -> Any:
    """Objects as the API server has them; None if it does not say."""
    try:
        return json.loads(kubectl("get", *words, "-o", "json"))
    except (StepFailed, ValueError):
        return None
