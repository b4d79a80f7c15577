"""Engine settings that follow from the promise: sequences, chunk budget, speculation.

Problem: an engine's limits decide which target breaks first, and defaults suit nobody's promise. Idea:
- `max_sequences`: more than those with which a mean step takes the whole TPOT target, or than the cache holds, only
  make every stream slow. Rounded up to a multiple of 16, at which CUDA graphs are captured.
- `budget`: the longest gap between two tokens is about a step full of prefill, so the smallest budget is best as long
  as it costs next to nothing of the load line, and fits a gap target where there is one.
- `graphs`: the host launches a mixture's many small kernels one by one, unless a CUDA graph of the step's size holds
  them.
- `speculation`: drafting pays while checking the drafts hides behind the reading of weights, so up to a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from plimsoll.core.knee import Tier, kv_sequences, pace, profile, stack
from plimsoll.core.latency import StepModel, pairs
from plimsoll.core.load_line import slo_rate
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.planning.expect import work_of

GRAPH_SIZES: Final = 16
NEXT_TO_NOTHING: Final = 0.99  # of the best load line that a smaller budget must keep
SELDOM: Final = 0.25  # of the budget that a mean step may fill at the load line: up to there the TTFT law was checked

GRAPHS_FLAG: Final = "--cudagraph-capture-sizes"  # of vLLM 0.26; the sizes follow as words of their own
GRAPHS_ALONE: Final = 512  # tokens of a step: vLLM captures no more by itself
GRAPHS_MOST: Final = 8192  # in larger steps the GPU takes longer than the host
_SPACING: Final = ((8, 256), (16, 512), (64, 1024), (128, 2048), (256, 4096), (512, GRAPHS_MOST))  # tokens apart, up to

DRAFTED: Final = 3  # tokens a step, of an EAGLE-3 head
ACCEPTED: Final = 2.5  # tokens a step that come out; an assumption of the measurement, so measure your own
LEAST_GAIN: Final = 1.1  # below it the draft's cache and its start are not worth their while
# Steps with drafts over steps without, by how long checking them takes over the base, (k + 1) B prefill_token / base.
# Measured on one H200, an 8B in 16 bits with vLLM 0.26 at batches of 1, 8, 32, 64, 128, and 600 to 900 tokens each:
# 6.45, 7.05, 8.44, 12.16, 20.47 ms over 4.90, 5.27, 6.11, 7.30, 9.95 ms; prefill_token 21.1 us, base 4.889 ms.
_FULL: Final = (0.0173, 0.1382, 0.5527, 1.1054, 2.2108)
_SLOWER: Final = (1.3163, 1.3378, 1.3813, 1.6658, 2.0573)


@dataclass(frozen=True)
class Graphs:
    """sizes: tokens of the steps to capture, ascending. why: for people, with what it costs."""

    sizes: tuple[int, ...]
    why: str

    @property
    def args(self) -> tuple[str, ...]:
        """For the engine's command line."""
        return GRAPHS_FLAG, *map(str, self.sizes)


@dataclass(frozen=True)
class Speculation:
    """up_to_batch: sequences up to which drafting pays, 0 if never. gain: tokens per second over those without, at the
    planned batch; below 1 it slows. why: for people."""

    on: bool
    up_to_batch: int
    gain: float
    why: str


def max_sequences(tier: Tier) -> int:
    """Slots for a serve or decode tier's engine: what its target or its cache allows, and no more than it has."""
    if tier.role is Role.PREFILL:
        return tier.limits.max_sequences
    batch = min(work_of(tier).batch(pace(tier)[0]), float(tier.limits.max_sequences))
    most = min(batch, kv_sequences(tier.workload, tier.limits.kv_tokens, tier.gateways))
    if tier.role is Role.DECODE and tier.slo.itl_s is not None:
        most = min(most, float(profile(tier).batch[0]))
    return min(tier.limits.max_sequences, GRAPH_SIZES * math.ceil(max(most, 1) / GRAPH_SIZES))


def longest_gap_s(tier: Tier) -> float:
    """A step full of prefill, of mean prompts, beside as many sequences as the target allows: the longest usual gap.

    Of a decode tier a step at that batch with one posting in it.
    """
    w = tier.workload
    batch = max_sequences(tier)
    cached = batch * (w.mean(w.prompt_tokens) + w.mean(w.output_tokens) / 2)
    if tier.role is Role.DECODE and tier.transfer is not None:
        even = float(tier.model.step_s(0, 0, batch, min(cached, tier.limits.kv_tokens)))
        return tier.transfer.step_factor * even + float(w.mean(tier.transfer.post_s(w.uncached_tokens)))
    tokens = max(1, tier.limits.token_budget - batch)
    context = max(0.0, w.mean(w.prompt_tokens) - tokens) / 2
    inside = float(pairs(context, min(tokens, w.mean(w.prompt_tokens))))
    return float(tier.model.step_s(tokens, inside, batch, min(cached, tier.limits.kv_tokens)))


