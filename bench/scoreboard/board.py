"""`python -m bench scoreboard`: plays what is not played yet, and writes runs, tables and pictures.

    python -m bench scoreboard --rows step-60 --policies plimsoll static:3 --seeds 2

Runs are kept in `--out` and made once; only a change of the program or of a row makes them anew.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from bench.scoreboard import expect, judge, picture, search, table
from bench.scoreboard.play import Task, code, play
from bench.scoreboard.rows import PLANTS, ROWS, SHORT, Row
from bench.scoreboard.search import Played
from bench.scoreboard.store import Store

OUT: Final = Path("build/scoreboard")
_SEARCHED: Final = 2  # seeds of a search


def main(words: Sequence[str]) -> int:
    """Play, judge and write; 2 where a row is unknown. Whether a row is reached is told, and fails nothing."""
    arguments = _parser().parse_args(words)
    known = {**ROWS, **SHORT}
    if unknown := [name for name in arguments.rows if name not in known]:
        print(f"no row {', '.join(unknown)}: there are {', '.join(known)}", file=sys.stderr)
        return 2
    rows = [known[name] for name in arguments.rows or ROWS]
    store, own_code = Store(arguments.out), code()

    def played(tasks: Sequence[Task]) -> list[dict[str, Any]]:
        return _played(tasks, store, own_code, arguments.processes)

    if arguments.expect:
        expect.write(played)
    elif arguments.search:
        for row, name in itertools.product(rows, arguments.search):
            search.search(name, row, arguments.seeds or _SEARCHED, played)
    else:
        _board(rows, arguments, played)
    return 0


def _board(rows: Sequence[Row], arguments: argparse.Namespace, played: Played) -> None:
    """Plays the rows, and writes tables and pictures."""
    found: list[dict[str, Any]] = []
    pages: list[str] = []
    for row in rows:
        for plant in arguments.plants:
            scores = _scores(row, plant, arguments, played)
            own = next((one for one in scores if one.policy == "plimsoll"), None)
            checks = [] if own is None else judge.checks(row, own, scores, nominal=plant == 1.0)
            place = Task(row, plant, "", 0).place
            pages.append(table.rendered(row, place, scores, checks))
            print(pages[-1], flush=True)
            found.append(
                {"row": place, "scores": [asdict(one) for one in scores], "checks": [c._asdict() for c in checks]}
            )
            picture.write(arguments.out / f"{place}.svg", f"{place}: {row.says}", scores)
    (arguments.out / "board.md").write_text("\n".join(pages))
    (arguments.out / "board.json").write_text(json.dumps(found, indent=1) + "\n")


def _scores(row: Row, plant: float, arguments: argparse.Namespace, played: Played) -> list[judge.Score]:
    """Of every policy on one row and plant."""
    seeds = range(1, (arguments.seeds or row.seeds) + 1)
    policies = arguments.policies or search.policies(row)
    tasks = [Task(row, plant, policy, seed) for policy in policies for seed in seeds]
    runs = list(zip(tasks, played(tasks), strict=True))
    return [judge.score(policy, [run for task, run in runs if task.policy == policy]) for policy in policies]


def _played(tasks: Sequence[Task], store: Store, own_code: str, processes: int) -> list[dict[str, Any]]:
    """The figures of each run, those that are kept and those that are made now, each in a process of its own."""
    keys = [task.key(own_code) for task in tasks]
    todo = {key: task for key, task in zip(keys, tasks, strict=True) if store.get(key) is None}
    for key, figures in _made(todo.items(), processes):
        store.put(key, own_code, todo[key], figures)
        task = todo[key]
        print(
            f"{task.place} {task.policy} seed {task.seed}: {figures['attainment_offered']:.2%} of offered, "
            f"{figures['gpu_hours']:.3f} GPU-hours, {figures['wall_s']:.0f} s of CPU",
            file=sys.stderr,
            flush=True,
        )
    return [dict(store.get(key) or {}) for key in keys]


def _made(todo: Iterable[tuple[str, Task]], processes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    with ProcessPoolExecutor(processes, max_tasks_per_child=1) as pool:
        waiting = {pool.submit(play, task): key for key, task in todo}
        for done in as_completed(waiting):
            yield waiting[done], done.result()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench scoreboard", description="Plimsoll beside other policies")
    parser.add_argument("--rows", nargs="*", default=[], metavar="ROW", help=f"all without a word: {', '.join(ROWS)}")
    parser.add_argument(
        "--policies", nargs="*", default=[], help="as `plimsoll simulate --policy`; all found settings without a word"
    )
    parser.add_argument(
        "--plants", nargs="*", type=float, default=[1.0], help=f"seconds of a step over the nominal: {PLANTS}"
    )
    parser.add_argument("--seeds", type=int, default=0, help="each row's own number without a word")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--expect", action="store_true", help="write down what the test's short rows come to")
    parser.add_argument(
        "--search", nargs="*", default=[], metavar="NAME", help="find the best setting of these policies on the rows"
    )
    return parser
