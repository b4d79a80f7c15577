"""`python -m bench trust`: every check in turn, printed and written to build/bench/trust.json.

With words only those groups: theory, laws, recorded, pairs, distserve, twin. The exit status is 1 where a bound is not
met; docs/trust.md says which are not, and why.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from bench.trust import laws, pairs, queues, records, sweeps, table2, twin
from bench.trust.check import Check, shown

REPORT: Final = Path("build") / "bench" / "trust.json"


def _recorded() -> list[Check]:
    runs = records.sweeps()
    return sweeps.checks(runs) + sweeps.cached(runs)


GROUPS: Final[dict[str, Callable[[], list[Check]]]] = {
    "theory": queues.checks,
    "laws": laws.checks,
    "recorded": _recorded,
    "pairs": lambda: pairs.checks(records.pairs()),
    "distserve": lambda: table2.checks(records.distserve()),
    "twin": lambda: twin.checks(twin.read()),
}


def main(wanted: Sequence[str]) -> int:
    """Runs the groups; returns 1 if a bound is not met."""
    if {"-h", "--help"} & set(wanted):
        print(__doc__)
        return 0
    if unknown := set(wanted) - set(GROUPS):
        print(f"no group {', '.join(sorted(unknown))}: known are {', '.join(GROUPS)}")
        return 2
    found = [check for name, run in GROUPS.items() if not wanted or name in wanted for check in run()]
    print("\n".join(shown(found)))
    held = sum(one.holds for one in found if one.bound is not None)
    print(f"\n{held} of {sum(one.bound is not None for one in found)} bounds hold")
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps([one.document() for one in found], indent=1) + "\n")
    return 0 if all(one.holds for one in found) else 1
