"""Memoised per-service results. They are safe to drop at any time.

Most inputs of a tick are those of the last tick, so results are stored with their inputs and reused while these are the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from plimsoll.core.autoscaling.scaling_policy import ScalingPolicy
from plimsoll.core.autoscaling.sizing_batch import TierCapacity
from plimsoll.core.autoscaling.tier_state import TierState
from plimsoll.core.autoscaling.unchanged import supports_fast_path
from plimsoll.core.demand.batched_forecast import GrowthCache
from plimsoll.core.ports import EngineInfo
from plimsoll.core.types import Unavailable


@dataclass(slots=True)
class CachedTier:
    """Cached results of one tier. line: its SLO capacity at the last decision."""

    line: TierCapacity | Unavailable | None = None
    about: EngineInfo | None = None
    basis: tuple[tuple[object, ...], tuple[object, ...]] = ((), ())
    chances: GrowthCache = field(default_factory=GrowthCache)


@dataclass(slots=True)
class DecisionCache:
    """Cached results of one service. policy: that of the last decision."""

    tiers: dict[str, CachedTier] = field(default_factory=dict)
    policy: ScalingPolicy | None = None
    _allowed: bool = False
    _rests_since: object = None
    _rests: Mapping[str, int] | None = None

    def of(self, tier: str) -> CachedTier:
        """Return the cache of a tier."""
        found = self.tiers.get(tier)
        if found is None:
            found = self.tiers[tier] = CachedTier()
        return found

    def news(self, tier: str, about: EngineInfo) -> bool:
        """Whether the engine info differs from the one that was processed last."""
        return self.of(tier).about is not about

    def met(self, tier: str, about: EngineInfo) -> None:
        """Record that the engine info has been processed."""
        self.of(tier).about = about

    def moved(self, tier: str, tiers: Sequence[TierState], same: tuple[object, ...], equal: tuple[object, ...]) -> bool:
        """Whether any input of a tier's SLO capacity has changed since the last call.

        same: inputs compared by identity, in addition to speeds and limits of all tiers. equal: inputs compared by
        value.
        """
        kept = self.of(tier)
        same += tuple(part for one in tiers for part in (one.posterior, one.last_window, one.limits))
        before, kept.basis = kept.basis, (same, equal)
        if before[1] != equal or len(before[0]) != len(same):
            return True
        return any(old is not new for old, new in zip(before[0], same, strict=True))

    def decided(self, policy: ScalingPolicy, capacities: Mapping[str, TierCapacity | Unavailable]) -> None:
        """Record the inputs of a decision."""
        if policy is not self.policy:
            self.policy, self._allowed = policy, supports_fast_path(policy)
        for name, line in capacities.items():
            self.of(name).line = line

    def rests(self, since: object, find: Callable[[], Mapping[str, int] | None]) -> Mapping[str, int] | None:
        """Return the settled counts from `find`, called once per `since` object."""
        if since is not self._rests_since:
            self._rests_since, self._rests = since, find()
        return self._rests

    def is_quiet_under(self, policy: ScalingPolicy) -> bool:
        """Whether the policy is that of the last decision and supports the unchanged fast path."""
        if policy is not self.policy:
            if policy != self.policy:
                return False
            self.policy = policy
        return self._allowed
