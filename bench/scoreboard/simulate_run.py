"""One run: a policy on a row's load, plant and seed, and its results, also minute by minute.

The plant is drawn with every seed: speeds of replicas within a tenth, noise of steps, starts. Requests come through two
gateways, as the chart installs them. Plimsoll begins each run with the state of a new service. A policy is given as in
`plimsoll simulate --policy`; `plimsoll:sloMissCost=K` sets that field of the manifest, for the frontier over it, and
`plimsoll:demand=engines` has targets in place of the tier: demand from the engines' counters, no admission control.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from bench.scoreboard import listed_starts
from bench.scoreboard.rows import BoardRow
from plimsoll.api.v1alpha1 import InferenceService, parse
from plimsoll.core.types import Role
from plimsoll.sim import profile
from plimsoll.sim.attempt import Attempt, AttemptOutcome, TraceRequest
from plimsoll.sim.clients import RetryBehavior
from plimsoll.sim.plant import Plant
from plimsoll.sim.policies import registry
from plimsoll.sim.policies.base import PolicyContext
from plimsoll.sim.result import RunResult
from plimsoll.sim.run_config import RunConfig
from plimsoll.sim.run_log import RunLog
from plimsoll.sim.screening import SearchSpace
from plimsoll.sim.simulator import Simulator

HOUR_S: Final = 3600.0
_MINUTE_S: Final = 60.0
GATEWAYS: Final = 2  # the chart's default
_DISAGGREGATED_BLOCK_TOKENS: Final = 128  # what the operator starts prefill and decode engines with
_CHUNK_TOKENS: Final = 512  # prompt tokens that one of a trace's blocks stands for


@dataclass(frozen=True)
class RunTask:
    """A run to be made. plant: seconds of a step over the nominal ones."""

    row: BoardRow
    plant: float
    policy: str
    seed: int

    @property
    def row_and_plant(self) -> str:
        return place_of(self.row.name, self.plant)

    @property
    def uses_operator(self) -> bool:
        """Whether the operator has a part in it: it decides, or its model lets in."""
        if self.policy.partition(":")[0] in ("plimsoll", "follower"):
            return "cap=" not in self.policy and "gated=0" not in self.policy
        return "gated=1" in self.policy


def place_of(row: str, plant: float) -> str:
    """The row's name and its plant."""
    return row if plant == 1.0 else f"{row}@{plant:g}"


