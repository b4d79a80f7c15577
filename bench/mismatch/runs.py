"""One run of a case: a policy and a seed, and its results in windows of five minutes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bench.mismatch.cases import LENGTH_S, MismatchCase
from bench.mismatch.plants import MismatchedPlant
from plimsoll.api.v1alpha1 import parse
from plimsoll.core.types import Role
from plimsoll.sim.attempt import Attempt
from plimsoll.sim.load_phases import reversals
from plimsoll.sim.policies import registry
from plimsoll.sim.policies.base import PolicyContext
from plimsoll.sim.result import RunResult
from plimsoll.sim.run_config import RunConfig
from plimsoll.sim.run_log import RunLog
from plimsoll.sim.simulator import Simulator

WINDOW_S: Final = 300.0
SLO_SHARE: Final = 0.95
GATEWAYS: Final = 2  # as the chart installs


@dataclass(frozen=True)
class MismatchRun:
    """The figures of one run.

    offered, within_slo: requests by window of `WINDOW_S` of their arrival. settled_s: when as many replicas were ready
    as the smallest constant fleet that meets the SLO has, and five minutes more; None if never.
    max_replicas, reversals: of the desired replicas of all tiers from then on; reversals are the most of one tier.
    changes: decisions of the whole run that changed a count.
    """

    offered: tuple[int, ...]
    within_slo: tuple[int, ...]
    settled_s: float | None
    max_replicas: int
    reversals: int
    gpu_hours: float
    changes: int

    @property
    def attainment(self) -> float:
        """Share of all offered requests that were within the SLO."""
        return sum(self.within_slo) / max(1, sum(self.offered))

    @property
    def settled_windows(self) -> tuple[bool, ...]:
        """Whether each whole window after `settled_s` met the SLO."""
        if self.settled_s is None:
            return ()
        first = int(-(-self.settled_s // WINDOW_S))
        counts = zip(self.offered[first:], self.within_slo[first:], strict=True)
        return tuple(within >= SLO_SHARE * offered for offered, within in counts)


def simulate(case: MismatchCase, policy: str, seed: int, least: Mapping[Role, int]) -> MismatchRun:
    """Run it. least: replicas of the smallest constant fleet that meets the SLO."""
    service, requests = parse(case.manifest()), case.requests(seed)
    gpus = {Role(name): case.gpus for name in case.tiers}
    bounds = {Role(name): tier.replica_bounds for name, tier in service.spec.tiers.items()}
    plant = MismatchedPlant(gpus=gpus, **case.plant_fields())
    slo = None if service.spec.slo is None else service.spec.slo.to_core()
    context = PolicyContext(bounds, plant, slo, gpus, requests)
    chosen = registry.parse(policy, context)
    initial = chosen.initial_replicas or dict.fromkeys(bounds, 1)
    config = RunConfig(
        initial, LENGTH_S, GATEWAYS if chosen.runs_operator else 1, seed, sends_max_tokens=case.sends_max_tokens
    )
    result = RunResult(plant, initial, slo, classes=service.classes)
    windows = int(LENGTH_S // WINDOW_S)
    offered, within = [0] * windows, [0] * windows

    def take(attempt: Attempt) -> None:
        result.add(attempt)
        if attempt.attempt == 1:
            window = min(windows - 1, int(attempt.trace_request.at_s // WINDOW_S))
            offered[window] += 1
            within[window] += result.is_within_slo(attempt)

    simulator = Simulator(service, plant, chosen, config, take)
    simulator.run(requests)
    settled_s = _settled_s(simulator.log, least)
    figures = result.summary(simulator, policy, seed, LENGTH_S, 0.0)
    return MismatchRun(
        tuple(offered),
        tuple(within),
        settled_s,
        _max_replicas(simulator.log, list(bounds), settled_s),
        max(_reversals(simulator.log, role, settled_s) for role in bounds),
        figures["gpu_hours"],
        figures["changes"],
    )


def _settled_s(log: RunLog, least: Mapping[Role, int]) -> float | None:
    ready: dict[Role, int] = {}
    for at_s, role, _, now_ready, _, _ in log.replicas:
        ready[role] = now_ready
        if all(ready.get(one, 0) >= replicas for one, replicas in least.items()):
            return at_s + WINDOW_S
    return None


def _desired_replicas(log: RunLog, role: Role) -> Sequence[tuple[float, int]]:
    return [(row[0], row[2]) for row in log.replicas if row[1] is role]


def _max_replicas(log: RunLog, roles: Sequence[Role], settled_s: float | None) -> int:
    """Most replicas desired at once, of all tiers, from `settled_s` to the end of the load."""
    from_s, desired, most = settled_s or 0.0, dict.fromkeys(roles, 0), 0
    for at_s, role, replicas, *_ in log.replicas:
        if at_s >= LENGTH_S:
            break
        if at_s >= from_s:
            most = max(most, sum(desired.values()))
        desired[role] = replicas
    return max(most, sum(desired.values()))


def _reversals(log: RunLog, role: Role, settled_s: float | None) -> int:
    after = [(at_s, replicas) for at_s, replicas in _desired_replicas(log, role) if at_s >= (settled_s or 0.0)]
    return max(reversals(after, [0.0], LENGTH_S), default=0)
