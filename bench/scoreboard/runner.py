"""Makes the missing runs, in this or in further processes, and starts none after its time budget."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Final

from bench.scoreboard.code_hash import CodeHash, run_key
from bench.scoreboard.run_store import RunStore, StoredRun
from bench.scoreboard.simulate_run import RunTask, simulate

RunTaskFunction = Callable[[RunTask], dict[str, Any]]
_RUNS_PER_WORKER: Final = 25  # that one process makes before another takes its place


class BudgetExhausted(Exception):
    """The time for new runs is over."""


@dataclass
class Runner:
    """Called with tasks, gives the figures of each. processes: beside this one; with one, runs are made here. budget_s:
    wall clock time after which no run is begun, inf without one. Raises Spent where one of them is not made by then;
    those that were are kept."""

    store: RunStore
    program: CodeHash
    processes: int = 1
    budget_s: float = float("inf")
    run_task: RunTaskFunction = simulate
    clock: Callable[[], float] = time.monotonic
    _began_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._began_s = self.clock()

    def __call__(self, tasks: Sequence[RunTask]) -> list[dict[str, Any]]:
        keys = [run_key(task, self.program) for task in tasks]
        missing = {key: task for key, task in zip(keys, tasks, strict=True) if self.store.get(key) is None}
        for key, figures in self._run_missing(missing) if missing else ():
            task = missing[key]
            self.store.put(StoredRun(key, task.row.name, task.plant, figures))
            print(
                f"{task.row_and_plant} {task.policy} seed {task.seed}: {figures['attainment_offered']:.2%} of offered, "
                f"{figures['gpu_hours']:.3f} GPU-hours, {figures['wall_s']:.0f} s of CPU",
                file=sys.stderr,
                flush=True,
            )
        figures_by_key = [self.store.get(key) for key in keys]
        if any(figures_found is None for figures_found in figures_by_key):
            raise BudgetExhausted
        return [dict(figures_found) for figures_found in figures_by_key if figures_found is not None]

    def _run_missing(self, missing: Mapping[str, RunTask]) -> Iterator[tuple[str, dict[str, Any]]]:
        waiting = itertools.takewhile(lambda _: not self._is_budget_spent, missing.items())
        if self.processes == 1:
            yield from ((key, self.run_task(task)) for key, task in waiting)
            return
        with ProcessPoolExecutor(self.processes, max_tasks_per_child=_RUNS_PER_WORKER) as pool:
            running: dict[Future[dict[str, Any]], str] = {}
            while True:
                for key, task in itertools.islice(waiting, self.processes - len(running)):
                    running[pool.submit(self.run_task, task)] = key
                if not running:
                    return
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(done), done.result()

    @property
    def _is_budget_spent(self) -> bool:
        return self.clock() - self._began_s >= self.budget_s
