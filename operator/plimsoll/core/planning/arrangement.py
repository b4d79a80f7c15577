"""Arrangements: aggregated or disaggregated tiers, their sizes for a rate, and whether KV transfer pays off.

Problem: decode engines generate tokens evenly. But prompts then queue for fewer GPUs, their KV must be transferred, and
two tiers round up twice. On two H200s, one prefill and one decode engine never beat two aggregated engines on TTFT and
TPOT targets down to 200 and 15 ms. They won where TPOT had to stay below what aggregated engines reach.

Idea: no rule of thumb. The same model sizes both for the same rate, the disaggregated one with the handover included in
TTFT, and GPUs are counted. The disaggregated arrangement must save a clear part of them, because it has more failure
modes. A fabric on which a prompt token takes longer than its local prefill rules it out.

A running fleet excludes requests that miss alone on an idle replica, because no size helps them. A plan must tell
whether users will get the SLO, so here they count as missed. If they exceed the allowed misses, no fleet is feasible.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from plimsoll.core.capacity.attainment import attainment
from plimsoll.core.capacity.goodput import goodput_knee_per_s
from plimsoll.core.capacity.sizing import (
    MAX_RELAXATIONS,
    MAX_SIZED_REPLICAS,
    Infeasible,
    Sizing,
    find_infeasibility,
    size_tier,
)
from plimsoll.core.capacity.slo_capacity import binding_constraint, slo_capacity_per_s
from plimsoll.core.capacity.tier_model import (
    HTTP_OVERHEAD_PER_TOKEN_S,
    HTTP_OVERHEAD_S,
    Constraint,
    TierProfile,
    TierSpec,
    build_profile,
    tpot_target,
    unloaded_ttft_s,
)
from plimsoll.core.engine_model.inter_token import LIGHT_LOAD
from plimsoll.core.engine_model.kv_transfer import TransferAssessment, TransferStats, assess, recompute_s_per_token
from plimsoll.core.planning.machine_model import Machine
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role, Unavailable
from plimsoll.core.workload import FloatArray, Workload

MAX_DISAGGREGATED_GPU_RATIO: Final = 0.9  # share of the aggregated GPUs; the disaggregated arrangement must need less
NVLINK_BYTES_PER_S: Final = 100e9  # between two H200s of one host, blocks of 128 tokens, measured; no pod has it
RDMA_BYTES_PER_S: Final = 50e9  # a device of 400 Gb/s
_BISECTIONS: Final = 20
_RELAXATION_FACTOR: Final = 1.05  # factor by which the search for a feasible SLO relaxes targets
_TRANSFER_LATENCY_S: Final = 1.9e-3  # of a transfer, besides its bytes and its posting
_HANDOVER_STEPS: Final = (
    2.5  # steps of the decode engine: the rest of one before the posting, one to observe the end, one to decode
)


@dataclass(frozen=True, eq=False)
class Arrangement:
    """One serve tier, or a prefill tier and a decode tier, sized for a rate. Parallel tuples."""

    tiers: tuple[TierSpec, ...]
    machines: tuple[Machine, ...]
    sizings: tuple[Sizing, ...]  # shares of all requests
    slo_capacity_per_s: float  # SLO capacity without admission control, requests/s
    too_long_share: float = 0.0  # share of the requests that the engine rejects for their length

    @property
    def disaggregated(self) -> bool:
        return len(self.tiers) > 1

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(one.replicas for one in self.sizings)

    @property
    def counts(self) -> dict[Role, int]:
        """Replicas by tier."""
        return {tier.role: count for tier, count in zip(self.tiers, self.replicas, strict=True)}

    @property
    def gpus(self) -> int:
        return sum(s.replicas * m.gpus for s, m in zip(self.sizings, self.machines, strict=True))

    @property
    def binding_constraint(self) -> Constraint:
        """Binding constraint of the tier with the lowest SLO capacity."""
        return min(self.sizings, key=lambda one: one.slo_capacity_per_s).constraint

    @property
    def goodput_knee_per_s(self) -> float:
        """Goodput knee: the rate of highest goodput without admission control."""
        pairs = zip(self.tiers, self.replicas, strict=True)
        return min(float(goodput_knee_per_s(build_profile(tier), count)[0]) for tier, count in pairs)


@dataclass(frozen=True)
class InfeasibleArrangement(Infeasible):
    """infeasible_share: share of the requests that miss alone on an idle replica."""

    infeasible_share: float = 0.0


def aggregated_tier(machine: Machine, workload: Workload, slo: Slo, arrival_cv2: float = 1.0) -> TierSpec:
    """A serve tier, whose engines prefill and decode."""
    model = machine.serve_model(workload, slo.tpot_s or math.inf)
    return TierSpec(Role.SERVE, model, workload, machine.limits, slo, arrival_cv2=arrival_cv2)


def disaggregated_tiers(
    prefill: Machine, decode: Machine, workload: Workload, slo: Slo, bytes_per_s: float, arrival_cv2: float = 1.0
) -> tuple[TierSpec, TierSpec]:
    """A prefill tier and a decode tier, each with the part of a mean request's TTFT that is spent in the other.

    Raises ValueError if the SLO has no TTFT target, because a prefill tier then has none.
    """
    handover = workload.mean(handover_s(decode, workload, bytes_per_s))
    model = decode.decode_model(workload, slo.tpot_s or math.inf)
    prefill_tier = TierSpec(
        Role.PREFILL,
        prefill.prefill_model,
        workload,
        prefill.limits,
        slo,
        arrival_cv2=arrival_cv2,
        ttft_outside_s=handover,
    )
    prefill_ttft_s = workload.mean(unloaded_ttft_s(replace(prefill_tier, ttft_outside_s=0.0)))
    decode_tier = TierSpec(
        Role.DECODE, model, workload, decode.limits, slo, transfer=decode.transfer, arrival_cv2=arrival_cv2,
        ttft_outside_s=prefill_ttft_s + handover - 1.5 * model.base_s,
    )  # fmt: skip
    return prefill_tier, decode_tier


def handover_s(decode: Machine, workload: Workload, bytes_per_s: float) -> FloatArray:
    """Time from the end of the remote prefill to the first token, by row, on an idle decode engine, seconds.

    HTTP, 2.5 steps, posting, and the bytes. Against one request at a time on two H200s of one host (128 to 8,192
    tokens, blocks of 128), it is 2 to 9 ms too long.
    """
    step = decode.cool.base_s * decode.transfer.step_factor
    http = HTTP_OVERHEAD_S + HTTP_OVERHEAD_PER_TOKEN_S * workload.prompt_tokens
    return http + _HANDOVER_STEPS * step + _transfer_time_s(decode, workload, bytes_per_s)


def _transfer_time_s(decode: Machine, workload: Workload, bytes_per_s: float) -> FloatArray:
    bytes_moved = workload.uncached_tokens * decode.kv_bytes_per_token
    return decode.transfer.post_s(workload.uncached_tokens) + _TRANSFER_LATENCY_S + bytes_moved / bytes_per_s


def assess_transfer(decode: Machine, workload: Workload, bytes_per_s: float) -> TransferAssessment | Unavailable:
    """Whether transferring a prompt's KV takes less than its local prefill; `Unavailable` without a prompt token.

    It is the assessment that the operator makes from engine counters, applied to a plan.
    """
    recompute = recompute_s_per_token(decode.hot, workload, decode.limits.token_budget)
    if isinstance(recompute, Unavailable):
        return recompute
    request_count = 1e6 / workload.mean(workload.uncached_tokens)  # requests, enough for an assessment
    posting_s = workload.mean(decode.transfer.post_s(workload.uncached_tokens))
    stats = TransferStats(
        1e6, request_count * workload.mean(_transfer_time_s(decode, workload, bytes_per_s)), request_count * posting_s
    )
    return assess(stats, recompute)


def size_arrangement(
    tiers: tuple[TierSpec, ...],
    machines: tuple[Machine, ...],
    rate_per_s: float,
    headroom: float = 0.0,
    too_long_share: float = 0.0,
) -> Arrangement | InfeasibleArrangement:
    """The fewest replicas of all tiers together that meet the SLO without admission control.

    too_long_share: share of the requests that the engine rejects for their length; the tiers' workload excludes them.

    Sizing assumes admission control and looks at one tier. From its result on, the tier that gains most gets one more
    replica until the product of the attainments is enough. Admission control is then a reserve, and the expected
    latency is within the SLO. Misses in the tiers are taken as independent.
    """
    required_rate = rate_per_s / (1 - headroom)
    profiles = _profiles_of_all_requests(tiers, too_long_share)
    infeasible_share = 1 - math.prod(1 - _infeasible_share(tier_profile) for tier_profile in profiles)
    counts: list[int] = []
    for tier in tiers:
        sizing = size_tier(tier, rate_per_s, headroom)
        if isinstance(sizing, Infeasible):
            return InfeasibleArrangement(sizing.constraint, sizing.nearest_slo, sizing.remedy, infeasible_share)
        counts.append(sizing.replicas)
    unloaded_attainments = [
        _attainment_without_admission(tier_profile.without_bursts, 0.0, 1) for tier_profile in profiles
    ]  # bursty arrivals are no reason: see `sizing.find_infeasibility`
    if math.prod(unloaded_attainments) < tiers[0].slo.share:  # not even with idle replicas
        worst = unloaded_attainments.index(min(unloaded_attainments))
        return InfeasibleArrangement(
            binding_constraint(profiles[worst], 0.0, 1)[0], None, infeasible_share=infeasible_share
        )
    max_counts = [MAX_SIZED_REPLICAS] * len(tiers)
    max_attainments = _attainments(profiles, required_rate, max_counts)
    if math.prod(max_attainments) < tiers[0].slo.share:
        worst = max_attainments.index(min(max_attainments))
        return InfeasibleArrangement(
            binding_constraint(profiles[worst], required_rate, MAX_SIZED_REPLICAS)[0],
            None,
            infeasible_share=infeasible_share,
        )

    def share_with(others: Sequence[int], tier_index: int, count: int) -> float:
        return math.prod(
            _attainments(profiles, required_rate, [*others[:tier_index], count, *others[tier_index + 1 :]])
        )

    for tier_index, min_count in enumerate(
        tuple(counts)
    ):  # no fewer would do if the other tier were as large as can be
        candidates = range(min_count, MAX_SIZED_REPLICAS)
        counts[tier_index] += bisect_left(
            candidates, tiers[0].slo.share, key=partial(share_with, max_counts, tier_index)
        )
    while math.prod(_attainments(profiles, required_rate, counts)) < tiers[0].slo.share:
        growable = [tier_index for tier_index, count in enumerate(counts) if count < MAX_SIZED_REPLICAS]
        counts[max(growable, key=lambda tier_index: share_with(counts, tier_index, counts[tier_index] + 1))] += 1
    return _arrangement(tiers, machines, profiles, rate_per_s, counts, too_long_share)


def with_replicas(arrangement: Arrangement, rate_per_s: float, replicas: Sequence[int]) -> Arrangement:
    """The same arrangement with other numbers of replicas, for a rate."""
    tiers, too_long_share = arrangement.tiers, arrangement.too_long_share
    profiles = _profiles_of_all_requests(tiers, too_long_share)
    return _arrangement(tiers, arrangement.machines, profiles, rate_per_s, replicas, too_long_share)


def _profiles_of_all_requests(tiers: Sequence[TierSpec], too_long_share: float) -> list[TierProfile]:
    return [
        count_infeasible(build_profile(tier), 0.0 if number else too_long_share) for number, tier in enumerate(tiers)
    ]


def _arrangement(
    tiers: tuple[TierSpec, ...],
    machines: tuple[Machine, ...],
    profiles: Sequence[TierProfile],
    rate_per_s: float,
    replicas: Sequence[int],
    too_long_share: float,
) -> Arrangement:
    pairs = list(zip(profiles, replicas, strict=True))
    sizings = tuple(_build_sizing(tier_profile, rate_per_s, count) for tier_profile, count in pairs)
    return Arrangement(tiers, machines, sizings, _joint_capacity_per_s(pairs, tiers[0].slo.share), too_long_share)


def count_infeasible(profile: TierProfile, too_long_share: float = 0.0) -> TierProfile:
    """The same profile with shares of all requests. Requests that miss alone or are too long form a class that always
    misses.
    """
    served = (1 - too_long_share) * profile.weights
    never_served, zeros = too_long_share + served[:, -1:], np.zeros((len(profile), 1))
    return replace(
        profile,
        slack_s=np.hstack((np.full_like(never_served, -math.inf), profile.slack_s)),
        weights=np.hstack((never_served, served[:, :-1], zeros)),
    )


def _infeasible_share(all_requests: TierProfile) -> float:
    """Share of all requests that misses alone on an idle replica."""
    return float(all_requests.weights[0, 0]) if all_requests.feasible_share[0] > 0 else 1.0


def nearest_slo(build: Callable[[Slo], TierSpec], slo: Slo, too_long_share: float = 0.0) -> Slo | None:
    """The SLO nearest to `slo` that a lightly loaded replica meets for its share of all requests.

    build: returns the tier for an SLO. The search starts at the nearest SLO that sizing finds, and relaxes the target
    that most requests miss, step by step. None where no target helps.
    """
    for _ in range(MAX_RELAXATIONS):
        tier = build(slo)
        infeasibility = find_infeasibility(tier)
        if infeasibility is not None:
            if infeasibility.nearest_slo is None:
                return None
            slo = infeasibility.nearest_slo
            continue
        all_requests = count_infeasible(build_profile(tier), too_long_share)
        light_rate = all_requests.saturation_rate_per_s(1, admission=False) * LIGHT_LOAD
        light_attainment = attainment(all_requests, light_rate, 1, admission=False)
        if light_attainment.within_slo[0] >= slo.share:
            return slo
        tpot_misses_more = (
            light_attainment.within_tpot[0] - light_attainment.within_slo[0] < 1 - light_attainment.within_tpot[0]
        )
        if slo.ttft_s is not None and not tpot_misses_more:
            slo = replace(slo, ttft_s=slo.ttft_s * _RELAXATION_FACTOR)
        elif slo.e2e_s is not None and (slo.tpot_s is None or tpot_target(tier)[1] is Constraint.E2E):
            slo = replace(slo, e2e_s=slo.e2e_s * _RELAXATION_FACTOR)
        elif slo.tpot_s is not None:
            slo = replace(slo, tpot_s=slo.tpot_s * _RELAXATION_FACTOR)
    return None


def _attainments(profiles: Sequence[TierProfile], rate_per_s: float, replicas: Sequence[int]) -> list[float]:
    return [
        _attainment_without_admission(profile, rate_per_s, count)
        for profile, count in zip(profiles, replicas, strict=True)
    ]


def _attainment_without_admission(profile: TierProfile, rate_per_s: float, replicas: int) -> float:
    """Attainment of all requests without admission control; 0 where a queue grows for ever."""
    if replicas < 1 or rate_per_s >= profile.saturation_rate_per_s(replicas, admission=False)[0]:
        return 0.0
    return float(attainment(profile, rate_per_s, replicas, admission=False).within_slo[0])


def _build_sizing(profile: TierProfile, rate_per_s: float, replicas: int) -> Sizing:
    capacity_per_s = slo_capacity_per_s(profile, replicas, admission=False)
    return Sizing(
        replicas,
        binding_constraint(profile, capacity_per_s, replicas)[0],
        float(profile.rho(rate_per_s, replicas)[0]),
        float(capacity_per_s[0]),
        _attainment_without_admission(profile, rate_per_s, replicas),
        _attainment_without_admission(profile, rate_per_s, replicas - 1),
        _infeasible_share(profile),
    )


def _joint_capacity_per_s(pairs: list[tuple[TierProfile, int]], share: float) -> float:
    """The highest rate at which the tiers together meet the share."""
    low, high = 0.0, min(float(slo_capacity_per_s(profile, count, admission=False)[0]) for profile, count in pairs)
    if len(pairs) == 1:
        return high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if math.prod(_attainment_without_admission(profile, middle, count) for profile, count in pairs) >= share:
            low = middle
        else:
            high = middle
    return low


def choose_arrangement(
    aggregated: Arrangement | Infeasible, disaggregated: Arrangement | Infeasible
) -> Arrangement | None:
    """The disaggregated arrangement if it alone is feasible or saves a clear part of the GPUs, else the aggregated one,
    if any.
    """
    if isinstance(disaggregated, Infeasible):
        return None if isinstance(aggregated, Infeasible) else aggregated
    if isinstance(aggregated, Infeasible) or disaggregated.gpus < MAX_DISAGGREGATED_GPU_RATIO * aggregated.gpus:
        return disaggregated
    return aggregated
