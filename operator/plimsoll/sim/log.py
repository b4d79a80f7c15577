"""What became of the tiers in a run: their counts and the decisions, each written down when it changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from plimsoll.core.picking.endpoint import Role
from plimsoll.core.scaling import TierDecision
from plimsoll.sim.fleet import Tier


@dataclass
class Log:
    """What a run leaves beside its requests. replicas: a row where a tier's counts change: time, tier, desired, ready,
    starting, draining. changes: time, tier, replicas before, and the decision."""

    replicas: list[tuple[float, Role, int, int, int, int]] = field(default_factory=list)
    changes: list[tuple[float, Role, int, TierDecision | int]] = field(default_factory=list)
    _last: dict[Role, tuple[int, int, int, int]] = field(default_factory=dict)

    def look(self, tiers: Mapping[Role, Tier], now_s: float) -> None:
        """Writes down what has changed of the tiers."""
        for role, tier in tiers.items():
            counts = tier.counts()
            if self._last.get(role) != counts:
                self._last[role] = counts
                self.replicas.append((now_s, role, *counts))
