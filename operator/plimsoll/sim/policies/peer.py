"""Common parts of peer autoscalers: each tier is scaled alone, by its own engines, at the peer's own interval.

As simulated here, no peer can queue requests while a tier has no replica, so a tier keeps at least one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from plimsoll.core.types import Role
from plimsoll.sim.attempt import TraceRequest
from plimsoll.sim.policies.base import Observation


class TierScaler(Protocol):
    """Scaler of one tier."""

    def desired_replicas(self, observation: Observation) -> int | None:
        """Return the replicas at this tick; None: unchanged."""
        ...


class PeerPolicy:
    """Replica counts by a peer's autoscaler. runs_operator: whether the operator's model decides about admission."""

    initial_replicas: Mapping[Role, int] | None = None

    def __init__(self, scalers: Mapping[Role, TierScaler], runs_operator: bool) -> None:
        self.runs_operator = runs_operator
        self._scalers = scalers

    def on_arrival(self, request: TraceRequest, now_s: float) -> None:
        """Peers do not see requests, only what engines and gateways count."""

    def desired_replicas(self, observation: Observation) -> Mapping[Role, int]:
        counts = {role: scaler.desired_replicas(observation) for role, scaler in self._scalers.items()}
        return {role: count for role, count in counts.items() if count is not None}


class PeriodicTimer:
    """A timer that is due at once, and then at a fixed interval."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._next_s = 0.0

    def is_due(self, now_s: float) -> bool:
        if now_s < self._next_s:
            return False
        while self._next_s <= now_s:
            self._next_s += self._period_s
        return True


def at_least_one(bounds: tuple[int, int]) -> tuple[int, int]:
    """A tier's bounds, with a lower bound of at least 1."""
    minimum, maximum = bounds
    return max(1, minimum), max(1, maximum)


def scalers(
    bounds: Mapping[Role, tuple[int, int]], make: Callable[[Role, tuple[int, int]], TierScaler]
) -> dict[Role, TierScaler]:
    return {role: make(role, at_least_one(limits)) for role, limits in bounds.items()}
