"""Results of a run in Dynamo's simulator or in Plimsoll's, counted by the same code as in `plimsoll simulate`."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from bench.scoreboard.simulate_run import HOUR_S, mean_replicas
from plimsoll.core.types import Role
from plimsoll.sim.attempt import Attempt
from plimsoll.sim.load_phases import OfferedWork, reversals
from plimsoll.sim.policies.base import PolicyContext
from plimsoll.sim.request_cost import RequestCostModel
from plimsoll.sim.result import RunResult
from plimsoll.sim.run_log import RunLog

_PERCENTILES: Final = (50, 95)  # percentiles
Counts = Sequence[tuple[float, int]]  # each from its moment on, seconds


@dataclass(frozen=True)
class ReplayRun:
    """Result of one run. attempts: all requests of the load, with their outcomes.

    Per tier: paid_s: replica-seconds until the end of the load, including starting and draining replicas; ready_counts,
    desired_counts: replicas that cost something, and ordered replicas, over time.
    """

    attempts: Sequence[Attempt]
    paid_s: Mapping[Role, float]
    ready_counts: Mapping[Role, Counts]
    desired_counts: Mapping[Role, Counts]


def run_figures(run: ReplayRun, scene: PolicyContext, end_s: float) -> dict[str, Any]:
    """A run's figures. Of each tier, peak: most replicas; turns: changes of the wanted ones against the last change's
    direction, the most in a stretch of constant load; later: mean replicas after the first hour, None without a second
    one."""
    windows = io.StringIO()
    result = RunResult(scene.plant, run.ready_counts, scene.slo, windows=windows)
    for attempt in run.attempts:
        result.add(attempt)
    windows_met = [json.loads(timeline)["passed"] for timeline in windows.getvalue().splitlines()]
    return {
        "offered": len(run.attempts),
        "attainment": sum(map(result.is_within_slo, run.attempts)) / len(run.attempts),
        "gpu_hours": sum(paid_s * scene.gpus[role] for role, paid_s in run.paid_s.items()) / HOUR_S,
        "peak": [max(count for _, count in ready_counts) for ready_counts in run.ready_counts.values()],
        "windows": len(windows_met),
        "passed": sum(windows_met),
        "turns": [
            max(reversals(run.desired_counts[role], _phases(run, role, scene), end_s)) for role in run.ready_counts
        ],
        "later": [_mean_after(*tier, end_s) for tier in run.ready_counts.items()] if end_s >= 2 * HOUR_S else None,
        **dict(_quantiles(run.attempts)),
    }


def _phases(run: ReplayRun, role: Role, scene: PolicyContext) -> list[float]:
    offered_work, offered = RequestCostModel(scene.plant, run.ready_counts), OfferedWork()
    for attempt in run.attempts:
        offered.add(attempt.trace_request.at_s, offered_work.cost_s(role, attempt.trace_request))
    return offered.phases()


def _mean_after(role: Role, ready_counts: Counts, end_s: float) -> float | None:
    return mean_replicas(RunLog([(at_s, role, 0, count, 0, 0) for at_s, count in ready_counts]), role, HOUR_S, end_s)


def _quantiles(attempts: Sequence[Attempt]) -> Iterator[tuple[str, float]]:
    for name in ("ttft", "tpot"):
        took_s = [took for attempt in attempts if (took := getattr(attempt, f"{name}_s")) is not None]
        yield from ((f"{name}_p{q}_s", float(np.percentile(took_s, q)) if took_s else 0.0) for q in _PERCENTILES)
