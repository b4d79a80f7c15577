"""`python -m bench mismatch`: whether measurement corrects the model where engines differ from what they announce.

    python -m bench mismatch --cases host-107ms slow --seeds 10 --processes 2

Each case is a constant load for 30 minutes, on two gateways, from one replica that starts with the prior of the data
sheet. k is the smallest constant fleet without admission control that keeps 95 % of offered requests within the SLO, as
a mean of the seeds. A case holds where, from five minutes after k replicas are ready on, at most one in twenty windows
of five minutes has less than 95 % within the SLO, no more than k + 1 replicas are wanted, and no seed has more than one
reversal. Prints a line for each case, and writes Markdown to `--out`. Nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.mismatch.cases import CASES, MismatchCase
from bench.mismatch.runs import SLO_SHARE, MismatchRun, simulate
from bench.scoreboard.markdown import markdown
from plimsoll.core.types import Role

OUT: Final = Path("build/bench/mismatch.md")
_MAX_MISSED_WINDOWS: Final = 0.05
_SEARCH_SEEDS: Final = 3  # of the constant fleets
_HEAD: Final = (
    "case", "k", "most replicas", "windows kept", "least of the offered in a window", "reversals", "offered in time",
    "GPU-hours", "holds",
)  # fmt: skip


@dataclass(frozen=True)
class CaseResult:
    """All seeds of a case. least: replicas by tier of the smallest constant fleet that meets the SLO."""

    case: MismatchCase
    least: Mapping[Role, int]
    runs: Sequence[MismatchRun]

    @property
    def windows(self) -> list[bool]:
        return [kept for run in self.runs for kept in run.settled_windows]

    @property
    def max_replicas(self) -> int:
        return max(run.max_replicas for run in self.runs)

    @property
    def reversals(self) -> int:
        return max(run.reversals for run in self.runs)

    @property
    def holds(self) -> bool:
        windows = self.windows
        kept = sum(windows) >= (1.0 - _MAX_MISSED_WINDOWS) * len(windows)
        settled = all(run.settled_windows for run in self.runs)
        return settled and kept and self.max_replicas <= sum(self.least.values()) + 1 and self.reversals <= 1

    def cells(self) -> tuple[str, ...]:
        """The case's row of the table."""
        windows = self.windows
        settled = [run for run in self.runs if run.settled_windows]
        least = min((_least_share(run) for run in settled), default=0.0)
        fleet = "+".join(str(replicas) for replicas in self.least.values())
        return (
            self.case.name,
            fleet,
            str(self.max_replicas),
            f"{sum(windows)} of {len(windows)}",
            f"{least:.1%}",
            str(self.reversals),
            f"{sum(run.attainment for run in self.runs) / len(self.runs):.1%}",
            f"{sum(run.gpu_hours for run in self.runs) / len(self.runs):.2f}",
            "yes" if self.holds else "**no**",
        )


def _least_share(run: MismatchRun) -> float:
    first = len(run.offered) - len(run.settled_windows)
    shares = zip(run.within_slo[first:], run.offered[first:], strict=True)
    return min(within / max(1, offered) for within, offered in shares)


def main(words: Sequence[str]) -> int:
    """Play and print. Exit status 2 for a case that does not exist."""
    arguments = _parser().parse_args(words)
    unknown = set(arguments.cases) - CASES.keys()
    if unknown:
        print(f"no case {', '.join(sorted(unknown))}; cases: {', '.join(CASES)}", file=sys.stderr)
        return 2
    chosen = [CASES[name] for name in arguments.cases or CASES]
    rows = []
    with ProcessPoolExecutor(arguments.processes) as pool:
        for result in _play(chosen, arguments.seeds, arguments.policy, pool):
            rows.append(result.cells())
            print(" | ".join(f"{name} {cell}" for name, cell in zip(_HEAD, rows[-1], strict=True)), flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text("\n".join(markdown(_HEAD, rows)) + "\n")
    return 0


def _play(cases: Sequence[MismatchCase], seeds: int, policy: str, pool: ProcessPoolExecutor) -> Iterator[CaseResult]:
    for case in cases:
        least = smallest_fleet(case, min(seeds, _SEARCH_SEEDS), pool)
        runs = pool.map(simulate, *zip(*((case, policy, seed, least) for seed in range(seeds)), strict=True))
        yield CaseResult(case, least, list(runs))


def smallest_fleet(case: MismatchCase, seeds: int, pool: ProcessPoolExecutor) -> Mapping[Role, int]:
    """Replicas by tier of the smallest constant fleet that meets the SLO; of the largest one if none does."""
    roles = [Role(name) for name in case.tiers]
    fleets = sorted(
        itertools.product(range(1, case.max_replicas + 1), repeat=len(roles)), key=lambda one: (sum(one), one)
    )
    for fleet in fleets:
        least = dict(zip(roles, fleet, strict=True))
        policy = f"static:{','.join(map(str, fleet))}"
        if simulate(case, policy, 0, least).attainment < SLO_SHARE - 0.02:
            continue
        tasks = [(case, policy, seed, least) for seed in range(seeds)]
        runs = list(pool.map(simulate, *zip(*tasks, strict=True)))
        if sum(run.attainment for run in runs) / seeds >= SLO_SHARE:
            return least
    return dict(zip(roles, fleets[-1], strict=True))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench mismatch", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--cases", nargs="+", default=[], metavar="CASE", help="all without it")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--policy", default="plimsoll", help="as `plimsoll simulate --policy` takes it")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=OUT)
    return parser
