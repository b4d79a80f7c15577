"""Tier model: what bounds the requests of a tier within the SLO. `attainment` evaluates it at a rate.

Problem: a small model on a big GPU never queues, but slows every stream. A large model runs out of slots or KV cache
while its steps are short. A prefill engine serves first come, first served. Each violates another target first, by its
tail and not by its mean, and a request is within the SLO only if it meets all targets together.

Idea: one reduction for all of them. A tier becomes a `TierProfile`: the step time model, the queue in front of its
slots, and a few classes of requests by the time that their own service leaves until the TTFT target. Attainment at a
rate on c replicas is then a sum over classes, one vectorised expression for any number of tiers. The SLO capacity
(`slo_capacity.slo_capacity_per_s`) and the goodput knee (`goodput.goodput_knee_per_s`) follow from it.

Attainment excludes requests that miss their targets alone on an idle replica, but the load includes their work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plimsoll.core.capacity.e2e import first_token_deadline_s, tpot_for_e2e_s
from plimsoll.core.capacity.kv_capacity import kv_sequences, kv_sequences_at_end
from plimsoll.core.capacity.queueing import (
    Floats,
    arrival_peakedness,
    step_wait_s,
    validate_number,
)
from plimsoll.core.capacity.slack_classes import group_by_slack
from plimsoll.core.engine_model.batching import share_within_tpot, step_time_budget_s
from plimsoll.core.engine_model.inter_token import InterTokenLatency, max_rate_within_itl
from plimsoll.core.engine_model.step_time import (
    EngineLimits,
    KvTransfer,
    StepModel,
    TierWork,
    decode_tier,
    serve_tier,
    tail_at,
    tail_table,
)
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.workload import FloatArray, Workload

HTTP_OVERHEAD_S: Final = 4.0e-3  # per request outside the engine: parsing and queues, measured with vLLM 0.26
HTTP_OVERHEAD_PER_TOKEN_S: Final = 0.63e-6  # and per prompt token
MAX_RATE_PER_S: Final = 1e6  # requests per second of one tier; a higher estimate is wrong

_IDLE_WAIT_STEPS: Final = 1.5  # steps, in the mean, before the own prefill on an idle replica
_RHO_POINTS: Final = 41  # of the tail factor's table, from rho 0 to 1
_NODES, _WEIGHTS = (0.5 * (np.polynomial.legendre.leggauss(6)[k] + (1 - k)) for k in (0, 1))  # on 0 .. 1
_MIN_TAIL_SHARE: Final = 0.75  # the spread of TPOT is derived from a quantile well above the median
_GRID_POINTS: Final = 33  # points of a grid search, which narrows by a factor of 16 in each round
_LIMIT_REFINEMENTS: Final = 3  # the limit need not be exact


class Constraint(StrEnum):
    """What limits the rate that a tier carries within the SLO."""

    TPOT = "TPOT"  # every stream slows: step time binds
    TTFT = "TTFT"  # prompts wait, or are prefilled in steps that have grown
    SLOTS = "slots"
    KV = "KV"
    E2E = "e2e"  # as TPOT, for the end-to-end target
    ITL = "itl"  # too many steps include a prefill, or all are too long, for the ITL target


CONSTRAINTS: Final = tuple(Constraint)


@dataclass(frozen=True, eq=False)
class TierSpec:
    """Inputs of sizing for one tier. Times in seconds. Raises a ValueError that names the argument.

    transfer: cost of receiving KV on a decode tier, None elsewhere. arrival_cv2: squared coefficient of variation of
    the gaps between arrivals, over the time scale of the wait; it fills slots and lengthens queues, not steps.
    tpot_tail_scale: measured tail of TPOT over its prior. ttft_outside_s: part of TTFT outside the tier (queued at the
    gateway, in the other tier, in transfer). itl_model: step model for ITL, None for `model`. gateways: number of
    gateways that send requests, each with a share of every replica's slots.
    """

    role: Role
    model: StepModel
    workload: Workload
    limits: EngineLimits
    slo: Slo
    transfer: KvTransfer | None = None
    arrival_cv2: float = 1.0
    tpot_tail_scale: float = 1.0
    ttft_outside_s: float = 0.0
    itl_model: StepModel | None = None
    gateways: int = 1

    def __post_init__(self) -> None:
        validate_number("arrival_cv2", self.arrival_cv2)
        validate_number("tail_scale", self.tpot_tail_scale, above=True)
        validate_number("elsewhere_s", self.ttft_outside_s)
        validate_number("gateways", self.gateways, least=1)
        if (self.role is Role.DECODE) != (self.transfer is not None):
            raise ValueError("transfer belongs to a decode tier, and a decode tier needs it")
        if not self.slo.has_target_for(self.role):
            raise ValueError("slo.ttft_s is needed: a prefill tier has no other target")


@dataclass(frozen=True, eq=False)
class TierProfile:
    """n tiers reduced to numbers: arrays of shape (n,), or (n, K) for K classes and (n, G) for the tail's table.

    The last class holds the requests that miss alone: infinite slack, because they are never rejected for time.
    """

    share: Floats  # share of requests that must meet the SLO
    base_s: Floats  # step time: T = base / (1 - lambda work / c)
    work_s: Floats  # 0 on a prefill tier, whose steps are not shared
    stall_s: Floats  # mean prefill (or posting) of a request, in which decoding stands still
    stall_square_s2: Floats
    tpot_s: Floats  # target, infinite without one
    tpot_tail: Floats  # (n, G) SLO quantile of TPOT over its mean at rho = 0 .. 1
    steps: Floats  # queue before the slots: see queueing.slot_queue
    slot_base_s: Floats
    slot_sequence_s: Floats
    slots: Floats  # without admission control, with room for the tokens of each at its end
    batch: (
        Floats  # that admission control fills, so that streams meet the TPOT target and fit the KV cache until they end
    )
    share_within_tpot: Floats  # share of the admitted requests that do
    gateways: Floats  # that share the slots
    causes: NDArray[np.intp]  # (n, 3) indices in Constraint of the causes of misses: TPOT, preceding steps, slots
    arrival_cv2: Floats  # of each gateway's queue: squared coefficients of variation of gaps and services
    service_cv2: Floats
    peakedness: Floats  # variance over mean of the number of its requests in progress, with slots for all
    slack_s: Floats  # (n, K) TTFT target less own service, ascending
    weights: Floats  # (n, K) shares of the requests
    step_limit_per_s: Floats  # rate of one replica above which its steps alone violate the SLO; infinity if never
    itl_limit_per_s: Floats  # the same for its ITL; 0 if it is violated at any useful rate

    def __len__(self) -> int:
        return self.share.size

    def select(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> TierProfile:
        """The tiers selected by a mask or by indices."""
        return TierProfile(*(getattr(self, field.name)[rows] for field in fields(self)))

    @property
    def without_bursts(self) -> TierProfile:
        """The same tiers with Poisson arrivals."""
        return replace(self, arrival_cv2=np.minimum(self.arrival_cv2, 1.0), peakedness=np.minimum(self.peakedness, 1.0))

    @property
    def feasible_share(self) -> Floats:
        """Share of the requests that are within the SLO alone on an idle replica."""
        return np.where(self.tpot_s >= self.tpot_unloaded_s, self.weights[:, :-1].sum(axis=1), 0.0)

    @property
    def tpot_unloaded_s(self) -> Floats:
        """TPOT of a batch of one, s."""
        return self.base_s + self.slot_sequence_s

    def rho(self, rate_per_s: ArrayLike, replicas: ArrayLike) -> Floats:
        """Share of the replicas' time that the requests' work takes."""
        work = np.where(self.work_s > 0, self.work_s, self.slot_base_s)
        return np.asarray(np.asarray(rate_per_s, dtype=np.float64) * work / np.asarray(replicas, dtype=np.float64))

    def saturation_rate_per_s(self, replicas: ArrayLike, *, admission: bool = True) -> Floats:
        """Departures per second within TPOT while all slots are in use: the rate that any queue grows at."""
        slots, share = (self.batch, self.share_within_tpot) if admission else (self.slots, 1.0)
        rate_per_replica = share * slots / (self.steps * (self.slot_base_s + self.slot_sequence_s * slots))
        return np.asarray(rate_per_replica * np.asarray(replicas, dtype=np.float64))


def stack_profiles(profiles: list[TierProfile]) -> TierProfile:
    """Stack several profiles into one; at least one."""
    return TierProfile(*(np.concatenate([getattr(p, field.name) for p in profiles]) for field in fields(TierProfile)))


def build_profile(tier: TierSpec) -> TierProfile:
    """Reduce one tier to its profile. It takes 2 to 4 ms: cache it while model and mix stay the same."""
    if tier.role is Role.PREFILL:
        return _prefill_profile(tier)
    profile = _shared_profile(tier)
    return replace(profile, step_limit_per_s=_step_limit_per_s(profile))


def unloaded_ttft_s(tier: TierSpec) -> FloatArray:
    """TTFT of each row of the workload on an idle replica, seconds.

    Serve and decode: an arrival waits for the rest of one step and the whole of the next, 1.5 steps in the mean.
    """
    w = tier.workload
    ttft_s = np.full(w.weights.size, float(tier.ttft_outside_s))
    if tier.role is not Role.PREFILL:
        ttft_s += _IDLE_WAIT_STEPS * tier.model.base_s
    if tier.role is not Role.DECODE:
        ttft_s += tier.model.prefill_s(w.uncached_tokens, w.cached_tokens, tier.limits.token_budget)
        ttft_s += HTTP_OVERHEAD_S + HTTP_OVERHEAD_PER_TOKEN_S * w.prompt_tokens
    return ttft_s


def tpot_target(tier: TierSpec) -> tuple[float, Constraint]:
    """TPOT that meets the SLO, seconds: the `tpot` target, or what `e2e` leaves if that is less; infinity without
    either.
    """
    slo_tpot_s = math.inf if tier.slo.tpot_s is None else tier.slo.tpot_s
    if tier.slo.e2e_s is None:
        return slo_tpot_s, Constraint.TPOT
    e2e_tpot_s = tpot_for_e2e_s(tier.slo, tier.workload, ttft_without_wait_s(tier), tier.model.base_s)
    return (e2e_tpot_s, Constraint.E2E) if e2e_tpot_s < slo_tpot_s else (slo_tpot_s, Constraint.TPOT)


def ttft_without_wait_s(tier: TierSpec) -> FloatArray:
    """`unloaded_ttft_s` without the steps that an arrival waits for."""
    return unloaded_ttft_s(tier) - (tier.role is not Role.PREFILL) * _IDLE_WAIT_STEPS * tier.model.base_s


def _wait_slack_s(tier: TierSpec) -> FloatArray:
    """Slack of each row beyond `unloaded_ttft_s`, seconds; the same for all rows where TTFT is only predicted."""
    slo, w = tier.slo, tier.workload
    if slo.ttft_s is None and slo.e2e_s is not None:
        remaining_s = first_token_deadline_s(slo, w, tpot_target(tier)[0]) - float(
            w.quantile(unloaded_ttft_s(tier), slo.share)
        )
        return np.full(w.weights.size, remaining_s)
    return np.minimum(
        slo.ttft_targets_s(w.prompt_tokens) - unloaded_ttft_s(tier), 1e9
    )  # no TTFT target: any wait will do


def _slack_classes(tier: TierSpec) -> tuple[Floats, Floats]:
    """Slack and weight of the classes, shapes (1, K): requests that miss alone are the last one."""
    slack, w = _wait_slack_s(tier), tier.workload
    fits = w.prompt_tokens + w.output_tokens <= tier.limits.kv_tokens
    means, weights = group_by_slack(slack, w.weights, (slack >= 0) & fits)
    return np.append(means, math.inf)[None], np.append(weights, max(0.0, 1 - weights.sum()))[None]


def _prefill_profile(tier: TierSpec) -> TierProfile:
    """c servers, first come first served; a request's service is the prefill of its prompt."""
    w = tier.workload
    service = tier.model.prefill_s(w.uncached_tokens, w.cached_tokens, tier.limits.token_budget)
    mean = w.mean(service)
    slack, weights = _slack_classes(tier)
    return TierProfile(
        **_single_row(
            share=tier.slo.share, base_s=0.0, work_s=0.0, stall_s=0.0, stall_square_s2=0.0, tpot_s=math.inf,
            steps=1.0, slot_base_s=mean, slot_sequence_s=0.0, slots=1.0, gateways=1.0,
            batch=1.0, share_within_tpot=1.0, arrival_cv2=tier.arrival_cv2, service_cv2=w.scv(service) or 0.0,
            peakedness=arrival_peakedness(tier.arrival_cv2, w.overlap(service)),
        ),
        tpot_tail=np.ones((1, _RHO_POINTS)), causes=_cause_row(Constraint.TPOT, Constraint.TTFT, Constraint.TTFT),
        slack_s=slack, weights=weights, step_limit_per_s=np.array([math.inf]), itl_limit_per_s=np.array([math.inf]),
    )  # fmt: skip


