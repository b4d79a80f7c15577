"""Expected latency of a planned fleet: quantiles of TTFT and TPOT at a rate, and attainment.

Problem: sizing tells whether attainment is enough, and a user asks for p95. Idea: the quantile is the target that the
share just meets. The sizing model therefore gives it by bisection, and no second model exists. The results are without
admission control, which can only improve them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from plimsoll.core.capacity.attainment import attainment
from plimsoll.core.capacity.tier_model import TierProfile, TierSpec, build_profile, unloaded_ttft_s
from plimsoll.core.engine_model.step_time import TierWork, decode_tier, serve_tier, tail_factor
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role

_MAX_TTFT_S: Final = 3600.0
_QUANTILE_RATIO: Final = 1.005  # ratio of the bounds at which the search for a quantile ends


@dataclass(frozen=True)
class ExpectedLatency:
    """Latency at one rate and replica count; infinite where a queue grows for ever, None where a tier has no such
    latency.
    """

    p50_ttft_s: float | None
    p95_ttft_s: float | None
    p50_tpot_s: float | None
    p95_tpot_s: float | None


def predict_latency(tiers: tuple[TierSpec, ...], rate_per_s: float, replicas: tuple[int, ...]) -> ExpectedLatency:
    """Expected latency of one serve tier, or of a prefill tier and a decode tier; `replicas` in the same order."""
    first_tier, last_tier = tiers[0], tiers[-1]
    return ExpectedLatency(
        ttft_quantile_s(first_tier, rate_per_s, replicas[0], 0.5),
        ttft_quantile_s(first_tier, rate_per_s, replicas[0], 0.95),
        tpot_quantile_s(last_tier, rate_per_s, replicas[-1], 0.5),
        tpot_quantile_s(last_tier, rate_per_s, replicas[-1], 0.95),
    )


def ttft_quantile_s(tier: TierSpec, rate_per_s: float, replicas: int, share: float) -> float:
    """The `share` quantile of TTFT of all requests, seconds: to half a percent, infinite in overload."""
    min_ttft_s, max_ttft_s = float(unloaded_ttft_s(tier).min()), _MAX_TTFT_S
    if _ttft_attainment(tier, max_ttft_s, rate_per_s, replicas) < share:
        return math.inf
    low, high = max(min_ttft_s, 1e-4) / _QUANTILE_RATIO, max_ttft_s
    while high > low * _QUANTILE_RATIO:
        middle = math.sqrt(low * high)
        if _ttft_attainment(tier, middle, rate_per_s, replicas) < share:
            low = middle
        else:
            high = middle
    return high


def _ttft_attainment(tier: TierSpec, ttft_s: float, rate_per_s: float, replicas: int) -> float:
    """Share of all requests that meet the TTFT target."""
    profile = build_profile(replace(tier, slo=Slo(tier.slo.share, ttft_s)))
    if rate_per_s >= profile.saturation_rate_per_s(replicas, admission=False)[0]:
        return 0.0
    return float(attainment(profile, rate_per_s, replicas, admission=False).within_slo[0] * profile.feasible_share[0])


def tpot_quantile_s(tier: TierSpec, rate_per_s: float, replicas: int, share: float) -> float | None:
    """The `share` quantile of requests' TPOT, seconds, for shares of at least a half; None for a prefill tier.

    The median is the mean TPOT of the model; above it, that times the tail factor.
    """
    if tier.role is Role.PREFILL:
        return None
    work = tier_work(tier)
    rho = float(work.rho(rate_per_s, replicas))
    if rho >= 1:
        return math.inf
    law_tpot_s = work.base_s / (1 - rho)
    if share <= 0.5:
        return float(work.tpot_s(rate_per_s, replicas))
    return law_tpot_s * max(1.0, float(tail_factor(work, rho, share)) * tier.tpot_tail_scale)


def tier_work(tier: TierSpec) -> TierWork:
    """`TierWork` of a serve or decode tier. Raises ValueError for a prefill tier."""
    if tier.role is Role.PREFILL:
        raise ValueError("a prefill tier shares no steps")
    if tier.transfer is None:
        return serve_tier(tier.model, tier.workload)
    return decode_tier(tier.model, tier.workload, tier.transfer)


def mean_batch(tier: TierSpec, rate_per_s: float, replicas: int) -> float:
    """Mean running sequences on a replica, by Little's law: lambda O T / c."""
    work = tier_work(tier)
    return rate_per_s / replicas * work.mean_output_tokens * float(work.tpot_s(rate_per_s, replicas))


def plan_attainment(
    tiers: tuple[TierSpec, ...], rate_per_s: float, replicas: tuple[int, ...], *, admission: bool = False
) -> float:
    """Attainment of all requests; for a disaggregated plan, the product over both tiers, taken as independent."""
    return profile_attainment([build_profile(tier) for tier in tiers], rate_per_s, replicas, admission=admission)


def profile_attainment(
    profiles: Sequence[TierProfile], rate_per_s: float, replicas: Sequence[int], *, admission: bool = False
) -> float:
    """`plan_attainment` of tiers that are already reduced to profiles."""
    share = 1.0
    for profile, count in zip(profiles, replicas, strict=True):
        rate = min(rate_per_s, float(profile.saturation_rate_per_s(count, admission=admission)[0]))
        tier_share = float(
            attainment(profile, rate, count, admission=admission).within_slo[0] * profile.feasible_share[0]
        )
        share *= tier_share * (rate / rate_per_s if admission else float(rate == rate_per_s))
    return share
