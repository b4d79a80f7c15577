"""Whether a decision would leave a service as it is: what `decide` would conclude, in figures alone and no words.

Problem: of a thousand services hardly one moves at a tick, and a decision that explains itself is dear to make.

Idea: the conditions under which all eight steps come to the present count, over arrays: a row for each service, a
column for each of its tiers, and a step of arithmetic for all of them in the order in which `decide` takes it. Whatever
is not plain (a start, a rate limit, a schedule, a count that goes down) is no quiet service, and gets its decision.
What goes on is the integrator of the tail, the trial of smaller counts that have not been enough for long enough, and
what is learned of needs that return: the state that a quiet tick leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from plimsoll.core.autoscaling.decision_state import NO_BACKOFF, DownscaleRegret, TierDecisionState, TimedReplicas
from plimsoll.core.autoscaling.downscale_regret import record_trials
from plimsoll.core.autoscaling.recommend import (
    DEMAND_STALE_S,
    MAX_LEVEL_ERROR,
    STANDBY_RETENTION_MARGIN,
    updated_tail_scale,
)
from plimsoll.core.autoscaling.scaling_policy import ScalingPolicy, TierPolicy
from plimsoll.core.autoscaling.sizing_batch import TierCapacity, cached_replicas, scale_down_margin
from plimsoll.core.autoscaling.stabilize import (
    downscale_candidates,
    exceedance,
    stabilization_window_s,
    sufficient_for_s,
)
from plimsoll.core.autoscaling.standby_sizing import StandbyInputs, joint_standby_replicas_batch
from plimsoll.core.demand.batched_forecast import BatchedForecast, GrowthCache, forecast_all
from plimsoll.core.demand.batched_growth import GrowthTable
from plimsoll.core.demand.batched_observe import Flags, Floats
from plimsoll.core.demand.demand_state import DemandState
from plimsoll.core.demand.standby_value import GrowthDistribution, standby_replicas
from plimsoll.core.demand.uncertainty import tier_miss_costs
from plimsoll.core.types import Unavailable


class UnchangedTier(NamedTuple):
    """One tier of a service that may be quiet.

    replicas: ordered, and all of them ready. demand: its last sample being in it. horizon_s: to look ahead. chances:
    of this tier for ever. tpot_s: the measured percentile.
    """

    name: str
    policy: TierPolicy
    line: TierCapacity
    state: TierDecisionState
    replicas: int
    demand: DemandState
    horizon_s: float
    chances: GrowthCache
    tpot_s: float | Unavailable


class UnchangedQuery(NamedTuple):
    """One service, with a policy that `allows` it. promised: share of its requests. passed_s: since its last tick."""

    tiers: Sequence[UnchangedTier]
    miss_cost: float
    headroom: float
    quantile: float
    promised: float
    passed_s: float


def supports_fast_path(policy: ScalingPolicy) -> bool:
    """Whether a service with this policy can be quiet at all."""
    least, most = policy.prefill_per_decode
    plain = all(
        tier.scale_up_limit is None and tier.scale_down_limit is None and not tier.schedule
        for tier in policy.tiers.values()
    )
    return plain and least == 0.0 and math.isinf(most)


def unchanged_states(services: Sequence[UnchangedQuery], now_s: float) -> list[dict[str, TierDecisionState] | None]:
    """For each service all of whose tiers stay at their counts, the states of those tiers that the tick leaves in
    another state than before; None for one that needs its decision. All have equally many tiers."""
    if not services:
        return []
    fleet = _Fleet(services, now_s)
    up, release, stays = fleet.counts()
    _together(fleet, up, release)
    before, still = fleet.before, (release >= fleet.before) | (up == fleet.before)
    stays &= ((up <= before) & (fleet.least <= before) & (before <= fleet.most)).all(axis=1)
    returns = _returns(fleet, release, stays, now_s)
    marks: list[tuple[TimedReplicas, ...] | None] = [()] * len(fleet.tiers)
    level = fleet.seen.level.ravel().tolist()
    missed = (fleet.miss_cost[:, None] * fleet.replica_work).ravel().tolist()
    for place in np.flatnonzero(stays[:, None] & ~still).tolist():
        tier, count, odds = fleet.tiers[place], int(release.flat[place]), fleet.odds[place]
        marks[place] = _on_trial(tier, returns[place], count, level[place], odds, missed[place], now_s)
    found: list[dict[str, TierDecisionState] | None] = []
    of = len(services[0].tiers)
    for n, (asked, quiet) in enumerate(zip(services, stays.tolist(), strict=True)):
        after: dict[str, TierDecisionState] | None = {} if quiet else None
        for place, tier in enumerate(asked.tiers, n * of):
            lower = marks[place]
            if after is None or lower is None:
                after = None
                break
            left = _state_after(tier, level[place], lower, returns[place], asked.passed_s)
            if left is not tier.state:
                after[tier.name] = left
        found.append(after)
    return found


class _Fleet:
    """Services of equally many tiers in arrays, a row each; what is of the service has one column."""

    def __init__(self, services: Sequence[UnchangedQuery], now_s: float) -> None:
        self.shape = len(services), len(services[0].tiers)
        self.tiers = [tier for service in services for tier in service.tiers]
        self.odds = [tier.chances.distribution(tier.demand, tier.horizon_s) for tier in self.tiers]
        self.before = self._column(lambda tier: tier.replicas)
        self.least = self._column(lambda tier: tier.policy.min_replicas)
        self.most = self._column(lambda tier: tier.policy.max_replicas)
        self.warm = self._column(lambda tier: tier.policy.warm_replicas)
        self.gpus = self._column(lambda tier: tier.policy.gpus_per_replica)
        self.replica_work = self._column(lambda tier: tier.line.replica_work)
        self.miss_cost = np.array([service.miss_cost for service in services])
        self.headroom = np.array([[service.headroom] for service in services])
        self.seen = self._ahead(services, now_s)
        self.need = np.zeros(self.shape)

    def _column(self, of: Callable[[UnchangedTier], float]) -> Floats:
        return np.array([of(tier) for tier in self.tiers], dtype=np.float64).reshape(self.shape)

    def _ahead(self, services: Sequence[UnchangedQuery], now_s: float) -> BatchedForecast:
        tiers = self.tiers
        quantiles = [service.quantile for service in services for _ in service.tiers]
        takes = self._column(lambda tier: tier.line.request_gpu_s * max(tier.policy.gpus_per_replica, 1))
        seen = forecast_all(
            [tier.demand for tier in tiers],
            now_s,
            [tier.horizon_s for tier in tiers],
            quantiles,
            [tier.chances for tier in tiers],
            [service.promised for service in services for _ in service.tiers],
            tier_miss_costs(self.miss_cost, takes).ravel(),
        )
        return BatchedForecast(*[column.reshape(self.shape) for column in seen])

    def counts(self) -> tuple[Floats, Floats, Flags]:
        """The counts below which tiers grow, those above which they shrink, and the services of which none grows, and
        of which both are known; of the others the counts say nothing. Leaves the need without a reserve as `need`."""
        fewest, release, stays = self._needs()
        self.need = fewest
        most = np.maximum(self.most, fewest)
        table = GrowthTable(self.odds)
        sure: Flags = np.asarray((self.seen.level_error <= MAX_LEVEL_ERROR * self.seen.level).all(axis=1))
        if self.shape[1] == 1:
            up, release = self._alone(table, fewest, release, most, stays, sure)
        else:
            up, release = self._in_reserve(table, fewest, release, most, stays, sure)
        return up, release, stays & (up <= self.before).all(axis=1)

    def _needs(self) -> tuple[Floats, Floats, Flags]:
        """Fewest that carry the forecast, fewest that may be left, and where neither is unknown or more than there
        is; elsewhere both are 0."""
        seen, before = self.seen, self.before
        fewest = self._fewest(seen.work, np.isfinite(seen.work))
        known = (seen.age_s <= DEMAND_STALE_S) & (self.replica_work > 0.0) & (fewest + self.warm <= before)
        some = known & (before > fewest) & (seen.work > 0.0)
        margin = scale_down_margin(seen.work, seen.level_error, seen.memory_fill)
        release = np.where(some, self._fewest(seen.work * margin, some), fewest)
        stays: Flags = np.asarray((known & ~np.isnan(release)).all(axis=1))
        return np.where(stays[:, None], fewest, 0.0), np.where(stays[:, None], release, 0.0), stays

    def _fewest(self, work: Floats, some: Flags) -> Floats:
        """Replicas for so much work, as the lines know; NaN where they do not, and where it is not asked for."""
        return cached_replicas([tier.line for tier in self.tiers], work, self.headroom, some)

    def _in_reserve(
        self, table: GrowthTable, fewest: Floats, release: Floats, most: Floats, stays: Flags, sure: Flags
    ) -> tuple[Floats, Floats]:
        """With what is worth having, and worth keeping, in reserve."""

        def worth(of: Flags, work: Floats, replicas: Floats, miss_cost: Floats) -> Floats:
            asked = np.where(of[:, None], work, 0.0)
            return joint_standby_replicas_batch(
                StandbyInputs(table, asked, self.replica_work, replicas, most, self.gpus), miss_cost
            )

        spare = worth(stays & sure, self.seen.baseline, fewest, self.miss_cost)
        enough = (release + self.warm >= self.before).all(axis=1)  # none goes without what is kept either
        kept = worth(stays & ~enough, self.seen.baseline, release, self.miss_cost * STANDBY_RETENTION_MARGIN)
        up = fewest + np.maximum(self.warm, spare)
        return up, np.maximum(up, release + np.maximum(self.warm, kept))

    def _alone(
        self, table: GrowthTable, fewest: Floats, release: Floats, most: Floats, stays: Flags, sure: Flags
    ) -> tuple[Floats, Floats]:
        """The same of services of one tier. Where its count lies between the two, they are not worked out further."""
        seen, before, every = self.seen, self.before, np.arange(len(self.tiers))

        def worth(work: Floats, replicas: Floats, miss_cost: Floats) -> Flags:
            found = table.standby_pays_off(every, work[:, 0], self.replica_work[:, 0], replicas[:, 0], miss_cost)
            return found[:, None]

        grows = sure[:, None] & (before < most) & worth(seen.baseline, before, self.miss_cost)
        standing = (fewest + self.warm == before) | (release + self.warm >= before)
        keeping = self.miss_cost * STANDBY_RETENTION_MARGIN
        standing |= (before <= most) & worth(seen.baseline, before - 1.0, keeping)
        up = np.where(grows, before + 1.0, fewest)
        down = np.where(standing, before, release)
        for n in np.flatnonzero(stays & ~(grows | standing)[:, 0]).tolist():
            tier, replica_work, cost = self.tiers[n], self.tiers[n].line.replica_work, float(self.miss_cost[n])
            need, left, top, warm = int(fewest[n, 0]), int(release[n, 0]), int(most[n, 0]), tier.policy.warm_replicas
            ordinary = float(seen.baseline[n, 0])
            bought = standby_replicas(self.odds[n], ordinary, replica_work, need, top, cost) if sure[n] else 0
            kept = standby_replicas(self.odds[n], ordinary, replica_work, left, top, cost * STANDBY_RETENTION_MARGIN)
            up[n] = need + max(warm, bought)
            down[n] = max(up[n, 0], left + max(warm, kept))
        return up, down


def _together(fleet: _Fleet, up: Floats, release: Floats) -> None:
    """No tier goes to zero while another one serves."""
    serves = (np.maximum(up, np.minimum(fleet.before, release)) > 0.0) | (fleet.least > 0.0)
    for place in range(fleet.shape[1]):
        raised = (up[:, place] == 0.0) & np.delete(serves, place, axis=1).any(axis=1)
        up[raised, place] = 1.0
        release[raised, place] = np.maximum(1.0, release[raised, place])
        serves[raised, place] = True


def _returns(fleet: _Fleet, release: Floats, stays: Flags, now_s: float) -> list[DownscaleRegret]:
    """What is known of each tier's returns after the tick; mostly what was known before."""
    known = [tier.state.downscale_regret for tier in fleet.tiers]
    served = np.array([one.served for one in known]).reshape(fleet.shape)
    idle = np.array([bool(one.idle) for one in known]).reshape(fleet.shape)
    line = fleet.replica_work * (1.0 - fleet.headroom)
    with np.errstate(all="ignore"):  # what is not known does not stay
        need = np.minimum(fleet.need, np.floor(fleet.seen.work / line + 0.5))
    reached = np.maximum(np.minimum(served, fleet.before), need)
    moves = idle | (reached != served) | (np.maximum(np.maximum(release, fleet.least), 1.0) < reached)
    for place in np.flatnonzero(stays[:, None] & moves).tolist():
        tier, reach, left = fleet.tiers[place], int(need.flat[place]), int(release.flat[place])
        before, least = tier.replicas, tier.policy.min_replicas
        known[place] = record_trials(known[place], before, before, reach, left, least, tier.horizon_s, now_s)
    return known