def budget(tiers: Sequence[Tier], gap_s: float | None = None) -> Tier | None:
    """Of one serve tier at several chunk budgets, ascending: the one to take; None where no budget keeps the gap.

    A budget that a mean step at the load line fills by more than a quarter is left out: prompts would queue for it.
    Where gaps are promised the load line is theirs, and only budgets that are not left out compete.
    """
    fitting = [tier for tier in tiers if gap_s is None or longest_gap_s(tier) <= gap_s]
    if not fitting:
        return None
    rates = slo_rate(stack([profile(tier) for tier in fitting]), 1)
    seldom = [filled(tier, float(rate)) <= SELDOM for tier, rate in zip(fitting, rates, strict=True)]
    best = rates[seldom].max(initial=0.0) if fitting[0].slo.itl_s is not None else rates.max()
    for tier, rate, holds in zip(fitting, rates, seldom, strict=True):
        if rate >= NEXT_TO_NOTHING * best and holds:
            return tier
    return fitting[-1]


def filled(tier: Tier, rate_per_s: float) -> float:
    """Share of the chunk budget that a mean step's prompt tokens take on one replica: lambda T U / budget."""
    uncached = tier.workload.mean(tier.workload.uncached_tokens)
    step = float(work_of(tier).tpot_s(rate_per_s))
    return rate_per_s * uncached * step / tier.limits.token_budget if rate_per_s else 0.0


def graphs(tokens: int, mixture: bool) -> Graphs | None:
    """CUDA graphs to capture for steps of up to so many tokens; None where vLLM's own do.

    Spaced as measured (`bench/hardware/data/30b-a3b-graphs`: one H200, vLLM 0.26, a 30B-A3B): a prompt of 1,024 tokens
    alone had its first token after 24.4 ms for 66.6, `init` took 71.0 s for 64.3, the cache held 756,848 tokens for
    763,040. A dense 8B in 8 bits gained nothing from them (`8b-fp8-graphs` and, on the same card, `8b-fp8-default`).
    """
    most = min(tokens, GRAPHS_MOST)
    if not mixture or most <= GRAPHS_ALONE:
        return None
    sizes, last = [1, 2, 4], 0
    for apart, until in _SPACING:
        sizes += range(last + apart, until + 1, apart)
        last = until
    why = (
        f"the host launches a mixture's kernels one by one in steps of more than {GRAPHS_ALONE} tokens, the most that "
        "vLLM captures by itself: a 30B-A3B on one H200 took 24 ms for 1,024 tokens with such graphs and 67 without, "
        "and carried about a quarter more; they cost 7 s of its start and 0.8 % of its cache"
    )
    return Graphs((*(size for size in sizes if size < most), most), why)


def slowdown(model: StepModel, batch: float) -> float:
    """A step with drafts over one without, at a batch: linear between what was measured, and its last slope beyond."""
    full = (DRAFTED + 1) * batch * model.prefill_token_s / model.base_s
    if full <= _FULL[-1]:
        return float(np.interp(full, _FULL, _SLOWER))
    slope = (_SLOWER[-1] - _SLOWER[-2]) / (_FULL[-1] - _FULL[-2])
    return _SLOWER[-1] + slope * (full - _FULL[-1])


def speculation(model: StepModel, batch: float, accepted: float = ACCEPTED, mixture: bool = False) -> Speculation:
    """Whether to draft at a mean batch, with so many tokens accepted a step (1 to 4, the step's own included).

    Never beyond the batch, in units of the base, that was measured. Raises ValueError.
    """
    if not 1 <= accepted <= DRAFTED + 1:
        raise ValueError(f"accepted must lie between 1 and {DRAFTED + 1}, not {accepted}")
    gain = accepted / slowdown(model, batch)
    if mixture:
        why = "not measured for mixtures of experts: each draft may pass other experts, whose weights must be read too"
        return Speculation(False, 0, gain, why)
    most = math.floor(_FULL[-1] * model.base_s / ((DRAFTED + 1) * model.prefill_token_s))
    while most > 0 and accepted / slowdown(model, most) < LEAST_GAIN:
        most -= 1
    if most == 0:
        return Speculation(False, 0, gain, f"{accepted:g} tokens a step do not make up for drafting at any batch")
    if batch <= most:
        return Speculation(True, most, gain, f"at a mean batch of {batch:.0f} it makes {gain:.2f} times the tokens")
    return Speculation(False, most, gain, f"the mean batch of {batch:.0f} is above the {most} up to which it pays")
