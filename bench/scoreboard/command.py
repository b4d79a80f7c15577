"""`python -m bench scoreboard`: makes missing runs, and writes runs, tables and charts.

    python -m bench scoreboard --rows step-60 --policies plimsoll static:3 --seeds 2
    python -m bench scoreboard --whole --budget-s 4500

Runs are stored in `--out`, those of the whole board beside this file too, and made once; only a change of the program
or of a row makes them again.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.scoreboard import board_file, cost_chart, docs_pages, full_run, markdown, regression, run_store, search
from bench.scoreboard.code_hash import code_hash
from bench.scoreboard.rows import BOARD_ROWS, PLANTS, SHORT_ROWS, BoardRow
from bench.scoreboard.run_plan import RUN_PLAN
from bench.scoreboard.runner import BudgetExhausted, Runner
from bench.scoreboard.simulate_run import RunTask

OUT: Final = Path("build/scoreboard")
_SEARCH_SEEDS: Final = 2  # seeds of a search


def main(words: Sequence[str]) -> int:
    """Play, judge and write; 2 where a row is unknown. Whether a row is reached is told, and fails nothing."""
    arguments = _parser().parse_args(words)
    all_rows = {**BOARD_ROWS, **SHORT_ROWS}
    if unknown := [name for name in arguments.rows if name not in all_rows]:
        print(f"no row {', '.join(unknown)}: there are {', '.join(all_rows)}", file=sys.stderr)
        return 2
    if arguments.page:
        docs_pages.write(board_file.read())
        return 0
    rows = [all_rows[name] for name in arguments.rows or BOARD_ROWS]
    player = Runner(run_store.RunStore(arguments.out), code_hash(), arguments.processes, arguments.budget_s)
    try:
        _play_plan(rows, arguments, player)
    except BudgetExhausted:
        print("the time is over: the same command goes on from here", file=sys.stderr)
    return 0


def _play_plan(rows: Sequence[BoardRow], arguments: argparse.Namespace, player: Runner) -> None:
    if arguments.expect:
        regression.write(player)
    elif arguments.search:
        for row, name in itertools.product(rows, arguments.search):
            search.search_settings(name, row, arguments.seeds or _SEARCH_SEEDS, player)
    elif arguments.whole:
        left = full_run.run_plan(RUN_PLAN, player)
        board_file.write(found := board_file.make_board(player.store, player.program, left), board_file.BOARD_FILE)
        run_store.write_committed(board_file.runs_of_program(player.store, player.program))
        print(f"{found.plays} runs, {found.cpu_s} s of CPU; {len(left)} items of the plan are left", file=sys.stderr)
    else:
        _write_board(rows, arguments, player)


def _write_board(rows: Sequence[BoardRow], arguments: argparse.Namespace, player: Runner) -> None:
    """Plays the rows, and writes tables and pictures."""
    entries: list[board_file.BoardEntry] = []
    pages: list[str] = []
    for row, plant in itertools.product(rows, arguments.plants):
        seeds = range(1, (arguments.seeds or row.seeds) + 1)
        policies = arguments.policies or search.row_policies(row)
        runs = player([RunTask(row, plant, policy, seed) for policy in policies for seed in seeds])
        scores = board_file.score_runs(runs)
        entries.append(entry := board_file.make_entry(row, plant, scores, boundary=False))
        pages.append(markdown.render_row(row, entry))
        print(pages[-1], flush=True)
        cost_chart.write(
            arguments.out / f"{entry.row_and_plant}.svg", f"{entry.row_and_plant}: {row.description}", scores
        )
    (arguments.out / "board.md").write_text("\n".join(pages))
    board_file.write(
        board_file.ScoreBoard(player.program.with_operator, 0, 0, [], entries), arguments.out / "board.json"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench scoreboard", description="Plimsoll beside other policies")
    parser.add_argument(
        "--rows", nargs="*", default=[], metavar="ROW", help=f"all without a word: {', '.join(BOARD_ROWS)}"
    )
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
    parser.add_argument("--whole", action="store_true", help=f"play the plan, and write {board_file.BOARD_FILE.name}")
    parser.add_argument(
        "--page", action="store_true", help=f"write the pages that are made of {board_file.BOARD_FILE.name}"
    )
    return parser
