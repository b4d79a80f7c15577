"""Standby replicas: whether one more replica is worth its GPU time while load is low.

Problem: only the replicas that are already ready serve a level shift within a start-up time. Level shifts are too rare
to show in a percentile of the service's own history. A longer start-up makes each of them more costly.

Idea: newsvendor. P(x) is the probability that work grows past x within the start-up time L. A new replica serves a
level shift only L later. Without a standby replica, the work between the capacity of n and of n + 1 replicas is missed
for L. Over L, the expected missed work is L times the integral of P over that range. The saving is the missed work, in
requests, times sloMissCost times the GPU-seconds of a request. The cost is L GPU-seconds, whether or not the replica is
used. P combines a prior with own history as a Gamma prior does: (weight * prior + history * own) / (weight + history).
Each growth factor has its own weight. Services differ more in how often load doubles than in how often it grows
tenfold, so one growth by six is no reason to expect another every quarter of an hour.

MISS_COST, the default: a replica that is certainly needed saves sloMissCost * u * L, where u is the share of a
replica's time that requests within the SLO take. The replica therefore pays off while the probability of needing it
exceeds 1 / (sloMissCost * u). The SLO gives that probability: a share of 1 - percentile of the requests may miss it.
For percentile 0.95 and u = 0.8, sloMissCost is 1 / (0.05 * 0.8) = 25: standby ends where need is as rare as the SLO
allows. Equivalently, a replica is kept if load fills it at least once in sloMissCost * u = 20 start-up times.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from plimsoll.core.demand import growth_stats
from plimsoll.core.demand.demand_state import DemandState
from plimsoll.core.demand.growth_prior import GROWTH_FACTORS, PRIOR_EXCEEDANCE, PRIOR_WEIGHT_S

MISS_COST: Final = 25.0


@dataclass(frozen=True, slots=True)
class GrowthDistribution:
    """Probability that work grows past each factor within the horizon (seconds).

    own_history_share: as in `Forecast`. own_growth: the largest factor that the service's own work has grown by within
    the horizon, 1 if none was seen. cumulative_integrals: derived; the integral of the probability from 0 to 1 and
    from 0 to each factor.
    """

    horizon_s: float
    factors: tuple[float, ...]
    exceedance: tuple[float, ...]
    own_history_share: float
    own_growth: float = 1.0
    cumulative_integrals: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sums, at, share = [1.0], 1.0, 1.0
        for next_at, next_share in zip(self.factors, self.exceedance, strict=True):
            sums.append(sums[-1] + 0.5 * (share + next_share) * (next_at - at))
            at, share = next_at, next_share
        object.__setattr__(self, "cumulative_integrals", tuple(sums))

    def between(self, low: float, high: float) -> float:
        """Integral of the exceedance probability over growth factors from `low` to `high`.

        The probability is 1 below factor 1, linear between the factors, and 0 beyond the last one.
        """
        return self.integral(high) - self.integral(low)

    def integral(self, factor: float) -> float:
        """Integral of the exceedance probability from 0 to `factor`."""
        return self.tail_and_integral(factor)[1]

    def tail_and_integral(self, factor: float) -> tuple[float, float]:
        """Return the probability of growth past `factor`, and its integral from 0 to `factor`."""
        if factor <= 1.0:
            return 1.0, max(0.0, factor)
        place = bisect_left(self.factors, factor)
        if place == len(self.factors):
            return 0.0, self.cumulative_integrals[-1]
        at, share = (self.factors[place - 1], self.exceedance[place - 1]) if place else (1.0, 1.0)
        width = factor - at
        end = share + (self.exceedance[place] - share) * width / (self.factors[place] - at)
        return end, self.cumulative_integrals[place] + 0.5 * (share + end) * width


@dataclass(frozen=True, slots=True)
class CostBenefit:
    """Expected saving and cost of one more replica over the horizon, both in GPU-seconds."""

    saving_gpu_s: float
    cost_gpu_s: float

    @property
    def pays_off(self) -> bool:
        return self.saving_gpu_s > self.cost_gpu_s


def growth_distribution(state: DemandState, horizon_s: float) -> GrowthDistribution:
    """Growth distribution within the horizon (seconds), from the prior and own history.

    Raises ValueError unless 0 <= horizon_s < inf.
    """
    if not 0.0 <= horizon_s < math.inf:
        raise ValueError(f"a horizon is a finite number of seconds, zero or more, not {horizon_s}")
    own_s = growth_stats.history_length_s(state.closed_growth, horizon_s)
    prior, weights_s = _growth_prior(horizon_s)
    own_shares = growth_stats.exceedance_shares(state.closed_growth, horizon_s)
    own_weights = [own_s / (own_s + weight_s) for weight_s in weights_s]
    mixed_shares = growth_stats.make_nonincreasing(
        [
            prior_share + own_weight * (own_share - prior_share)
            for prior_share, own_weight, own_share in zip(prior, own_weights, own_shares, strict=True)
        ]
    )
    return GrowthDistribution(
        horizon_s,
        GROWTH_FACTORS,
        mixed_shares,
        own_weights[growth_stats.DOUBLING_INDEX],
        max((factor for factor, share in zip(GROWTH_FACTORS, own_shares, strict=True) if share > 0.0), default=1.0),
    )


def own_history_share(state: DemandState, horizon_s: float) -> float:
    """Weight of own history against the prior in the probability that load doubles within the horizon, 0 to 1."""
    own_s = growth_stats.history_length_s(state.closed_growth, horizon_s)
    return own_s / (own_s + _growth_prior(horizon_s)[1][growth_stats.DOUBLING_INDEX])


@lru_cache(256)  # one entry for each start-up time in a fleet
def _growth_prior(horizon_s: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Prior share of growth past each factor, and each share's weight in seconds of own history."""
    weights_s = tuple(
        growth_stats.interpolate(horizon_weights, horizon_s) for horizon_weights in zip(*PRIOR_WEIGHT_S, strict=True)
    )
    return growth_stats.shares_at_horizon(PRIOR_EXCEEDANCE, horizon_s), weights_s


