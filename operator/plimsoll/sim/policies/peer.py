"""What peers' autoscalers have in common here: each tier is scaled alone, by its own engines, at the peer's own pace.

None of them can hold requests while a tier has no replica, as simulated here, so a tier keeps at least one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from plimsoll.core.picking.endpoint import Role
from plimsoll.sim.policies.base import Look
from plimsoll.sim.visit import Asked


class Scaler(Protocol):
    """Of one tier."""

    def wanted(self, look: Look) -> int | None:
        """Replicas at this tick; None: as it is."""
        ...


class Peer:
    """gated: whether the operator's model decides about admission while the peer decides about replicas."""

    initial: Mapping[Role, int] | None = None

    def __init__(self, scalers: Mapping[Role, Scaler], gated: bool) -> None:
        self.operator = gated
        self._scalers = scalers

    def arrived(self, asked: Asked, now_s: float) -> None:
        """Peers do not see requests, only what engines and gateways count."""

    def wanted(self, look: Look) -> Mapping[Role, int]:
        found = {role: scaler.wanted(look) for role, scaler in self._scalers.items()}
        return {role: count for role, count in found.items() if count is not None}


class Timer:
    """Something that is done at once and then every so often."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._next_s = 0.0

    def due(self, now_s: float) -> bool:
        if now_s < self._next_s:
            return False
        while self._next_s <= now_s:
            self._next_s += self._period_s
        return True


def kept(bounds: tuple[int, int]) -> tuple[int, int]:
    """A tier's bounds, of which the lower is at least 1."""
    least, most = bounds
    return max(1, least), max(1, most)


def scalers(
    bounds: Mapping[Role, tuple[int, int]], make: Callable[[Role, tuple[int, int]], Scaler]
) -> dict[Role, Scaler]:
    return {role: make(role, kept(limits)) for role, limits in bounds.items()}
