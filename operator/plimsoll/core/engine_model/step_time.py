"""Step time of an engine, and what follows from it: the work of a request, TPOT under load and its tail.

Problem: an engine's speed is not one number. Prompt tokens, running sequences and their cached tokens each slow a step
by their own amount. Which of them weighs most differs between models and machines.

Idea: one linear model of a step with six coefficients. Summed over a request it gives that request's work in
GPU-seconds. Decoding shares the GPU, so TPOT is base / (1 - rho). `capacity.tier_model` decides whether step time,
slots or KV binds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from plimsoll.core.units import format_number
from plimsoll.core.workload import FloatArray, Workload

_STRATA_MIDPOINTS: Final = (np.arange(24) + 0.5) / 24  # of strata of output lengths
_NORMAL_GRID: Final = np.linspace(-3.5, 3.5, 29)  # normal deviates of the variation at each length, with their weights
_NORMAL_WEIGHTS: Final = np.exp(-(_NORMAL_GRID**2) / 2) / np.exp(-(_NORMAL_GRID**2) / 2).sum() / _STRATA_MIDPOINTS.size
_MAX_RHO: Final = 0.98  # a higher rho uses the tail at this one; above it there is no steady state
_NEWTON_STEPS: Final = 12  # Newton steps; each doubles the digits


@dataclass(frozen=True)
class StepModel:
    """Seconds of one engine step, linear in what the step does.

    A step that prefills tokens n at context ctx, decodes b sequences and reads k cached tokens takes
    base + any_prefill [some n > 0] + prefill_token sum n + prefill_pair sum n (ctx + n / 2) + sequence b
    + cached_token k. Fitted to real vLLM on one H200 within 3 % per block of steps.
    All are finite; base is above 0, any_prefill may be negative but not below -base, the others are 0 or more.
    Raises ValueError that names the coefficient.
    """

    base_s: float  # launch and reading the weights
    any_prefill_s: float  # once in a step with any prefill; may be negative
    prefill_token_s: float
    prefill_pair_s: float  # per prefilled token and token of its context
    sequence_s: float  # per decoding sequence
    cached_token_s: float  # per cached token that decoding reads

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = -self.base_s if field.name == "any_prefill_s" else 0.0
            if not (math.isfinite(value) and value >= least):
                raise ValueError(f"{field.name} must be finite and at least {format_number(least)}, not {value}")
        if self.base_s == 0:
            raise ValueError("base_s must be above 0: no step is free")

    def interpolate(self, other: StepModel, share: float) -> StepModel:
        """Linear interpolation: this model at share 0, the other at share 1."""
        pairs = ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return StepModel(*((1 - share) * own_value + share * other_value for own_value, other_value in pairs))

    def step_s(
        self,
        prefill_tokens: npt.ArrayLike,
        prefill_pairs: npt.ArrayLike,
        sequences: npt.ArrayLike,
        cached_tokens: npt.ArrayLike,
    ) -> FloatArray:
        """Seconds of steps: numbers or arrays that broadcast; prefill_pairs is sum n (ctx + n / 2), see
        `prefill_pairs`.

        Here and below counts are finite and 0 or more; a ValueError names an invalid one.
        """
        tokens = _validate_count("prefill_tokens", prefill_tokens)
        return np.asarray(
            self.base_s
            + self.any_prefill_s * (tokens > 0)
            + self.prefill_token_s * tokens
            + self.prefill_pair_s * _validate_count("prefill_pairs", prefill_pairs)
            + self.sequence_s * _validate_count("sequences", sequences)
            + self.cached_token_s * _validate_count("cached_tokens", cached_tokens)
        )

    def prefill_work_s(self, uncached: npt.ArrayLike, cached: npt.ArrayLike) -> FloatArray:
        """GPU seconds that prefills add to steps: a U + c U (H + U / 2). Token counts, arrays that broadcast."""
        return np.asarray(
            self.prefill_token_s * _validate_count("uncached", uncached)
            + self.prefill_pair_s * prefill_pairs(cached, uncached)
        )

    def decode_work_s(self, prompt: npt.ArrayLike, output: npt.ArrayLike) -> FloatArray:
        """GPU seconds that decoding adds to steps: O (d + e (P + O / 2)), P the whole prompt, cached or not.

        Cached prompt tokens are free in prefill only: every decode step reads them.
        """
        tokens = _validate_count("output", output)
        return np.asarray(
            tokens * (self.sequence_s + self.cached_token_s * (_validate_count("prompt", prompt) + tokens / 2))
        )

    def prefill_s(self, uncached: npt.ArrayLike, cached: npt.ArrayLike, token_budget: float) -> FloatArray:
        """Seconds to prefill prompts on an otherwise idle engine, one step per chunk of at most `token_budget` tokens.

        ceil(U / budget) (base + any_prefill) + a U + c U (H + U / 2): pairs over chunks add up to those of the whole.
        """
        if not token_budget >= 1:
            raise ValueError(f"token_budget must be at least 1, not {token_budget}")
        chunks = np.ceil(_validate_count("uncached", uncached) / token_budget)
        return np.asarray(chunks * (self.base_s + self.any_prefill_s) + self.prefill_work_s(uncached, cached))


@dataclass(frozen=True)
class EngineLimits:
    """Limits of one replica's engine. All are whole numbers of at least 1; raises ValueError."""

    max_sequences: int  # slots, vLLM's max_num_seqs
    kv_tokens: int  # tokens that the KV cache holds
    token_budget: int  # tokens a step may compute, vLLM's max_num_batched_tokens

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field.name} must be a whole number of at least 1, not {value!r}")


