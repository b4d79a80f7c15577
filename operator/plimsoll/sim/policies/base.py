"""What sizes the tiers of a simulated fleet: the operator's own core, or another policy beside it.

Problem: policies are compared fairly only where each sees what it would see in a cluster, and no more.

Idea: a policy is told of every arrival and asked at every tick. Peers' autoscalers read what engines and gateways
export, at the period at which they would; yardsticks may know the plant and each request's length once it has been
written, and the clairvoyant one the future.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from plimsoll.core.picking.endpoint import Role
from plimsoll.core.ports import EngineReading, ServiceReading
from plimsoll.core.slo import Slo
from plimsoll.sim.iteration import Iteration
from plimsoll.sim.plant import Plant
from plimsoll.sim.visit import Asked

Bounds = Mapping[Role, tuple[int, int]]
T = TypeVar("T")


class Engines(Mapping[Role, tuple[T, ...]], Generic[T]):
    """What each tier's ready engines tell, read when the tier is looked up."""

    def __init__(self, roles: Collection[Role], read: Callable[[Role], tuple[T, ...]]) -> None:
        self._roles, self._read = roles, read

    def __getitem__(self, role: Role) -> tuple[T, ...]:
        if role not in self._roles:
            raise KeyError(role)
        return self._read(role)

    def __iter__(self) -> Iterator[Role]:
        return iter(self._roles)

    def __len__(self) -> int:
        return len(self._roles)


@dataclass(frozen=True, slots=True)
class Look:
    """What any policy may see at a tick.

    decided: what the operator's core wants, None where it does not run. engines: each ready engine's own metrics, read
    at this moment and only when a tier is looked up: whoever looks seldom has old figures, as a scraper has. gateways:
    what each counted. ready, starting: replicas of each tier that take requests, and that will; ordered is the wanted
    count. iterations: the newest step of each ready engine, which an instrumented scheduler alone tells.
    """

    now_s: float
    ordered: Mapping[Role, int]
    decided: Mapping[Role, int] | None = None
    engines: Mapping[Role, tuple[EngineReading, ...]] = field(default_factory=dict)
    gateways: tuple[ServiceReading, ...] = ()
    ready: Mapping[Role, int] = field(default_factory=dict)
    starting: Mapping[Role, int] = field(default_factory=dict)
    iterations: Mapping[Role, tuple[Iteration, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scene:
    """What a policy is made for. gpus: of a replica. asked: the whole trace, for those that know the future alone.
    gateways: that share a cap on what is in flight."""

    bounds: Bounds
    plant: Plant
    slo: Slo | None = None
    gpus: Mapping[Role, int] = field(default_factory=dict)
    asked: Sequence[Asked] | None = None
    gateways: int = 1


class Policy(Protocol):
    """operator: whether the operator's core runs, and so whether gateways let in by its model. initial: replicas that
    are ready when a run begins, None where the user says so."""

    operator: bool
    initial: Mapping[Role, int] | None

    def arrived(self, asked: Asked, now_s: float) -> None: ...

    def wanted(self, look: Look) -> Mapping[Role, int]:
        """Replicas by tier; a tier that is missing stays as it is."""
        ...


class Plimsoll:
    """The operator's own decisions."""

    operator = True
    initial: Mapping[Role, int] | None = None

    def arrived(self, asked: Asked, now_s: float) -> None:
        """Nothing: the operator hears of it from the gateways."""

    def wanted(self, look: Look) -> Mapping[Role, int]:
        return look.decided or {}


class Static:
    """Always the same, beyond the manifest's bounds too: it is a yardstick, and they bind who scales."""

    def __init__(self, replicas: Mapping[Role, int], gated: bool) -> None:
        self.operator = gated
        self.initial: Mapping[Role, int] | None = replicas

    def arrived(self, asked: Asked, now_s: float) -> None:
        """Of no interest."""

    def wanted(self, look: Look) -> Mapping[Role, int]:
        return self.initial or {}
