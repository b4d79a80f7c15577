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

from plimsoll.core.forecast import Odds, State, Unknown, spare_replicas
from plimsoll.core.forecast.doubt import miss_costs
from plimsoll.core.forecast.fleet import Flags, Floats
from plimsoll.core.forecast.outlook import Chances, Outlook, outlook
from plimsoll.core.forecast.table import Table
from plimsoll.core.scaling.direction import chance, held_s, lasted_s, lower_marks
from plimsoll.core.scaling.policy import Policy, TierPolicy
from plimsoll.core.scaling.reserve import Stocks, reserves_all
from plimsoll.core.scaling.returns import tried
from plimsoll.core.scaling.sized import Line, margin_of, remembered
from plimsoll.core.scaling.state import NO_BACKOFF, Mark, Returns, TierState
from plimsoll.core.scaling.wanted import RESERVE_MARGIN, STALE_S, UNSURE, scaled


class Quiet(NamedTuple):
    """One tier of a service that may be quiet.

    replicas: ordered, and all of them ready. demand: its last sample being in it. horizon_s: to look ahead. chances:
    of this tier for ever. tpot_s: the measured percentile.
    """

    name: str
    policy: TierPolicy
    line: Line
    state: TierState
    replicas: int
    demand: State
    horizon_s: float
    chances: Chances
    tpot_s: float | Unknown


class Asked(NamedTuple):
    """One service, with a policy that `allows` it. promised: share of its requests. passed_s: since its last tick."""

    tiers: Sequence[Quiet]
    miss_cost: float
    headroom: float
    quantile: float
    promised: float
    passed_s: float


def allows(policy: Policy) -> bool:
    """Whether a service with this policy can be quiet at all."""
    least, most = policy.prefill_per_decode
    plain = all(tier.up is None and tier.down is None and not tier.schedule for tier in policy.tiers.values())
    return plain and least == 0.0 and math.isinf(most)


def stay(services: Sequence[Asked], now_s: float) -> list[dict[str, TierState] | None]:
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
    marks: list[tuple[Mark, ...] | None] = [()] * len(fleet.tiers)
    level = fleet.seen.level.ravel().tolist()
    missed = (fleet.miss_cost[:, None] * fleet.replica_work).ravel().tolist()
    for place in np.flatnonzero(stays[:, None] & ~still).tolist():
        tier, count, odds = fleet.tiers[place], int(release.flat[place]), fleet.odds[place]
        marks[place] = _on_trial(tier, returns[place], count, level[place], odds, missed[place], now_s)
    found: list[dict[str, TierState] | None] = []
    of = len(services[0].tiers)
    for n, (asked, quiet) in enumerate(zip(services, stays.tolist(), strict=True)):
        after: dict[str, TierState] | None = {} if quiet else None
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

    def __init__(self, services: Sequence[Asked], now_s: float) -> None:
        self.shape = len(services), len(services[0].tiers)
        self.tiers = [tier for service in services for tier in service.tiers]
        self.odds = [tier.chances.at(tier.demand, tier.horizon_s) for tier in self.tiers]
        self.before = self._column(lambda tier: tier.replicas)
        self.least = self._column(lambda tier: tier.policy.min_replicas)
        self.most = self._column(lambda tier: tier.policy.max_replicas)
        self.warm = self._column(lambda tier: tier.policy.warm_replicas)
        self.gpus = self._column(lambda tier: tier.policy.gpus)
        self.replica_work = self._column(lambda tier: tier.line.replica_work)
        self.miss_cost = np.array([service.miss_cost for service in services])
        self.headroom = np.array([[service.headroom] for service in services])
        self.seen = self._ahead(services, now_s)
        self.need = np.zeros(self.shape)

    def _column(self, of: Callable[[Quiet], float]) -> Floats:
        return np.array([of(tier) for tier in self.tiers], dtype=np.float64).reshape(self.shape)

    def _ahead(self, services: Sequence[Asked], now_s: float) -> Outlook:
        tiers = self.tiers
        quantiles = [service.quantile for service in services for _ in service.tiers]
        takes = self._column(lambda tier: tier.line.request_gpu_s * max(tier.policy.gpus, 1))
        seen = outlook(
            [tier.demand for tier in tiers],
            now_s,
            [tier.horizon_s for tier in tiers],
            quantiles,
            [tier.chances for tier in tiers],
            [service.promised for service in services for _ in service.tiers],
            miss_costs(self.miss_cost, takes).ravel(),
        )
        return Outlook(*[column.reshape(self.shape) for column in seen])

    def counts(self) -> tuple[Floats, Floats, Flags]:
        """The counts below which tiers grow, those above which they shrink, and the services of which none grows, and
        of which both are known; of the others the counts say nothing. Leaves the need without a reserve as `need`."""
        fewest, release, stays = self._needs()
        self.need = fewest
        most = np.maximum(self.most, fewest)
        table = Table(self.odds)
        sure: Flags = np.asarray((self.seen.error <= UNSURE * self.seen.level).all(axis=1))
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
        known = (seen.age_s <= STALE_S) & (self.replica_work > 0.0) & (fewest + self.warm <= before)
        some = known & (before > fewest) & (seen.work > 0.0)
        margin = margin_of(seen.work, seen.error, seen.memory)
        release = np.where(some, self._fewest(seen.work * margin, some), fewest)
        stays: Flags = np.asarray((known & ~np.isnan(release)).all(axis=1))
        return np.where(stays[:, None], fewest, 0.0), np.where(stays[:, None], release, 0.0), stays

    def _fewest(self, work: Floats, some: Flags) -> Floats:
        """Replicas for so much work, as the lines know; NaN where they do not, and where it is not asked for."""
        return remembered([tier.line for tier in self.tiers], work, self.headroom, some)

    def _in_reserve(
        self, table: Table, fewest: Floats, release: Floats, most: Floats, stays: Flags, sure: Flags
    ) -> tuple[Floats, Floats]:
        """With what is worth having, and worth keeping, in reserve."""

        def worth(of: Flags, work: Floats, replicas: Floats, miss_cost: Floats) -> Floats:
            asked = np.where(of[:, None], work, 0.0)
            return reserves_all(Stocks(table, asked, self.replica_work, replicas, most, self.gpus), miss_cost)

        spare = worth(stays & sure, self.seen.ordinary, fewest, self.miss_cost)
        enough = (release + self.warm >= self.before).all(axis=1)  # none goes without what is kept either
        kept = worth(stays & ~enough, self.seen.ordinary, release, self.miss_cost * RESERVE_MARGIN)
        up = fewest + np.maximum(self.warm, spare)
        return up, np.maximum(up, release + np.maximum(self.warm, kept))

    def _alone(
        self, table: Table, fewest: Floats, release: Floats, most: Floats, stays: Flags, sure: Flags
    ) -> tuple[Floats, Floats]:
        """The same of services of one tier. Where its count lies between the two, they are not worked out further."""
        seen, before, every = self.seen, self.before, np.arange(len(self.tiers))

        def worth(work: Floats, replicas: Floats, miss_cost: Floats) -> Flags:
            found = table.is_worth(every, work[:, 0], self.replica_work[:, 0], replicas[:, 0], miss_cost)
            return found[:, None]

        grows = sure[:, None] & (before < most) & worth(seen.ordinary, before, self.miss_cost)
        standing = (fewest + self.warm == before) | (release + self.warm >= before)
        keeping = self.miss_cost * RESERVE_MARGIN
        standing |= (before <= most) & worth(seen.ordinary, before - 1.0, keeping)
        up = np.where(grows, before + 1.0, fewest)
        down = np.where(standing, before, release)
        for n in np.flatnonzero(stays & ~(grows | standing)[:, 0]).tolist():
            tier, replica_work, cost = self.tiers[n], self.tiers[n].line.replica_work, float(self.miss_cost[n])
            need, left, top, warm = int(fewest[n, 0]), int(release[n, 0]), int(most[n, 0]), tier.policy.warm_replicas
            ordinary = float(seen.ordinary[n, 0])
            bought = spare_replicas(self.odds[n], ordinary, replica_work, need, top, cost) if sure[n] else 0
            kept = spare_replicas(self.odds[n], ordinary, replica_work, left, top, cost * RESERVE_MARGIN)
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