@dataclass(frozen=True)
class KvTransfer:
    """Cost of receiving KV for a decode engine: its main loop posts every read and launches no step meanwhile.

    Measured with vLLM 0.26 and NIXL between two H200s of one host. layers and block_tokens are at least 1, times 0 or
    more, shares above 0 (post_loss_share 0 or more); raises a ValueError that names the argument.
    """

    layers: int
    block_tokens: int
    post_fixed_s: float = 0.7e-3
    post_block_layer_s: float = 2.9e-6  # per block and layer
    step_factor: float = 0.93  # steps of an engine that only decodes, over the model's; 0.91 to 0.95 measured
    post_loss_share: float = 0.9  # of the posting time that steps lose; the rest overlaps with the step on the GPU

    def __post_init__(self) -> None:
        least = {"layers": 1, "block_tokens": 1, "step_factor": math.ulp(0.0)}
        for field in fields(self):
            value = getattr(self, field.name)
            if not least.get(field.name, 0.0) <= value < math.inf:
                raise ValueError(f"{field.name} must be finite and at least {least.get(field.name, 0)}, not {value}")

    def post_s(self, tokens: npt.ArrayLike) -> FloatArray:
        """Seconds of posting for prompts of `tokens` tokens computed elsewhere (arrays broadcast); 0 for none."""
        blocks = np.ceil(_validate_count("tokens", tokens) / self.block_tokens)
        return np.asarray((blocks > 0) * self.post_fixed_s + self.post_block_layer_s * self.layers * blocks)


