"""`python -m bench trust`: every check in turn, printed and written to build/bench/trust.json.

With words only those groups: theory, laws, recorded, pairs, distserve, twin. The exit status is 1 where a bound is not
met; docs/evaluation/simulator-validation.md says which are not, and why.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from bench.trust import distserve_replay, invariants, pd_replay, queueing_theory, recorded_runs, sweep_replay, twin
from bench.trust.check import SimulatorCheck, shown

REPORT: Final = Path("build") / "bench" / "trust.json"


def _recorded() -> list[SimulatorCheck]:
    runs = recorded_runs.load_sweeps()
    return sweep_replay.checks(runs) + sweep_replay.prefix_cache_checks(runs)


GROUPS: Final[dict[str, Callable[[], list[SimulatorCheck]]]] = {
    "theory": queueing_theory.checks,
    "laws": invariants.checks,
    "recorded": _recorded,
    "pairs": lambda: pd_replay.checks(recorded_runs.load_pairs()),
    "distserve": lambda: distserve_replay.checks(recorded_runs.load_distserve()),
    "twin": lambda: twin.checks(twin.read_runs()),
}


def main(groups: Sequence[str]) -> int:
    """Runs the groups; returns 1 if a bound is not met."""
    if {"-h", "--help"} & set(groups):
        print(__doc__)
        return 0
    if unknown := set(groups) - set(GROUPS):
        print(f"no group {', '.join(sorted(unknown))}: known are {', '.join(GROUPS)}")
        return 2
    checks = [check for name, run in GROUPS.items() if not groups or name in groups for check in run()]
    print("\n".join(shown(checks)))
    all_hold = sum(result.holds for result in checks if result.bound is not None)
    print(f"\n{all_hold} of {sum(result.bound is not None for result in checks)} bounds hold")
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps([result.document() for result in checks], indent=1) + "\n")
    return 0 if all(result.holds for result in checks) else 1
