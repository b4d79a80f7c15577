"""Who sets the replica count of a tier again and again, while Plimsoll sets it too. Pure.

Problem: a HorizontalPodAutoscaler of a tier's Deployment, or a script, writes a count, and Plimsoll sets it back. Each
write looks like one change by hand, which is no fault, so the two undo each other for ever.

Idea: one write of another client is a change by hand. CONTESTED_WRITES of them within CONTEST_SECONDS are a contest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from plimsoll.controllers.replicas_owner import describe_owner
from plimsoll.core.autoscaling.inputs import TierSnapshot

CONTESTED_WRITES: Final = 3
CONTEST_SECONDS: Final = 600.0


@dataclass
class ReplicaContests:
    """Writes of other clients to the tiers of one service. Times are seconds since the epoch."""

    _last: dict[str, tuple[str, int]] = field(default_factory=dict)  # by tier: who else set the count, and the count
    _writers: dict[str, str] = field(default_factory=dict)  # by tier: the other client that wrote last
    _writes_s: dict[str, deque[float]] = field(default_factory=dict)  # by tier: times of the last writes of others

    def update(self, tiers: Mapping[str, TierSnapshot], now_s: float) -> str:
        """Who contests the count of which tiers, as a clause; "" if no client does."""
        found = []
        for name, tier in tiers.items():
            times = self._writes_s.setdefault(name, deque(maxlen=CONTESTED_WRITES))
            if tier.replicas_set_by is None:
                self._last.pop(name, None)
            elif self._last.get(name) != (tier.replicas_set_by, tier.replicas):
                self._last[name] = tier.replicas_set_by, tier.replicas
                self._writers[name] = tier.replicas_set_by
                times.append(now_s)
            if len(times) == CONTESTED_WRITES and now_s - times[0] <= CONTEST_SECONDS:
                found.append(f"{describe_owner(self._writers[name])} sets the replica count of {name}")
        return ", ".join(found)
