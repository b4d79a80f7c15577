"""Results of short rows, seed by seed: `python -m bench scoreboard --expect` writes them.

A test repeats them with the same seeds, and fails if attainment is lower or GPU time higher by more than three standard
errors of the differences' mean. The random draws of a seed, engines' speeds above all, are the same on both sides, so
only the effect of a change remains as noise.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.scoreboard.rows import SHORT_ROWS, BoardRow
from bench.scoreboard.search import RunTasks
from bench.scoreboard.simulate_run import RunTask

EXPECTED_POLICIES: Final = ("plimsoll", "static:4")
MAX_STANDARD_ERRORS: Final = 3.0
_FIGURES: Final = ("attainment_offered", "attainment_admitted", "gpu_hours")
_ROUNDING: Final = 1e-5
_FILE: Final = Path(__file__).parent / "expected.json"

Expected = Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]


def write(played: RunTasks) -> None:
    """Plays all short rows with all their seeds."""
    figures = {
        name: {policy: _figures(row, policy, played) for policy in EXPECTED_POLICIES}
        for name, row in SHORT_ROWS.items()
    }
    _FILE.write_text(json.dumps(figures, indent=1) + "\n")


def _figures(row: BoardRow, policy: str, played: RunTasks) -> dict[str, list[float]]:
    runs = played([RunTask(row, 1.0, policy, seed) for seed in range(1, row.seeds + 1)])
    return {key: [round(run[key], 5) for run in runs] for key in _FIGURES}


def read() -> Expected:
    """Each figure of seeds 1, 2 and so on, by row and policy."""
    return dict(json.loads(_FILE.read_text()))


def find_regressions(runs: Sequence[Mapping[str, Any]], expected: Mapping[str, Sequence[float]]) -> list[str]:
    """What is worse in these runs, of seeds 1, 2 and so on, than chance allows, in words."""
    regressions = []
    for key, expected_figures in expected.items():
        sign = 1.0 if key == "gpu_hours" else -1.0  # the way that is worse
        differences = [
            sign * (run[key] - expected_value) for run, expected_value in zip(runs, expected_figures, strict=True)
        ]
        tolerance = MAX_STANDARD_ERRORS * statistics.stdev(differences) / math.sqrt(len(differences)) + _ROUNDING
        if (mean := statistics.fmean(differences)) > tolerance:
            regressions.append(f"{key} is worse by {mean:.5f}, and chance explains {tolerance:.5f}")
    return regressions
