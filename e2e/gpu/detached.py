"""A run that goes on between calls, where a call may be shorter than a scenario.

Problem: a trace of twenty minutes outlasts a call, and a machine may be taken away before the last scenario is over.
Idea: the run is a process of its own session that writes into a folder of its own. `follow` prints its log, ends as
soon as another scenario is over, and copies what is complete.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from e2e.gpu import processes
from e2e.gpu.processes import StepFailed
from e2e.gpu.settings import CHECKOUT, LOGS, ROOT

RESULTS: Final = ROOT / "results"
NAME: Final = "run"
_POLL_S: Final = 0.5


def begin(words: Sequence[str]) -> None:
    """Start `run` with these words; its results are those of an empty folder. Raises StepFailed if one goes on."""
    if _goes_on():
        raise StepFailed("a detached run goes on: wait for it")
    processes.forget(NAME)
    shutil.rmtree(RESULTS, ignore_errors=True)
    RESULTS.mkdir(parents=True)
    (LOGS / f"{NAME}.log").unlink(missing_ok=True)
    command = [sys.executable, "-m", "e2e.gpu", "run", *words, "--out", str(RESULTS)]
    processes.start(NAME, command, {"PYTHONPATH": f"{CHECKOUT / 'operator'}:{CHECKOUT}"})


def follow(out: Path, seconds: float) -> bool:
    """Until another scenario is over, the run has ended, or the time is up; whether the run has ended.

    Copies the results of all scenarios that are over to `out`. Raises StepFailed if no run was begun.
    """
    if not RESULTS.exists():
        raise StepFailed("no detached run was begun")
    deadline = time.monotonic() + seconds
    before, log = _complete(), LOGS / f"{NAME}.log"
    with log.open("rb") as lines:
        while True:
            goes_on = _goes_on()
            sys.stdout.write(lines.read().decode(errors="replace"))
            sys.stdout.flush()
            if not goes_on or _complete() != before or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
    out.mkdir(parents=True, exist_ok=True)
    for name in _complete():
        for path in RESULTS.glob(f"{name}.*"):
            shutil.copy2(path, out / path.name)
    if not goes_on:
        processes.forget(NAME)
    return not goes_on


def _goes_on() -> bool:
    return NAME in processes.started() and NAME not in processes.ended()


def _complete() -> list[str]:
    """Scenarios that are over: this file of theirs is written last."""
    return sorted(path.name.removesuffix(".json.gz") for path in RESULTS.glob("*.json.gz"))
