"""How many replicas each tier should have.

One pure function from what is known to a decision that explains itself. The status, the Event and the log line are
renderings of the decision's steps; nothing is decided anywhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TierPolicy:
    """The user's bounds on one tier, in replicas."""

    min_replicas: int
    max_replicas: int


@dataclass(frozen=True)
class Step:
    """One consideration on the way: its name, the replicas after it, and why in words."""

    name: str
    replicas: int
    why: str


@dataclass(frozen=True)
class TierDecision:
    """The replicas that a tier should have, and the steps that led there."""

    replicas: int
    steps: tuple[Step, ...]

    @property
    def why(self) -> str:
        return "; ".join(step.why for step in self.steps)


def decide(tiers: Mapping[str, TierPolicy]) -> dict[str, TierDecision]:
    """Replicas for each tier, independent of one another: the least that the user allows."""
    return {name: _minimum(policy) for name, policy in tiers.items()}


def _minimum(policy: TierPolicy) -> TierDecision:
    step = Step("limits", policy.min_replicas, f"minReplicas is {policy.min_replicas}")
    return TierDecision(policy.min_replicas, (step,))
