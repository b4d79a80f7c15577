"""`python -m bench scoreboard`: plays what is not played yet, and writes runs, tables and pictures.

    python -m bench scoreboard --rows step-60 --policies plimsoll static:3 --seeds 2
    python -m bench scoreboard --whole --budget-s 4500

Runs are kept in `--out`, those of the whole board beside this file too, and made once; only a change of the program or
of a row makes them anew.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.scoreboard import expect, page, picture, report, search, store, table, whole
from bench.scoreboard.plan import PLAN
from bench.scoreboard.play import Task
from bench.scoreboard.player import Player, Spent
from bench.scoreboard.program import code
from bench.scoreboard.rows import PLANTS, ROWS, SHORT, Row

OUT: Final = Path("build/scoreboard")
_SEARCHED: Final = 2  # seeds of a search


def main(words: Sequence[str]) -> int:
    """Play, judge and write; 2 where a row is unknown. Whether a row is reached is told, and fails nothing."""
    arguments = _parser().parse_args(words)
    known = {**ROWS, **SHORT}
    if unknown := [name for name in arguments.rows if name not in known]:
        print(f"no row {', '.join(unknown)}: there are {', '.join(known)}", file=sys.stderr)
        return 2
    if arguments.page:
        page.write(report.read())
        return 0
    rows = [known[name] for name in arguments.rows or ROWS]
    player = Player(store.Store(arguments.out), code(), arguments.processes, arguments.budget_s)
    try:
        _play(rows, arguments, player)
    except Spent:
        print("the time is over: the same command goes on from here", file=sys.stderr)
    return 0


def _play(rows: Sequence[Row], arguments: argparse.Namespace, player: Player) -> None:
    if arguments.expect:
        expect.write(player)
    elif arguments.search:
        for row, name in itertools.product(rows, arguments.search):
            search.search(name, row, arguments.seeds or _SEARCHED, player)
    elif arguments.whole:
        left = whole.follow(PLAN, player)
        report.write(found := report.board(player.store, player.program, left), report.FILE)
        store.commit(report.of_program(player.store, player.program))
        print(f"{found.plays} runs, {found.cpu_s} s of CPU; {len(left)} items of the plan are left", file=sys.stderr)
    else:
        _board(rows, arguments, player)


def _board(rows: Sequence[Row], arguments: argparse.Namespace, player: Player) -> None:
    """Plays the rows, and writes tables and pictures."""
    places: list[report.Judged] = []
    pages: list[str] = []
    for row, plant in itertools.product(rows, arguments.plants):
        seeds = range(1, (arguments.seeds or row.seeds) + 1)
        policies = arguments.policies or search.policies(row)
        runs = player([Task(row, plant, policy, seed) for policy in policies for seed in seeds])
        scores = report.scored(runs)
        places.append(one := report.judged(row, plant, scores, boundary=False))
        pages.append(table.rendered(row, one))
        print(pages[-1], flush=True)
        picture.write(arguments.out / f"{one.place}.svg", f"{one.place}: {row.says}", scores)
    (arguments.out / "board.md").write_text("\n".join(pages))
    report.write(report.Board(player.program.whole, 0, 0, [], places), arguments.out / "board.json")


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
    parser.add_argument("--budget-s", type=float, default=math.inf, help="begin no run after so many seconds")
    parser.add_argument("--expect", action="store_true", help="write down what the test's short rows come to")
    parser.add_argument(
        "--search", nargs="*", default=[], metavar="NAME", help="find the best setting of these policies on the rows"
    )
    parser.add_argument("--whole", action="store_true", help=f"play the plan, and write {report.FILE.name}")
    parser.add_argument("--page", action="store_true", help=f"write the pages that are made of {report.FILE.name}")
    return parser
