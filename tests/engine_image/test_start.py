"""The container's first process: it passes signals on, however early they come, and its end is the launcher's."""

from __future__ import annotations

import os
import signal
import subprocess
import time
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
def stand_in(tmp_path: Path) -> Path:
    """A folder whose `python3` is a launcher that notes what happens to it."""
    python = tmp_path / "python3"
    python.write_text(LAUNCHER)
    python.chmod(0o755)
    return tmp_path


def started(folder: Path, *args: str) -> subprocess.Popen[bytes]:
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.Popen(["sh", str(START), *args], cwd=folder, env={**os.environ, "PATH": path})


def ended(process: subprocess.Popen[bytes]) -> int:
    """Its exit code; one that does not end is killed."""
    try:
        return process.wait(30)
    finally:
        process.kill()
        process.wait()


def test_its_end_is_the_launchers_and_arguments_are_passed_on(stand_in: Path) -> None:
    assert ended(started(stand_in, "quick", "way")) == 7
    assert (stand_in / "args").read_text() == "-P -m launcher quick way\n"


def test_a_signal_reaches_the_launcher_which_ends_in_its_own_time(stand_in: Path) -> None:
    process = started(stand_in)
    end = time.monotonic() + 30
    while not (stand_in / "up").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == 3
    assert (stand_in / "told").exists()


def test_a_signal_however_early_is_not_lost(stand_in: Path) -> None:
    """For about a millisecond the launcher is a copy of the shell: of 100 signals in it one or two used to be lost."""
    early = []
    for n in range(200):
        early.append(started(stand_in))
        time.sleep(n % 20 / 4000)
        early[-1].send_signal(signal.SIGTERM)
    assert {ended(process) for process in early} <= {3, 128 + signal.SIGTERM, -signal.SIGTERM}
