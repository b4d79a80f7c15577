"""When a service is decided next: at once if anything calls for it, else every few seconds.

Problem: a decision takes about half a millisecond, and nearly all of them repeat the last one. 1,000 services that are
decided every second take half a core.

Idea: all services are sampled at each tick, which is cheap. A service is due for a decision when

- its demand exceeds what the replicas of its last sizing carry,
- a minute of its demand has closed, or its level has become certain: standby replicas are then chosen again,
- its spec, its SLO capacity, or its ordered or ready replicas have changed,
- requests wait (without a gateway at the engines), retries are reserved, or more requests are rejected than before,
- requests arrive and a tier has no replica,
- the last decision is not settled: with the same load, the next tick could decide otherwise,
- or DECISION_INTERVAL_S have passed. A hash of the service's key spreads these decisions over the interval.

Of a fleet with more than LARGE_FLEET busy services, half are sampled at each tick (`has_turn`), and at once those that
have queued requests or a new spec.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Hashable, Mapping
from typing import Final, NamedTuple

from plimsoll.core.autoscaling.decision_state import TierDecisionState
from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot, TierSnapshot
from plimsoll.core.autoscaling.observations import SizingResult, TierDemand
from plimsoll.core.autoscaling.scaling_decision import ScalingDecision, ScalingLimit, TierDecision
from plimsoll.core.autoscaling.sizing_batch import TierCapacity
from plimsoll.core.autoscaling.sizing_requests import has_retry_backlog
from plimsoll.core.autoscaling.standby_sizing import is_level_certain
from plimsoll.core.autoscaling.tier_state import TierState
from plimsoll.core.demand import level_model
from plimsoll.core.demand.demand_state import DemandState
from plimsoll.core.demand.growth_stats import GrowthStats
from plimsoll.core.types import Unavailable

DECISION_INTERVAL_S: Final = 15.0  # longest time between two decisions of a service
LARGE_FLEET: Final = 250  # busy services above which each is sampled at every second tick
_TEMPORARY_LIMITS: Final = {ScalingLimit.RATE, ScalingLimit.UNSCHEDULABLE}

Counts = dict[str, tuple[int, int, str | None]]


class CarriedWork(NamedTuple):
    """What the replicas of a sizing carry, and how its forecast follows the level.

    work: GPU-seconds per second. horizon_s: of the forecast, seconds. per_level: forecast over the level with its
    trend. growth: observed growth, by which standby replicas are chosen; is_certain: whether the level was certain
    enough to choose any.
    """

    work: float
    horizon_s: float
    per_level: float
    growth: GrowthStats
    is_certain: bool

    def is_outdated(self, state: DemandState) -> bool:
        """Whether the load has grown beyond the carried work, or standby replicas would be chosen again."""
        estimate = state.estimate
        if (
            state.closed_growth is not self.growth
            or is_level_certain(estimate.level, estimate.error) != self.is_certain
        ):
            return True
        return self.per_level * _level_with_trend(estimate, self.horizon_s) > self.work


class DecisionBasis(NamedTuple):
    """What a decision was made from. at_s: its time; due_s: time of the next one if nothing calls for it before.

    counts: ordered and ready replicas of each tier, and who else ordered them. carried: of the sized tiers.
    rejected_share: of the last minute, 0.0 if unknown. has_retry_backlog: retries were reserved, or
    requests queued at engines without a gateway.
    """

    at_s: float
    due_s: float
    spec: ScalingSpec
    counts: Counts
    capacities: tuple[TierCapacity | Unavailable, ...]
    carried: Mapping[str, CarriedWork]
    rejected_share: float
    has_retry_backlog: bool

    def is_due(
        self,
        tiers: Mapping[str, TierState],
        snapshot: ServiceSnapshot,
        spec: ScalingSpec,
        is_idle: bool | Unavailable,
        now_s: float,
    ) -> bool:
        """Whether the service must be decided at now_s, seconds since the epoch. is_idle: as in `ServiceActivity`."""
        if not self.at_s <= now_s < self.due_s:  # or the clock was set back
            return True
        metrics = snapshot.metrics
        if spec != self.spec or snapshot_counts(snapshot.tiers) != self.counts:
            return True
        if any([tier.starting for tier in snapshot.tiers.values()]):
            return True
        if is_idle is False and any([tier.replicas == 0 for tier in snapshot.tiers.values()]):
            return True
        if _is_positive(metrics.queued) or has_retry_backlog(tiers, snapshot):
            return True
        if known_share(metrics.rejected_share) > self.rejected_share:
            return True
        if any([tier.capacity is not old for tier, old in zip(tiers.values(), self.capacities, strict=True)]):
            return True
        return any([carried.is_outdated(tiers[name].forecast_state) for name, carried in self.carried.items()])


def has_turn(key: str, tick: int, busy_services: int) -> bool:
    """Whether a busy service is sampled at this tick. key: of the service; tick: its number."""
    return busy_services <= LARGE_FLEET or (zlib.crc32(key.encode()) + tick) % 2 == 0


def snapshot_counts(tiers: Mapping[str, TierSnapshot]) -> Counts:
    """Return the ordered and ready replicas of each tier, and who else ordered them."""
    return {name: (tier.replicas, tier.ready, tier.replicas_set_by) for name, tier in tiers.items()}


def carried_work(state: DemandState, demand: TierDemand, sizing: SizingResult) -> CarriedWork:
    """Return what the replicas of a sizing carry: their SLO capacity, and at least the forecast that it is for."""
    forecast, capacity = demand.forecast, sizing.replica_work * (1.0 - sizing.headroom) / sizing.capacity_correction
    estimate = state.estimate
    level = _level_with_trend(estimate, forecast.horizon_s)
    return CarriedWork(
        max(sizing.replicas * capacity, forecast.work),
        forecast.horizon_s,
        forecast.work / level if level > 0.0 else 1.0,
        state.closed_growth,
        is_level_certain(estimate.level, estimate.error),
    )


def due_s(decision: ScalingDecision, tiers: Mapping[str, TierSnapshot], key: Hashable, now_s: float) -> float:
    """Return the time of the next decision if nothing calls for it before: now_s if this one is not settled.

    key: of the service; equal keys have the same phase in every process.
    """
    is_settled = all(
        _is_settled(tier, decision.state.tiers.get(name, TierDecisionState())) for name, tier in decision.tiers.items()
    )
    if not is_settled or any(tier.ready != tier.replicas or tier.starting for tier in tiers.values()):
        return now_s
    phase_s = DECISION_INTERVAL_S * zlib.crc32(repr(key).encode()) / 2**32
    intervals = math.floor((now_s - phase_s) / DECISION_INTERVAL_S) + 1
    return min(phase_s + intervals * DECISION_INTERVAL_S, now_s + DECISION_INTERVAL_S)


def known_share(share: float | Unavailable) -> float:
    """Return the share, 0.0 if it is unknown."""
    return 0.0 if isinstance(share, Unavailable) else share


def _is_settled(decision: TierDecision, state: TierDecisionState) -> bool:
    """Whether the demand is known, the count stays, and no limit or stabilization window is about to end."""
    awaits_scale_down = (
        state.downscale_candidates
        and decision.recommended == decision.previous_replicas
        and ScalingLimit.MIN not in decision.limits
    )
    return (
        not decision.is_held
        and not awaits_scale_down
        and decision.replicas == decision.previous_replicas
        and _TEMPORARY_LIMITS.isdisjoint(decision.limits)
    )


def _is_positive(amount: float | Unavailable) -> bool:
    return not isinstance(amount, Unavailable) and amount > 0.0


def _level_with_trend(estimate: level_model.LevelEstimate, horizon_s: float) -> float:
    return estimate.level + level_model.damped_rise(estimate.slope_per_s, horizon_s)
