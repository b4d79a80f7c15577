"""What a tier makes of a load: the share of requests that is in promise at a rate on so many replicas.

Problem: a small model on a big GPU queues nobody and slows every stream; a large one runs out of slots or cache while
its steps are short; a prefill engine serves first come, first served. Each breaks another target first, by its tail and
not by its mean, and a request keeps the promise only if it meets all targets together.

Idea: one reduction for all of them. A tier becomes a `Profile`: the law of its step, the queue before its slots, and a
few classes of requests by the time that their own service leaves until the TTFT target. Then the share of requests in
promise at a rate on c replicas is a sum over classes, one vectorised expression for any number of tiers. The load line
(`load_line.slo_rate`) and the knee (`goodput.knee_rate`) are read off it.

A request that misses its targets alone on an idle replica is left out of the share; its work counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plimsoll.core.batch import held, step_budget_s
from plimsoll.core.gaps import Gaps, rate_within
from plimsoll.core.latency import (
    EngineLimits,
    KvTransfer,
    StepModel,
    TierWork,
    decode_tier,
    serve_tier,
    tail_at,
    tail_table,
)
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.queueing import Floats, arrival_peakedness, checked, in_time, slot_queue, step_wait_s, variability
from plimsoll.core.slack import by_slack
from plimsoll.core.slo import Slo
from plimsoll.core.whole import first_s, pace_s
from plimsoll.core.workload import FloatArray, Workload

HTTP_S: Final = 4.0e-3  # outside the engine, of any request: parsing and queues, measured with vLLM 0.26
HTTP_TOKEN_S: Final = 0.63e-6  # and per prompt token
KV_QUANTILE: Final = 2.326  # normal quantile of 99 %: of what all residents of a replica will hold together
TOGETHER: Final = 0.08  # seen at the load line of two shapes, step by step (docs/design/0007-admission.md)
APART: Final = 0.3  # coefficient of variation of answers from which on hardly anything of it was seen
HIGHEST_RATE: Final = 1e6  # requests per second of one tier; more is an estimate gone wrong

_WAITED_ALONE: Final = 1.5  # steps, in the mean, before the own prefill on an idle replica
_RHO_POINTS: Final = 41  # of the tail factor's table, from rho 0 to 1
_NODES, _WEIGHTS = (0.5 * (np.polynomial.legendre.leggauss(6)[k] + (1 - k)) for k in (0, 1))  # on 0 .. 1
_LEAST_TAIL_SHARE: Final = 0.75  # the spread of TPOT is read off a quantile that lies well above the median
_GRID: Final = 33  # points of a search for a bound, which closes in by a factor of 16 each time
_LIMIT_CLOSINGS: Final = 3  # it need not be sharp
_LEAST_CV2: Final = 1e-3  # of service times: no queue is quite regular
_RARE_SIGMAS: Final = 9.0  # slots so far above the mean batch are never all taken


class Constraint(StrEnum):
    """What stops a tier from carrying more within the promise."""

    TPOT = "TPOT"  # every stream slows: step time binds
    TTFT = "TTFT"  # prompts wait, or are prefilled in steps that have grown
    SLOTS = "slots"
    KV = "KV"
    E2E = "e2e"  # as TPOT, for the sake of the whole answer
    ITL = "itl"  # too many steps have a prompt in them, or all are too long, for the gaps between tokens


NAMES: Final = tuple(Constraint)


@dataclass(frozen=True, eq=False)
class Tier:
    """All that sizing needs to know of one tier. Times in seconds; raises ValueError that names the argument.

    transfer: what receiving KV costs a decode tier, None elsewhere. arrival_cv2: squared coefficient of variation of
    the gaps between arrivals, over the time scale of the wait; it fills places and lengthens queues, not steps.
    tail_scale: measured tail of TPOT over its prior. elsewhere_s: time of the first token spent outside the tier (held
    at the gateway, in the other tier, in transfer). gap_model: what gaps are reckoned with, None for `model`.
    gateways: by which requests come, each with a part of every replica's places.
    """

    role: Role
    model: StepModel
    workload: Workload
    limits: EngineLimits
    slo: Slo
    transfer: KvTransfer | None = None
    arrival_cv2: float = 1.0
    tail_scale: float = 1.0
    elsewhere_s: float = 0.0
    gap_model: StepModel | None = None
    gateways: int = 1

    def __post_init__(self) -> None:
        checked("arrival_cv2", self.arrival_cv2)
        checked("tail_scale", self.tail_scale, above=True)
        checked("elsewhere_s", self.elsewhere_s)
        checked("gateways", self.gateways, least=1)
        if (self.role is Role.DECODE) != (self.transfer is not None):
            raise ValueError("transfer belongs to a decode tier, and a decode tier needs it")
        if self.role is Role.PREFILL and self.slo.ttft_s is None:
            raise ValueError("slo.ttft_s is needed: a prefill tier has no other target")


@dataclass(frozen=True, eq=False)
class Profile:
    """n tiers reduced to numbers: arrays of shape (n,), or (n, K) for K classes and (n, G) for the tail's table.

    The last class holds the requests that miss alone: infinite slack, since they are never refused for time.
    """

    share: Floats  # promised
    base_s: Floats  # step law: T = base / (1 - lambda work / c)
    work_s: Floats  # 0 on a prefill tier, whose steps nobody shares
    stall_s: Floats  # mean prefill (or posting) of a request, in which decoding stands still
    stall_square_s2: Floats
    tpot_s: Floats  # target, infinite without one
    tail: Floats  # (n, G) promised quantile of TPOT over the law at rho = 0 .. 1
    steps: Floats  # queue before the slots: see queueing.slot_queue
    slot_base_s: Floats
    slot_sequence_s: Floats
    slots: Floats  # without admission, all with room for what they hold at their ends
    batch: Floats  # that admission fills, so that streams meet the TPOT target and KV holds all until they end
    held: Floats  # share of those let in that do
    gateways: Floats  # among which the slots are parted
    causes: NDArray[np.intp]  # (n, 3) places in Constraint of what makes requests miss: pace, steps before it, slots
    arrival_cv2: Floats  # of each gateway's queue: squared coefficients of variation of gaps and services
    service_cv2: Floats
    peaked: Floats  # variance over mean of how many of its requests would be under way with room for all
    slack_s: Floats  # (n, K) TTFT target less own service, ascending
    weights: Floats  # (n, K) shares of the requests
    step_limit_per_s: Floats  # rate of one replica above which its steps alone break the promise; infinity if never
    gap_limit_per_s: Floats  # and its gaps between tokens; 0 if they do at any rate worth offering

    def __len__(self) -> int:
        return self.share.size

    def take(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> Profile:
        """The tiers chosen by a mask or by indices."""
        return Profile(*(getattr(self, field.name)[rows] for field in fields(self)))

    @property
    def calm(self) -> Profile:
        """The same tiers with arrivals that do not bunch."""
        return replace(self, arrival_cv2=np.minimum(self.arrival_cv2, 1.0), peaked=np.minimum(self.peaked, 1.0))

    @property
    def feasible(self) -> Floats:
        """Share of the requests that keep the promise alone on an idle replica."""
        return np.where(self.tpot_s >= self.tpot_alone_s, self.weights[:, :-1].sum(axis=1), 0.0)

    @property
    def tpot_alone_s(self) -> Floats:
        """TPOT of a batch of one, s."""
        return self.base_s + self.slot_sequence_s

    def rho(self, rate_per_s: ArrayLike, replicas: ArrayLike) -> Floats:
        """Share of the replicas' time that the requests' work takes."""
        work = np.where(self.work_s > 0, self.work_s, self.slot_base_s)
        return np.asarray(np.asarray(rate_per_s, dtype=np.float64) * work / np.asarray(replicas, dtype=np.float64))

    def full_rate_per_s(self, replicas: ArrayLike, *, admission: bool = True) -> Floats:
        """What leaves so many replicas within TPOT while all slots are taken: the rate that no queue survives, 1/s."""
        slots, held = (self.batch, self.held) if admission else (self.slots, 1.0)
        one = held * slots / (self.steps * (self.slot_base_s + self.slot_sequence_s * slots))
        return np.asarray(one * np.asarray(replicas, dtype=np.float64))


def stack(profiles: list[Profile]) -> Profile:
    """Several profiles as one; at least one."""
    return Profile(*(np.concatenate([getattr(p, field.name) for p in profiles]) for field in fields(Profile)))


def profile(tier: Tier) -> Profile:
    """One tier, reduced. The costly part of sizing (2 to 4 ms): keep it while model and mix stay the same."""
    if tier.role is Role.PREFILL:
        return _prefill_profile(tier)
    reduced = _shared_profile(tier)
    return replace(reduced, step_limit_per_s=_step_limit_per_s(reduced))


def alone_s(tier: Tier) -> FloatArray:
    """Time to the first token of each row of the workload on an idle replica, s.

    Serve and decode: an arrival meets the rest of one step and the whole of the next, 1.5 steps in the mean.
    """
    w = tier.workload
    own = np.full(w.weights.size, float(tier.elsewhere_s))
    if tier.role is not Role.PREFILL:
        own += _WAITED_ALONE * tier.model.base_s
    if tier.role is not Role.DECODE:
        own += tier.model.prefill_s(w.uncached_tokens, w.cached_tokens, tier.limits.token_budget)
        own += HTTP_S + HTTP_TOKEN_S * w.prompt_tokens
    return own


def pace(tier: Tier) -> tuple[float, Constraint]:
    """TPOT that keeps the promise, s, by `tpot` or by what `e2e` leaves if that is less; infinity without either."""
    asked_s = math.inf if tier.slo.tpot_s is None else tier.slo.tpot_s
    if tier.slo.e2e_s is None:
        return asked_s, Constraint.TPOT
    left_s = pace_s(tier.slo, tier.workload, own_s(tier), tier.model.base_s)
    return (left_s, Constraint.E2E) if left_s < asked_s else (asked_s, Constraint.TPOT)


def own_s(tier: Tier) -> FloatArray:
    """`alone_s` without the steps that an arrival waits for."""
    return alone_s(tier) - (tier.role is not Role.PREFILL) * _WAITED_ALONE * tier.model.base_s


def _slack_s(tier: Tier) -> FloatArray:
    """What each row of the workload may wait beyond `alone_s`, s; where a TTFT is only predicted, all as long."""
    slo, w = tier.slo, tier.workload
    if slo.ttft_s is None and slo.e2e_s is not None:
        left = first_s(slo, w, pace(tier)[0]) - float(w.quantile(alone_s(tier), slo.share))
        return np.full(w.weights.size, left)
    return np.minimum(slo.ttft_targets_s(w.prompt_tokens) - alone_s(tier), 1e9)  # no TTFT target: any wait will do


def _classes(tier: Tier) -> tuple[Floats, Floats]:
    """Slack and weight of the classes, shapes (1, K): requests that miss alone are the last one."""
    slack, w = _slack_s(tier), tier.workload
    fits = w.prompt_tokens + w.output_tokens <= tier.limits.kv_tokens
    means, weights = by_slack(slack, w.weights, (slack >= 0) & fits)
    return np.append(means, math.inf)[None], np.append(weights, max(0.0, 1 - weights.sum()))[None]


def _prefill_profile(tier: Tier) -> Profile:
    """c servers, first come first served; a request's service is the prefill of its prompt."""
    w = tier.workload
    service = tier.model.prefill_s(w.uncached_tokens, w.cached_tokens, tier.limits.token_budget)
    mean = w.mean(service)
    slack, weights = _classes(tier)
    return Profile(
        **_columns(
            share=tier.slo.share, base_s=0.0, work_s=0.0, stall_s=0.0, stall_square_s2=0.0, tpot_s=math.inf,
            steps=1.0, slot_base_s=mean, slot_sequence_s=0.0, slots=1.0, gateways=1.0,
            batch=1.0, held=1.0, arrival_cv2=tier.arrival_cv2, service_cv2=w.scv(service) or 0.0,
            peaked=arrival_peakedness(tier.arrival_cv2, w.overlap(service)),
        ),
        tail=np.ones((1, _RHO_POINTS)), causes=_causes(Constraint.TPOT, Constraint.TTFT, Constraint.TTFT),
        slack_s=slack, weights=weights, step_limit_per_s=np.array([math.inf]), gap_limit_per_s=np.array([math.inf]),
    )  # fmt: skip


