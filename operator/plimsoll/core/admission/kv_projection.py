"""Projects the KV cache use of the running requests of a replica until they end.

Problem: a request holds all its tokens only at its end, and running requests are at all stages. Reserving the final
size of each wastes KV: with outputs six times as long as prompts, only two fifths of the possible requests fit.
Reserving the current size is too little, because requests grow, and requests admitted together peak together. Running
requests also differ from arriving ones: if one output in seven is twenty times as long as the others, four of five
running requests are long.

Idea: the future KV of a request is random: its tokens at a later step if it still runs, else nothing. The survival
probability comes from past outputs: the share of those of at least this length that became longer. Requests end
independently, so means and variances add up, at each of a fixed set of future steps. The sums are updated as requests
come and go, and recomputed as they progress. Time is counted in engine steps, so the step time does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from statistics import NormalDist
from typing import Final, NamedTuple

import numpy as np

from plimsoll.core.admission.cost_model import OUTPUT_QUANTILES, EngineCostModel, RequestCost
from plimsoll.core.capacity.kv_capacity import KV_Z_SCORE
from plimsoll.core.workload import FloatArray

STEPS_PER_MEAN_OUTPUT: Final = 32  # bins per mean output, the resolution of the projection
REFRESH_STEPS: Final = 12.0  # recompute after this many steps, or after one bin if longer
# In bins: dense while most running requests end, sparse where only the longest are left.
_HORIZONS: Final = np.array([*range(0, 32, 2), *range(32, 64, 4), 64, 80, 96, 128, 192, 256])
_MAX_PROGRESS: Final = 512  # in bins; upper bound
_MAX_OUTPUT_TOKENS: Final = 1e12  # stands for no limit
_CACHED_DISTRIBUTIONS: Final = 16  # each takes 0.3 MB


class Projection(NamedTuple):
    """Mean and variance of the KV tokens of requests, at each horizon and at their end."""

    mean: FloatArray
    variance: FloatArray
    final: float
    final_variance: float


class LengthDistribution:
    """The distribution of output lengths, from ascending, equally likely lengths `tokens`.

    The tables are indexed by the bin of the tokens generated so far, and by the horizon. `survival` is the probability
    that the request still runs at the horizon.
    """

    def __init__(self, tokens: FloatArray) -> None:
        self.bin_tokens = max(float(tokens.mean()) / STEPS_PER_MEAN_OUTPUT, 1.0)
        self.horizon_tokens = self.bin_tokens * _HORIZONS
        parts = np.arange(_MAX_PROGRESS + 1)
        longer_than = tokens.size - np.searchsorted(tokens, self.bin_tokens * np.arange(parts.size + _HORIZONS[-1]))
        alive = longer_than[: parts.size]
        has_samples = alive > 0
        count, first_index = np.maximum(alive, 1), tokens.size - alive
        self.survival = np.where(has_samples[:, None], longer_than[parts[:, None] + _HORIZONS] / count[:, None], 1.0)
        self.survival[:, 0] = 1.0
        self.survival_variance = self.survival * (1.0 - self.survival)
        # A request longer than every sample counts as at its end, without further growth.
        self.tokens_added = np.where(has_samples[:, None], self.horizon_tokens, 0.0)
        suffix_sums = np.concatenate((np.cumsum(tokens[::-1])[::-1], [0.0]))
        suffix_square_sums = np.concatenate((np.cumsum(tokens[::-1] ** 2)[::-1], [0.0]))
        self.expected_output = np.where(has_samples, suffix_sums[first_index] / count, 0.0)
        self.output_variance = np.where(
            has_samples, np.maximum(suffix_square_sums[first_index] / count - self.expected_output**2, 0.0), 0.0
        )
        self._memo_cost: RequestCost | None = None
        self._memo_projection: Projection | None = None

    def new_request(self, cost: RequestCost) -> Projection:
        """Returns the projection of a new request. Memoised, because all replicas ask for the same request."""
        if cost is not self._memo_cost or self._memo_projection is None:
            self._memo_cost, self._memo_projection = cost, self.project(cost, 0.0)
        return self._memo_projection

    def project(self, cost: RequestCost, generated: float) -> Projection:
        """Returns the projection of a request with `generated` output tokens per sequence."""
        n, max_output = cost.sequences, cost.max_output_tokens
        generated = min(generated, max_output)
        progress = min(int(generated / self.bin_tokens), _MAX_PROGRESS)
        prompt_tokens = (cost.kv_mean_tokens - cost.output_tokens) / n
        kv_tokens = self.tokens_added[progress] + (prompt_tokens + generated)
        if max_output < math.inf:  # it must have ended by the next horizon
            last_horizon = int(np.searchsorted(self.horizon_tokens, max_output - generated)) + 1
            kv_tokens[last_horizon:] = 0.0
            np.minimum(kv_tokens, prompt_tokens + max_output, out=kv_tokens)
        mean, variance = self.survival[progress] * kv_tokens, self.survival_variance[progress] * kv_tokens * kv_tokens
        final_output = min(max(float(self.expected_output[progress]), generated), max_output)
        # The variance of values in [a, b] with mean u is at most (b - u) (u - a) (Bhatia and Davis 2000).
        final_variance = min(
            float(self.output_variance[progress]),
            (min(max_output, _MAX_OUTPUT_TOKENS) - final_output) * (final_output - generated),
        )
        return Projection(n * mean, n * variance, n * (prompt_tokens + final_output), n * final_variance)

    def project_sum(self, costs: Iterable[RequestCost], generated: FloatArray) -> Projection:
        """Returns the sum of the projections of several requests, with the `generated` tokens of each."""
        columns = np.array(
            [(cost.sequences, cost.kv_mean_tokens, cost.output_tokens, cost.max_output_tokens) for cost in costs]
        )
        n, max_output = columns[:, 0], columns[:, 3]
        generated = np.minimum(generated, max_output)
        progress = np.minimum((generated / self.bin_tokens).astype(np.intp), _MAX_PROGRESS)
        prompt_tokens = (columns[:, 1] - columns[:, 2]) / n
        kv_tokens = self.tokens_added[progress] + (prompt_tokens + generated)[:, None]
        if np.any(max_output < math.inf):
            kv_tokens[:, 1:][self.horizon_tokens[:-1] >= (max_output - generated)[:, None]] = 0.0
            np.minimum(kv_tokens, (prompt_tokens + max_output)[:, None], out=kv_tokens)
        final_output = np.minimum(np.maximum(self.expected_output[progress], generated), max_output)
        final_variance = np.minimum(
            self.output_variance[progress],
            (np.minimum(max_output, _MAX_OUTPUT_TOKENS) - final_output) * (final_output - generated),
        )
        mean, variance = (
            n @ (self.survival[progress] * kv_tokens),
            n @ (self.survival_variance[progress] * kv_tokens * kv_tokens),
        )
        return Projection(mean, variance, float(n @ (prompt_tokens + final_output)), float(n @ final_variance))


@lru_cache(_CACHED_DISTRIBUTIONS)
def length_distribution(output_quantiles: tuple[float, ...], mean: float, variance: float) -> LengthDistribution:
    """Returns the distribution of `output_quantiles`, or if empty, a lognormal one of this mean and variance."""
    if output_quantiles:
        return LengthDistribution(np.array(output_quantiles))
    sigma = math.sqrt(math.log1p(variance / (mean * mean))) if mean > 0 else 0.0
    normal_quantiles = [NormalDist().inv_cdf((k + 0.5) / OUTPUT_QUANTILES) for k in range(OUTPUT_QUANTILES)]
    multipliers = np.exp(sigma * np.array(normal_quantiles))
    return LengthDistribution(mean * multipliers / multipliers.mean())


class KvProjection:
    """The projection of one replica. Times are in steps of the replica."""

    __slots__ = ("_costs", "_first_token_step", "_generated", "_lengths", "_refreshed_step", "_sum")

    def __init__(self, cost_model: EngineCostModel) -> None:
        self._lengths = length_distribution(
            cost_model.output_quantiles, cost_model.output_mean, cost_model.output_variance
        )
        self._costs: dict[str, RequestCost] = {}
        self._first_token_step: dict[str, float] = {}  # step of the first token by request
        self._generated: dict[str, float] = {}  # tokens as included in the sum
        self._refreshed_step = -math.inf  # step of the last `advance`
        self._sum = _empty_projection()

    def add(self, id: str, cost: RequestCost, first_token_step: float, step: float) -> None:
        """Add a request whose first token is at `first_token_step`, past or future. `step` is the current step."""
        generated = max(0.0, step - first_token_step)
        self._costs[id], self._first_token_step[id], self._generated[id] = cost, first_token_step, generated
        self._accumulate(
            self._lengths.new_request(cost) if generated == 0.0 else self._lengths.project(cost, generated), 1.0
        )

    def remove(self, id: str) -> None:
        """Remove a request that ended."""
        cost, generated = self._costs.pop(id), self._generated.pop(id)
        del self._first_token_step[id]
        if self._costs:
            self._accumulate(self._lengths.project(cost, generated), -1.0)
        else:  # prevents accumulated rounding errors
            self._sum = _empty_projection()

    def _accumulate(self, projection: Projection, sign: float) -> None:
        mean, variance, final, final_variance = self._sum
        mean += sign * projection.mean
        variance += sign * projection.variance
        self._sum = Projection(
            mean, variance, final + sign * projection.final, final_variance + sign * projection.final_variance
        )

    def advance(self, step: float) -> None:
        """Recompute the sum with the current progress of all requests, if enough steps have passed."""
        if step - self._refreshed_step < max(REFRESH_STEPS, self._lengths.bin_tokens) or not self._costs:
            return
        self._refreshed_step = step
        generated = np.maximum(step - np.array([*self._first_token_step.values()]), 0.0)
        self._generated = dict(zip(self._costs, generated.tolist(), strict=True))
        self._sum = self._lengths.project_sum(self._costs.values(), generated)

    def final_tokens(self, cost: RequestCost | None = None) -> float:
        """Returns a high quantile of the KV tokens if all requests, and a new one, are at their ends."""
        _, _, final, variance = self._sum
        if cost is not None:
            projection = self._lengths.new_request(cost)
            final, variance = final + projection.final, variance + projection.final_variance
        return final + KV_Z_SCORE * math.sqrt(max(variance, 0.0))

    def peak_tokens(self, cost: RequestCost) -> float:
        """Returns the maximum over all horizons of a high quantile of the KV tokens, with a new request."""
        projection, total = self._lengths.new_request(cost), self._sum
        variance = np.maximum(total.variance + projection.variance, 0.0)
        return float(np.max(total.mean + projection.mean + KV_Z_SCORE * np.sqrt(variance)))


def _empty_projection() -> Projection:
    return Projection(np.zeros(_HORIZONS.size), np.zeros(_HORIZONS.size), 0.0, 0.0)
