"""Sizing: how many replicas a rate needs, or why no number of replicas is enough.

Problem: the result must be the smallest fleet that meets the SLO, for a thousand tiers within a tick. It must name the
binding constraint and the attainment with one replica fewer. Some SLOs cannot be met by any fleet, because a request
alone on an idle replica already violates them.

Idea: attainment at a rate grows with the replicas. The smallest fleet is therefore found by doubling steps and
bisection, for all tiers at once; a tier leaves the search when it is settled. The search starts at the replicas that
can serve the load at all, or at the last result. `Infeasible` is a result besides `Sizing`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plimsoll.core.capacity.attainment import attainment
from plimsoll.core.capacity.e2e import e2e_for_tpot_s
from plimsoll.core.capacity.queueing import Floats, validate_number
from plimsoll.core.capacity.slo_capacity import binding_constraint, slo_capacity_per_s, weighted_miss_share
from plimsoll.core.capacity.tier_model import (
    MAX_RATE_PER_S,
    Constraint,
    TierProfile,
    TierSpec,
    build_profile,
    inter_token_latency,
    tpot_target,
    ttft_without_wait_s,
    unloaded_ttft_s,
)
from plimsoll.core.engine_model.inter_token import ITL_SHARE, LIGHT_LOAD, itl_quantile_s
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.units import format_number

MAX_SIZED_REPLICAS: Final = 100_000  # no larger fleet is returned
_NEGLIGIBLE_RATE_PER_S: Final = 1e-6  # requests/s that one replica carries wherever the SLO is feasible
_NEGLIGIBLE_LOAD: Final = 1e-6  # the same as a share of what all slots of a replica could serve
_RELAXATION_FACTOR: Final = 1.05  # factor by which the search for a feasible SLO relaxes targets
MAX_RELAXATIONS: Final = 120
_ITL_REMEDY: Final = "a smaller --max-num-batched-tokens, or a prefill tier, makes the gaps shorter"


@dataclass(frozen=True, eq=False)
class TierSizes:
    """Replicas of n tiers, arrays of shape (n,).

    replicas: 0 without load, infinity where no number is enough. utilisation: rho, the share of time that work takes.
    attainment: share of the requests feasible alone that are within the SLO. attainment_one_fewer: the same with one
    replica fewer, which rejects what it cannot serve at all.
    """

    replicas: Floats
    utilisation: Floats
    attainment: Floats
    attainment_one_fewer: Floats


@dataclass(frozen=True)
class Sizing:
    """Replicas of one tier for one rate.

    constraint: the one that this fleet reaches first. utilisation: rho, the share of time that work takes.
    slo_capacity_per_s: SLO capacity of this fleet, requests/s. attainment, attainment_one_fewer: as in `TierSizes`.
    infeasible_share: share of the requests that miss alone on an idle replica. They are served behind the others, and
    no other share includes them.
    """

    replicas: int
    constraint: Constraint
    utilisation: float
    slo_capacity_per_s: float
    attainment: float
    attainment_one_fewer: float
    infeasible_share: float


@dataclass(frozen=True)
class Infeasible:
    """No number of replicas meets the SLO.

    constraint: the violated target. nearest_slo: the nearest SLO that a replica at a tenth of its saturation rate
    meets, with only the necessary targets relaxed; None where no target helps (KV cache too small). remedy: what would
    help besides looser targets, as text; "" where nothing is known.
    """

    constraint: Constraint
    nearest_slo: Slo | None
    remedy: str = ""

    @property
    def hint(self) -> str:
        """The remedy, as the end of a sentence."""
        return f"; {self.remedy}" if self.remedy else ""


def size_tier(tier: TierSpec, rate_per_s: float, headroom: float = 0.0) -> Sizing | Infeasible:
    """The smallest number of replicas whose SLO capacity, less `headroom` (a share of it), covers the tier's rate.

    rate_per_s: requests per second of the whole tier, first attempts only, never of one pod. Raises a ValueError that
    names the argument.
    """
    infeasibility = find_infeasibility(tier)
    if infeasibility is not None:
        return infeasibility
    profile = build_profile(tier)
    sizes = size_tiers(profile, rate_per_s, headroom)
    if math.isinf(sizes.replicas[0]):
        return _explain_infeasible(tier)
    replicas = int(sizes.replicas[0])
    capacity_per_s = slo_capacity_per_s(profile, max(replicas, 1))
    return Sizing(
        replicas=replicas,
        constraint=binding_constraint(profile, capacity_per_s, max(replicas, 1))[0],
        utilisation=float(sizes.utilisation[0]),
        slo_capacity_per_s=float(capacity_per_s[0]) if replicas else 0.0,
        attainment=float(sizes.attainment[0]),
        attainment_one_fewer=float(sizes.attainment_one_fewer[0]),
        infeasible_share=float(1 - profile.feasible_share[0]),
    )


def find_infeasibility(tier: TierSpec) -> Infeasible | None:
    """Why no number of replicas meets the SLO, however low the rate; None where some number does.

    Bursty arrivals are no reason, because enough replicas even them out.
    """
    return (
        None
        if is_feasible(build_profile(tier))[0]
        else _explain_infeasible(replace(tier, arrival_cv2=min(tier.arrival_cv2, 1.0)))
    )


def is_feasible(profile: TierProfile) -> NDArray[np.bool_]:
    """Whether some number of replicas meets the SLO of each tier at a low enough rate, (n,)."""
    unbursty = profile.without_bursts
    return np.isfinite(size_tiers(unbursty, _NEGLIGIBLE_RATE_PER_S).replicas) & _meets_slo(unbursty, _NEGLIGIBLE_LOAD)


def size_tiers(
    profile: TierProfile, rate_per_s: ArrayLike, headroom: ArrayLike = 0.0, start: ArrayLike | None = None
) -> TierSizes:
    """`size_tier` for n tiers in one call. start: replicas at which the search begins, such as the last result; any
    value works.
    """
    rate = np.broadcast_to(validate_number("rate_per_s", rate_per_s), profile.share.shape)
    if np.any(rate > MAX_RATE_PER_S):
        raise ValueError(
            f"rate_per_s must be at most {format_number(MAX_RATE_PER_S)}: more is no load but a wrong estimate"
        )
    headroom_share = validate_number("headroom", headroom)
    if np.any(headroom_share >= 1):
        raise ValueError(f"headroom must be below 1, not {headroom!r}")
    required_rate = np.broadcast_to(rate / (1 - headroom_share), rate.shape)
    with np.errstate(divide="ignore", invalid="ignore"):  # a step limit of 0: no number of replicas is enough
        max_rate = np.minimum(
            np.minimum(profile.saturation_rate_per_s(1), profile.step_limit_per_s), profile.itl_limit_per_s
        )
        min_replicas = np.where(rate > 0, np.maximum(np.ceil(required_rate / max_rate * (1 - 1e-12)), 1.0), 1.0)
    search_start = (
        min_replicas if start is None else np.maximum(np.where(np.isfinite(start), start, min_replicas), min_replicas)
    )
    search = _search_replicas(
        profile, required_rate, min_replicas, np.minimum(np.floor(search_start), MAX_SIZED_REPLICAS)
    )
    replicas = np.where(rate > 0, search.replicas, 0.0)
    active = np.flatnonzero(np.isfinite(replicas) & (rate > 0))
    attainments, one_fewer = np.where(rate > 0, 0.0, 1.0), np.zeros(len(profile))
    utilisation = np.zeros(len(profile))
    utilisation[active] = profile.select(active).rho(rate[active], replicas[active])
    same_rate = required_rate[active] == rate[active]  # with headroom the search used another rate
    for shares, search_shares, replica_counts in (
        (attainments, search.share_enough, replicas),
        (one_fewer, search.share_one_fewer, replicas - 1),
    ):
        shares[active] = np.where(same_rate, search_shares[active], np.nan)
        unevaluated = active[np.isnan(shares[active])]
        shares[unevaluated] = _attainment_at(
            profile.select(unevaluated), rate[unevaluated], replica_counts[unevaluated]
        )
    return TierSizes(replicas, utilisation, attainments, one_fewer)


@dataclass(frozen=True, eq=False)
class _SearchResult:
    """Fewest replicas, and the attainment with them and with one fewer; NaN where it was not computed."""

    replicas: Floats
    share_enough: Floats
    share_one_fewer: Floats


def _search_replicas(
    profile: TierProfile, required_rate: Floats, min_replicas: Floats, search_start: Floats
) -> _SearchResult:
    """The fewest replicas that are enough, at least `min_replicas`; infinity if MAX_SIZED_REPLICAS are not enough."""
    sufficient, insufficient, tried = np.full(len(profile), np.inf), min_replicas - 1, search_start.copy()
    share_enough, share_one_fewer = np.full(len(profile), np.nan), np.full(len(profile), np.nan)
    stride = 1.0
    unsettled = np.flatnonzero(min_replicas <= MAX_SIZED_REPLICAS)
    while unsettled.size:
        replica_counts, rows = tried[unsettled], profile.select(unsettled)
        within_slo = attainment(rows, required_rate[unsettled], replica_counts)
        shares, meets_slo = (
            within_slo.within_slo,
            weighted_miss_share(rows, within_slo, required_rate[unsettled], replica_counts) <= 1 - rows.share,
        )
        sufficient[unsettled[meets_slo]], share_enough[unsettled[meets_slo]] = (
            replica_counts[meets_slo],
            shares[meets_slo],
        )
        insufficient[unsettled[~meets_slo]], share_one_fewer[unsettled[~meets_slo]] = (
            replica_counts[~meets_slo],
            shares[~meets_slo],
        )
        # Doubling steps up or down until both sides are known, then halves.
        top = np.where(np.isinf(sufficient), 0.0, sufficient)
        midpoint = np.where(
            np.isnan(share_one_fewer), np.maximum(top - stride, insufficient + 1), np.floor((insufficient + top) / 2)
        )
        tried = np.where(np.isinf(sufficient), np.minimum(insufficient + stride, MAX_SIZED_REPLICAS), midpoint)
        stride *= 2
        unsettled = unsettled[
            (sufficient[unsettled] - insufficient[unsettled] > 1) & (insufficient[unsettled] < MAX_SIZED_REPLICAS)
        ]
    return _SearchResult(sufficient, share_enough, share_one_fewer)


def _attainment_at(profile: TierProfile, rate: Floats, replicas: Floats) -> Floats:
    """Attainment; the excess over the saturation rate is rejected at random, and zero replicas serve no request."""
    replica_counts = np.maximum(replicas, 1.0)
    served = np.minimum(rate, profile.saturation_rate_per_s(replica_counts))
    return np.asarray(
        np.where(replicas > 0, attainment(profile, served, replica_counts).within_slo * served / rate, 0.0)
    )


def _meets_slo(profile: TierProfile, load: float) -> NDArray[np.bool_]:
    """Whether one replica at this share of what all its slots could serve meets the SLO, (n,)."""
    rate = profile.saturation_rate_per_s(1, admission=False) * load
    return np.asarray(attainment(profile, rate, 1).within_slo >= profile.share)


def _explain_infeasible(tier: TierSpec) -> Infeasible:
    profile, w = build_profile(tier), tier.workload
    if w.quantile(w.prompt_tokens + w.output_tokens, tier.slo.share) > tier.limits.kv_tokens:
        return Infeasible(Constraint.KV, None)
    if profile.tpot_s[0] < profile.tpot_unloaded_s[0]:
        broken_constraint = tpot_target(tier)[1]
    elif profile.itl_limit_per_s[0] <= 0:
        no_remedy = (
            tier.role is Role.DECODE
            or inter_token_latency(tier)[0].share_above(0.0, tier.slo.itl_s or math.inf) > 1 - ITL_SHARE
        )
        return Infeasible(Constraint.ITL, _nearest_feasible_slo(tier, Constraint.ITL), "" if no_remedy else _ITL_REMEDY)
    else:
        broken_constraint = binding_constraint(profile, 0.0, 1)[0] if profile.feasible_share[0] > 0 else Constraint.TTFT
    return Infeasible(broken_constraint, _nearest_feasible_slo(tier, broken_constraint))


def _nearest_feasible_slo(tier: TierSpec, broken_constraint: Constraint) -> Slo | None:
    """The nearest SLO that a lightly loaded replica meets: targets are relaxed one by one in small steps."""
    slo, w = tier.slo, tier.workload
    none_fit = build_profile(tier).weights[0, :-1].sum() <= 0
    if slo.ttft_s is not None and (
        none_fit or broken_constraint not in (Constraint.TPOT, Constraint.E2E, Constraint.ITL)
    ):
        allowance = slo.ttft_per_1k_tokens_s * w.prompt_tokens / 1000
        required_ttft_s = np.maximum(
            unloaded_ttft_s(tier) - allowance, 0.0
        )  # long prompts may have more than they need
        slo = replace(slo, ttft_s=max(slo.ttft_s, float(w.quantile(required_ttft_s, slo.share))))
    for _ in range(MAX_RELAXATIONS):
        profile = build_profile(replace(tier, slo=slo))
        if profile.itl_limit_per_s[0] <= 0:
            itl, max_rate_per_s = inter_token_latency(replace(tier, slo=slo))
            slo = replace(slo, itl_s=itl_quantile_s(itl, LIGHT_LOAD * max_rate_per_s))
            continue
        if profile.feasible_share[0] > 0 and _meets_slo(profile, LIGHT_LOAD)[0]:
            return slo
        light_rate = profile.saturation_rate_per_s(1, admission=False) * LIGHT_LOAD
        without_admission = attainment(profile, light_rate, 1, admission=False)
        # If it is met without admission control, the batch that TPOT allows is the limit.
        tpot_breaks = without_admission.within_tpot[0] < slo.share or without_admission.within_slo[0] >= slo.share
        if math.isfinite(profile.tpot_s[0]) and (tpot_breaks or slo.ttft_s is None):
            slo = _relax_tpot(replace(tier, slo=slo), float(profile.tpot_unloaded_s[0]))
        elif slo.ttft_s is not None:
            slo = replace(slo, ttft_s=slo.ttft_s * _RELAXATION_FACTOR)
    return None


def _relax_tpot(tier: TierSpec, unloaded_tpot_s: float) -> Slo:
    """The SLO with the target behind TPOT relaxed by one step, at least to what an idle replica meets."""
    slo = tier.slo
    if tpot_target(tier)[1] is Constraint.E2E and slo.e2e_s is not None:
        reachable_e2e_s = e2e_for_tpot_s(
            slo, tier.workload, ttft_without_wait_s(tier), tier.model.base_s, unloaded_tpot_s
        )
        return replace(slo, e2e_s=max(slo.e2e_s * _RELAXATION_FACTOR, reachable_e2e_s))
    assert slo.tpot_s is not None
    return replace(slo, tpot_s=max(slo.tpot_s * _RELAXATION_FACTOR, unloaded_tpot_s))