class MinuteCounts:
    """What arrived in each minute, and what became of it."""

    def __init__(self, length_s: float) -> None:
        minute_count = int(length_s // _MINUTE_S) + 1
        self.offered, self.shed, self.late = [0] * minute_count, [0] * minute_count, [0] * minute_count

    def add(self, attempt: Attempt, within_slo: bool) -> None:
        minute = min(len(self.offered) - 1, int(attempt.trace_request.at_s // _MINUTE_S))
        self.offered[minute] += 1
        if attempt.outcome is AttemptOutcome.SHED:
            self.shed[minute] += 1
        elif not within_slo:
            self.late[minute] += 1


def simulate(task: RunTask) -> dict[str, Any]:
    """The run's figures, which JSON can hold: those of `plimsoll simulate`, and `board`."""
    row, requests, service = task.row, task.row.load.make(task.seed), _service(task)
    platform = search_space(row, task.plant, requests)
    plant, slo = platform.context.plant, platform.context.slo
    policy = registry.parse(
        task.policy.partition(":")[0] if _is_plimsoll(task.policy) else task.policy, platform.context
    )
    assert policy.runs_operator is task.uses_operator, task.policy
    setting = RunConfig(
        policy.initial_replicas or platform.initial,
        row.load.length_s,
        GATEWAYS,
        seed=task.seed,
        retry_behavior=RetryBehavior(row.clients),
    )
    result = RunResult(plant, setting.initial, slo, classes=service.classes)
    minutes = MinuteCounts(row.load.length_s)

    def take(attempt: Attempt) -> None:
        result.add(attempt)
        if attempt.attempt == 1:
            minutes.add(attempt, result.is_within_slo(attempt))

    simulator = Simulator(service, plant, policy, setting, take)
    started_s = time.process_time()
    simulator.run(requests)
    figures = result.summary(simulator, task.policy, task.seed, setting.end_s, time.process_time() - started_s)
    return {**figures, "board": _board_figures(row, simulator.log, minutes)}


def search_space(row: BoardRow, plant: float, requests: Sequence[TraceRequest]) -> SearchSpace:
    """What policies on this row are made for, with the requests of one seed."""
    service = parse(row.manifest())
    replica_bounds = {Role(name): tier.replica_bounds for name, tier in service.spec.tiers.items()}
    gpus = dict.fromkeys(replica_bounds, row.gpus)
    chunk = _CHUNK_TOKENS if requests[0].block_ids else 0
    machines = Plant(_hardware(row), listed_starts.parse(row.startup), scale=plant, hash_block_tokens=chunk, gpus=gpus)
    slo = None if service.spec.slo is None else service.spec.slo.to_core()
    scene = PolicyContext(replica_bounds, machines, slo, gpus, requests)
    return SearchSpace(scene, dict(zip(replica_bounds, row.initial, strict=True)), row.load.length_s)


def _is_plimsoll(policy: str) -> bool:
    return policy.partition(":")[0] == "plimsoll"


def _service(task: RunTask) -> InferenceService:
    manifest = task.row.manifest()
    if _is_plimsoll(task.policy) and ":" in task.policy:
        name, _, value = task.policy.partition(":")[2].partition("=")
        if (name, value) == ("demand", "engines"):
            manifest["spec"] = _with_target(task.row, manifest["spec"])
        elif name == "sloMissCost" and value.isdecimal():
            scaling = {**manifest["spec"].get("scaling", {}), "sloMissCost": int(value)}
            manifest["spec"] = {**manifest["spec"], "scaling": scaling}
        else:
            raise ValueError(f"{task.policy}: only sloMissCost=K or demand=engines may follow")
    return parse(manifest)


def _with_target(row: BoardRow, spec: dict[str, Any]) -> dict[str, Any]:
    """The spec with a Deployment of the same engines in place of the tier, whose count Plimsoll sets."""
    (tier,) = spec["tiers"].values()
    reference = {"apiVersion": "apps/v1", "kind": "Deployment", "name": row.name}
    others = {name: value for name, value in spec.items() if name != "tiers"}
    scaling = {**spec.get("scaling", {}), "mode": "Auto"}
    return {**others, "scaling": scaling, "targets": {"serve": {"scaleTargetRef": reference, **tier}}}


def _hardware(row: BoardRow) -> profile.HardwareProfile:
    hardware_profile = profile.load(row.hardware)
    return (
        hardware_profile if len(row.tiers) == 1 else replace(hardware_profile, block_size=_DISAGGREGATED_BLOCK_TOKENS)
    )


def _board_figures(row: BoardRow, log: RunLog, minutes: MinuteCounts) -> dict[str, Any]:
    """What the board judges and shows beyond a run's own figures."""
    tiers = [Role(name) for name, _, _ in row.tiers]
    counts = {
        f"{role}_{name}": _minute_column(log, role, column, row.load.length_s)
        for role in tiers
        for name, column in (("desired", 2), ("ready", 3))
    }
    return {
        "mean_replicas_later": _mean_replicas_after(log, tiers, HOUR_S, row.load.length_s),
        "mean_replicas_settled": _mean_replicas_after(log, tiers, 2 * HOUR_S, row.load.length_s),
        "minutes": {"offered": minutes.offered, "shed": minutes.shed, "late": minutes.late, **counts},
    }


def _mean_replicas_after(log: RunLog, tiers: Sequence[Role], from_s: float, to_s: float) -> dict[str, float | None]:
    """Mean replicas of each tier from `from_s` on; None where that is less than an hour."""
    has_an_hour = to_s >= from_s + HOUR_S
    return {str(role): mean_replicas(log, role, from_s, to_s) if has_an_hour else None for role in tiers}


def mean_replicas(log: RunLog, role: Role, from_s: float, to_s: float) -> float | None:
    """Mean replicas that cost something from `from_s` on; None where the run ends before."""
    if to_s <= from_s:
        return None
    rows = [row for row in log.replicas if row[1] is role]
    ends_s = [*(row[0] for row in rows[1:]), to_s]
    weighted_sum = sum(
        sum(row[3:]) * max(0.0, min(end_s, to_s) - max(row[0], from_s)) for row, end_s in zip(rows, ends_s, strict=True)
    )
    return round(weighted_sum / (to_s - from_s), 4)


def _minute_column(log: RunLog, role: Role, column: int, length_s: float) -> list[int]:
    """A column of the tier's counts at the end of each minute."""
    rows = [row for row in log.replicas if row[1] is role]
    values, last = [], 0
    for minute in range(int(length_s // _MINUTE_S) + 1):
        while last + 1 < len(rows) and rows[last + 1][0] <= (minute + 1) * _MINUTE_S:
            last += 1
        values.append(int(rows[last][column]))
    return values