@dataclass(frozen=True, eq=False)
class TierWork:
    """Effect of a workload's requests on the steps of one tier's replica. `serve_tier` and `decode_tier` build it.

    A step takes base_s when nothing runs. A request adds stall_s at once, while every other stream stalls (its prefill,
    or the posting of its KV reads). It adds decode_s in equal shares, one per token (arrays, one entry per row of the
    workload). any_stall_s is added to each step with a stall.
    """

    workload: Workload
    base_s: float
    any_stall_s: float
    stall_s: FloatArray
    decode_s: FloatArray

    def __post_init__(self) -> None:
        if self.mean_output_tokens <= 0 or self.work_s <= 0:
            raise ValueError("output_tokens are all 0: such requests have no TPOT and no place in a batch")

    @cached_property
    def work_s(self) -> float:
        """Mean GPU-seconds of a request, w."""
        return self.workload.mean(self.stall_s + self.decode_s)

    @cached_property
    def mean_output_tokens(self) -> float:
        """Mean output tokens of a request, which is the number of steps that it stays."""
        return self.workload.mean(self.workload.output_tokens)

    @cached_property
    def sequence_s(self) -> float:
        """Time that one running sequence adds to a step: its mean decode work over its mean tokens."""
        return self.workload.mean(self.decode_s) / self.mean_output_tokens

    def rho(self, rate_per_s: npt.ArrayLike, replicas: npt.ArrayLike = 1) -> FloatArray:
        """Share of the GPU's time that requests' work takes, lambda w / replicas; arrays broadcast.

        Rates are finite and 0 or more, replicas above 0; raises ValueError.
        """
        return np.asarray(
            _validate_count("rate_per_s", rate_per_s) * self.work_s / _validate_count("replicas", replicas, above=True)
        )

    def tpot_s(self, rate_per_s: npt.ArrayLike, replicas: npt.ArrayLike = 1) -> FloatArray:
        """Return the mean TPOT at a rate: T = (base + any_stall (1 - e^(-lambda T))) / (1 - rho); infinite at overload.

        Processor sharing with the any-stall term in the share of steps that have one. Against vLLM on one H200 its p50
        is within 5 % for an 8B to rho 0.75, within 10 % for a 70B to 0.6, where base / (1 - rho) alone is 10 % high and
        20 % low. Arrays broadcast; raises ValueError as `rho`.
        """
        rho = self.rho(rate_per_s, replicas)
        rate, free = rho / self.work_s, 1.0 - rho
        stable = np.where(free > 0, free, 1.0)
        # Newton from here converges from one side: the residual is concave and falls, or convex and falls.
        step = (self.base_s + self.any_stall_s) / stable
        for _ in range(_NEWTON_STEPS if self.any_stall_s else 0):
            prob_no_stall = np.exp(-rate * step)
            residual = self.base_s + self.any_stall_s * (1 - prob_no_stall) - stable * step
            step = step - residual / (self.any_stall_s * rate * prob_no_stall - stable)
        return np.asarray(np.where(free > 0, step, math.inf))

    def step_s(self, batch: float) -> float:
        """Step time of a mean batch: base + any_stall (1 - e^(-b / O)) + b w / O, as lambda T = b / O (Little)."""
        requests_per_step = batch / self.mean_output_tokens
        return self.base_s - self.any_stall_s * math.expm1(-requests_per_step) + requests_per_step * self.work_s

    def batch(self, tpot_s: float) -> float:
        """Mean running sequences at which a step takes tpot_s, the inverse of `step_s`; 0 where the base is longer.

        tpot_s: 0 or more, infinite without a target. Raises ValueError.
        """
        if not tpot_s >= 0:
            raise ValueError(f"tpot_s must be 0 or more, not {tpot_s}")
        if tpot_s <= self.base_s or math.isinf(tpot_s):
            return 0.0 if tpot_s <= self.base_s else math.inf
        requests_per_step = max(0.0, (tpot_s - self.base_s - self.any_stall_s) / self.work_s)
        for _ in range(_NEWTON_STEPS if self.any_stall_s else 0):
            excess = self.step_s(requests_per_step * self.mean_output_tokens) - tpot_s
            requests_per_step -= excess / max(
                self.work_s + self.any_stall_s * math.exp(-requests_per_step), self.work_s * 1e-3
            )
        return max(0.0, requests_per_step) * self.mean_output_tokens

    def rate_per_s(self, batch: float) -> float:
        """Requests per second that a mean batch sustains, b / (O T)."""
        return batch / (self.mean_output_tokens * self.step_s(batch))


def serve_tier(model: StepModel, workload: Workload) -> TierWork:
    """Replicas that prefill and decode: work a U + c U (H + U / 2) + O (d + e (H + U + O / 2)) per request.

    The any-prefill term belongs to no request, because several prompts may share a step. It counts once per step with
    prefill.
    """
    return TierWork(
        workload,
        model.base_s,
        model.any_prefill_s,
        model.prefill_work_s(workload.uncached_tokens, workload.cached_tokens),
        model.decode_work_s(workload.prompt_tokens, workload.output_tokens),
    )


def decode_tier(model: StepModel, workload: Workload, transfer: KvTransfer) -> TierWork:
    """Replicas that decode after a remote prefill: TPOT = f base / (1 - f rho_D - 0.9 lambda post / replicas).

    The loss to posting adds to rho, because the batch grows too. cached_tokens are those that the decode engine itself
    has, so only uncached_tokens are transferred.
    """
    return TierWork(
        workload,
        transfer.step_factor * model.base_s,
        0.0,
        transfer.post_loss_share * transfer.post_s(workload.uncached_tokens),
        transfer.step_factor * model.decode_work_s(workload.prompt_tokens, workload.output_tokens),
    )


