"""Makes the runs that are not kept yet, here or in processes beside this one, and begins none when its time is up."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Final

from bench.scoreboard.play import Task, play
from bench.scoreboard.program import Program, key_of
from bench.scoreboard.store import Store

Made = Callable[[Task], dict[str, Any]]
_PLAYS: Final = 25  # that one process makes before another takes its place


class Spent(Exception):
    """The time for new runs is over."""


@dataclass
class Player:
    """Called with tasks, gives the figures of each. processes: beside this one; with one, runs are made here. budget_s:
    wall clock time after which no run is begun, inf without one. Raises Spent where one of them is not made by then;
    those that were are kept."""

    store: Store
    program: Program
    processes: int = 1
    budget_s: float = float("inf")
    made: Made = play
    clock: Callable[[], float] = time.monotonic
    _began_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._began_s = self.clock()

    def __call__(self, tasks: Sequence[Task]) -> list[dict[str, Any]]:
        keys = [key_of(task, self.program) for task in tasks]
        todo = {key: task for key, task in zip(keys, tasks, strict=True) if self.store.get(key) is None}
        for key, figures in self._make(todo) if todo else ():
            task = todo[key]
            self.store.put(key, task, figures)
            print(
                f"{task.place} {task.policy} seed {task.seed}: {figures['attainment_offered']:.2%} of offered, "
                f"{figures['gpu_hours']:.3f} GPU-hours, {figures['wall_s']:.0f} s of CPU",
                file=sys.stderr,
                flush=True,
            )
        found = [self.store.get(key) for key in keys]
        if any(one is None for one in found):
            raise Spent
        return [dict(one) for one in found if one is not None]

    def _make(self, todo: Mapping[str, Task]) -> Iterator[tuple[str, dict[str, Any]]]:
        left = itertools.takewhile(lambda _: not self._spent, todo.items())
        if self.processes == 1:
            yield from ((key, self.made(task)) for key, task in left)
            return
        with ProcessPoolExecutor(self.processes, max_tasks_per_child=_PLAYS) as pool:
            running: dict[Future[dict[str, Any]], str] = {}
            while True:
                for key, task in itertools.islice(left, self.processes - len(running)):
                    running[pool.submit(self.made, task)] = key
                if not running:
                    return
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(done), done.result()

    @property
    def _spent(self) -> bool:
        return self.clock() - self._began_s >= self.budget_s
