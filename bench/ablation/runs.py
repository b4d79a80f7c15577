"""One run: a place (a row of the scoreboard, or a mismatch), a seed, and the operator with all mechanisms or without
one.

Problem: fifty mechanisms times twenty places times seeds take hours, and many of them are never called in a place.
Idea: the complete operator runs first, and records which mechanisms were called with another result than their
replacement's (`watched`). One that was not cannot change the run, so it is not run again. Runs are stored under the
hash of the program, the place, the seed and the mechanism.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bench.ablation.length_rows import LENGTH_ROWS
from bench.ablation.mechanisms import MECHANISMS
from bench.ablation.switches import switched_off, watched
from bench.mismatch import runs as mismatch_runs
from bench.mismatch.cases import CASES
from bench.scoreboard import simulate_run
from bench.scoreboard.code_hash import CodeHash, executed_code
from bench.scoreboard.rows import BOARD_ROWS, SHORT_ROWS, RowTargets
from bench.scoreboard.run_store import RunStore, StoredRun
from bench.scoreboard.simulate_run import RunTask

ROWS: Final = {**SHORT_ROWS, **LENGTH_ROWS, **BOARD_ROWS}
PLACES: Final = (*ROWS, *CASES)
_POLICY: Final = "plimsoll"
_FIGURES_OF_THE_MACHINE: Final = ("wall_s",)


@dataclass(frozen=True)
class AblationTask:
    """A run to be made. place: a row or a mismatch. mechanism: what is switched off; None for the whole law."""

    place: str
    seed: int
    mechanism: str | None = None

    @property
    def label(self) -> str:
        return f"{self.place} seed {self.seed} " + ("whole" if self.mechanism is None else f"without {self.mechanism}")


def simulate(task: AblationTask) -> dict[str, Any]:
    """Return the figures of one run as a JSON object.

    `attainment` is the share of offered requests within the SLO; `changes` and `reversals` are those of the replica
    counts of all tiers. `digest` is a hash of all results: equal digests mean equal runs. `reached` lists the
    mechanisms that were called, only if none is switched off.
    """
    began_s = time.process_time()
    if task.mechanism is not None:
        with switched_off(MECHANISMS[task.mechanism]):
            figures = _figures(task)
    else:
        with watched(list(MECHANISMS.values())) as calls:
            figures = _figures(task)
        figures["reached"] = sorted(calls)
    return {**figures, "mechanism": task.mechanism, "seed": task.seed, "wall_s": time.process_time() - began_s}


def _figures(task: AblationTask) -> dict[str, Any]:
    if task.place in CASES:
        run = mismatch_runs.simulate(CASES[task.place], _POLICY, task.seed, {})
        return {
            "attainment": run.attainment,
            "gpu_hours": run.gpu_hours,
            "changes": run.changes,
            "reversals": run.reversals,
            "digest": _digest(run.__dict__),
        }
    figures = simulate_run.simulate(RunTask(ROWS[task.place], 1.0, _POLICY, task.seed))
    return {
        "attainment": figures["attainment_offered"],
        "gpu_hours": figures["gpu_hours"],
        "changes": figures["changes"],
        "reversals": sum(sum(counts) for counts in figures["reversals"].values()),
        "digest": _digest({name: value for name, value in figures.items() if name not in _FIGURES_OF_THE_MACHINE}),
    }


def _digest(figures: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(figures, sort_keys=True, default=str).encode()).hexdigest()[:16]


def task_key(task: AblationTask, program: CodeHash) -> str:
    """Hash of all that the run depends on."""
    if task.place in CASES:
        place: object = (CASES[task.place].description, _mismatch_hash())
    else:
        place = replace(ROWS[task.place], name="", description="", targets=RowTargets(), seeds=0)
    without = (
        [(name, one.definition) for name, one in MECHANISMS.items()]  # what is watched
        if task.mechanism is None
        else MECHANISMS[task.mechanism].definition
    )
    depends = (task.place, place, task.seed, task.mechanism, without, program.with_operator)
    return hashlib.sha256(repr(depends).encode()).hexdigest()[:24]


def _mismatch_hash() -> str:
    folder = Path(mismatch_runs.__file__).parent
    modules = (executed_code((folder / name).read_bytes()) for name in ("cases.py", "plants.py", "runs.py"))
    return hashlib.sha256(b"".join(modules)).hexdigest()


@dataclass
class AblationRunner:
    """Makes the runs that are not kept yet. processes: at once. until_s: of `time.monotonic`; none is begun later."""

    store: RunStore
    program: CodeHash
    processes: int = 1
    until_s: float = float("inf")

    def figures(self, task: AblationTask) -> Mapping[str, Any] | None:
        """A kept run; that of the whole law for a mechanism that it did not reach; None if neither was made."""
        if task.mechanism is not None:
            whole = self.store.get(task_key(replace(task, mechanism=None), self.program))
            if whole is not None and task.mechanism not in whole["reached"]:
                return whole
        return self.store.get(task_key(task, self.program))

    def run(self, places: Sequence[str], seeds: int, mechanisms: Sequence[str], screen: bool = False) -> bool:
        """Run place by place, the whole law first. Returns whether all runs are made.

        screen: look for mechanisms without any difference, so that one that has shown one is not run in later places.
        """
        each, names = range(1, seeds + 1), list(mechanisms)
        for place in places:
            self._run([AblationTask(place, seed) for seed in each])
            self._run([AblationTask(place, seed, name) for seed in each for name in names])
            if time.monotonic() >= self.until_s:
                return False
            if screen:
                names = [name for name in names if not any(self._differs(place, seed, name) for seed in each)]
        return True

    def _differs(self, place: str, seed: int, mechanism: str) -> bool:
        whole, without = self.figures(AblationTask(place, seed)), self.figures(AblationTask(place, seed, mechanism))
        return whole is not None and without is not None and whole["digest"] != without["digest"]

    def _run(self, tasks: Iterable[AblationTask]) -> None:
        missing = [task for task in tasks if self.figures(task) is None]
        for task, figures in self._simulate(missing):
            self.store.put(StoredRun(task_key(task, self.program), task.place, 1.0, figures))
            print(
                f"{task.label}: {figures['attainment']:.2%} of offered, {figures['gpu_hours']:.3f} GPU-hours, "
                f"{figures['changes']} changes, {figures['wall_s']:.0f} s of CPU",
                file=sys.stderr,
                flush=True,
            )

    def _simulate(self, tasks: Sequence[AblationTask]) -> Iterator[tuple[AblationTask, dict[str, Any]]]:
        waiting = iter(tasks)
        if self.processes == 1:
            for task in waiting:
                if time.monotonic() >= self.until_s:
                    return
                yield task, simulate(task)
            return
        with ProcessPoolExecutor(self.processes) as pool:
            running: dict[Future[dict[str, Any]], AblationTask] = {}
            while True:
                while len(running) < self.processes and time.monotonic() < self.until_s:
                    task = next(waiting, None)
                    if task is None:
                        break
                    running[pool.submit(simulate, task)] = task
                if not running:
                    return
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(done), done.result()