def prefill_pairs(context: npt.ArrayLike, tokens: npt.ArrayLike) -> FloatArray:
    """Token pairs of prefilling `tokens` after `context`: n (ctx + n / 2), the sum over tokens of those before each."""
    n = _validate_count("tokens", tokens)
    return np.asarray(n * (_validate_count("context", context) + n / 2))


def _validate_count(name: str, values: npt.ArrayLike, above: bool = False) -> FloatArray:
    numbers = np.asarray(values, dtype=np.float64)
    if not np.all(np.isfinite(numbers) & ((numbers > 0) if above else (numbers >= 0))):
        raise ValueError(f"{name} must be finite and {'above 0' if above else '0 or more'}, not {values!r}")
    return numbers


def tpot_s(base_s: npt.ArrayLike, rho: npt.ArrayLike) -> FloatArray:
    """Mean TPOT under processor sharing, base / (1 - rho); infinite from rho 1 on. Arrays broadcast.

    A step holds the base and the work that arrived during it: T = base + rho T. `TierWork.tpot_s` adds the any-prefill
    term. rho and base_s are finite and 0 or more; raises ValueError.
    """
    free = 1.0 - _validate_count("rho", rho)
    return np.asarray(np.where(free > 0, _validate_count("base_s", base_s) / np.where(free > 0, free, 1.0), math.inf))


def tail_factor(tier: TierWork, rho: npt.ArrayLike, share: float = 0.95) -> FloatArray:
    """Prior of the `share` quantile of requests' TPOT over base / (1 - rho). rho: finite, 0 or more, any shape.

    Nothing in it is fitted; it is the linear noise of the step model under Poisson arrivals. Steps without stalls take
    D = T (1 - rho_p), T as `TierWork.tpot_s`, rho_p the stalls' share of time. Requests of O tokens differ from T by
    - the stalls p that fall into their life: compound Poisson, each growing into a busy period, variance
      lambda E[p^2] / ((1 - rho_p) O D) relative to T^2;
    - the batch they meet: stalls let arrivals in as clusters of dispersion I = (1 - rho_p^2 + lambda^2 E[p^2]) /
      (1 - rho_p)^2 (the customers of an M/G/1 busy period), so the batch has variance over mean V = (1 + (I - 1) h)
      (1 - rho_p) / (1 - rho), h = E[min(O, O')] / E[O] (batch arrivals to infinite servers, slowed by sharing). It
      forgets within E[O] (1 - rho_p) / (1 - rho) steps, over which a long request averages;
    - the prefills that have queued behind their own: that busy period, divided by O, delays short ones.
    Mean and variance at each output length give the excess over the base, taken as lognormal; the quantile is that of
    the mixture. Against simulated single steps (7 mixes, rho 0.3 to 0.84) p95 is within 9 %, most often 2 to 5 % low,
    and p99 within 15 %; prompts of 6,000 to outputs of 100 have both up to 17 % low. At rho 0.89 it turns high, by up
    to 15 and 22 %. A chat mix has 1.29 at rho 0.5 and 1.38 at 0.84, even short prompts 1.05 and 0.98: a negative
    any-prefill term takes the mean below base / (1 - rho), to which the factor refers. Recorded p95 are met within 6 %
    in most windows. Raises ValueError.
    """
    if not 0 < share < 1:
        raise ValueError(f"share must lie between 0 and 1, not {share}")
    load = np.minimum(_validate_count("rho", rho), _MAX_RHO)
    means, variances = _tpot_moments(tier, load.reshape(-1, 1))
    min_tpot_s = tier.base_s + min(0.0, tier.any_stall_s)
    excess = np.maximum(means - min_tpot_s, 1e-9 * tier.base_s)[..., None]
    log_variance = np.log1p(variances[..., None] / excess**2)
    values = min_tpot_s + excess * np.exp(np.sqrt(log_variance) * _NORMAL_GRID - log_variance / 2)
    quantiles = _row_quantiles(values.reshape(load.size, -1), np.tile(_NORMAL_WEIGHTS, _STRATA_MIDPOINTS.size), share)
    return np.asarray(quantiles.reshape(load.shape) * (1 - load) / tier.base_s)