def _on_trial(
    tier: UnchangedTier,
    returns: DownscaleRegret,
    release: int,
    level: float,
    odds: GrowthDistribution,
    missed: float,
    now_s: float,
) -> tuple[TimedReplicas, ...] | None:
    """The marks that are left of a tier that has more than `release`, where its count stays all the same: for too
    short a time yet, or as the least that is allowed; else None."""
    before = tier.replicas
    if before == tier.policy.min_replicas:
        marks = tier.state.downscale_candidates
        same = marks and marks[-1].replicas == release and marks[0].replicas < before
        return marks if same else None
    if release == 0 or not level > 0.0:
        return None
    marks = downscale_candidates(tier.state.downscale_candidates, before, release, now_s)
    # A larger count has lasted longer and is held for less: where the largest must wait, so must all.
    leaps = exceedance(odds, (before - 1) * tier.line.replica_work / level)
    hold_s = stabilization_window_s(returns, odds.horizon_s, leaps, missed)
    return marks if sufficient_for_s(marks, before - 1, now_s) < hold_s else None


def _state_after(
    tier: UnchangedTier, level: float, lower: tuple[TimedReplicas, ...], returns: DownscaleRegret, passed_s: float
) -> TierDecisionState:
    """What a quiet tick leaves of a tier: its tail's scale has moved towards what is measured."""
    state = tier.state
    if lower != state.downscale_candidates or returns is not state.downscale_regret:
        state = state._replace(downscale_candidates=lower, downscale_regret=returns)
    measured = tier.tpot_s
    if isinstance(measured, Unavailable) or not 0.0 < measured < math.inf:
        return state
    law_s = tier.line.tpot_s(level, tier.replicas)
    if law_s is None:
        return state
    moved = updated_tail_scale(state.tpot_tail_scale, measured, law_s, passed_s)
    return state if moved == state.tpot_tail_scale else state._replace(tpot_tail_scale=moved)


def settled(state: TierDecisionState, replicas: int) -> bool:
    """Whether the last decision left nothing that is still to run out, and saw all of them ready."""
    return (
        state.replicas == state.ready == replicas and state.scheduling_backoff == NO_BACKOFF and not state.order_history
    )
