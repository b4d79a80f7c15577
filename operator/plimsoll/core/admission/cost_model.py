"""The cost of one request on a replica, and the limits of a replica, from the step-time model.

Problem: an admission decision must take microseconds, but use the same model that sizes the replicas. The batch must
not be so full that a mean TPOT within the target hides a tail beyond it.

Idea: compute everything that needs arrays once per tick. `engine_cost_model` finds for each class the step time at
which the goodput of a full replica peaks, and stores the coefficients as floats. `EngineCostModel.request_cost` then
maps a request to numbers that add up over the running requests of a replica.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Final, NamedTuple, TypeAlias

import numpy as np

from plimsoll.core import codec
from plimsoll.core.admission.request import AdmissionRequest
from plimsoll.core.capacity.tier_model import (
    HTTP_OVERHEAD_PER_TOKEN_S,
    HTTP_OVERHEAD_S,
    TierSpec,
    inter_token_latency,
    tpot_target,
)
from plimsoll.core.codec import Count, Number, Rounded
from plimsoll.core.engine_model.batching import INFEASIBLE_TPOT_STEPS, step_time_budget_s
from plimsoll.core.engine_model.inter_token import max_rate_within_itl
from plimsoll.core.engine_model.step_time import StepModel, TierWork, decode_tier, serve_tier
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.workload import Workload

# A stall is spread over at least this many tokens; for shorter outputs the prefill share of steps is the limit.
MIN_SPREAD_TOKENS: Final = 32.0
SHORT_OUTPUT_SHARE: Final = 0.1  # a deadline that fewer responses could meet is too short
OUTPUT_QUANTILES: Final = 32  # number of equally weighted quantiles of the output length
# Upper bound on one sequence's stalls, as a share of the step budget above the base step: very long prompts are rare.
MAX_STALL_SHARE: Final = 0.1
DEFAULT_CLASS: Final = "default"  # the class of requests that name none
_Unbounded: TypeAlias = Annotated[float, Number(digits=6, infinite=True)]  # infinite without a TPOT target


@dataclass(frozen=True)
class ClassPolicy:
    """One class of requests. Raises ValueError that names the argument.

    A higher `priority` goes first. `max_queue_time_s` limits the wait if no replica is ready, or if the SLO is out of
    reach anyway. `guaranteed_share` (0 to 1) is the share of admitted work that the class gets before priorities count.
    `max_utilization` (0 to 1) is the highest utilization of a replica that admits it; below 1, the class is shed before
    saturation and leaves room for higher classes.
    """

    name: str
    priority: int
    slo: Slo
    max_queue_time_s: float = 30.0
    guaranteed_share: float = 0.0
    max_utilization: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.max_queue_time_s) and self.max_queue_time_s >= 0):
            raise ValueError(f"max_queue_time_s must be finite and at least 0, not {self.max_queue_time_s}")
        if not 0 <= self.guaranteed_share <= 1:
            raise ValueError(f"guaranteed_share must lie between 0 and 1, not {self.guaranteed_share}")
        if not 0 < self.max_utilization <= 1:
            raise ValueError(f"max_utilization must be above 0 and at most 1, not {self.max_utilization}")


def default_class(classes: Iterable[ClassPolicy]) -> ClassPolicy | None:
    """Returns the class of requests that name none: `default`, else that of the lowest priority; None without any."""
    known = list(classes)
    named = (one for one in known if one.name == DEFAULT_CLASS)
    return next(named, None) or min(known, key=lambda one: one.priority, default=None)


class RequestCost(NamedTuple):
    """The resources that one request needs on a replica.

    - `sequence_tokens`: KV tokens that decoding reads, averaged over its stay, for all sequences.
    - `stall_s`: time during which all other streams stall (prefill, or posting of KV reads).
    - `step_s`: what it adds to the mean step while it runs, with its stalls spread over its output tokens.
    - `kv_mean_tokens`: mean of the KV tokens that it holds at its end.
    - `work_s`: total work in GPU-seconds of the sequences that an engine holds at once. More of them run in turns and
      share their prompt, so that one request is never worth more than an engine's KV cache.
    - `output_tokens`: expected output of all sequences.
    - `idle_ttft_s`: TTFT on an idle replica; `network_s` is the part of it outside the engine.
    - `remote_prefill_s`: time on a prefill replica, 0 for local prefill.
    - `prefill_chunks`: steps that its own prefill takes.
    - `max_output_tokens`: output limit of one sequence.
    """

    sequences: int
    sequence_tokens: float
    stall_s: float
    step_s: float
    kv_mean_tokens: float
    work_s: float
    output_tokens: float
    idle_ttft_s: float
    network_s: float
    remote_prefill_s: float
    prefill_chunks: int
    max_output_tokens: float

    @property
    def prompt_tokens(self) -> float:
        """Prompt tokens of one sequence."""
        return (self.kv_mean_tokens - self.output_tokens) / self.sequences


@codec.stored_as("a cost model", optional=("kv_transfer_token_s", "output_quantiles"))
@dataclass(frozen=True, slots=True)
class EngineCostModel:
    """The cost model of one tier, the same for all its replicas. Times are in seconds. See `engine_cost_model`.

    - `batch`: the integer batch size at which the goodput of a replica peaks. KV is limited separately, in tokens.
    - `step_budget_s`, `tpot_s`: step time of a full batch and TPOT target, by class index.
    - `full_utilization`: share of a full replica's time that is work.
    - `max_spread_s`: upper bound on what one sequence's stalls add to a step.
    - `stall_s`, `idle_ttft_s`: those of a mean request, see `RequestCost`.
    - `kv_transfer_token_s`: measured KV transfer time per prompt token, without posting. None if unknown.
    - `output_quantiles`: equally weighted quantiles of output tokens, ascending. Empty if only mean and variance are
      known.
    """

    base_s: Rounded
    prefill_step_s: Rounded
    prefill_token_s: Rounded
    prefill_pair_s: Rounded
    sequence_s: Rounded
    cached_token_s: Rounded
    post_fixed_s: Rounded
    post_block_s: Rounded  # per KV block
    block_tokens: Count  # block size of the KV transfer; 0 without transfer
    remote_base_s: Rounded  # base time of a step of a prefill replica
    remote_token_s: Rounded
    remote_pair_s: Rounded
    token_budget: Count
    kv_tokens: Count
    max_sequences: Count
    output_mean: Rounded
    output_variance: Rounded
    batch: Count
    step_budget_s: tuple[_Unbounded, ...]
    tpot_s: tuple[_Unbounded, ...]
    full_utilization: Rounded
    max_spread_s: _Unbounded
    stall_s: Rounded
    idle_ttft_s: Rounded
    kv_transfer_token_s: Rounded | None = None
    output_quantiles: tuple[Rounded, ...] = ()

    def validate(self) -> None:
        """Raise ValueError for values that no engine has."""
        if any(after < previous for previous, after in pairwise((0.0, *self.output_quantiles))):
            raise ValueError("output_quantiles must ascend from 0")
        if min(self.batch, self.max_sequences, self.kv_tokens) < 1 or not self.base_s > 0.0:
            raise ValueError("batch, max_sequences and kv_tokens must be at least 1, base_s above 0")

    @property
    def chunk_s(self) -> float:
        """Time that a full prefill chunk adds to a step, in seconds."""
        return max(self.token_budget * self.prefill_token_s, 1e-9)

    @property
    def remote_step_s(self) -> float:
        """Time of a full step of a prefill replica, in seconds."""
        return self.remote_base_s + self.token_budget * self.remote_token_s

    def request_cost(
        self, request: AdmissionRequest, remote: bool = False, cached: int = 0, prefill_cached: int = 0
    ) -> RequestCost:
        """Returns the cost of one request. If `remote`, a prefill replica computes its prompt.

        `cached` and `prefill_cached` are the prompt tokens cached on its replica and on its prefill replica, at least
        `request.cached_tokens`. The expected output is the workload's mean, at most `max_tokens`.
        """
        n, prompt_tokens = request.sequences, request.prompt_tokens
        if cached < request.cached_tokens:
            cached = request.cached_tokens
        uncached = prompt_tokens - cached if prompt_tokens > cached else 1
        output_tokens = self.output_mean
        max_tokens = request.max_tokens
        if max_tokens is not None and max_tokens < output_tokens:
            output_tokens = float(max_tokens)
        remote_prefill_s = 0.0
        network_s = HTTP_OVERHEAD_S + HTTP_OVERHEAD_PER_TOKEN_S * prompt_tokens
        if remote and self.block_tokens:
            remote_prefill_s = self.remote_prefill_s(request, prefill_cached)
            if self.kv_transfer_token_s is not None:
                network_s += self.kv_transfer_token_s * uncached
            stall_s = self.post_fixed_s + self.post_block_s * -(-uncached // self.block_tokens)
            chunks = 1
        else:
            chunks = 1 if uncached <= self.token_budget else -(-uncached // self.token_budget)
            stall_s = self.prefill_token_s * uncached + self.prefill_step_s * chunks
            stall_s += self.prefill_pair_s * uncached * (cached + uncached / 2)
            if stall_s < 0.0:
                stall_s = 0.0
        stall_s *= n
        context_tokens = prompt_tokens + output_tokens / 2
        decode_s = n * (self.sequence_s + self.cached_token_s * context_tokens)
        spread_s = stall_s / (output_tokens if output_tokens > MIN_SPREAD_TOKENS else MIN_SPREAD_TOKENS)
        if spread_s > n * self.max_spread_s:
            spread_s = n * self.max_spread_s
        work_s = stall_s + decode_s * output_tokens
        if n > 1:
            work_s *= self._sequences_at_once(n, prompt_tokens + output_tokens) / n
        return RequestCost(  # positional: keyword arguments cost 1 us
            n, n * context_tokens, stall_s, decode_s + spread_s, n * (prompt_tokens + output_tokens),
            work_s, n * output_tokens,
            stall_s + (0.5 + chunks) * self.base_s + network_s + remote_prefill_s,
            network_s, remote_prefill_s, chunks, math.inf if max_tokens is None else max(1.0, max_tokens),
        )  # fmt: skip

    def _sequences_at_once(self, sequences: int, tokens: float) -> float:
        """Returns how many sequences of so many tokens each an engine holds at once, at least 1."""
        return max(1.0, min(sequences, self.max_sequences, self.kv_tokens / tokens))

    def remote_prefill_s(self, request: AdmissionRequest, cached: int) -> float:
        """Returns the time of one request on a prefill replica with `cached` tokens of its prompt, in seconds."""
        cached = max(cached, request.cached_tokens)
        uncached = max(request.prompt_tokens - cached, 1)
        prefill_s = uncached * (self.remote_token_s + self.remote_pair_s * (cached + uncached / 2))
        return request.sequences * (prefill_s + -(-uncached // self.token_budget) * self.remote_base_s)


def engine_cost_model(
    tier: TierSpec,
    classes: tuple[ClassPolicy, ...],
    prefill: StepModel | None = None,
    kv_transfer_token_s: float | None = None,
) -> EngineCostModel:
    """Returns the cost model of a serve or decode tier for its classes. It takes a few hundred microseconds.

    `tier.tpot_tail_scale` scales the assumed spread of TPOT. `prefill` is the step model of the prefill replicas, None
    if they are as fast as this tier. For `kv_transfer_token_s` see `EngineCostModel`. Raises ValueError for a prefill
    tier and without classes.
    """
    if tier.role is Role.PREFILL or not classes:
        raise ValueError("a cost model needs a serve or decode tier and at least one class")
    model, workload, transfer = tier.model, tier.workload, tier.transfer
    prefill_model = model if prefill is None else prefill
    tier_work = serve_tier(model, workload) if transfer is None else decode_tier(model, workload, transfer)
    step_factor = 1.0 if transfer is None else transfer.step_factor
    targets = tuple(tpot_target(replace(tier, slo=c.slo))[0] for c in classes)
    itl_step_s = _itl_step_budget_s(tier, tier_work)
    budgets = tuple(min(step_time_budget_s(tier_work, target, tier.tpot_tail_scale), itl_step_s) for target in targets)
    widest_budget_s = max(budgets)
    kv_per_sequence = (
        workload.mean(workload.output_tokens * (workload.prompt_tokens + workload.output_tokens / 2))
        / tier_work.mean_output_tokens
    )
    batch = max(1.0, min(tier_work.batch(widest_budget_s), tier.limits.max_sequences))
    full_batch = max(1.0, min(batch, tier.limits.kv_tokens / max(kv_per_sequence, 1.0)))
    return EngineCostModel(
        base_s=tier_work.base_s, prefill_step_s=tier_work.any_stall_s, prefill_token_s=model.prefill_token_s,
        prefill_pair_s=model.prefill_pair_s, sequence_s=step_factor * model.sequence_s,
        cached_token_s=step_factor * model.cached_token_s,
        post_fixed_s=0.0 if transfer is None else transfer.post_loss_share * transfer.post_fixed_s,
        post_block_s=(
            0.0 if transfer is None else transfer.post_loss_share * transfer.post_block_layer_s * transfer.layers
        ),
        block_tokens=0 if transfer is None else transfer.block_tokens,
        remote_base_s=prefill_model.base_s + prefill_model.any_prefill_s,
        remote_token_s=prefill_model.prefill_token_s, remote_pair_s=prefill_model.prefill_pair_s,
        token_budget=tier.limits.token_budget, kv_tokens=tier.limits.kv_tokens,
        max_sequences=tier.limits.max_sequences, output_mean=tier_work.mean_output_tokens,
        output_variance=(workload.scv(workload.output_tokens) or 0.0) * tier_work.mean_output_tokens**2,
        batch=math.floor(batch), step_budget_s=budgets, tpot_s=targets,
        full_utilization=1 - tier_work.base_s / max(tier_work.step_s(full_batch), 1.000001 * tier_work.base_s),
        max_spread_s=MAX_STALL_SHARE * (min(budgets) - tier_work.base_s),
        stall_s=workload.mean(tier_work.stall_s),
        idle_ttft_s=_idle_ttft_s(
            model, prefill_model, workload, tier_work, transfer is not None, kv_transfer_token_s or 0.0
        ),
        kv_transfer_token_s=kv_transfer_token_s,
        output_quantiles=tuple(
            workload.quantile(
                workload.output_tokens, (np.arange(OUTPUT_QUANTILES) + 0.5) / OUTPUT_QUANTILES
            ).tolist()
        ),
    )  # fmt: skip


def _idle_ttft_s(
    model: StepModel,
    prefill_model: StepModel,
    workload: Workload,
    work: TierWork,
    remote: bool,
    kv_transfer_token_s: float,
) -> float:
    """Returns the TTFT of a mean request on an idle replica in seconds, by the same formula as `request_cost`."""
    prefill_s = workload.mean(prefill_model.prefill_work_s(workload.uncached_tokens, workload.cached_tokens))
    network_s = HTTP_OVERHEAD_S + HTTP_OVERHEAD_PER_TOKEN_S * workload.mean(workload.prompt_tokens)
    if remote:
        prefill_s += prefill_model.base_s + workload.mean(work.stall_s)
        network_s += kv_transfer_token_s * workload.mean(workload.uncached_tokens)
    return 1.5 * model.base_s + prefill_s + network_s


def _itl_step_budget_s(tier: TierSpec, work: TierWork) -> float:
    """Returns the mean step of the largest batch at the highest rate that meets the ITL target, in seconds."""
    if tier.slo.itl_s is None:
        return math.inf
    itl_model, max_rate = inter_token_latency(tier)
    rate = max_rate_within_itl(itl_model, max_rate, tier.slo.itl_s)
    if rate <= 0.0:
        return INFEASIBLE_TPOT_STEPS * work.step_s(1.0)
    return math.inf if math.isinf(rate) else work.step_s(itl_model.batch_p99(rate))


def client_deadline_s(request: AdmissionRequest, cost: RequestCost, model: EngineCostModel, step_s: float) -> float:
    """Returns the latest time of the first token by the client's own deadline, infinity without one.

    A response that must be complete by a time needs it earlier by its other tokens, at `step_s` seconds each. It counts
    as short as one in ten is, and as its expected output if only mean and variance are known.
    """
    first_token_s = math.inf if request.deadline_s is None else request.deadline_s
    if request.complete_by_s is None:
        return first_token_s
    tokens, quantiles = cost.output_tokens / cost.sequences, model.output_quantiles
    if quantiles:
        tokens = min(tokens, quantiles[int(SHORT_OUTPUT_SHARE * len(quantiles))])
    return min(first_token_s, request.complete_by_s - max(tokens - 1.0, 0.0) * step_s)


def target_ttft_s(slo: Slo, request: AdmissionRequest, cost: RequestCost, tpot_s: float) -> float:
    """Returns the time from arrival to the first token that keeps the targets, in seconds; infinity without one.

    The end-to-end target leaves time for the expected output at `tpot_s` seconds for each token, infinity if unknown.
    """
    deadlines = slo.deadlines(request.prompt_tokens)
    decode_s = 0.0 if tpot_s == math.inf else max(cost.output_tokens / cost.sequences - 1.0, 0.0) * tpot_s
    return min(deadlines.ttft_s, deadlines.e2e_s - decode_s)
