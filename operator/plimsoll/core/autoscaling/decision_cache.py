"""Memoised per-service results. They are safe to drop at any time.

Most inputs of a tick are those of the last tick, so results are stored with their inputs and reused while these are the
same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from plimsoll.core.autoscaling.tier_state import TierState
from plimsoll.core.demand.demand_state import DemandState
from plimsoll.core.demand.growth_stats import GrowthStats
from plimsoll.core.demand.standby_value import GrowthDistribution, growth_distribution
from plimsoll.core.ports import EngineInfo


@dataclass(slots=True)
class CachedTier:
    """Cached results of one tier."""

    about: EngineInfo | None = None
    basis: tuple[tuple[object, ...], tuple[object, ...]] = ((), ())
    _growth: tuple[GrowthStats, GrowthDistribution] | None = None

    def growth_distribution(self, state: DemandState, horizon_s: float) -> GrowthDistribution:
        """`standby_value.growth_distribution`; it changes when a minute closes or with the horizon."""
        if self._growth is None or self._growth[0] is not state.closed_growth or self._growth[1].horizon_s != horizon_s:
            self._growth = state.closed_growth, growth_distribution(state, horizon_s)
        return self._growth[1]


@dataclass(slots=True)
class DecisionCache:
    """Cached results of one service."""

    tiers: dict[str, CachedTier] = field(default_factory=dict)

    def of(self, tier: str) -> CachedTier:
        """Return the cache of a tier."""
        found = self.tiers.get(tier)
        if found is None:
            found = self.tiers[tier] = CachedTier()
        return found

    def is_unprocessed(self, tier: str, about: EngineInfo) -> bool:
        """Whether the engine info differs from the one that was processed last."""
        return self.of(tier).about is not about

    def mark_processed(self, tier: str, about: EngineInfo) -> None:
        """Record that the engine info has been processed."""
        self.of(tier).about = about

    def has_new_input(
        self, tier: str, tiers: Sequence[TierState], same: tuple[object, ...], equal: tuple[object, ...]
    ) -> bool:
        """Whether any input of a tier's SLO capacity has changed since the last call.

        same: inputs compared by identity, in addition to speeds and limits of all tiers. equal: inputs compared by
        value.
        """
        kept = self.of(tier)
        same += tuple(
            part for one in tiers for part in (one.engines.posterior, one.engines.last_window, one.engines.limits)
        )
        before, kept.basis = kept.basis, (same, equal)
        if before[1] != equal or len(before[0]) != len(same):
            return True
        return any(old is not new for old, new in zip(before[0], same, strict=True))