def _row_quantiles(values: FloatArray, weights: FloatArray, share: float) -> FloatArray:
    """Weighted quantile of each row, linear between the points; values (rows, n), weights (n,) that sum to 1."""
    order = np.argsort(values, axis=1)
    ordered, mass = np.take_along_axis(values, order, axis=1), weights[order]
    cumulative = np.cumsum(mass, axis=1) - mass / 2
    above = np.clip(np.sum(cumulative < share, axis=1), 1, weights.size - 1)[:, None]
    ends = [
        np.take_along_axis(values_part, index, axis=1)[:, 0]
        for index in (above - 1, above)
        for values_part in (cumulative, ordered)
    ]
    part = np.clip((share - ends[0]) / np.maximum(ends[2] - ends[0], 1e-300), 0.0, 1.0)
    return np.asarray(ends[1] + part * (ends[3] - ends[1]))


def _tpot_moments(tier: TierWork, rho: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Mean and variance of TPOT, (loads, strata of output length), for rho of shape (loads, 1): see `tail_factor`."""
    w, mean_output = tier.workload, tier.mean_output_tokens
    outputs = np.maximum(w.quantile(w.output_tokens, _STRATA_MIDPOINTS), 1.0)
    rate = rho / tier.work_s
    p1, p2, p3 = (w.moment(tier.stall_s, order) for order in (1, 2, 3))
    rho_p = rate * p1
    free, free_p = 1 - rho, 1 - rho_p
    step = tier.tpot_s(rate)
    step_without_stalls_s = step * free_p

    over_mean = batch_dispersion(tier, rho)
    age = outputs * free / (mean_output * free_p)
    averaging_factor = 2 * (age + np.expm1(-age)) / age**2
    batch_variance = (
        (tier.sequence_s / step_without_stalls_s) ** 2 * rate * mean_output * step * over_mean * averaging_factor
    )
    stall_variance = rate * p2 / (free_p * outputs * step_without_stalls_s)

    wait = rate * p2 / (2 * free_p)  # Pollaczek-Khinchine, as is its second moment below
    stay = p1 + wait
    stay_variance = p2 - p1**2 + rate * p3 / (3 * free_p) + wait**2
    queued_s = rho_p * stay
    queued_variance = rate * p2 * stay + rho_p**2 * stay_variance
    delay = queued_s / free_p
    delay_variance = queued_variance / free_p**2 + rate * p2 * queued_s / free_p**3

    means = step * (1 + tier.sequence_s * over_mean / step_without_stalls_s) + delay / outputs
    return means, step**2 * (batch_variance + stall_variance) + delay_variance / outputs**2


def tail_table(tier: TierWork, share: float, scale: float, points: int) -> FloatArray:
    """`tail_factor` times a scale, at `points` loads from rho 0 to 1; never falling, so that more load never helps."""
    rho = np.linspace(0, 1, points)
    tail = np.maximum(tail_factor(tier, rho, share) * scale, 1.001)
    return np.asarray(np.maximum.accumulate(tail / (1 - np.minimum(rho, 0.999))) * (1 - np.minimum(rho, 0.999)))


def tail_at(table: FloatArray, rho: FloatArray) -> FloatArray:
    """Each row of a table (n, points) at its rho, shape (n,), 0 to 1; linear between the points."""
    positions = rho * (table.shape[1] - 1)
    left = np.minimum(positions.astype(np.intp), table.shape[1] - 2)
    rows, part = np.arange(len(rho)), positions - left
    return np.asarray(table[rows, left] * (1 - part) + table[rows, left + 1] * part)


def batch_dispersion(tier: TierWork, rho: FloatArray) -> FloatArray:
    """V of `tail_factor`: variance over mean of the running sequences. rho: below 1, any shape."""
    w, rate = tier.workload, rho / tier.work_s
    p1, p2 = (w.moment(tier.stall_s, order) for order in (1, 2))
    rho_p = rate * p1
    free, free_p = 1 - rho, 1 - rho_p
    clusters = (1 - rho_p**2 + rate**2 * p2) / free_p**2
    return np.asarray((1 + (clusters - 1) * w.overlap(w.output_tokens)) * free_p / free)