def inter_token_latency(tier: TierSpec) -> tuple[InterTokenLatency, float]:
    """ITL model of one replica of a serve or decode tier, and the highest rate that its other limits allow."""
    work = _tier_work(replace(tier, model=tier.itl_model or tier.model))
    itl = InterTokenLatency(work, None if tier.role is Role.DECODE else tier.limits.token_budget)
    return itl, work.rate_per_s(min(_slot_limits(tier, _tier_work(tier)).values()))


def _tier_work(tier: TierSpec) -> TierWork:
    model, w = tier.model, tier.workload
    return serve_tier(model, w) if tier.transfer is None else decode_tier(model, w, tier.transfer)


def _slot_limits(tier: TierSpec, work: TierWork) -> dict[Constraint, float]:
    """Sequences that each limit except ITL allows at once on a replica, as admission control fills it."""
    kv_limit = kv_sequences(tier.workload, tier.limits.kv_tokens, tier.gateways)
    slots = {Constraint.SLOTS: float(tier.limits.max_sequences), Constraint.KV: kv_limit}
    if tier.role is Role.DECODE:  # its steps are even: a batch within the target keeps each stream within it
        target, tpot_constraint = tpot_target(tier)
        slots[tpot_constraint] = min(work.batch(target), 1e9)
    return slots


