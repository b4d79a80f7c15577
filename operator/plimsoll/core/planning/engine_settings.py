"""Engine settings that follow from the SLO: sequences, chunk budget, CUDA graphs, speculation.

Problem: an engine's limits decide which target is violated first, and defaults fit no particular SLO. Idea:
- `max_sequences`: at most the batch whose mean step takes the whole TPOT target, or that the KV cache holds; more only
  slows every stream. It is rounded up to a multiple of 16, at which CUDA graphs are captured.
- `choose_token_budget`: the longest ITL is about a step full of prefill. The smallest budget is best while it costs
  nearly nothing of the SLO capacity, and meets an ITL target if there is one.
- `choose_cuda_graphs`: the host launches a mixture's many small kernels one by one, unless a CUDA graph of the step's
  size holds them.
- `advise_speculation`: drafting pays off while verification of the drafts overlaps with the reading of weights, so up
  to a batch size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from plimsoll.core.capacity.kv_capacity import kv_sequences
from plimsoll.core.capacity.slo_capacity import slo_capacity_per_s
from plimsoll.core.capacity.tier_model import TierSpec, build_profile, stack_profiles, tpot_target
from plimsoll.core.engine_model.step_time import StepModel, prefill_pairs
from plimsoll.core.planning.expected_latency import tier_work
from plimsoll.core.types import Role
from plimsoll.core.units import format_number
from plimsoll.engines import vllm

GRAPH_SIZE_STEP: Final = 16
MIN_CAPACITY_SHARE: Final = 0.99  # share of the best SLO capacity that a smaller budget must reach
MAX_BUDGET_FILL: Final = (
    0.25  # share of the budget that a mean step may fill at SLO capacity: the TTFT model was checked up to there
)

DEFAULT_GRAPH_TOKENS: Final = 512  # tokens of a step: vLLM captures no larger steps by default
MAX_GRAPH_TOKENS: Final = 8192  # in larger steps, the GPU takes longer than the host
_GRAPH_SPACING: Final = (
    (8, 256),
    (16, 512),
    (64, 1024),
    (128, 2048),
    (256, 4096),
    (512, MAX_GRAPH_TOKENS),
)  # tokens apart, up to

DRAFT_TOKENS: Final = 3  # tokens a step, of an EAGLE-3 head
ACCEPTED_TOKENS: Final = 2.5  # accepted tokens per step; an assumption of the measurement, so measure your own
MIN_SPECULATION_GAIN: Final = 1.1  # below it, the draft's cache and start-up cost more than they gain
# Steps with drafts over steps without, by how long checking them takes over the base, (k + 1) B prefill_token / base.
# Measured on one H200, an 8B in 16 bits with vLLM 0.26 at batches of 1, 8, 32, 64, 128, and 600 to 900 tokens each:
# 6.45, 7.05, 8.44, 12.16, 20.47 ms over 4.90, 5.27, 6.11, 7.30, 9.95 ms; prefill_token 21.1 us, base 4.889 ms.
_VERIFY_LOAD: Final = (0.0173, 0.1382, 0.5527, 1.1054, 2.2108)
_STEP_SLOWDOWN: Final = (1.3163, 1.3378, 1.3813, 1.6658, 2.0573)


@dataclass(frozen=True)
class CudaGraphs:
    """sizes: tokens of the steps to capture, ascending. reason: text for users, with the cost."""

    sizes: tuple[int, ...]
    reason: str

    @property
    def args(self) -> tuple[str, ...]:
        """Arguments for the engine's command line."""
        return vllm.CUDA_GRAPH_SIZES, *map(str, self.sizes)


@dataclass(frozen=True)
class Speculation:
    """Advice on speculative decoding.

    max_batch: largest batch at which drafting pays off, 0 if never. gain: tokens per second over those without
    drafting, at the planned batch; below 1 it slows decoding. reason: text for users.
    """

    enabled: bool
    max_batch: int
    gain: float
    reason: str


def max_sequences(tier: TierSpec) -> int:
    """Slots for the engine of a serve or decode tier: the limit by target or cache, at most its present slots."""
    if tier.role is Role.PREFILL:
        return tier.limits.max_sequences
    batch = min(tier_work(tier).batch(tpot_target(tier)[0]), float(tier.limits.max_sequences))
    max_batch = min(batch, kv_sequences(tier.workload, tier.limits.kv_tokens, tier.gateways))
    if tier.role is Role.DECODE and tier.slo.itl_s is not None:
        max_batch = min(max_batch, float(build_profile(tier).batch[0]))
    return min(tier.limits.max_sequences, GRAPH_SIZE_STEP * math.ceil(max(max_batch, 1) / GRAPH_SIZE_STEP))


def max_itl_s(tier: TierSpec) -> float:
    """The longest usual ITL: a step full of prefill of mean prompts, with the batch that the target allows.

    On a decode tier, a step at that batch with one posting in it.
    """
    w = tier.workload
    batch = max_sequences(tier)
    cached = batch * (w.mean(w.prompt_tokens) + w.mean(w.output_tokens) / 2)
    if tier.role is Role.DECODE and tier.transfer is not None:
        plain_step_s = float(tier.model.step_s(0, 0, batch, min(cached, tier.limits.kv_tokens)))
        return tier.transfer.step_factor * plain_step_s + float(w.mean(tier.transfer.post_s(w.uncached_tokens)))
    tokens = max(1, tier.limits.token_budget - batch)
    context = max(0.0, w.mean(w.prompt_tokens) - tokens) / 2
    pair_count = float(prefill_pairs(context, min(tokens, w.mean(w.prompt_tokens))))
    return float(tier.model.step_s(tokens, pair_count, batch, min(cached, tier.limits.kv_tokens)))


