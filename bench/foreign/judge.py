"""What a run came to, on their simulator or on ours: counted by the same code, that of `plimsoll simulate`."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from bench.scoreboard.play import HOUR_S, replicas
from plimsoll.core.picking.endpoint import Role
from plimsoll.sim.log import Log
from plimsoll.sim.phases import Offered, reversals
from plimsoll.sim.policies.base import Scene
from plimsoll.sim.result import Result
from plimsoll.sim.visit import Visit
from plimsoll.sim.work import Work

_SHOWN: Final = (50, 95)  # percentiles
Counts = Sequence[tuple[float, int]]  # each from its moment on, seconds


@dataclass(frozen=True)
class Run:
    """visits: each request of the load, with what became of it. Of each tier, paid_s: replica-seconds until the load's
    end, starting and draining included; there, wanted: replicas that cost something, and that were ordered."""

    visits: Sequence[Visit]
    paid_s: Mapping[Role, float]
    there: Mapping[Role, Counts]
    wanted: Mapping[Role, Counts]


def judged(run: Run, scene: Scene, end_s: float) -> dict[str, Any]:
    """A run's figures. Of each tier, peak: most replicas; turns: changes of the wanted ones against the last change's
    direction, the most in a stretch of constant load; later: mean replicas after the first hour, None without a second
    one."""
    windows = io.StringIO()
    result = Result(scene.plant, run.there, scene.slo, windows=windows)
    for visit in run.visits:
        result.take(visit)
    passed = [json.loads(line)["passed"] for line in windows.getvalue().splitlines()]
    return {
        "offered": len(run.visits),
        "attainment": sum(map(result.met, run.visits)) / len(run.visits),
        "gpu_hours": sum(paid_s * scene.gpus[role] for role, paid_s in run.paid_s.items()) / HOUR_S,
        "peak": [max(count for _, count in there) for there in run.there.values()],
        "windows": len(passed),
        "passed": sum(passed),
        "turns": [max(reversals(run.wanted[role], _phases(run, role, scene), end_s)) for role in run.there],
        "later": [_later(*tier, end_s) for tier in run.there.items()] if end_s >= 2 * HOUR_S else None,
        **dict(_times(run.visits)),
    }


def _phases(run: Run, role: Role, scene: Scene) -> list[float]:
    work, offered = Work(scene.plant, run.there), Offered()
    for visit in run.visits:
        offered.add(visit.asked.at_s, work.seconds(role, visit.asked))
    return offered.phases()


def _later(role: Role, there: Counts, end_s: float) -> float | None:
    return replicas(Log([(at_s, role, 0, count, 0, 0) for at_s, count in there]), role, HOUR_S, end_s)


def _times(visits: Sequence[Visit]) -> Iterator[tuple[str, float]]:
    for name in ("ttft", "tpot"):
        took_s = [took for one in visits if (took := getattr(one, f"{name}_s")) is not None]
        yield from ((f"{name}_p{q}_s", float(np.percentile(took_s, q)) if took_s else 0.0) for q in _SHOWN)
