"""Request lengths: the joint lengths from the engines' histograms, and the mean prompt of arrivals.

Problem: the cost of a request is needed when it arrives, and then only its bytes are known. Engines count tokens, but
of completed requests, minutes later. They do not report which prompt and output belong together. A prefill tier sees
one output token per request.

Idea: gateways estimate tokens from bytes, and engines count them. The ratio of the two means over the same minutes
corrects the estimate, and a ratio for each kind of content where prompts have pictures, sound or video
(`token_ratios`). Lengths of completed requests decay over minutes. They give the shape, scaled to the prompts that
arrive now and to the present output. The present output is the tokens generated in the last half minute, over those
expected for the known lengths (`completion_estimator`). While outputs grow longer, completed requests are the short
ones, but the generated tokens already include the others. Before any request has completed, an output is at least as
long as it is so far: an overloaded engine completes none for most of a minute. It begins none either, and those that
run are the long ones: no output counts as longer than the steps since the first one allow. Where arriving prompts or
generated tokens show with certainty a new mix, all requests that completed before the last half minute are discarded.
A mixture of two mixes has lengths that neither load has, for minutes. Cached tokens are the same share of each prompt,
because engines count them only in sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from plimsoll.core.demand.completion_estimator import CompletionEstimator, OutputLengths
from plimsoll.core.demand.counter_delta import EngineInterval, ServiceInterval
from plimsoll.core.demand.mean_lengths import MeanLengths
from plimsoll.core.demand.sliding_window import DecayingSum, SlidingWindow
from plimsoll.core.demand.token_ratios import TokenRatioEstimator
from plimsoll.core.histogram import total_count
from plimsoll.core.ports import BucketCounts
from plimsoll.core.prompt_tokens import corrected_tokens
from plimsoll.core.stats import shrink
from plimsoll.core.types import Unavailable
from plimsoll.core.workload import FloatArray, LengthHistogram, Workload, from_histograms, from_samples

_MIN_REQUESTS: Final = 5.0  # fewer requests give no lengths
TOO_FEW_COMPLETED: Final = Unavailable(
    f"request lengths are unknown: engines have reported fewer than {_MIN_REQUESTS:.0f} completed requests since the "
    "operator started"
)
_LENGTHS_MEMORY_S: Final = 300.0
_RECENT_S: Final = 30.0
_SHIFT_ERRORS: Final = 2.0  # standard errors by which the recent mean output must differ to be a new mix
_CERTAIN_SHIFT_ERRORS: Final = 4.0  # standard errors that random variation exceeds once in 16,000 checks
_MIN_WEIGHT: Final = 100.0  # number of requests whose lengths are kept, whatever their age
_PRIOR_REQUESTS: Final = 20.0  # weight of the estimate from bytes, in requests
_REBUILD_S: Final = 30.0
_MEAN_TOLERANCE: Final = 0.1  # a mean that differs by a larger share rebuilds the lengths
_REUSE_TOLERANCE: Final = 0.01


class _LengthHistograms(NamedTuple):
    prompt: BucketCounts
    output: BucketCounts


class _TokenTotals(NamedTuple):
    requests: float
    tokens: float


class _EstimatedTotals(NamedTuple):
    """Requests with their estimated tokens; media: those of them that are no text, by kind, None without any."""

    requests: float
    tokens: float
    media: Mapping[str, float] | None


class _OutputTotals(NamedTuple):
    """Over some time: started requests, generated tokens, and the expected completions (`CompletionEstimator`)."""

    started: float
    tokens: float
    expected_completions: float


class _PromptSources(NamedTuple):
    computed: float
    cached: float


class _CachedWorkload(NamedTuple):
    """The last workload and its inputs: lengths without cached tokens, factors of prompts and outputs, and cached
    share.
    """

    base: Workload
    factors: tuple[float, float]
    cached_share: float
    workload: Workload

    def is_close_to(self, factors: tuple[float, float], cached_share: float) -> bool:
        """Whether a new workload would differ by at most a hundredth."""
        moved = any(abs(new - old) > _REUSE_TOLERANCE * old for old, new in zip(self.factors, factors, strict=True))
        return not moved and abs(cached_share - self.cached_share) <= _REUSE_TOLERANCE


class RequestLengthEstimator:
    """Estimates the request lengths of one service."""

    def __init__(self) -> None:
        self._completed: DecayingSum[_LengthHistograms] = DecayingSum(_LENGTHS_MEMORY_S, _MIN_WEIGHT)
        self._recently_completed: SlidingWindow[_LengthHistograms] = SlidingWindow(_RECENT_S)
        self._recent_output: SlidingWindow[_OutputTotals] = SlidingWindow(_RECENT_S)
        self._token_ratios = TokenRatioEstimator()
        self._mean_lengths = MeanLengths()
        self._estimated_prompts: DecayingSum[_EstimatedTotals] = DecayingSum(_LENGTHS_MEMORY_S, _MIN_WEIGHT)
        self._counted_prompts: DecayingSum[_TokenTotals] = DecayingSum(_LENGTHS_MEMORY_S, _MIN_WEIGHT)
        self._prompt_sources: DecayingSum[_PromptSources] = DecayingSum(_LENGTHS_MEMORY_S, _MIN_WEIGHT)
        self._base_build: tuple[float, float, float, Workload] | None = (
            None  # time, prompt and output means (tokens), workload
        )
        self._output_lengths: OutputLengths | None = None  # of the base workload
        self._base_prompt_mean = 1.0  # of the base workload, tokens
        self._mix_shift_s = -math.inf  # last time that a new mix was detected
        self._cached_workload: _CachedWorkload | None = None
        self._partial_workload: Workload | None = None

    def on_arrivals(self, at_s: float, interval: ServiceInterval) -> None:
        """Add what a gateway counted until at_s."""
        self._mean_lengths.on_served(at_s, interval.succeeded)
        if interval.arrivals_with_tokens is not None and interval.arrival_tokens is not None:
            requests, tokens, media = (
                interval.arrivals_with_tokens,
                interval.arrival_tokens,
                interval.arrival_media_tokens,
            )
            self._estimated_prompts.add(at_s, requests, _EstimatedTotals(requests, tokens, media))
            self._token_ratios.on_estimated(at_s, requests, tokens, media or {}, interval.rejected)

    def on_output(self, at_s: float, interval: EngineInterval, completions: CompletionEstimator | None) -> None:
        """Add what an engine that generates responses counted until at_s. completions: its estimator, None where
        unknown.
        """
        if interval.prompt_tokens is not None and interval.output_tokens is not None:
            lengths = _LengthHistograms(interval.prompt_tokens, interval.output_tokens)
            self._completed.add(at_s, total_count(interval.prompt_tokens), lengths)
            self._recently_completed.add(at_s, lengths)
        if interval.ttft_s is not None and interval.generated_tokens is not None:
            started = expected = total_count(interval.ttft_s)
            if completions is not None:
                usual, longest = self._output_lengths, completions.longest_output
                if usual is not None:
                    expected, longest = completions.expected_completions(usual), max(longest, usual.max_tokens)
                # A full engine starts no request, and those that run are the long ones.
                expected = max(expected, interval.generated_tokens / max(longest, 1.0))
            self._recent_output.add(at_s, _OutputTotals(started, interval.generated_tokens, expected))
        self._mean_lengths.on_tokens(at_s, interval)
        prompts = _prompt_totals(interval)
        if prompts is not None:
            self._counted_prompts.add(at_s, prompts.requests, prompts)
            self._token_ratios.on_counted(at_s, prompts.requests, prompts.tokens)

    def on_prefill(self, at_s: float, interval: EngineInterval) -> None:
        """Add what an engine that prefills, for itself or remotely, counted until at_s."""
        computed, cached = interval.local_prompt_tokens, interval.cached_prompt_tokens
        if computed is not None and cached is not None:
            # Blocks from a KV store or from another engine were not computed here either.
            reused = cached + (interval.transferred_prompt_tokens or 0.0)
            requests = float(computed + reused > 0.0) if interval.ttft_s is None else total_count(interval.ttft_s)
            self._prompt_sources.add(at_s, requests, _PromptSources(computed, reused))

    @property
    def cached_share(self) -> float:
        """Share of prompt tokens that no prefill computes; 0 where engines do not report it, which overestimates the
        work.
        """
        sources = self._prompt_sources.sum
        return sources.cached / (sources.computed + sources.cached) if sources and sources.cached > 0.0 else 0.0

    def mean_prompt_tokens(self, recent: ServiceInterval | None) -> float | Unavailable:
        """Mean prompt tokens of the arrivals of the last minute."""
        if recent is None or recent.arrivals <= 0.0:
            return Unavailable("nothing arrived in the last minute")
        estimate, counted = self._estimated_prompts.sum, self._counted_prompts.sum
        if recent.arrivals_with_tokens and recent.arrival_tokens and estimate is not None:
            tokens = corrected_tokens(
                recent.arrival_tokens, recent.arrival_media_tokens or {}, self._token_ratios.ratios()
            )
            return tokens / recent.arrivals_with_tokens * self._overall_ratio(estimate)
        if counted is None or counted.requests < _MIN_REQUESTS:
            return Unavailable("neither gateways nor engines count prompt tokens")
        return counted.tokens / counted.requests

    def token_ratios(self) -> Mapping[str, float]:
        """Counted over estimated tokens by kind (`prompt_tokens.KINDS`). Empty for text close to its estimate."""
        ratios, estimate = self._token_ratios.ratios(), self._estimated_prompts.sum
        if not ratios or estimate is None:
            return {}
        if not self._token_ratios.has_media:
            return ratios
        overall = self._overall_ratio(estimate)
        return {kind: overall * ratio for kind, ratio in ratios.items()}

    def _overall_ratio(self, estimate: _EstimatedTotals) -> float:
        """Counted tokens over those estimated with the ratio of each kind, of the same requests."""
        tokens = corrected_tokens(estimate.tokens, estimate.media or {}, self._token_ratios.ratios())
        return _correction_ratio(_TokenTotals(estimate.requests, tokens), self._counted_prompts.sum)

    def workload(
        self, now_s: float, mean_prompt_tokens: float | Unavailable, arrivals: float
    ) -> Workload | Unavailable:
        """Joint request lengths.

        Prompts are scaled to `mean_prompt_tokens` where the means differ by more than a tenth and random variation.
        Outputs are scaled up to the recent outputs where these are longer by as much. arrivals: requests in the mean of
        `mean_prompt_tokens`.
        """
        completed = self._completed.sum
        if completed is None and self._mean_lengths.is_known:
            return self._mean_lengths.workload(self.cached_share)
        if completed is None or self._completed.weight < _MIN_REQUESTS:
            return self._partial_lengths(now_s)
        base = self._base(now_s, completed)
        if isinstance(base, Unavailable):
            return base
        prompt_factor = (
            1.0 if isinstance(mean_prompt_tokens, Unavailable) else mean_prompt_tokens / self._base_prompt_mean
        )
        output_factor, requests = self._recent_output_factor(now_s, base)
        if self._is_mix_shift(prompt_factor, base.uncached_tokens, arrivals, base) or self._is_mix_shift(
            output_factor, base.output_tokens, requests, base
        ):
            self._mix_shift_s = now_s
        if 0.0 <= now_s - self._mix_shift_s < _RECENT_S:
            self._discard_older(now_s)
        prompts = self._significant_factor(prompt_factor, base.uncached_tokens, arrivals, base)
        outputs = self._significant_factor(output_factor, base.output_tokens, requests, base)
        factors, cached_share = (prompts, max(1.0, outputs)), self.cached_share
        if (
            self._cached_workload is None
            or self._cached_workload.base is not base
            or not self._cached_workload.is_close_to(factors, cached_share)
        ):
            self._cached_workload = _CachedWorkload(
                base, factors, cached_share, _scaled_workload(base, factors, cached_share)
            )
        return self._cached_workload.workload

    def _partial_lengths(self, now_s: float) -> Workload | Unavailable:
        """Lengths of the started requests, with their outputs so far, while too few requests have completed."""
        recent_output, counted, previous = (
            self._recent_output.total(now_s),
            self._counted_prompts.sum,
            self._partial_workload,
        )
        if (
            recent_output is None
            or counted is None
            or not (min(recent_output.started, counted.requests) >= _MIN_REQUESTS and counted.tokens)
        ):
            return TOO_FEW_COMPLETED
        prompt, output = counted.tokens / counted.requests, max(recent_output.tokens / recent_output.started, 1.0)
        cached = max(0.0, min(prompt * self.cached_share, prompt - 1.0))
        lengths = np.array(((max(prompt - cached, 1.0),), (cached,), (output,)))
        if previous is None or np.any(
            np.abs(lengths - (previous.uncached_tokens, previous.cached_tokens, previous.output_tokens))
            > _REUSE_TOLERANCE * lengths
        ):
            self._partial_workload = previous = from_samples(*lengths)
        return previous

    def _recent_output_factor(self, now_s: float, base: Workload) -> tuple[float, float]:
        """Mean recent output over that of the base, and the number of requests it rests on; 1 and 0 where unknown.

        It counts tokens, because shorter responses complete first and are over-represented among recent completions.
        """
        recent_output = self._recent_output.total(now_s)
        if (
            recent_output is None
            or recent_output.expected_completions < _MIN_REQUESTS
            or not recent_output.tokens > 0.0
        ):
            return 1.0, 0.0
        return recent_output.tokens / recent_output.expected_completions / base.mean(
            base.output_tokens
        ), recent_output.expected_completions

    def _relative_error(self, lengths: FloatArray, requests: float, base: Workload) -> float:
        """Relative standard error of a mean over `requests` requests to that of the completed ones."""
        if requests <= 0.0:
            return math.inf
        return math.sqrt((base.scv(lengths) or 0.0) * (1.0 / requests + 1.0 / self._completed.weight))

    def _significant_factor(self, factor: float, lengths: FloatArray, requests: float, base: Workload) -> float:
        """Return the factor, nearer to 1 the more of it random variation explains."""
        threshold = max(_MEAN_TOLERANCE, _SHIFT_ERRORS * self._relative_error(lengths, requests, base))
        return _shrink_factor(factor, threshold)

    def _is_mix_shift(self, factor: float, lengths: FloatArray, requests: float, base: Workload) -> bool:
        """Whether a mean of `factor` times that of the completed requests is beyond random variation."""
        return abs(factor - 1.0) > max(
            _MEAN_TOLERANCE, _CERTAIN_SHIFT_ERRORS * self._relative_error(lengths, requests, base)
        )

    def _discard_older(self, now_s: float) -> None:
        """Keep only the most recently completed requests, until half a minute after the last sign of a new mix."""
        recent = self._recently_completed.total(now_s)
        self._completed.discard_older(recent, 0.0 if recent is None else total_count(recent.prompt))

    def _base(self, now_s: float, completed: _LengthHistograms) -> Workload | Unavailable:
        """Lengths without cached tokens. A build takes milliseconds, so it is repeated only when it is old or a mean
        has moved.
        """
        means = (_mean(completed.prompt), _mean(completed.output))
        if self._base_build is not None and _is_current(self._base_build, now_s, means):
            return self._base_build[3]
        try:
            base = from_histograms(_to_histogram(completed.prompt), _to_histogram(completed.output))
        except ValueError as error:
            return Unavailable(f"the engines' histograms of lengths do not make sense: {error}")
        self._base_build, self._base_prompt_mean, self._output_lengths = (
            (now_s, *means, base),
            base.mean(base.uncached_tokens),
            OutputLengths(base),
        )
        return base


def _shrink_factor(factor: float, threshold: float) -> float:
    """Soft threshold for a factor that may be random variation: 1 up to the threshold, all of it well beyond."""
    return 1.0 + math.copysign(shrink(abs(factor - 1.0), threshold), factor - 1.0)


def _scaled_workload(base: Workload, factors: tuple[float, float], cached_share: float) -> Workload:
    prompts = np.maximum(base.uncached_tokens * factors[0], 1.0)
    cached = np.minimum(prompts * cached_share, prompts - 1.0)  # engines always compute the last token
    outputs = np.maximum(base.output_tokens * factors[1], 1.0)
    return replace(base, uncached_tokens=prompts - cached, cached_tokens=cached, output_tokens=outputs)


def _prompt_totals(interval: EngineInterval) -> _TokenTotals | None:
    """Prompt tokens of the requests that began to generate output.

    Completed requests are the second choice, because they exclude disconnected clients, which had the long requests.
    """
    sources = (interval.local_prompt_tokens, interval.cached_prompt_tokens, interval.transferred_prompt_tokens)
    counts = [tokens for tokens in sources if tokens is not None]
    if interval.ttft_s is not None and interval.local_prompt_tokens is not None:
        return _TokenTotals(total_count(interval.ttft_s), math.fsum(counts))
    if interval.ttft_s is not None and interval.all_prompt_tokens is not None:
        return _TokenTotals(total_count(interval.ttft_s), interval.all_prompt_tokens)
    if interval.prompt_tokens is not None:
        return _TokenTotals(total_count(interval.prompt_tokens), interval.prompt_tokens.value_sum)
    return None


def _correction_ratio(estimate: _TokenTotals, counted: _TokenTotals | None) -> float:
    """Counted over estimated tokens of a request, shrunk towards 1 while few requests are known."""
    mean = estimate.tokens / estimate.requests
    if counted is None or mean <= 0.0:
        return 1.0
    return (counted.tokens + _PRIOR_REQUESTS * mean) / ((counted.requests + _PRIOR_REQUESTS) * mean)


def _mean(histogram: BucketCounts) -> float:
    """Mean of the histogram; 0 if it is empty."""
    size = total_count(histogram)
    return histogram.value_sum / size if size > 0.0 else 0.0


def _to_histogram(histogram: BucketCounts) -> LengthHistogram:
    """Convert to a `LengthHistogram`. Twice the last edge is the guess for the end of the open bucket."""
    max_tokens = 2.0 * histogram.edges[-2] if len(histogram.edges) > 1 and histogram.counts[-1] > 0.0 else None
    return LengthHistogram(np.array(histogram.edges), np.array(histogram.counts), _mean(histogram) or None, max_tokens)


def _is_current(base_build: tuple[float, float, float, Workload], now_s: float, means: tuple[float, float]) -> bool:
    at_s, *built_means, _ = base_build
    moved = any(abs(new - old) > _MEAN_TOLERANCE * old for old, new in zip(built_means, means, strict=True))
    return 0.0 <= now_s - at_s < _REBUILD_S and not moved