def standby_cost_benefit(
    distribution: GrowthDistribution, work: float, replica_work: float, replicas: int, miss_cost: float = MISS_COST
) -> CostBenefit:
    """Expected saving and cost of one replica beyond `replicas`, over the horizon of `distribution`.

    work: the level that load grows from, GPU-seconds per second. Pass `Forecast.baseline`; the current level would add
    standby replicas on top of a level shift that has just happened. replica_work: what one replica serves within the
    SLO, same unit, > 0. replicas: the count without the standby replica. miss_cost: the cost of a missed request, in
    multiples of the GPU-seconds that it takes, >= 0. Raises ValueError for arguments out of range.
    """
    if not (0.0 <= work < math.inf and 0.0 < replica_work < math.inf and replicas >= 0 and 0.0 <= miss_cost < math.inf):
        raise ValueError(f"no worth of a replica for {work=}, {replica_work=}, {replicas=}, {miss_cost=}")
    price = distribution.horizon_s
    if work == 0.0:
        return CostBenefit(0.0, price)
    needed = work * distribution.between(replicas * replica_work / work, (replicas + 1) * replica_work / work)
    return CostBenefit(miss_cost * needed * distribution.horizon_s, price)


def standby_replicas(
    distribution: GrowthDistribution,
    work: float,
    replica_work: float,
    replicas: int,
    max_replicas: int,
    miss_cost: float = MISS_COST,
) -> int:
    """Number of standby replicas that pay off beyond `replicas`, 0 to max_replicas - replicas.

    The other arguments are those of `standby_cost_benefit`. The search is a bisection, because each replica saves no
    more than the one before it.
    """
    if (
        replicas >= max_replicas
        or not standby_cost_benefit(distribution, work, replica_work, replicas, miss_cost).pays_off
    ):
        return 0  # the usual case, without the bisection
    return bisect_left(
        range(replicas, max_replicas),
        True,
        key=lambda n: not standby_pays_off(distribution, work, replica_work, n, miss_cost),
    )


def standby_pays_off(
    distribution: GrowthDistribution, work: float, replica_work: float, replicas: int, miss_cost: float
) -> bool:
    """`standby_cost_benefit(...).pays_off`, without checking the arguments."""
    price = distribution.horizon_s
    if work == 0.0:
        return False
    needed = work * distribution.between(replicas * replica_work / work, (replicas + 1) * replica_work / work)
    return miss_cost * needed * price > price
