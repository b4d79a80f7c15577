"""The replicas of one tier, as a Deployment makes and ends them: ordered, starting, ready, draining, gone.

A replica starts when there are GPUs for it; until then its pod is pending, and costs nothing, since it holds nothing.
It costs from then on (from its order, where the cluster has GPUs enough) to its end. Where fewer are wanted those go
that `core.scaling.leaving` names: the emptiest where the operator marks them, as it knows them, else the youngest. Who
is ready finishes what it has. One that dies is made anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final

from plimsoll.core.autoscaler import TierSeen
from plimsoll.core.lifecycle import Starting
from plimsoll.core.picking.endpoint import Endpoint, Role
from plimsoll.core.scaling.leaving import UNTOLD, Candidate, Load, leaving
from plimsoll.sim.engine import Engine
from plimsoll.sim.errors import BadInput
from plimsoll.sim.plant import Plant, quiet_s
from plimsoll.sim.startup import Phases, under_way
from plimsoll.sim.visit import Visit

_NO_NODE: Final = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."


@dataclass(slots=True)
class Cards:
    """GPUs that the cluster has left for all tiers; None: as many as anybody wants."""

    free: int | None = None

    def take(self, gpus: int) -> bool:
        """False where there are not so many."""
        if self.free is None:
            return True
        if gpus > self.free:
            return False
        self.free -= gpus
        return True

    def give(self, gpus: int) -> None:
        if self.free is not None:
            self.free += gpus


@dataclass(eq=False, slots=True)
class Replica:
    """One engine pod. Times in seconds after the run's start. placed_s: when it got its node, None while it has none.
    visits: requests that it works on, by their id."""

    name: str
    role: Role
    engine: Engine
    phases: Phases
    ordered_s: float
    placed_s: float | None = None
    ready_s: float = math.inf
    visits: dict[int, Visit] = field(default_factory=dict)
    ready: bool = False
    draining_s: float | None = None
    gone_s: float | None = None
    armed_s: float | None = None  # when the loop will look at its engine

    @property
    def live(self) -> bool:
        """Takes requests."""
        return self.ready and self.draining_s is None and self.gone_s is None

    def starting(self, now_s: float, epoch_s: float) -> Starting:
        """How far its start has come, as its pod and launcher tell it."""
        created_s = epoch_s + self.ordered_s
        if self.placed_s is None:
            return Starting(self.name, created_s, self.phases[0][0], created_s, _NO_NODE)
        phase, since_s = under_way(self.phases, self.placed_s, now_s)
        return Starting(self.name, created_s, phase, epoch_s + since_s)

    @property
    def took(self) -> Phases:
        """Its phases as they were, the first one with the wait for a node."""
        (first, seconds), *others = self.phases
        waited_s = 0.0 if self.placed_s is None else self.placed_s - self.ordered_s
        return ((first, seconds + waited_s), *others)


class Tier:
    """All replicas of one role."""

    def __init__(self, role: Role, plant: Plant, random: Random, cards: Cards | None = None) -> None:
        """cards: shared by all tiers."""
        self.role = role
        self.desired = 0
        self.replicas: dict[str, Replica] = {}
        self.pending: dict[str, Replica] = {}  # those without a node
        self._plant, self._random = plant, random
        self._cards, self._gpus = cards or Cards(), plant.gpus.get(role, 1)
        self._made = 0
        self._gone: list[tuple[float, float]] = []  # when those that are gone got their node, and when they ended
        self._about = plant.about(role)

    def begin(self, replicas: int) -> list[Replica]:
        """Replicas that are ready when the run begins. Raises BadInput where there are not enough GPUs for them."""
        self.desired = replicas
        made = [self._make(0.0) for _ in range(replicas)]
        for one in made:
            if not self.place(one, 0.0):
                raise BadInput(f"--max-gpus: too few for the {replicas} {self.role} replicas of the start")
            one.ready_s, one.ready = 0.0, True
        return made

    def set(
        self, wanted: int, now_s: float, load: Callable[[str], Load] | None = None
    ) -> tuple[list[Replica], list[Replica]]:
        """Orders replicas, or gives some back: those that are new, to be placed, and those ready that drain now.

        load: what is known of each by whoever names those that go; None where nobody does.
        """
        self.desired = wanted
        staying = [one for one in self.replicas.values() if one.draining_s is None]
        made = [self._make(now_s) for _ in range(wanted - len(staying))]
        known = [Candidate(one.name, one.ready, one.ready_s, load(one.name) if load else UNTOLD) for one in staying]
        drained = []
        for one in (self.replicas[going.name] for going in leaving(known, wanted)):
            one.draining_s = now_s
            if one.ready:
                drained.append(one)
            else:
                self.end(one, now_s)
        return made, drained

    def place(self, replica: Replica, now_s: float) -> bool:
        """A node for one that is pending; False where none has room."""
        if not self._cards.take(self._gpus):
            return False
        del self.pending[replica.name]
        replica.placed_s, replica.ready_s = now_s, now_s + sum(seconds for _, seconds in replica.phases)
        return True

    def end(self, replica: Replica, now_s: float) -> None:
        """It is gone."""
        replica.gone_s = now_s
        if replica.placed_s is None:
            del self.pending[replica.name]
        else:
            self._gone.append((replica.placed_s, now_s))
            self._cards.give(self._gpus)
        del self.replicas[replica.name]

    def may_end(self, replica: Replica, now_s: float) -> bool:
        """Whether one that drains has nothing left to do."""
        if replica.draining_s is None or replica.gone_s is not None or replica.visits:
            return False
        return now_s >= replica.draining_s + quiet_s() and replica.engine.idle

    def paid_s(self, until_s: float) -> float:
        """Replica-seconds until then."""
        living = ((one.placed_s, until_s) for one in self.replicas.values() if one.placed_s is not None)
        return sum(max(0.0, min(gone_s, until_s) - placed_s) for placed_s, gone_s in (*self._gone, *living))

    def counts(self) -> tuple[int, int, int, int]:
        """Desired, ready, starting, draining."""
        live = draining = 0
        for one in self.replicas.values():
            live += one.live
            draining += one.draining_s is not None
        return self.desired, live, len(self.replicas) - live - draining, draining

    def seen(self, now_s: float, epoch_s: float) -> TierSeen:
        """As the operator sees it."""
        live = sum(one.live for one in self.replicas.values())
        starting = [one for one in self.replicas.values() if not one.ready and one.draining_s is None]
        return TierSeen(
            self.desired, live, tuple(one.starting(now_s, epoch_s) for one in starting), self._about if live else None
        )

    def endpoints(self) -> list[Endpoint]:
        """Those that can be sent to."""
        routable = self.role is not Role.PREFILL
        return [
            Endpoint(r.name, r.name, self.role, "1", True, routable=routable) for r in self.replicas.values() if r.live
        ]

    def _make(self, now_s: float) -> Replica:
        self._made += 1
        phases = self._plant.start.draw(self._random)
        engine = self._plant.engine(self.role, self._random)
        name = f"{self.role}-{self._made}"
        made = self.replicas[name] = self.pending[name] = Replica(name, self.role, engine, phases, now_s)
        return made