def _returns(fleet: _Fleet, release: Floats, stays: Flags, now_s: float) -> list[Returns]:
    """What is known of each tier's returns after the tick; mostly what was known before."""
    known = [tier.state.returns for tier in fleet.tiers]
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
        known[place] = tried(known[place], before, before, reach, left, least, tier.horizon_s, now_s)
    return known


def _on_trial(
    tier: Quiet, returns: Returns, release: int, level: float, odds: Odds, missed: float, now_s: float
) -> tuple[Mark, ...] | None:
    """The marks that are left of a tier that has more than `release`, where its count stays all the same: for too
    short a time yet, or as the least that is allowed; else None."""
    before = tier.replicas
    if before == tier.policy.min_replicas:
        marks = tier.state.lower
        same = marks and marks[-1].replicas == release and marks[0].replicas < before
        return marks if same else None
    if release == 0 or not level > 0.0:
        return None
    marks = lower_marks(tier.state.lower, before, release, now_s)
    # A larger count has lasted longer and is held for less: where the largest must wait, so must all.
    leaps = chance(odds, (before - 1) * tier.line.replica_work / level)
    hold_s = held_s(returns, odds.horizon_s, leaps, missed)
    return marks if lasted_s(marks, before - 1, now_s) < hold_s else None


def _state_after(tier: Quiet, level: float, lower: tuple[Mark, ...], returns: Returns, passed_s: float) -> TierState:
    """What a quiet tick leaves of a tier: its tail's scale has moved towards what is measured."""
    state = tier.state
    if lower != state.lower or returns is not state.returns:
        state = state._replace(lower=lower, returns=returns)
    measured = tier.tpot_s
    if isinstance(measured, Unknown) or not 0.0 < measured < math.inf:
        return state
    law_s = tier.line.tpot_s(level, tier.replicas)
    if law_s is None:
        return state
    moved = scaled(state.tail_scale, measured, law_s, passed_s)
    return state if moved == state.tail_scale else state._replace(tail_scale=moved)


def settled(state: TierState, replicas: int) -> bool:
    """Whether the last decision left nothing that is still to run out, and saw all of them ready."""
    return state.replicas == state.ready == replicas and state.backoff == NO_BACKOFF and not state.ordered
