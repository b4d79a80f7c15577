"""One run: a policy on a row's load, plant and seed, and what became of it, minute by minute too.

The plant is drawn anew with every seed: speeds of replicas within a tenth, noise of steps, starts. Plimsoll begins each
run knowing what a new service knows. A policy's word is that of `plimsoll simulate --policy`; `plimsoll:missCost=K`
sets that field of the manifest, for the frontier over it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from bench.scoreboard.rows import Row
from plimsoll.api.v1alpha1 import InferenceService, parse
from plimsoll.core.picking.endpoint import Role
from plimsoll.sim import profile, startup
from plimsoll.sim.clients import Manner
from plimsoll.sim.log import Log
from plimsoll.sim.plant import Plant
from plimsoll.sim.policies import registry
from plimsoll.sim.policies.base import Scene
from plimsoll.sim.result import Result
from plimsoll.sim.screen import Ground
from plimsoll.sim.setting import Setting
from plimsoll.sim.visit import Asked, End, Visit
from plimsoll.sim.world import World

HOUR_S: Final = 3600.0
_MINUTE_S: Final = 60.0
_DISAGGREGATED_BLOCK: Final = 128  # what the operator starts prefill and decode engines with
_CHUNK: Final = 512  # prompt tokens that one of a trace's blocks stands for


@dataclass(frozen=True)
class Task:
    """A run to be made. plant: seconds of a step over the nominal ones."""

    row: Row
    plant: float
    policy: str
    seed: int

    @property
    def place(self) -> str:
        return place(self.row.name, self.plant)

    @property
    def operated(self) -> bool:
        """Whether the operator has a part in it: it decides, or its model lets in."""
        if self.policy.partition(":")[0] in ("plimsoll", "follower"):
            return "cap=" not in self.policy and "gated=0" not in self.policy
        return "gated=1" in self.policy


def place(row: str, plant: float) -> str:
    """The row's name and its plant."""
    return row if plant == 1.0 else f"{row}@{plant:g}"


class Minutes:
    """What arrived in each minute, and what became of it."""

    def __init__(self, length_s: float) -> None:
        whole = int(length_s // _MINUTE_S) + 1
        self.offered, self.shed, self.late = [0] * whole, [0] * whole, [0] * whole

    def take(self, visit: Visit, met: bool) -> None:
        minute = min(len(self.offered) - 1, int(visit.asked.at_s // _MINUTE_S))
        self.offered[minute] += 1
        if visit.end is End.SHED:
            self.shed[minute] += 1
        elif not met:
            self.late[minute] += 1


def play(task: Task) -> dict[str, Any]:
    """The run's figures, which JSON can hold: those of `plimsoll simulate`, and `board`."""
    row, asked, service = task.row, task.row.load.make(task.seed), _service(task)
    known = ground(row, task.plant, asked)
    plant, slo = known.scene.plant, known.scene.slo
    policy = registry.parse(task.policy.partition(":")[0] if _ours(task.policy) else task.policy, known.scene)
    assert policy.operator is task.operated, task.policy
    setting = Setting(policy.initial or known.initial, row.load.length_s, seed=task.seed, clients=Manner(row.clients))
    result = Result(plant, setting.initial, slo, classes=service.classes)
    minutes = Minutes(row.load.length_s)

    def take(visit: Visit) -> None:
        result.take(visit)
        if visit.attempt == 1:
            minutes.take(visit, result.met(visit))

    world = World(service, plant, policy, setting, take)
    began_s = time.process_time()
    world.run(asked)
    figures = result.summary(world, task.policy, task.seed, setting.end_s, time.process_time() - began_s)
    return {**figures, "board": _board(row, world.log, minutes)}


def ground(row: Row, plant: float, asked: Sequence[Asked]) -> Ground:
    """What policies on this row are made for, with the requests of one seed."""
    service = parse(row.manifest())
    bounds = {Role(name): tier.bounds for name, tier in service.spec.tiers.items()}
    gpus = dict.fromkeys(bounds, row.gpus)
    chunk = _CHUNK if asked[0].ids else 0
    machines = Plant(_machine(row), startup.parse(row.start_up), scale=plant, chunk=chunk, gpus=gpus)
    slo = None if service.spec.slo is None else service.spec.slo.to_core()
    scene = Scene(bounds, machines, slo, gpus, asked)
    return Ground(scene, dict(zip(bounds, row.initial, strict=True)), row.load.length_s)


def _ours(policy: str) -> bool:
    return policy.partition(":")[0] == "plimsoll"


def _service(task: Task) -> InferenceService:
    manifest = task.row.manifest()
    if _ours(task.policy) and ":" in task.policy:
        name, _, value = task.policy.partition(":")[2].partition("=")
        if name != "missCost" or not value.isdecimal():
            raise ValueError(f"{task.policy}: missCost=K is all that may follow")
        scaling = {**manifest["spec"].get("scaling", {}), "missCost": int(value)}
        manifest["spec"] = {**manifest["spec"], "scaling": scaling}
    return parse(manifest)


def _machine(row: Row) -> profile.Profile:
    own = profile.load(row.hardware)
    return own if len(row.tiers) == 1 else replace(own, block_size=_DISAGGREGATED_BLOCK)


def _board(row: Row, log: Log, minutes: Minutes) -> dict[str, Any]:
    """What the board judges and shows beyond a run's own figures."""
    tiers = [Role(name) for name, _, _ in row.tiers]
    counts = {
        f"{role}_{name}": _each_minute(log, role, column, row.load.length_s)
        for role in tiers
        for name, column in (("desired", 2), ("ready", 3))
    }
    return {
        "mean_replicas_later": _after(log, tiers, HOUR_S, row.load.length_s),
        "mean_replicas_settled": _after(log, tiers, 2 * HOUR_S, row.load.length_s),
        "minutes": {"offered": minutes.offered, "shed": minutes.shed, "late": minutes.late, **counts},
    }


def _after(log: Log, tiers: Sequence[Role], from_s: float, to_s: float) -> dict[str, float | None]:
    """Mean replicas of each tier from `from_s` on; None where that is less than an hour."""
    long_enough = to_s >= from_s + HOUR_S
    return {str(role): replicas(log, role, from_s, to_s) if long_enough else None for role in tiers}


def replicas(log: Log, role: Role, from_s: float, to_s: float) -> float | None:
    """Mean replicas that cost something from `from_s` on; None where the run ends before."""
    if to_s <= from_s:
        return None
    rows = [one for one in log.replicas if one[1] is role]
    ends_s = [*(one[0] for one in rows[1:]), to_s]
    whole = sum(
        sum(one[3:]) * max(0.0, min(end_s, to_s) - max(one[0], from_s)) for one, end_s in zip(rows, ends_s, strict=True)
    )
    return round(whole / (to_s - from_s), 4)


def _each_minute(log: Log, role: Role, column: int, length_s: float) -> list[int]:
    """A column of the tier's counts at the end of each minute."""
    rows = [one for one in log.replicas if one[1] is role]
    found, last = [], 0
    for minute in range(int(length_s // _MINUTE_S) + 1):
        while last + 1 < len(rows) and rows[last + 1][0] <= (minute + 1) * _MINUTE_S:
            last += 1
        found.append(int(rows[last][column]))
    return found
