"""Interface of scaling policies for the simulated fleet: the operator's own core, or another policy in its place.

Problem: policies are compared fairly only if each sees what it would see in a cluster, and no more.

Idea: a policy receives every arrival, and is called at every tick. Peer autoscalers read what engines and gateways
export, at their own period. Baselines may know the plant, and each request's length once it is generated; the oracle
knows the future.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from plimsoll.core.ports import EngineReading, ServiceReading
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.sim.attempt import TraceRequest
from plimsoll.sim.engine.iteration import Iteration
from plimsoll.sim.plant import Plant

Bounds = Mapping[Role, tuple[int, int]]
T = TypeVar("T")


class EngineReadings(Mapping[Role, tuple[T, ...]], Generic[T]):
    """Readings of each tier's ready engines, scraped when the tier is looked up."""

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
class Observation:
    """What a policy may observe at a tick. desired: the ordered replicas of each tier.

    operator_desired: replicas that the operator's core recommends, None if it does not run. engine_readings: metrics of
    each ready engine, read only when a tier is looked up, so a policy that reads rarely sees old values, as a scraper
    does. gateway_readings: counters of each gateway. ready, starting: replicas of each tier. iterations: the last step
    of each ready engine, which only an instrumented scheduler reports.
    """

    now_s: float
    desired: Mapping[Role, int]
    operator_desired: Mapping[Role, int] | None = None
    engine_readings: Mapping[Role, tuple[EngineReading, ...]] = field(default_factory=dict)
    gateway_readings: tuple[ServiceReading, ...] = ()
    ready: Mapping[Role, int] = field(default_factory=dict)
    starting: Mapping[Role, int] = field(default_factory=dict)
    iterations: Mapping[Role, tuple[Iteration, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a policy is created for. gpus: of a replica. requests: the whole trace, only for policies that know the
    future. takes_requests: whether gateways send the requests to the engines, so that they can admit.
    """

    bounds: Bounds
    plant: Plant
    slo: Slo | None = None
    gpus: Mapping[Role, int] = field(default_factory=dict)
    requests: Sequence[TraceRequest] | None = None
    takes_requests: bool = True


class SimulatedPolicy(Protocol):
    """A policy in the simulator.

    runs_operator: whether the operator's core runs, so that gateways admit by its model. initial_replicas: replicas
    that are ready at the start, None if the user sets them.
    """

    runs_operator: bool
    initial_replicas: Mapping[Role, int] | None

    def on_arrival(self, request: TraceRequest, now_s: float) -> None: ...

    def desired_replicas(self, observation: Observation) -> Mapping[Role, int]:
        """Return replicas by tier; a missing tier keeps its count."""
        ...


class PlimsollPolicy:
    """The operator's own decisions."""

    runs_operator = True
    initial_replicas: Mapping[Role, int] | None = None

    def on_arrival(self, request: TraceRequest, now_s: float) -> None:
        """Do nothing: the operator observes arrivals through the gateways."""

    def desired_replicas(self, observation: Observation) -> Mapping[Role, int]:
        return observation.operator_desired or {}


class StaticPolicy:
    """Constant replicas, even outside the manifest's bounds, which apply only to autoscaling."""

    def __init__(self, replicas: Mapping[Role, int], runs_operator: bool) -> None:
        self.runs_operator = runs_operator
        self.initial_replicas: Mapping[Role, int] | None = replicas

    def on_arrival(self, request: TraceRequest, now_s: float) -> None:
        """Do nothing."""

    def desired_replicas(self, observation: Observation) -> Mapping[Role, int]:
        return self.initial_replicas or {}
