"""The replicas of one tier, as a Deployment makes and ends them: ordered, starting, ready, draining, gone.

A replica costs from its order to its end. Where fewer are wanted those go first that are not ready yet, then the ones
that became ready last; who is ready finishes what it has. One that dies is made anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from plimsoll.core.autoscaler import TierSeen
from plimsoll.core.lifecycle import Starting
from plimsoll.core.picking.endpoint import Endpoint, Role
from plimsoll.sim.engine import Engine
from plimsoll.sim.plant import Plant, quiet_s
from plimsoll.sim.startup import Phases
from plimsoll.sim.visit import Visit


@dataclass(eq=False, slots=True)
class Replica:
    """One engine pod. Times in seconds after the run's start. visits: requests that it works on, by their id."""

    name: str
    role: Role
    engine: Engine
    phases: Phases
    ordered_s: float
    ready_s: float
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
        began_s = self.ordered_s
        for name, seconds in self.phases:
            if now_s < began_s + seconds:
                return Starting(self.name, epoch_s + self.ordered_s, name, epoch_s + began_s)
            began_s += seconds
        return Starting(self.name, epoch_s + self.ordered_s, self.phases[-1][0], epoch_s + began_s)


class Tier:
    """All replicas of one role."""

    def __init__(self, role: Role, plant: Plant, random: Random) -> None:
        self.role = role
        self.desired = 0
        self.replicas: dict[str, Replica] = {}
        self._plant, self._random = plant, random
        self._made = 0
        self._paid_s = 0.0
        self._about = plant.about(role)

    def begin(self, replicas: int) -> list[Replica]:
        """Replicas that are ready when the run begins."""
        self.desired = replicas
        made = [self._make(0.0) for _ in range(replicas)]
        for one in made:
            one.ready_s, one.ready = 0.0, True
        return made

    def set(self, wanted: int, now_s: float) -> tuple[list[Replica], list[Replica]]:
        """Orders replicas, or gives some back: those that are new, and those that were ready and drain now."""
        self.desired = wanted
        staying = [one for one in self.replicas.values() if one.draining_s is None]
        made = [self._make(now_s) for _ in range(wanted - len(staying))]
        leaving = sorted(staying, key=lambda one: (one.ready, -one.ready_s, one.name))[: max(0, len(staying) - wanted)]
        drained = []
        for one in leaving:
            one.draining_s = now_s
            if one.ready:
                drained.append(one)
            else:
                self.end(one, now_s)
        return made, drained

    def end(self, replica: Replica, now_s: float) -> None:
        """It is gone."""
        replica.gone_s = now_s
        self._paid_s += now_s - replica.ordered_s
        del self.replicas[replica.name]

    def may_end(self, replica: Replica, now_s: float) -> bool:
        """Whether one that drains has nothing left to do."""
        if replica.draining_s is None or replica.gone_s is not None or replica.visits:
            return False
        return now_s >= replica.draining_s + quiet_s() and replica.engine.idle

    def paid_s(self, until_s: float) -> float:
        """Replica-seconds until then."""
        return self._paid_s + sum(max(0.0, until_s - one.ordered_s) for one in self.replicas.values())

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
        made = Replica(name, self.role, engine, phases, now_s, now_s + sum(seconds for _, seconds in phases))
        self.replicas[name] = made
        return made