def choose_token_budget(tiers: Sequence[TierSpec], itl_limit_s: float | None = None) -> TierSpec | None:
    """Choose among one serve tier's chunk budgets, ascending; None where no budget meets the ITL target.

    A budget that a mean step at SLO capacity fills by more than a quarter is excluded, because prompts would queue for
    it. With an ITL target, the SLO capacity includes it, and only budgets that are not excluded compete.
    """
    fitting = [tier for tier in tiers if itl_limit_s is None or max_itl_s(tier) <= itl_limit_s]
    if not fitting:
        return None
    rates = slo_capacity_per_s(stack_profiles([build_profile(tier) for tier in fitting]), 1)
    low_fill = [budget_fill(tier, float(rate)) <= MAX_BUDGET_FILL for tier, rate in zip(fitting, rates, strict=True)]
    best = rates[low_fill].max(initial=0.0) if fitting[0].slo.itl_s is not None else rates.max()
    for tier, rate, fills_little in zip(fitting, rates, low_fill, strict=True):
        if rate >= MIN_CAPACITY_SHARE * best and fills_little:
            return tier
    return fitting[-1]


def budget_fill(tier: TierSpec, rate_per_s: float) -> float:
    """Share of the chunk budget that a mean step's prompt tokens use on one replica: lambda T U / budget."""
    uncached = tier.workload.mean(tier.workload.uncached_tokens)
    step = float(tier_work(tier).tpot_s(rate_per_s))
    return rate_per_s * uncached * step / tier.limits.token_budget if rate_per_s else 0.0


def choose_cuda_graphs(tokens: int, mixture: bool) -> CudaGraphs | None:
    """CUDA graphs to capture for steps of up to `tokens` tokens; None where vLLM's own are enough.

    Spaced as measured (`bench/hardware/data/30b-a3b-graphs`: one H200, vLLM 0.26, a 30B-A3B): a prompt of 1,024 tokens
    alone had its first token after 24.4 ms against 66.6, `init` took 71.0 s against 64.3, and the cache held 756,848
    tokens against 763,040. A dense 8B in 8 bits gained nothing (`8b-fp8-graphs` and, on the same card,
    `8b-fp8-default`).
    """
    max_tokens = min(tokens, MAX_GRAPH_TOKENS)
    if not mixture or max_tokens <= DEFAULT_GRAPH_TOKENS:
        return None
    sizes, last = [1, 2, 4], 0
    for spacing, until in _GRAPH_SPACING:
        sizes += range(last + spacing, until + 1, spacing)
        last = until
    reason = (
        f"the host launches a mixture's kernels one by one in steps of more than {DEFAULT_GRAPH_TOKENS} tokens, "
        "the most that vLLM captures by itself: a 30B-A3B on one H200 took 24 ms for 1,024 tokens with such graphs "
        "and 67 without, and carried about a quarter more; they cost 7 s of its start and 0.8 % of its cache"
    )
    return CudaGraphs((*(size for size in sizes if size < max_tokens), max_tokens), reason)


def speculation_slowdown(model: StepModel, batch: float) -> float:
    """Ratio of a step with drafts to one without, at a batch: linear between the measurements, with the last slope
    beyond.
    """
    verify_load = (DRAFT_TOKENS + 1) * batch * model.prefill_token_s / model.base_s
    if verify_load <= _VERIFY_LOAD[-1]:
        return float(np.interp(verify_load, _VERIFY_LOAD, _STEP_SLOWDOWN))
    slope = (_STEP_SLOWDOWN[-1] - _STEP_SLOWDOWN[-2]) / (_VERIFY_LOAD[-1] - _VERIFY_LOAD[-2])
    return _STEP_SLOWDOWN[-1] + slope * (verify_load - _VERIFY_LOAD[-1])


def advise_speculation(
    model: StepModel, batch: float, accepted_tokens: float = ACCEPTED_TOKENS, mixture: bool = False
) -> Speculation:
    """Whether to draft at a mean batch, with `accepted_tokens` accepted per step (1 to 4, the step's own included).

    Never beyond the measured batch, in units of the base. Raises ValueError.
    """
    if not 1 <= accepted_tokens <= DRAFT_TOKENS + 1:
        raise ValueError(f"accepted_tokens must lie between 1 and {DRAFT_TOKENS + 1}, not {accepted_tokens}")
    gain = accepted_tokens / speculation_slowdown(model, batch)
    if mixture:
        reason = (
            "not measured for mixtures of experts: each draft may pass other experts, whose weights must be read too"
        )
        return Speculation(False, 0, gain, reason)
    max_batch = math.floor(_VERIFY_LOAD[-1] * model.base_s / ((DRAFT_TOKENS + 1) * model.prefill_token_s))
    while max_batch > 0 and accepted_tokens / speculation_slowdown(model, max_batch) < MIN_SPECULATION_GAIN:
        max_batch -= 1
    if max_batch == 0:
        return Speculation(
            False,
            0,
            gain,
            f"{format_number(accepted_tokens)} tokens a step do not make up for drafting at any batch",
        )
    if batch <= max_batch:
        return Speculation(
            True, max_batch, gain, f"at a mean batch of {batch:.0f} it makes {gain:.2f} times the tokens"
        )
    return Speculation(
        False, max_batch, gain, f"the mean batch of {batch:.0f} is above the {max_batch} up to which it pays"
    )