def _shared_profile(tier: TierSpec) -> TierProfile:
    """Profile of steps that all running sequences share, behind a queue for slots or KV."""
    w, work = tier.workload, _tier_work(tier)
    steps = work.mean_output_tokens
    slack, weights = _slack_classes(tier)
    target, tpot_constraint = tpot_target(tier)
    cv2 = 1.0 + (tier.arrival_cv2 - 1.0) / tier.gateways  # of a part that is drawn from all at random
    first_token_constraint = (
        Constraint.E2E if tier.slo.ttft_s is None and tier.slo.e2e_s is not None else Constraint.TTFT
    )
    slots, itl_limit, itl_batch = _slot_limits(tier, work), math.inf, math.inf
    if tier.slo.itl_s is not None:
        itl, max_rate_per_s = inter_token_latency(tier)
        itl_limit = max_rate_within_itl(itl, max_rate_per_s, tier.slo.itl_s)
        itl_batch = itl.batch_p99(itl_limit) if 0 < itl_limit < math.inf else math.inf
    if tier.role is Role.DECODE and 0 < itl_limit < math.inf:  # its batch is held, by Little's law
        slots[Constraint.ITL], itl_limit = itl_limit * steps * float(work.tpot_s(itl_limit)), math.inf
    binding = min(slots, key=lambda name: slots[name])
    batch, share_in_tpot = max(1.0, slots[binding]), 1.0
    if tier.role is Role.SERVE:  # which `core.admission` fills so far
        optimal_batch = work.batch(step_time_budget_s(work, target, tier.tpot_tail_scale))
        if itl_batch < min(batch, optimal_batch):
            binding = tpot_constraint = Constraint.ITL
        batch = max(1.0, min(batch, itl_batch, optimal_batch))
        share_in_tpot = share_within_tpot(work, batch, target, tier.tpot_tail_scale)
    return TierProfile(
        **_single_row(
            share=tier.slo.share, base_s=work.base_s, work_s=work.work_s, stall_s=w.mean(work.stall_s),
            stall_square_s2=w.moment(work.stall_s, 2), tpot_s=target, steps=steps, slot_base_s=work.base_s,
            slot_sequence_s=work.work_s / steps, gateways=tier.gateways,
            slots=max(
                1, math.floor(min({**slots, Constraint.KV: kv_sequences_at_end(w, tier.limits.kv_tokens)}.values()))
            ),
            batch=math.floor(batch), share_within_tpot=share_in_tpot,
            arrival_cv2=cv2, service_cv2=max(1.0, w.scv(w.output_tokens) or 0.0),
            peakedness=arrival_peakedness(cv2, w.overlap(w.output_tokens)),
        ),
        tpot_tail=tail_table(work, max(tier.slo.share, _MIN_TAIL_SHARE), tier.tpot_tail_scale, _RHO_POINTS)[None],
        causes=_cause_row(tpot_constraint, first_token_constraint, binding), slack_s=slack, weights=weights,
        step_limit_per_s=np.array([math.inf]), itl_limit_per_s=np.array([itl_limit]),
    )  # fmt: skip