def gaps(tier: Tier) -> tuple[Gaps, float]:
    """The gaps of one replica of a serve or decode tier, and the highest rate that its other limits leave it."""
    work = _work(replace(tier, model=tier.gap_model or tier.model))
    own = Gaps(work, None if tier.role is Role.DECODE else tier.limits.token_budget)
    return own, work.rate_per_s(min(_slots(tier, _work(tier)).values()))


def _work(tier: Tier) -> TierWork:
    model, w = tier.model, tier.workload
    return serve_tier(model, w) if tier.transfer is None else decode_tier(model, w, tier.transfer)


def _slots(tier: Tier, work: TierWork) -> dict[Constraint, float]:
    """Sequences that each limit but that of the gaps lets run at once on a replica, as admission fills it."""
    holds = kv_sequences(tier.workload, tier.limits.kv_tokens, tier.gateways)
    slots = {Constraint.SLOTS: float(tier.limits.max_sequences), Constraint.KV: holds}
    if tier.role is Role.DECODE:  # its steps are even: a batch within the target keeps each stream within it
        target, paced = pace(tier)
        slots[paced] = min(work.batch(target), 1e9)
    return slots


def kv_sequences(of: Workload, kv_tokens: int, gateways: int = 1) -> float:
    """Sequences whose tokens the KV cache seldom fails to hold, each gateway's in its part of it.

    Those that run are met in proportion to their stay and anywhere in it: in a length of L from its prompt P to P + L,
    evenly. So many of them are independent of each other, and it is their mean and variance that has to fit. Answers
    that are all alike are not: those that came together stay together, which costs TOGETHER of them. Where it is less
    than what fits at their ends, as with few of very unequal lengths, it is that.
    """
    prompt, output, room = of.prompt_tokens, of.output_tokens, kv_tokens / gateways
    stay = of.mean(output)
    held = of.mean(output * (prompt + output / 2)) / stay
    square = of.mean(output * (prompt**2 + prompt * output + output**2 / 3)) / stay
    spread = KV_QUANTILE * math.sqrt(max(0.0, square - held**2))
    root = (math.sqrt(spread**2 + 4 * held * room) - spread) / (2 * held)
    alike = max(0.0, 1.0 - math.sqrt(of.scv(output) or 0.0) / APART)
    return max((1.0 - TOGETHER * alike) * gateways * root**2, _at_ends(of, kv_tokens))


