"""Log of the tiers in a run: their counts and decisions, recorded at each change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from plimsoll.core.autoscaling.scaling_decision import TierDecision
from plimsoll.core.types import Role
from plimsoll.sim.fleet import FleetTier


@dataclass
class RunLog:
    """Log of a run. replicas: a row per change of a tier's counts: time, tier, desired, ready, starting, draining.
    changes: time, tier, replicas before, and the decision.
    """

    replicas: list[tuple[float, Role, int, int, int, int]] = field(default_factory=list)
    changes: list[tuple[float, Role, int, TierDecision | int]] = field(default_factory=list)
    _last_counts: dict[Role, tuple[int, int, int, int]] = field(default_factory=dict)

    def record(self, tiers: Mapping[Role, FleetTier], now_s: float) -> None:
        """Record the changes of the tiers."""
        for role, tier in tiers.items():
            counts = tier.counts()
            if self._last_counts.get(role) != counts:
                self._last_counts[role] = counts
                self.replicas.append((now_s, role, *counts))
