"""Joint sizing of the standby replicas of all tiers of a service.

Problem: a request needs every tier, so standby replicas of one tier are worthless beyond the capacity of the others. If
each tier is priced by its own share of the work, an expensive replica is never added, and the others are useless.

Idea: capacity is the growth of the baseline load that the weakest tier still carries. Starting from the needed
replicas, the weakest tier repeatedly gets one more. Each has a cost; the additional capacity saves requests that would
miss the SLO, valued by their work in all tiers. They miss until the short tiers have started, so the growth within the
start-up time of these tiers counts. The best count maximises saving minus cost. With one tier, this is the rule of
`demand.standby_value`.

The growth that a new service is assumed to have is that of other services. It orders one standby replica, and one more
for every ten that are needed. A `miss_cost` of n times the default multiplies both by n. More than that needs growth
that the service itself has shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from plimsoll.core.demand.standby_value import MISS_COST, CostBenefit, GrowthDistribution, standby_replicas

NEEDED_PER_PRIOR_REPLICA: Final = 10
MAX_LEVEL_ERROR: Final = 0.055  # relative; above it (in the first minute or so) no standby replica is added
MIN_LEVEL_WORK: Final = 1e-9  # GPU-seconds per second; below it, no standby replica pays off


@dataclass(frozen=True, slots=True)
class StandbyInput:
    """One tier. work: baseline load, GPU-seconds per second. replica_work: SLO capacity of one replica, same unit.
    replicas: needed without standby. max_replicas: upper bound. own_growth_replicas: standby replicas that the largest
    growth of the service's own load would fill."""

    growth: GrowthDistribution
    work: float
    replica_work: float
    replicas: int
    max_replicas: int
    gpus_per_replica: int = 1
    own_growth_replicas: int = 0


def is_level_certain(level: float, error: float) -> bool:
    """Whether the level, in GPU-seconds per second with its error, is certain enough to add standby replicas."""
    return error <= MAX_LEVEL_ERROR * level


@dataclass(frozen=True, slots=True)
class StandbyPlan:
    """replicas: standby replicas of each tier. value: saving and cost of all of them."""

    replicas: list[int]
    value: CostBenefit


def plan_standby(tiers: Sequence[StandbyInput], miss_cost: float) -> StandbyPlan:
    """Return the standby replicas with their value. Arguments as for `joint_standby_replicas`."""
    standby = joint_standby_replicas(tiers, miss_cost)
    if not any(standby):
        return StandbyPlan(standby, CostBenefit(0.0, 0.0))
    base_growth = [tier.replicas * tier.replica_work / tier.work for tier in tiers]
    growth_from = min(base_growth)
    growth_to = min((tier.replicas + n) * tier.replica_work / tier.work for tier, n in zip(tiers, standby, strict=True))
    saved_growth, distribution = 0.0, _slowest_growth_of_short(tiers, base_growth, growth_from)
    while growth_from < growth_to:
        distribution = _slowest_growth_of_short(tiers, base_growth, growth_from)
        growth_until = min([growth_to, *(limit for limit in base_growth if limit > growth_from)])
        saved_growth += distribution.between(growth_from, growth_until)
        growth_from = growth_until
    cost = sum(n * max(tier.gpus_per_replica, 1) for tier, n in zip(tiers, standby, strict=True))
    return StandbyPlan(
        standby,
        CostBenefit(
            miss_cost * _total_gpu_work(tiers) * saved_growth * distribution.horizon_s, cost * distribution.horizon_s
        ),
    )


def joint_standby_replicas(tiers: Sequence[StandbyInput], miss_cost: float) -> list[int]:
    """Return the standby replicas of each tier. miss_cost: cost of a missed request, in multiples of its GPU-seconds in
    all tiers."""
    if any(tier.work < MIN_LEVEL_WORK for tier in tiers):
        return [0] * len(tiers)
    from_prior = _replicas_by_prior(sum(tier.replicas for tier in tiers), miss_cost)
    if len(tiers) == 1:
        (single,) = tiers
        maximum = min(single.max_replicas, single.replicas + max(single.own_growth_replicas, from_prior))
        return [standby_replicas(single.growth, single.work, single.replica_work, single.replicas, maximum, miss_cost)]
    slowest_growth = _slowest_growth(tiers)
    growth_per_replica = [tier.replica_work / tier.work for tier in tiers]  # growth factor per replica
    price = [float(max(tier.gpus_per_replica, 1)) for tier in tiers]
    value = miss_cost * _total_gpu_work(tiers)
    counts = [tier.replicas for tier in tiers]
    base_growth = [count * growth for count, growth in zip(counts, growth_per_replica, strict=True)]
    carried_growth = list(base_growth)
    weakest_growth = min(carried_growth)
    best_net, best_counts, saving, cost = 0.0, list(counts), 0.0, 0.0
    while True:
        weakest = carried_growth.index(weakest_growth)
        if (
            counts[weakest] >= tiers[weakest].max_replicas
            or sum(max(0, n - tier.replicas - tier.own_growth_replicas) for n, tier in zip(counts, tiers, strict=True))
            >= from_prior
            or value * slowest_growth.tail_and_integral(weakest_growth)[0] * growth_per_replica[weakest]
            <= price[weakest]
        ):
            break  # further replicas cost more than they save
        distribution = _slowest_growth_of_short(tiers, base_growth, weakest_growth)
        saving_before = distribution.tail_and_integral(weakest_growth)[1]
        counts[weakest] += 1
        carried_growth[weakest] = counts[weakest] * growth_per_replica[weakest]
        cost += price[weakest]
        weakest_growth = min(carried_growth)
        saving += value * (distribution.tail_and_integral(weakest_growth)[1] - saving_before)
        net = saving - cost
        if net > best_net:
            best_net, best_counts = net, list(counts)
    return [count - tier.replicas for count, tier in zip(best_counts, tiers, strict=True)]


def _replicas_by_prior(needed: int, miss_cost: float) -> int:
    """Return how many standby replicas the growth of other services justifies."""
    return (1 + needed // NEEDED_PER_PRIOR_REPLICA) * max(1, round(miss_cost / MISS_COST))


def _slowest_growth(tiers: Sequence[StandbyInput]) -> GrowthDistribution:
    """Return the growth distribution of the tier with the longest start-up."""
    return max((tier.growth for tier in tiers), key=lambda distribution: distribution.horizon_s)


def _slowest_growth_of_short(
    tiers: Sequence[StandbyInput], base_growth: Sequence[float], growth: float
) -> GrowthDistribution:
    """Return the slowest growth distribution of the tiers whose needed replicas do not carry `growth`.

    base_growth: growth that the needed replicas of each tier carry.
    """
    return _slowest_growth([tier for tier, carried in zip(tiers, base_growth, strict=True) if carried <= growth])


def _total_gpu_work(tiers: Sequence[StandbyInput]) -> float:
    """Return the work of all tiers, GPU-seconds per second."""
    return math.fsum(tier.work * max(tier.gpus_per_replica, 1) for tier in tiers)