def _cause_row(*names: Constraint) -> NDArray[np.intp]:
    return np.array([[CONSTRAINTS.index(name) for name in names]])


def _single_row(**numbers: float) -> dict[str, Floats]:
    return {name: np.array([value], dtype=np.float64) for name, value in numbers.items()}


def attainment_without_queueing(
    profile: TierProfile, rate_per_s: Floats, arrival_cv2: Floats, admission: bool, replicas: ArrayLike
) -> tuple[Floats, Floats, Floats]:
    """Attainment without waits for a slot: by class (n, K - 1), within the TPOT target, and the mean wait for steps.

    rate_per_s: of one replica. TPOT is its mean times a log-logistic factor of median 1 whose SLO quantile is the tail
    factor. The steps that a prompt waits for scale with the same factor, so both targets are evaluated together at each
    value of it.
    """
    rho = np.minimum(rate_per_s * profile.work_s, 1.0)
    step = profile.base_s / np.maximum(1 - rho, 1e-12)
    log_tail = np.log(tail_at(profile.tpot_tail, rho))
    quantile = np.maximum(profile.share, _MIN_TAIL_SHARE)
    power = np.log(quantile / (1 - quantile)) / np.maximum(log_tail, 1e-3)
    with np.errstate(over="ignore", divide="ignore"):
        share_within = 1 / (1 + np.exp(power * np.log(step / profile.tpot_s)))
    tpot = np.where(rho < 1, np.maximum(share_within, profile.share_within_tpot) if admission else share_within, 0.0)
    fixed_wait_s, random_wait_s = step_wait_s(
        rate_per_s, step, profile.base_s, profile.stall_s, profile.stall_square_s2, arrival_cv2, replicas
    )
    quantiles = np.maximum(tpot, 1e-12)[:, None] * _NODES
    tail_factor = np.exp(np.log(quantiles / (1 - quantiles)) / power[:, None])
    slack_left_s = (
        profile.slack_s[:, :-1, None]
        + (1.5 * profile.base_s)[:, None, None]
        - (tail_factor * fixed_wait_s[:, None])[:, None, :]
    )
    tail = np.exp(-np.maximum(slack_left_s, 0.0) / np.maximum(tail_factor * random_wait_s[:, None], 1e-12)[:, None, :])
    share_met = tpot[:, None] * (np.where(slack_left_s >= 0, 1 - tail, 0.0) @ _WEIGHTS)
    return share_met, tpot, np.maximum(fixed_wait_s + random_wait_s - 1.5 * profile.base_s, 0.0)


def _step_limit_per_s(profile: TierProfile) -> Floats:
    """Rate of one replica above which its steps alone violate the SLO, for a profile of one tier, shape (1,)."""
    low, high = 0.0, float(profile.saturation_rate_per_s(1)[0])
    tiled, poisson_cv2 = (
        profile.select(np.zeros(_GRID_POINTS, dtype=np.intp)),
        np.ones(_GRID_POINTS),
    )  # of many, bunches are dealt out and prompts avoid each other
    for refinement in range(_LIMIT_REFINEMENTS):
        rates = np.linspace(low, high, _GRID_POINTS)
        share_met, _, _ = attainment_without_queueing(tiled, rates, poisson_cv2, True, math.inf)
        share_met = (share_met * tiled.weights[:, :-1]).sum(axis=1)
        first_miss = int(np.argmin(np.append(share_met >= tiled.share * tiled.feasible_share, False)))
        if first_miss == _GRID_POINTS:
            return np.array([math.inf if refinement == 0 else high])
        low, high = float(rates[max(first_miss - 1, 0)]), float(rates[first_miss])
    return np.array([high if profile.feasible_share[0] > 0 else 0.0])