def _at_ends(of: Workload, kv_tokens: int) -> float:
    """Sequences that KV holds with room for all that each will hold."""
    return kv_tokens * of.mean(of.output_tokens) / of.mean(of.output_tokens * (of.prompt_tokens + of.output_tokens))


def _shared_profile(tier: Tier) -> Profile:
    """Steps shared by all that run, behind a queue for slots or KV."""
    w, work = tier.workload, _work(tier)
    steps = work.mean_output_tokens
    slack, weights = _classes(tier)
    target, paced = pace(tier)
    cv2 = 1.0 + (tier.arrival_cv2 - 1.0) / tier.gateways  # of a part that is drawn from all at random
    first = Constraint.E2E if tier.slo.ttft_s is None and tier.slo.e2e_s is not None else Constraint.TTFT
    slots, gap_limit, even = _slots(tier, work), math.inf, math.inf
    if tier.slo.itl_s is not None:
        own, highest = gaps(tier)
        gap_limit = rate_within(own, highest, tier.slo.itl_s)
        even = own.fullest(gap_limit) if 0 < gap_limit < math.inf else math.inf
    if tier.role is Role.DECODE and 0 < gap_limit < math.inf:  # its batch is held, by Little's law
        slots[Constraint.ITL], gap_limit = gap_limit * steps * float(work.tpot_s(gap_limit)), math.inf
    least = min(slots, key=lambda name: slots[name])
    batch, within = max(1.0, slots[least]), 1.0
    if tier.role is Role.SERVE:  # which `core.admission` fills so far
        paces = work.batch(step_budget_s(work, target, tier.tail_scale))
        if even < min(batch, paces):
            least = paced = Constraint.ITL
        batch = max(1.0, min(batch, even, paces))
        within = held(work, batch, target, tier.tail_scale)
    return Profile(
        **_columns(
            share=tier.slo.share, base_s=work.base_s, work_s=work.work_s, stall_s=w.mean(work.stall_s),
            stall_square_s2=w.moment(work.stall_s, 2), tpot_s=target, steps=steps, slot_base_s=work.base_s,
            slot_sequence_s=work.work_s / steps, gateways=tier.gateways,
            slots=max(1, math.floor(min({**slots, Constraint.KV: _at_ends(w, tier.limits.kv_tokens)}.values()))),
            batch=math.floor(batch), held=within,
            arrival_cv2=cv2, service_cv2=max(1.0, w.scv(w.output_tokens) or 0.0),
            peaked=arrival_peakedness(cv2, w.overlap(w.output_tokens)),
        ),
        tail=tail_table(work, max(tier.slo.share, _LEAST_TAIL_SHARE), tier.tail_scale, _RHO_POINTS)[None],
        causes=_causes(paced, first, least), slack_s=slack, weights=weights,
        step_limit_per_s=np.array([math.inf]), gap_limit_per_s=np.array([gap_limit]),
    )  # fmt: skip


def _causes(*names: Constraint) -> NDArray[np.intp]:
    return np.array([[NAMES.index(name) for name in names]])


def _columns(**numbers: float) -> dict[str, Floats]:
    return {name: np.array([value], dtype=np.float64) for name, value in numbers.items()}


@dataclass(frozen=True, eq=False)
class Attainment:
    """Shares of the requests that are feasible alone, arrays of shape (n,); all 0 where nothing is feasible.

    attained: in promise. steps: what it would be if nobody waited for a slot or a server. tpot: in the TPOT target.
    """

    attained: Floats
    steps: Floats
    tpot: Floats


def attainment(tiers: Profile, rate_per_s: ArrayLike, replicas: ArrayLike, *, admission: bool = True) -> Attainment:
    """The share of requests in promise, for n tiers at their rates (requests/s of the whole tier) and replicas.

    admission: a request that would wait beyond its slack is refused, counted as missed and out of the way of others;
    without it everybody waits. Arrays of shape (n,) or numbers.
    """
    rate = np.broadcast_to(checked("rate_per_s", rate_per_s), tiers.share.shape)
    c = np.broadcast_to(checked("replicas", replicas, least=1), tiers.share.shape)
    among = 1.0 + (tiers.arrival_cv2 - 1.0) * tiers.gateways / c  # of a replica's own arrivals, dealt out to all
    met, tpot, behind = _step_share(tiers, rate / c, among, admission)
    slack = np.maximum(tiers.slack_s - behind[:, None], 0.0)
    served = _slot_share(replace(tiers, slots=tiers.batch) if admission else tiers, rate, c, slack, admission)
    counted = tiers.weights[:, :-1] / np.maximum(tiers.feasible, 1e-300)[:, None]
    counted = np.where(tiers.feasible[:, None] > 0, counted, 0.0)
    steps = (counted * met).sum(axis=1)
    return Attainment((counted * met * served[:, :-1]).sum(axis=1), steps, np.where(tiers.feasible > 0, tpot, 0.0))


def _step_share(
    tiers: Profile, rate_per_s: Floats, arrival_cv2: Floats, admission: bool
) -> tuple[Floats, Floats, Floats]:
    """Of requests that need not wait for a slot: in promise by class (n, K - 1), in TPOT target, mean wait for steps.

    TPOT is the law times a log-logistic factor of median 1 whose promised quantile is the tail factor. The steps that a
    prompt waits for are as long as that factor says, so both targets are judged together at each value of it.
    """
    rho = np.minimum(rate_per_s * tiers.work_s, 1.0)
    step = tiers.base_s / np.maximum(1 - rho, 1e-12)
    log_tail = np.log(tail_at(tiers.tail, rho))
    quantile = np.maximum(tiers.share, _LEAST_TAIL_SHARE)
    power = np.log(quantile / (1 - quantile)) / np.maximum(log_tail, 1e-3)
    with np.errstate(over="ignore", divide="ignore"):
        within = 1 / (1 + np.exp(power * np.log(step / tiers.tpot_s)))
    tpot = np.where(rho < 1, np.maximum(within, tiers.held) if admission else within, 0.0)
    least, spread = step_wait_s(rate_per_s, step, tiers.base_s, tiers.stall_s, tiers.stall_square_s2, arrival_cv2)
    reached = np.maximum(tpot, 1e-12)[:, None] * _NODES
    factor = np.exp(np.log(reached / (1 - reached)) / power[:, None])
    room = tiers.slack_s[:, :-1, None] + (1.5 * tiers.base_s)[:, None, None] - (factor * least[:, None])[:, None, :]
    tail = np.exp(-np.maximum(room, 0.0) / np.maximum(factor * spread[:, None], 1e-12)[:, None, :])
    met = tpot[:, None] * (np.where(room >= 0, 1 - tail, 0.0) @ _WEIGHTS)
    return met, tpot, np.maximum(least + spread - 1.5 * tiers.base_s, 0.0)


def _step_limit_per_s(tiers: Profile) -> Floats:
    """The rate of one replica above which `_step_share` breaks the promise, for a profile of one tier, shape (1,)."""
    low, high = 0.0, float(tiers.full_rate_per_s(1)[0])
    tiled, alone = tiers.take(np.zeros(_GRID, dtype=np.intp)), np.ones(_GRID)  # of many, bunches are dealt out
    for closing in range(_LIMIT_CLOSINGS):
        rates = np.linspace(low, high, _GRID)
        met = (_step_share(tiled, rates, alone, True)[0] * tiled.weights[:, :-1]).sum(axis=1)
        kept = int(np.argmin(np.append(met >= tiled.share * tiled.feasible, False)))
        if kept == _GRID:
            return np.array([math.inf if closing == 0 else high])
        low, high = float(rates[max(kept - 1, 0)]), float(rates[kept])
    return np.array([high if tiers.feasible[0] > 0 else 0.0])


def _slot_share(tiers: Profile, rate: Floats, c: Floats, slack_s: Floats, admission: bool) -> Floats:
    """P(a request of each class has a slot within its slack), (n, K); 1 where slots are far more than what runs."""
    served = np.ones_like(slack_s)
    rows = np.flatnonzero(_slots_matter(tiers, rate, c))
    if rows.size == 0:
        return served
    some, rate, c, slack_s = tiers.take(rows), rate[rows], c[rows], slack_s[rows]
    parts = some.gateways  # each has its places for itself, and is slowed by what the others have there
    rate, places = rate / parts, np.maximum(np.floor(some.slots / parts), 1.0)
    sequence_s = some.slot_sequence_s * parts
    queue = slot_queue(rate, some.steps, some.slot_base_s, sequence_s, places, c, peaked=some.peaked)
    rho = rate / queue.full_per_s
    if admission:
        # Waits beyond the slack are cut off, so that what counts is how it fares near full load, whatever the load.
        spread = variability(np.ones_like(rho), some.arrival_cv2, np.maximum(some.service_cv2, _LEAST_CV2))
        served[rows] = in_time(queue.log_inverse, rate, queue.full_per_s, spread, slack_s, some.weights)
    else:
        drain = queue.drain_per_s / variability(rho, some.arrival_cv2, some.service_cv2)
        with np.errstate(invalid="ignore"):
            late = queue.delayed[:, None] * np.exp(-drain[:, None] * np.where(np.isinf(slack_s), 0.0, slack_s))
        served[rows] = 1 - late
    return served


def _slots_matter(tiers: Profile, rate: Floats, c: Floats) -> NDArray[np.bool_]:
    """False where the mean number running lies many of its standard deviations (negative binomial) under the slots."""
    load = rate * tiers.steps / c
    free = 1 - load * tiers.slot_sequence_s
    mean = load * (tiers.slot_base_s + tiers.slot_sequence_s) / np.maximum(free, 1e-12)
    sigma = np.sqrt(np.maximum(tiers.peaked, 1.0) * tiers.gateways * (mean / np.maximum(free, 1e-12) + 1) / c)
    return np.asarray((free <= 0) | (mean + _RARE_SIGMAS * sigma + 3 * tiers.gateways / c > tiers.slots))
