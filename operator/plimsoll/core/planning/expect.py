"""What users of a planned fleet should see: quantiles of TTFT and TPOT at a rate, and the share in promise.

Problem: sizing answers "is the share kept", a reader asks "what will p95 be". Idea: the quantile is the target at which
the share is just reached, so it is found with the law that sizes, by bisection; no second law exists. Nobody is refused
here: what is expected is how a fleet does without a gate, so that a gate can only better it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from plimsoll.core.knee import Profile, Tier, alone_s, attainment, profile
from plimsoll.core.latency import TierWork, decode_tier, serve_tier, tail_factor
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.slo import Slo

_LONGEST_S: Final = 3600.0
_CLOSE: Final = 1.005  # ratio of the bounds at which a quantile is found


@dataclass(frozen=True)
class Expected:
    """At one rate on so many replicas; infinite where a queue grows for ever, None where a tier has no such time."""

    p50_ttft_s: float | None
    p95_ttft_s: float | None
    p50_tpot_s: float | None
    p95_tpot_s: float | None


def expected(tiers: tuple[Tier, ...], rate_per_s: float, replicas: tuple[int, ...]) -> Expected:
    """Of one serve tier, or of a prefill tier before a decode tier; `replicas` in the same order."""
    first, last = tiers[0], tiers[-1]
    return Expected(
        ttft_s(first, rate_per_s, replicas[0], 0.5),
        ttft_s(first, rate_per_s, replicas[0], 0.95),
        tpot_s(last, rate_per_s, replicas[-1], 0.5),
        tpot_s(last, rate_per_s, replicas[-1], 0.95),
    )


def ttft_s(tier: Tier, rate_per_s: float, replicas: int, share: float) -> float:
    """The `share` quantile of the time to first token of all requests, s: to half a percent, infinite in overload."""
    shortest, longest = float(alone_s(tier).min()), _LONGEST_S
    if _in_time(tier, longest, rate_per_s, replicas) < share:
        return math.inf
    low, high = max(shortest, 1e-4) / _CLOSE, longest
    while high > low * _CLOSE:
        middle = math.sqrt(low * high)
        if _in_time(tier, middle, rate_per_s, replicas) < share:
            low = middle
        else:
            high = middle
    return high


def _in_time(tier: Tier, ttft_s: float, rate_per_s: float, replicas: int) -> float:
    """Share of all requests whose first token is there in time."""
    one = profile(replace(tier, slo=Slo(tier.slo.share, ttft_s)))
    if rate_per_s >= one.full_rate_per_s(replicas, admission=False)[0]:
        return 0.0
    return float(attainment(one, rate_per_s, replicas, admission=False).attained[0] * one.feasible[0])


def tpot_s(tier: Tier, rate_per_s: float, replicas: int, share: float) -> float | None:
    """The `share` quantile of requests' TPOT, s, for shares of at least a half; None of a prefill tier.

    The median is the law's; above it the law times its tail factor.
    """
    if tier.role is Role.PREFILL:
        return None
    work = work_of(tier)
    rho = float(work.rho(rate_per_s, replicas))
    if rho >= 1:
        return math.inf
    law = work.base_s / (1 - rho)
    if share <= 0.5:
        return float(work.tpot_s(rate_per_s, replicas))
    return law * max(1.0, float(tail_factor(work, rho, share)) * tier.tail_scale)


def work_of(tier: Tier) -> TierWork:
    """What requests do to the steps of a serve or decode tier. Raises ValueError for a prefill tier."""
    if tier.role is Role.PREFILL:
        raise ValueError("a prefill tier shares no steps")
    if tier.transfer is None:
        return serve_tier(tier.model, tier.workload)
    return decode_tier(tier.model, tier.workload, tier.transfer)


def mean_batch(tier: Tier, rate_per_s: float, replicas: int) -> float:
    """Sequences that run on a replica in the mean, by Little's law: lambda O T / c."""
    work = work_of(tier)
    return rate_per_s / replicas * work.mean_output_tokens * float(work.tpot_s(rate_per_s, replicas))


def kept(tiers: tuple[Tier, ...], rate_per_s: float, replicas: tuple[int, ...], *, admission: bool = False) -> float:
    """Share of all requests in promise: of a pair, the product of both tiers' shares, taken as independent."""
    return share_kept([profile(tier) for tier in tiers], rate_per_s, replicas, admission=admission)


def share_kept(
    tiers: Sequence[Profile], rate_per_s: float, replicas: Sequence[int], *, admission: bool = False
) -> float:
    """`kept` of tiers that were reduced before."""
    share = 1.0
    for one, count in zip(tiers, replicas, strict=True):
        rate = min(rate_per_s, float(one.full_rate_per_s(count, admission=admission)[0]))
        found = float(attainment(one, rate, count, admission=admission).attained[0] * one.feasible[0])
        share *= found * (rate / rate_per_s if admission else float(rate == rate_per_s))
    return share
