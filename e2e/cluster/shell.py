"""Running other programs: quiet while they work, their last words when they fail.

What a command prints goes to the verb's log under build/log. A stage prints its name when it starts and its seconds
when it ends, so that a slow step is seen while it is slow.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster.settings import LOGS

TAIL_LINES = 40
_log: Path = LOGS / "cluster.log"


class CommandFailed(Exception):
    """A step cannot go on; the message is what the user reads."""


def log_to(verb: str) -> None:
    """Begin the log of one verb."""
    global _log
    LOGS.mkdir(parents=True, exist_ok=True)
    _log = LOGS / f"{verb}.log"
    _log.write_text("")


def print_line(text: str) -> None:
    """One line with the time of day."""
    print(f"{time.strftime('%T')}  {text}", flush=True)


@contextmanager
def stage(title: str) -> Iterator[None]:
    """Name a step and print its seconds when it is done."""
    print_line(f"{title} ...")
    start = time.monotonic()
    yield
    print_line(f"{title}: {time.monotonic() - start:.0f} s")


def run(
    *argv: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None, stdin: int | None = None
) -> None:
    """Run to the end; raises Failed with the tail of the output."""
    with _log.open("ab") as log:
        log.write(f"$ {' '.join(map(str, argv))}\n".encode())
        log.flush()
        start = log.tell()
        done = subprocess.run(
            list(map(str, argv)),
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdin=stdin or subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode != 0:
        output_tail = _log.read_bytes()[start:].decode(errors="replace").splitlines()[-TAIL_LINES:]
        raise CommandFailed(
            "\n".join([f"failed ({done.returncode}): {' '.join(map(str, argv))}", *output_tail, f"whole log: {_log}"])
        )


def output(*argv: str | Path, cwd: Path | None = None) -> str:
    """Standard output, stripped; raises Failed with the standard error."""
    done = subprocess.run(list(map(str, argv)), cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CommandFailed(f"failed ({done.returncode}): {' '.join(map(str, argv))}\n{done.stderr.strip()}")
    return done.stdout.strip()


def succeeds(*argv: str | Path, timeout: float = 60) -> bool:
    """Whether another program answers yes; a missing program or no answer in time is a no."""
    try:
        return (
            subprocess.run(
                list(map(str, argv)), stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False
            ).returncode
            == 0
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False


def fail(text: str) -> int:
    """Print an error; the exit status of the process."""
    print(text, file=sys.stderr, flush=True)
    return 1


def wait_for(question: Callable[[], bool], what: str, seconds: float) -> None:
    """Ask until the answer is yes; raises Failed when the time is up."""
    deadline = time.monotonic() + seconds
    while not question():
        if time.monotonic() > deadline:
            raise CommandFailed(f"{what} did not become ready within {seconds:.0f} s")
        time.sleep(0.5)
