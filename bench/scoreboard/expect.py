"""What short rows come to today, seed by seed: `python -m bench scoreboard --expect` writes it down.

A test plays them again with the same seeds, and fails where attainment is lower or GPU time higher by more than three
standard errors of the differences' mean. What a seed draws, engines' speeds above all, is the same on both sides, so
that only what a change does differently is left as chance.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.scoreboard.play import Task
from bench.scoreboard.rows import SHORT, Row
from bench.scoreboard.search import Played

POLICIES: Final = ("plimsoll", "static:4")
DEVIATIONS: Final = 3.0
_FIGURES: Final = ("attainment_offered", "attainment_admitted", "gpu_hours")
_ROUNDING: Final = 1e-5
_FILE: Final = Path(__file__).parent / "expected.json"

Expected = Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]


def write(played: Played) -> None:
    """Plays all short rows with all their seeds."""
    found = {name: {policy: _figures(row, policy, played) for policy in POLICIES} for name, row in SHORT.items()}
    _FILE.write_text(json.dumps(found, indent=1) + "\n")


def _figures(row: Row, policy: str, played: Played) -> dict[str, list[float]]:
    runs = played([Task(row, 1.0, policy, seed) for seed in range(1, row.seeds + 1)])
    return {key: [round(run[key], 5) for run in runs] for key in _FIGURES}


def read() -> Expected:
    """Each figure of seeds 1, 2 and so on, by row and policy."""
    return dict(json.loads(_FILE.read_text()))


def worse(runs: Sequence[Mapping[str, Any]], expected: Mapping[str, Sequence[float]]) -> list[str]:
    """What is worse in these runs, of seeds 1, 2 and so on, than chance allows, in words."""
    found = []
    for key, known in expected.items():
        sign = 1.0 if key == "gpu_hours" else -1.0  # the way that is worse
        by = [sign * (run[key] - was) for run, was in zip(runs, known, strict=True)]
        allowed = DEVIATIONS * statistics.stdev(by) / math.sqrt(len(by)) + _ROUNDING
        if (mean := statistics.fmean(by)) > allowed:
            found.append(f"{key} is worse by {mean:.5f}, and chance explains {allowed:.5f}")
    return found
