"""Whether one more replica is worth its GPU time in quiet times.

Problem: load that leaps within a start-up finds the replicas that are there; a percentile of own history cannot tell,
since leaps are too rare to be in it, and the longer the start-up the more a leap costs.

Idea: newsvendor. Let P(x) be the probability that work leaps past x within the start-up time L. A leap is met L later,
so without a further replica the work between the n replicas' capacity and the n + 1 replicas' is missed for L after it:
over L, the expected missed work is L times the integral of P over that range. Missed work, in requests, times missCost
times the GPU-seconds of a request is the saving; L GPU-seconds are the price, whatever the replica does in them.
P is the prior's, weighed with own history as a Gamma prior is: (weight * prior + history * own) / (weight + history),
each factor with a weight of its own, since services differ in how often load doubles more than in how often it grows
tenfold: one leap by six is no reason to expect one every quarter of an hour.

MISS_COST, the default: the saving of a replica that is needed for sure is missCost * u * L, u the share of a replica's
time that requests in promise take, so the replica is bought while the probability that it is needed is above
1 / (missCost * u). The promise itself names that probability: 1 - percentile of the requests may miss. With the
percentile 0.95 and u = 0.8, 1 / (0.05 * 0.8) = 25: spare ends where need is as rare as the promise allows. Read another
way, a replica is kept if a leap that fills it comes at least once in missCost * u = 20 start-up times.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from plimsoll.core.forecast import growth
from plimsoll.core.forecast.state import State
from plimsoll.core.jumps import EXCEEDANCE, FACTORS, WEIGHT_S

MISS_COST: Final = 25.0


@dataclass(frozen=True, slots=True)
class Odds:
    """Probability that work grows past each factor within the horizon; history: as in Forecast.

    upto: integral of the probability from 0 to 1 and to each factor, which follows from the others. packed: the
    probability of growth past 1 and past each factor, then upto, as doubles.
    """

    horizon_s: float
    factors: tuple[float, ...]
    exceedance: tuple[float, ...]
    history: float
    upto: tuple[float, ...] = field(init=False, repr=False, compare=False)
    packed: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sums, at, share = [1.0], 1.0, 1.0
        for next_at, next_share in zip(self.factors, self.exceedance, strict=True):
            sums.append(sums[-1] + 0.5 * (share + next_share) * (next_at - at))
            at, share = next_at, next_share
        object.__setattr__(self, "upto", tuple(sums))
        object.__setattr__(self, "packed", array("d", (1.0, *self.exceedance, *sums)).tobytes())

    def between(self, low: float, high: float) -> float:
        """Integral of the probability over growth factors from `low` to `high`; 1 below 1, linear between, 0 beyond."""
        return self.integral(high) - self.integral(low)

    def integral(self, factor: float) -> float:
        """Of the probability from 0 to `factor`."""
        return self.past(factor)[1]

    def past(self, factor: float) -> tuple[float, float]:
        """The probability of growth past `factor`, 1 up to 1, linear between, 0 beyond; and its integral from 0."""
        if factor <= 1.0:
            return 1.0, max(0.0, factor)
        place = bisect_left(self.factors, factor)
        if place == len(self.factors):
            return 0.0, self.upto[-1]
        at, share = (self.factors[place - 1], self.exceedance[place - 1]) if place else (1.0, 1.0)
        width = factor - at
        end = share + (self.exceedance[place] - share) * width / (self.factors[place] - at)
        return end, self.upto[place] + 0.5 * (share + end) * width


@dataclass(frozen=True, slots=True)
class SpareWorth:
    """What a further replica saves and takes over the horizon, both in GPU-seconds."""

    saving_gpu_s: float
    cost_gpu_s: float

    @property
    def worth(self) -> bool:
        return self.saving_gpu_s > self.cost_gpu_s


def odds(state: State, horizon_s: float) -> Odds:
    """What prior and own history say about growth within the horizon. Raises ValueError unless 0 <= horizon < inf."""
    if not 0.0 <= horizon_s < math.inf:
        raise ValueError(f"a horizon is a finite number of seconds, zero or more, not {horizon_s}")
    own_s = growth.history_s(state.past, horizon_s)
    prior, weights_s = _prior(horizon_s)
    own = growth.shares(state.past, horizon_s)
    parts = [own_s / (own_s + weight_s) for weight_s in weights_s]
    mixed = growth.falling([p + part * (o - p) for p, part, o in zip(prior, parts, own, strict=True)])
    return Odds(horizon_s, FACTORS, mixed, parts[growth.DOUBLED])


def history(state: State, horizon_s: float) -> float:
    """Share of own history, against the prior, in what is known of a load that doubles within the horizon, 0 to 1."""
    own_s = growth.history_s(state.past, horizon_s)
    return own_s / (own_s + _prior(horizon_s)[1][growth.DOUBLED])


@lru_cache(256)  # the start-up times of a fleet
def _prior(horizon_s: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Shares past each factor, and the seconds of own history that each is worth."""
    weights_s = tuple(growth.interpolate(at, horizon_s) for at in zip(*WEIGHT_S, strict=True))
    return growth.across(EXCEEDANCE, horizon_s), weights_s


def spare_worth(
    chances: Odds, work: float, replica_work: float, replicas: int, miss_cost: float = MISS_COST
) -> SpareWorth:
    """Expected saving and price of the replica after the first `replicas`, over the horizon of `chances`.

    work: what load leaps from, GPU-seconds per second: Forecast.ordinary (with the level itself, spare would be bought
    on top of a leap that has just come). replica_work: what one replica serves in promise, same unit, > 0. replicas:
    all there would be without it. miss_cost: what a missed request costs, in multiples of the GPU-seconds that it
    takes; >= 0. Raises ValueError.
    """
    if not (0.0 <= work < math.inf and 0.0 < replica_work < math.inf and replicas >= 0 and 0.0 <= miss_cost < math.inf):
        raise ValueError(f"no worth of a replica for {work=}, {replica_work=}, {replicas=}, {miss_cost=}")
    price = chances.horizon_s
    if work == 0.0:
        return SpareWorth(0.0, price)
    needed = work * chances.between(replicas * replica_work / work, (replicas + 1) * replica_work / work)
    return SpareWorth(miss_cost * needed * chances.horizon_s, price)


def spare_replicas(
    chances: Odds, work: float, replica_work: float, replicas: int, most: int, miss_cost: float = MISS_COST
) -> int:
    """Replicas worth having beyond `replicas`, 0 to most - replicas; arguments as for `spare_worth`.

    Each is worth no more than the one before it.
    """
    if replicas >= most or not spare_worth(chances, work, replica_work, replicas, miss_cost).worth:
        return 0  # mostly
    return bisect_left(
        range(replicas, most), True, key=lambda n: not is_worth(chances, work, replica_work, n, miss_cost)
    )


def is_worth(chances: Odds, work: float, replica_work: float, replicas: int, miss_cost: float) -> bool:
    """`spare_worth(...).worth` of arguments that are known to make sense."""
    price = chances.horizon_s
    if work == 0.0:
        return False
    needed = work * chances.between(replicas * replica_work / work, (replicas + 1) * replica_work / work)
    return miss_cost * needed * price > price
