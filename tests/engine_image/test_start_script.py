"""The container's first process: it passes signals on, however early they come, and its end is the launcher's."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

START = Path(__file__).parents[2] / "engine-image" / "launcher" / "start.sh"
LAUNCHER = """#!/bin/sh
echo "$@" > args
[ "$4" = quick ] && exit 7
trap 'echo told > told; exit 3' TERM
echo up > up
while :; do sleep 0.05; done
"""


@pytest.fixture
def fake_launcher(tmp_path: Path) -> Path:
    """A folder whose `python3` is a launcher that notes what happens to it."""
    python = tmp_path / "python3"
    python.write_text(LAUNCHER)
    python.chmod(0o755)
    return tmp_path


def started(folder: Path, *args: str) -> subprocess.Popen[bytes]:
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.Popen(["sh", str(START), *args], cwd=folder, env={**os.environ, "PATH": path})


def exit_code(process: subprocess.Popen[bytes]) -> int:
    """Its exit code; one that does not end is killed."""
    try:
        return process.wait(30)
    finally:
        process.kill()
        process.wait()


def until(there: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not there():
        assert time.monotonic() < end


def has_forked(process: subprocess.Popen[bytes]) -> str:
    """The processes that it has started."""
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()


def test_start_script_passes_arguments_and_exit_code(fake_launcher: Path) -> None:
    assert exit_code(started(fake_launcher, "quick", "way")) == 7
    assert (fake_launcher / "args").read_text() == "-P -m launcher quick way\n"


def test_start_script_forwards_signal_to_launcher(fake_launcher: Path) -> None:
    process = started(fake_launcher)
    until((fake_launcher / "up").exists)
    process.send_signal(signal.SIGTERM)
    assert exit_code(process) == 3
    assert (fake_launcher / "told").exists()


def test_start_script_early_signal_is_not_lost(fake_launcher: Path) -> None:
    """For about a millisecond the launcher is a copy of the shell, and most signals in it used to be lost."""
    early = []
    for _ in range(50):
        early.append(started(fake_launcher))
        until(partial(has_forked, early[-1]))
        early[-1].send_signal(signal.SIGTERM)
    assert {exit_code(process) for process in early} <= {3, 128 + signal.SIGTERM}
