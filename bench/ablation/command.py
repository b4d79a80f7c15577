"""`python -m bench ablation`: the law without one of its mechanisms at a time.

    python -m bench ablation --screen --budget-s 900
    python -m bench ablation --seeds 5 --processes 4
    python -m bench ablation --places step-60 sigma --mechanisms standby trend --seeds 10

Each of `mechanisms.MECHANISMS` is switched off alone, on rows of the scoreboard and on the mismatches, with the
requests and the noise of the same seeds. Runs are kept in `--store` and made once; a change of the program, of a place
or of a mechanism makes them anew. Writes the page to `--out`. Nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.ablation import page
from bench.ablation.mechanisms import MECHANISMS
from bench.ablation.runs import PLACES, AblationRunner
from bench.mismatch.cases import CASES
from bench.scoreboard.code_hash import code_hash
from bench.scoreboard.run_store import RunStore

STORE: Final = Path("build/ablation")
OUT: Final = Path("docs/evaluation/ablation.md")
FULL_ROWS: Final = (
    "step-0", "step-60", "step-120", "step-240", "ramp-120", "guide", "step-60-pd", "shift-60-pd", "retry-honour",
    "unseen-square", "unseen-naps-pd", "mooncake",
)  # fmt: skip
# By measured CPU time of a run of the whole law, 5 to 20 s.
SCREEN_PLACES: Final = (
    "short", "retry-honour", "half-kv", "unseen-naps-pd", "mooncake", "unseen-flood", "shift-60-pd", "two-prompts",
)  # fmt: skip


def main(words: Sequence[str]) -> int:
    """Run and write. Exit status 2 for a place or a mechanism that does not exist."""
    arguments = _parser().parse_args(words)
    for kind, names, known in (
        ("place", arguments.places, PLACES),
        ("mechanism", arguments.mechanisms, tuple(MECHANISMS)),
    ):
        if unknown := [name for name in names if name not in known]:
            print(f"no {kind} {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
            return 2
    places = arguments.places or (SCREEN_PLACES if arguments.screen else (*FULL_ROWS, *CASES))
    mechanisms = arguments.mechanisms or list(MECHANISMS)
    seeds = 1 if arguments.screen else arguments.seeds
    store = RunStore(arguments.store, committed=arguments.store / "committed.jsonl.gz")
    until_s = time.monotonic() + arguments.budget_s
    runner = AblationRunner(store, code_hash(), arguments.processes, until_s)
    if not arguments.page and not runner.run(places, seeds, mechanisms, arguments.screen):
        print("the time is over: the same command goes on from here", file=sys.stderr)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(page.render(runner, places, seeds, mechanisms))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench ablation", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--places", nargs="+", default=[], metavar="PLACE", help="rows of the scoreboard, mismatches")
    parser.add_argument("--mechanisms", nargs="+", default=[], metavar="NAME", help="all without it")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--screen", action="store_true", help="one seed, and no run of what has differed before")
    parser.add_argument("--processes", type=int, default=1, help="runs at once")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="begin no run after so many seconds")
    parser.add_argument("--page", action="store_true", help="run nothing, write the page of the kept runs")
    parser.add_argument("--store", type=Path, default=STORE, help="folder of the kept runs")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser
