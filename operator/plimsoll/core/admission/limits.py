"""What one more request costs a replica, and how full a replica may be: the step model made into plain numbers.

Problem: the decision about a request must be made in microseconds, yet with the same model that sizes the fleet, and
the batch must not be so full that a mean within the target hides a tail beyond it.

Idea: everything that needs arrays is done once per tick. `limits` finds for each class the step time at which goodput
of a replica that is always full peaks, and keeps the coefficients as floats. `Limits.need` then turns one request into
six numbers that can be added up over the residents of a replica.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from plimsoll.core.admission.outcome import Request
from plimsoll.core.batch import HOPELESS_STEPS, step_budget_s
from plimsoll.core.gaps import rate_within
from plimsoll.core.knee import HTTP_S, HTTP_TOKEN_S, Tier, gaps, pace
from plimsoll.core.latency import StepModel, TierWork, decode_tier, serve_tier
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.slo import Slo
from plimsoll.core.workload import Workload

LEAST_SPREAD: Final = 32.0  # tokens over which a stall is spread at least; below, the share of steps for prefill binds
STRATA: Final = 32  # of equal weight, by which answers' lengths are told
MOST_SPREAD: Final = 0.1  # of the room for work in a step, that one sequence's stalls may take: a giant's soon are over


@dataclass(frozen=True)
class ClassPolicy:
    """One class of requests. Raises ValueError that names the argument.

    priority: higher goes first. slo: its targets. hold_s: the longest it may wait where no replica is ready, or where
    its targets are out of reach anyway. guaranteed_share: of the work admitted, 0 to 1, that it gets before any other
    class's priority counts. fill: how full, 0 to 1, replicas may be for it to be let in: below 1 it is shed before
    saturation, so that higher classes find room.
    """

    name: str
    priority: int
    slo: Slo
    hold_s: float = 30.0
    guaranteed_share: float = 0.0
    fill: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.hold_s) and self.hold_s >= 0):
            raise ValueError(f"hold_s must be finite and at least 0, not {self.hold_s}")
        if not 0 <= self.guaranteed_share <= 1:
            raise ValueError(f"guaranteed_share must lie between 0 and 1, not {self.guaranteed_share}")
        if not 0 < self.fill <= 1:
            raise ValueError(f"fill must be above 0 and at most 1, not {self.fill}")


class Need(NamedTuple):
    """What one request asks of a replica.

    sequences: that it runs. sequence_tokens: cached tokens that decoding reads, in the mean over its stay. stall_s:
    time in which all other streams stand still (prefill, or posting of KV reads). step_s: what it adds to the mean step
    while it is there, its stalls spread over its tokens. kv_mean_tokens, kv_variance: of what it will hold at its end.
    work_s: GPU seconds in all. output_tokens: expected, of all its sequences. alone_s: time to first token on an idle
    replica. outside_s: of it, outside the engine. prefill_s: on a prefill replica, 0 where there is none. chunks: steps
    that its own prefill takes. most_tokens: that one sequence's answer may have.
    """

    sequences: int
    sequence_tokens: float
    stall_s: float
    step_s: float
    kv_mean_tokens: float
    kv_variance: float
    work_s: float
    output_tokens: float
    alone_s: float
    outside_s: float
    prefill_s: float
    chunks: int
    most_tokens: float

    @property
    def prompt_tokens(self) -> float:
        """Of one sequence."""
        return (self.kv_mean_tokens - self.output_tokens) / self.sequences


@dataclass(frozen=True, slots=True)
class Limits:
    """One tier's model as plain numbers, times in seconds; made by `limits`, the same for all its replicas.

    batch: b*, sequences of a replica at which goodput peaks, whole; KV is counted in tokens beside it. step_budget_s,
    tpot_s: of each class by its index, the step that a full batch may take and the target. rho: share of a full
    replica's time that work takes. most_spread_s: the most that one sequence's stalls count in a step. stall_s,
    alone_s: of a mean request, see `Need`. move_token_s: a prompt token's KV on its way from a prefill replica, beside
    posting, as the engines counted it; None while nobody knows. answers: tokens of answers, ascending, of which each
    stands for as many; none where only their mean and variance are known.
    """

    base_s: float
    any_stall_s: float
    prefill_token_s: float
    prefill_pair_s: float
    sequence_s: float
    cached_token_s: float
    post_fixed_s: float
    post_piece_s: float  # per block of tokens
    block_tokens: int  # of KV transfer; 0 where there is none
    leg_base_s: float  # of a step of a prefill replica; its tokens and pairs, as it is itself known
    leg_token_s: float
    leg_pair_s: float
    token_budget: int
    kv_tokens: int
    max_sequences: int
    output_mean: float
    output_variance: float
    batch: int
    step_budget_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    rho: float
    most_spread_s: float
    stall_s: float
    alone_s: float
    move_token_s: float | None
    answers: tuple[float, ...] = ()

    @property
    def chunk_s(self) -> float:
        """Time that a step full of prefill takes on top of its decoding."""
        return max(self.token_budget * self.prefill_token_s, 1e-9)

    @property
    def leg_step_s(self) -> float:
        """Time of a full step of a prefill replica."""
        return self.leg_base_s + self.token_budget * self.leg_token_s

    def need(self, request: Request, remote: bool = False, cached: int = 0, prefill_cached: int = 0) -> Need:
        """The cost of one request. remote: a prefill replica computes its prompt.

        cached, prefill_cached: tokens of the prompt that are cached where it would run, and on its prefill replica;
        at least request.cached_tokens are.

        Output: the workload's mean, and no more than max_tokens; for values between 0 and m of mean u the variance is
        at most (m - u) u (Bhatia and Davis 2000).
        """
        n, prompt = request.sequences, request.prompt_tokens
        if cached < request.cached_tokens:
            cached = request.cached_tokens
        uncached = prompt - cached if prompt > cached else 1
        output, variance = self.output_mean, self.output_variance
        most = request.max_tokens
        if most is not None:
            if most < output:
                output = float(most)
            variance = min(variance, (most - output) * output)
        leg_s = 0.0
        outside_s = HTTP_S + HTTP_TOKEN_S * prompt
        if remote and self.block_tokens:
            leg_s = self.leg_s(request, prefill_cached)
            if self.move_token_s is not None:
                outside_s += self.move_token_s * uncached
            stall_s = self.post_fixed_s + self.post_piece_s * -(-uncached // self.block_tokens)
            chunks = 1
        else:
            chunks = 1 if uncached <= self.token_budget else -(-uncached // self.token_budget)
            stall_s = self.prefill_token_s * uncached + self.any_stall_s * chunks
            stall_s += self.prefill_pair_s * uncached * (cached + uncached / 2)
            if stall_s < 0.0:
                stall_s = 0.0
        stall_s *= n
        read = prompt + output / 2
        decode_s = n * (self.sequence_s + self.cached_token_s * read)
        spread_s = stall_s / (output if output > LEAST_SPREAD else LEAST_SPREAD)
        if spread_s > n * self.most_spread_s:
            spread_s = n * self.most_spread_s
        return Need(  # by position: names would cost a microsecond
            n, n * read, stall_s, decode_s + spread_s, n * (prompt + output), n * variance,
            stall_s + decode_s * output, n * output, stall_s + (0.5 + chunks) * self.base_s + outside_s + leg_s,
            outside_s, leg_s, chunks, math.inf if most is None else max(1.0, most),
        )  # fmt: skip

    def leg_s(self, request: Request, cached: int) -> float:
        """Time of one request on a prefill replica that has so many tokens of it cached."""
        cached = max(cached, request.cached_tokens)
        uncached = max(request.prompt_tokens - cached, 1)
        prefill_s = uncached * (self.leg_token_s + self.leg_pair_s * (cached + uncached / 2))
        return request.sequences * (prefill_s + -(-uncached // self.token_budget) * self.leg_base_s)


def limits(
    tier: Tier,
    classes: tuple[ClassPolicy, ...],
    prefill: StepModel | None = None,
    move_token_s: float | None = None,
) -> Limits:
    """The limits of a serve or decode tier for its classes; a few hundred microseconds, so once per tick.

    tier.tail_scale loosens or tightens the assumed spread of TPOT. prefill: of the replicas that prefill for this tier,
    which no engine that decodes tells of; None: as fast as the tier's own. move_token_s: see `Limits`. Raises
    ValueError for a prefill tier, whose replicas are only waited for, and without classes.
    """
    if tier.role is Role.PREFILL or not classes:
        raise ValueError("limits are those of a serve or decode tier, with at least one class")
    m, w, transfer = tier.model, tier.workload, tier.transfer
    leg = m if prefill is None else prefill
    work = serve_tier(m, w) if transfer is None else decode_tier(m, w, transfer)
    factor = 1.0 if transfer is None else transfer.step_factor
    targets = tuple(pace(replace(tier, slo=c.slo))[0] for c in classes)
    even_s = _even_step_s(tier, work)
    budgets = tuple(min(step_budget_s(work, target, tier.tail_scale), even_s) for target in targets)
    widest = max(budgets)
    held = w.mean(w.output_tokens * (w.prompt_tokens + w.output_tokens / 2)) / work.mean_output_tokens
    batch = max(1.0, min(work.batch(widest), tier.limits.max_sequences))
    room = max(1.0, min(batch, tier.limits.kv_tokens / max(held, 1.0)))
    return Limits(
        base_s=work.base_s, any_stall_s=work.any_stall_s, prefill_token_s=m.prefill_token_s,
        prefill_pair_s=m.prefill_pair_s, sequence_s=factor * m.sequence_s, cached_token_s=factor * m.cached_token_s,
        post_fixed_s=0.0 if transfer is None else transfer.lost_share * transfer.post_fixed_s,
        post_piece_s=0.0 if transfer is None else transfer.lost_share * transfer.post_piece_s * transfer.layers,
        block_tokens=0 if transfer is None else transfer.block_tokens, leg_base_s=leg.base_s + leg.any_prefill_s,
        leg_token_s=leg.prefill_token_s, leg_pair_s=leg.prefill_pair_s,
        token_budget=tier.limits.token_budget, kv_tokens=tier.limits.kv_tokens,
        max_sequences=tier.limits.max_sequences, output_mean=work.mean_output_tokens,
        output_variance=(w.scv(w.output_tokens) or 0.0) * work.mean_output_tokens**2,
        batch=math.floor(batch), step_budget_s=budgets, tpot_s=targets,
        rho=1 - work.base_s / max(work.step_s(room), 1.000001 * work.base_s),
        most_spread_s=MOST_SPREAD * (min(budgets) - work.base_s),
        stall_s=w.mean(work.stall_s),
        alone_s=_alone_s(m, leg, w, work, transfer is not None, move_token_s or 0.0),
        move_token_s=move_token_s,
        answers=tuple(w.quantile(w.output_tokens, (np.arange(STRATA) + 0.5) / STRATA).tolist()),
    )  # fmt: skip


def _alone_s(own: StepModel, leg: StepModel, of: Workload, work: TierWork, remote: bool, move_token_s: float) -> float:
    """Time to the first token of a mean request on an idle replica, as `Limits.need` reckons it for one."""
    prefill_s = of.mean(leg.prefill_work_s(of.uncached_tokens, of.cached_tokens))
    outside_s = HTTP_S + HTTP_TOKEN_S * of.mean(of.prompt_tokens)
    if remote:
        prefill_s += leg.base_s + of.mean(work.stall_s)
        outside_s += move_token_s * of.mean(of.uncached_tokens)
    return 1.5 * own.base_s + prefill_s + outside_s


def _even_step_s(tier: Tier, work: TierWork) -> float:
    """The mean step of the fullest batch at the load up to which sizing takes the gaps to keep their target, s."""
    if tier.slo.itl_s is None:
        return math.inf
    own, highest = gaps(tier)
    rate = rate_within(own, highest, tier.slo.itl_s)
    if rate <= 0.0:
        return HOPELESS_STEPS * work.step_s(1.0)
    return math.inf if math.isinf(rate) else work.step_s(own.fullest(rate))
