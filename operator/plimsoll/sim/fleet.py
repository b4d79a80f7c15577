"""Replicas of one tier, created and ended as by a Deployment: pending, starting, ready, draining, ended.

A replica starts when there are GPUs for it. Until then its pod is pending and costs nothing. It costs from its start to
its end (from its order, if the cluster has enough GPUs). On scale-down, `core.autoscaling.scale_down_candidates`
selects the replicas: the ones with the least load, as the operator knows it, if the operator marks them; otherwise the
youngest. A draining replica completes its requests. A replica that dies is replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final

from plimsoll.core.autoscaling.inputs import TierSnapshot
from plimsoll.core.autoscaling.scale_down_candidates import (
    UNKNOWN_LOAD,
    ReplicaLoad,
    ScaleDownCandidate,
    select_for_removal,
)
from plimsoll.core.autoscaling.startup_time import StartingPod
from plimsoll.core.routing.endpoint import Endpoint
from plimsoll.core.types import Role
from plimsoll.sim.attempt import Attempt
from plimsoll.sim.engine.simulated_engine import SimulatedEngine
from plimsoll.sim.errors import BadInput
from plimsoll.sim.plant import Plant, min_drain_s
from plimsoll.sim.startup import StartupPhases, current_phase

_UNSCHEDULABLE: Final = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."


@dataclass(slots=True)
class GpuPool:
    """Free GPUs of the cluster for all tiers; None: unlimited."""

    free: int | None = None

    def take(self, gpus: int) -> bool:
        """Take GPUs; False if there are not enough."""
        if self.free is None:
            return True
        if gpus > self.free:
            return False
        self.free -= gpus
        return True

    def release(self, gpus: int) -> None:
        if self.free is not None:
            self.free += gpus


@dataclass(eq=False, slots=True)
class SimulatedReplica:
    """One engine pod. Times in seconds after the run's start.

    placed_s: when it got its node, None without one. attempts: its running requests, by id.
    """

    name: str
    role: Role
    engine: SimulatedEngine
    planned_phases: StartupPhases
    ordered_s: float
    placed_s: float | None = None
    ready_s: float = math.inf
    attempts: dict[int, Attempt] = field(default_factory=dict)
    ready: bool = False
    draining_s: float | None = None
    ended_s: float | None = None
    next_advance_s: float | None = None  # when the simulator advances its engine next

    @property
    def is_serving(self) -> bool:
        """Whether it accepts requests."""
        return self.ready and self.draining_s is None and self.ended_s is None

    def startup_status(self, now_s: float, epoch_s: float) -> StartingPod:
        """Progress of its start-up, as its pod and launcher report it."""
        if self.placed_s is None:
            created_s = epoch_s + self.ordered_s
            return StartingPod(self.name, created_s, self.planned_phases[0][0], created_s, _UNSCHEDULABLE)
        phase, since_s = current_phase(self.planned_phases, self.placed_s, now_s)
        return StartingPod(self.name, epoch_s + self.placed_s, phase, epoch_s + since_s)

    @property
    def startup_phases(self) -> StartupPhases:
        """Its actual start-up phases; the first one includes the wait for a node."""
        (first, seconds), *others = self.planned_phases
        waited_s = 0.0 if self.placed_s is None else self.placed_s - self.ordered_s
        return ((first, seconds + waited_s), *others)


class FleetTier:
    """All replicas of one role."""

    def __init__(self, role: Role, plant: Plant, random: Random, gpu_pool: GpuPool | None = None) -> None:
        """gpu_pool: shared by all tiers."""
        self.role = role
        self.desired = 0
        self.replicas: dict[str, SimulatedReplica] = {}
        self.pending: dict[str, SimulatedReplica] = {}  # those without a node
        self._plant, self._random = plant, random
        self._gpu_pool, self._gpus = gpu_pool or GpuPool(), plant.gpus.get(role, 1)
        self._created = 0
        self._ended: list[tuple[float, float]] = []  # when those that are gone got their node, and when they ended
        self._engine_info = plant.engine_info(role)

    def start_initial(self, replicas: int) -> list[SimulatedReplica]:
        """Start replicas that are ready when the run begins. Raises BadInput if there are not enough GPUs for them."""
        self.desired = replicas
        created = [self._create(0.0) for _ in range(replicas)]
        for one in created:
            if not self.schedule(one, 0.0):
                raise BadInput(f"--max-gpus: too few for the {replicas} {self.role} replicas of the start")
            one.ready_s, one.ready = 0.0, True
        return created

    def scale(
        self, desired: int, now_s: float, load: Callable[[str], ReplicaLoad] | None = None
    ) -> tuple[list[SimulatedReplica], list[SimulatedReplica]]:
        """Order or remove replicas. Returns the new replicas, which need a node, and the ready ones that start to
        drain.

        load: the known load of each replica, for the choice of candidates; None if the operator marks none.
        """
        self.desired = desired
        current = [replica for replica in self.replicas.values() if replica.draining_s is None]
        created = [self._create(now_s) for _ in range(desired - len(current))]
        candidates = [
            ScaleDownCandidate(
                replica.name, replica.ready, replica.ready_s, load(replica.name) if load else UNKNOWN_LOAD
            )
            for replica in current
        ]
        drained = []
        for replica in (self.replicas[candidate.name] for candidate in select_for_removal(candidates, desired)):
            replica.draining_s = now_s
            if replica.ready:
                drained.append(replica)
            else:
                self.end(replica, now_s)
        return created, drained

    def schedule(self, replica: SimulatedReplica, now_s: float) -> bool:
        """Place a pending replica on a node; False if none has room."""
        if not self._gpu_pool.take(self._gpus):
            return False
        del self.pending[replica.name]
        replica.placed_s, replica.ready_s = now_s, now_s + sum(seconds for _, seconds in replica.planned_phases)
        return True

    def end(self, replica: SimulatedReplica, now_s: float) -> None:
        """End a replica."""
        replica.ended_s = now_s
        if replica.placed_s is None:
            del self.pending[replica.name]
        else:
            self._ended.append((replica.placed_s, now_s))
            self._gpu_pool.release(self._gpus)
        del self.replicas[replica.name]

    def is_drained(self, replica: SimulatedReplica, now_s: float) -> bool:
        """Whether a draining replica has no request left."""
        if replica.draining_s is None or replica.ended_s is not None or replica.attempts:
            return False
        return now_s >= replica.draining_s + min_drain_s() and replica.engine.idle

    def replica_seconds(self, until_s: float) -> float:
        """Replica-seconds until until_s."""
        running = ((one.placed_s, until_s) for one in self.replicas.values() if one.placed_s is not None)
        return sum(max(0.0, min(ended_s, until_s) - placed_s) for placed_s, ended_s in (*self._ended, *running))

    def counts(self) -> tuple[int, int, int, int]:
        """Desired, ready, starting, draining."""
        ready = draining = 0
        for one in self.replicas.values():
            ready += one.is_serving
            draining += one.draining_s is not None
        return self.desired, ready, len(self.replicas) - ready - draining, draining

    def snapshot(self, now_s: float, epoch_s: float) -> TierSnapshot:
        """The tier as the operator sees it."""
        live = sum(one.is_serving for one in self.replicas.values())
        starting = [one for one in self.replicas.values() if not one.ready and one.draining_s is None]
        return TierSnapshot(
            self.desired,
            live,
            tuple(one.startup_status(now_s, epoch_s) for one in starting),
            self._engine_info if live else None,
        )

    def endpoints(self) -> list[Endpoint]:
        """Endpoints that accept requests."""
        routable = self.role is not Role.PREFILL
        return [
            Endpoint(r.name, r.name, self.role, "1", True, routable=routable)
            for r in self.replicas.values()
            if r.is_serving
        ]

    def _create(self, now_s: float) -> SimulatedReplica:
        self._created += 1
        phases = self._plant.startup.sample(self._random)
        engine = self._plant.engine(self.role, self._random)
        name = f"{self.role}-{self._created}"
        replica = self.replicas[name] = self.pending[name] = SimulatedReplica(name, self.role, engine, phases, now_s)
        return replica
