"""What short rows come to today, and how much of it is chance: `python -m bench scoreboard --expect` writes it down.

A test plays them again with fewer seeds, and fails where attainment is lower or GPU time higher than chance allows: by
three standard errors of such a mean, from the scatter of as many seeds as the row says.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.scoreboard.play import Task
from bench.scoreboard.rows import SHORT
from bench.scoreboard.search import Played

POLICIES: Final = ("plimsoll", "static:4")
DEVIATIONS: Final = 3.0
_FIGURES: Final = ("attainment_offered", "attainment_admitted", "gpu_hours")
_FILE: Final = Path(__file__).parent / "expected.json"

Expected = Mapping[str, Mapping[str, Mapping[str, tuple[float, float]]]]


def write(played: Played) -> None:
    """Plays all short rows with all their seeds."""
    found: dict[str, dict[str, dict[str, tuple[float, float]]]] = {}
    for name, row in SHORT.items():
        for policy in POLICIES:
            runs = played([Task(row, 1.0, policy, seed) for seed in range(1, row.seeds + 1)])
            figures = {key: [run[key] for run in runs] for key in _FIGURES}
            found.setdefault(name, {})[policy] = {
                key: (round(statistics.fmean(each), 5), round(statistics.stdev(each), 5))
                for key, each in figures.items()
            }
    _FILE.write_text(json.dumps(found, indent=1) + "\n")


def read() -> Expected:
    """Mean and standard deviation of each figure, by row and policy."""
    return dict(json.loads(_FILE.read_text()))


def worse(runs: Sequence[Mapping[str, Any]], expected: Mapping[str, tuple[float, float]]) -> list[str]:
    """What is worse in the mean of these runs than chance allows, in words."""
    found = []
    for key, (mean, deviation) in expected.items():
        value = statistics.fmean(run[key] for run in runs)
        sign = 1.0 if key == "gpu_hours" else -1.0  # the way that is worse
        allowed = DEVIATIONS * deviation / math.sqrt(len(runs)) + 1e-5  # figures are rounded
        if sign * (value - mean) > allowed:
            found.append(f"{key} is {value:.5f}, was {mean}, and chance explains {allowed:.5f}")
    return found
