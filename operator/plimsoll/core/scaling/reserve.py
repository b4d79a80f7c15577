"""Replicas in reserve against a leap, of all tiers of a service together.

Problem: a request needs every tier. What one tier has in reserve is worth nothing beyond what the others can carry, and
a replica of one may stand before as many requests as four of another: priced by its own part of their work alone it is
never bought, and then the other four were bought for nothing.

Idea: capacity is one number, the growth of the ordinary load that the weakest tier still carries. From what is needed
anyway the weakest tier gets one replica more, again and again; each is paid for, and what all of them carry beyond
saves the requests that would be missed, at what these take of all tiers. They are missed until the tiers that are short
could follow, so it is the growth within their start-up that counts: a tier with room enough may start as slowly as it
likes. The reserve ends where saved less paid is most. With one tier this is the rule of `forecast.spare`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from plimsoll.core.forecast import Odds, SpareWorth, spare_replicas
from plimsoll.core.forecast.fleet import Floats
from plimsoll.core.forecast.table import Table

LEAST_WORK: Final = 1e-9  # GPU-seconds per second; a second in thirty years leaps to nothing that a replica is kept for


@dataclass(frozen=True, slots=True)
class Stock:
    """One tier. work: what load leaps from, GPU-seconds per second. replica_work: what one replica carries within the
    promise, same unit. replicas: needed without a reserve. most: that may be. gpus: of one replica."""

    odds: Odds
    work: float
    replica_work: float
    replicas: int
    most: int
    gpus: int = 1


@dataclass(frozen=True, slots=True)
class Stocks:
    """The tiers of many services of equally many tiers, two or more: as Stock, each an array of a row a service, a
    column a tier. odds: of row and column, one after the other."""

    odds: Table
    work: Floats
    replica_work: Floats
    replicas: Floats
    most: Floats
    gpus: Floats


@dataclass(frozen=True, slots=True)
class Reserve:
    """replicas: beyond those needed, of each tier. worth: what all of them save and take."""

    replicas: list[int]
    worth: SpareWorth


def reserve(tiers: Sequence[Stock], miss_cost: float) -> Reserve:
    """What is worth having beyond what is needed, with its worth. Arguments as for `reserves`."""
    found = reserves(tiers, miss_cost)
    if not any(found):
        return Reserve(found, SpareWorth(0.0, 0.0))
    needed = [tier.replicas * tier.replica_work / tier.work for tier in tiers]
    at = min(needed)
    after = min((tier.replicas + n) * tier.replica_work / tier.work for tier, n in zip(tiers, found, strict=True))
    saved, odds = 0.0, _slowest_short(tiers, needed, at)
    while at < after:
        odds = _slowest_short(tiers, needed, at)
        upto = min([after, *(growth for growth in needed if growth > at)])
        saved += odds.between(at, upto)
        at = upto
    paid = sum(n * max(tier.gpus, 1) for tier, n in zip(tiers, found, strict=True))
    return Reserve(found, SpareWorth(miss_cost * _work(tiers) * saved * odds.horizon_s, paid * odds.horizon_s))


def reserves(tiers: Sequence[Stock], miss_cost: float) -> list[int]:
    """Replicas worth having beyond those needed, for each tier. miss_cost: of a missed request, in multiples of the
    GPU-seconds that it takes in all tiers."""
    if any(tier.work < LEAST_WORK for tier in tiers):
        return [0] * len(tiers)
    if len(tiers) == 1:
        (only,) = tiers
        return [spare_replicas(only.odds, only.work, only.replica_work, only.replicas, only.most, miss_cost)]
    longest = _slowest(tiers)
    step = [tier.replica_work / tier.work for tier in tiers]  # growth that one replica carries
    price = [float(max(tier.gpus, 1)) for tier in tiers]
    value = miss_cost * _work(tiers)
    counts = [tier.replicas for tier in tiers]
    needed = [count * growth for count, growth in zip(counts, step, strict=True)]
    carried = list(needed)
    at = min(carried)
    best, found, saved, paid = 0.0, list(counts), 0.0, 0.0
    while True:
        weakest = carried.index(at)
        if counts[weakest] >= tiers[weakest].most or value * longest.past(at)[0] * step[weakest] <= price[weakest]:
            break  # less is saved from here on than the weakest alone costs, and the others are not free either
        odds = _slowest_short(tiers, needed, at)
        start = odds.past(at)[1]
        counts[weakest] += 1
        carried[weakest] = counts[weakest] * step[weakest]
        paid += price[weakest]
        at = min(carried)
        saved += value * (odds.past(at)[1] - start)
        net = saved - paid
        if net > best:
            best, found = net, list(counts)
    return [count - tier.replicas for count, tier in zip(found, tiers, strict=True)]


def reserves_all(stocks: Stocks, miss_cost: Floats) -> Floats:
    """`reserves` of each service, shape (services, tiers): every step is taken for all that still take one.

    miss_cost: by service.
    """
    found = stocks.replicas.copy()
    rows = np.flatnonzero((stocks.work >= LEAST_WORK).all(axis=1))
    work, most, counts = stocks.work[rows], stocks.most[rows], stocks.replicas[rows]
    step, price = stocks.replica_work[rows] / work, np.maximum(stocks.gpus[rows], 1.0)
    value = miss_cost[rows] * (work * price).sum(axis=1)
    horizon_s = stocks.odds.horizon_s.reshape(found.shape)[rows]
    first = rows * found.shape[1]
    longest = first + horizon_s.argmax(axis=1)  # of the tier that starts slowest
    needed = counts * step
    carried = needed.copy()
    best, saved, paid = np.zeros((3, len(rows)))
    left = np.arange(len(rows))
    while True:
        weakest, at = carried[left].argmin(axis=1), carried[left].min(axis=1)
        worth, own = value[left] * stocks.odds.past(longest[left], at)[0] * step[left, weakest], price[left, weakest]
        more = (counts[left, weakest] < most[left, weakest]) & (worth > own)
        left, weakest, at = left[more], weakest[more], at[more]
        if not len(left):
            return found - stocks.replicas
        odds = first[left] + np.where(needed[left] <= at[:, None], horizon_s[left], -np.inf).argmax(axis=1)
        start = stocks.odds.past(odds, at)[1]
        counts[left, weakest] += 1.0
        carried[left, weakest] = counts[left, weakest] * step[left, weakest]
        paid[left] += price[left, weakest]
        saved[left] += value[left] * (stocks.odds.past(odds, carried[left].min(axis=1))[1] - start)
        net = saved[left] - paid[left]
        better = left[net > best[left]]
        best[left] = np.maximum(best[left], net)
        found[rows[better]] = counts[better]


def _slowest(tiers: Sequence[Stock]) -> Odds:
    """How load grows until the tier that starts slowest could follow."""
    return max((tier.odds for tier in tiers), key=lambda odds: odds.horizon_s)


def _slowest_short(tiers: Sequence[Stock], needed: Sequence[float], growth: float) -> Odds:
    """The same of those that are short without a reserve once load has grown so far. needed: growth that is carried
    by what is needed, of each."""
    return _slowest([tier for tier, carried in zip(tiers, needed, strict=True) if carried <= growth])


def _work(tiers: Sequence[Stock]) -> float:
    """GPU-seconds per second in all tiers."""
    return math.fsum(tier.work * max(tier.gpus, 1) for tier in tiers)
