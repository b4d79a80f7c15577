"""Engine counters with vLLM's buckets and semantics, as a scrape would read them.

Steps count when they generated a token, a prompt's computed tokens with its first token, and a request's lengths when
it completed. The figures lag the work as in a real engine.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Final

from plimsoll.core.ports import BucketCounts, EngineReading
from plimsoll.sim.quantile_sketch import QuantileSketch

_TTFT_BOUNDS_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_BOUNDS_S: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip


class MetricHistogram:
    """Counts of values up to each bucket edge, and their sum."""

    __slots__ = ("counts", "edges", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.edges = (*bounds, math.inf)
        self.counts = [0.0] * len(self.edges)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.edges, value)] += count
        self.total += value * count

    def buckets(self) -> BucketCounts:
        return BucketCounts(self.edges, tuple(self.counts), self.total)


def _token_bounds(max_tokens: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to the model's context."""
    series = [float(step * 10**power) for power in range(len(str(max_tokens))) for step in (1, 2, 5)]
    return tuple(value for value in series if value <= max_tokens)


class EngineMetrics:
    """Metrics of one engine. post_s, transfer_s: time spent in posting KV reads, and until the KV arrived."""

    def __init__(self, max_model_len: int) -> None:
        tokens = _token_bounds(max_model_len)
        self.steps = self.generated_tokens = self.local_prompt_tokens = self.cached_prompt_tokens = (
            self.transferred_prompt_tokens
        ) = 0
        self.preemptions = 0
        self.post_s = self.transfer_s = 0.0
        self.itl = QuantileSketch()  # inter-token latencies
        self._prompt, self._output = MetricHistogram(tokens), MetricHistogram(tokens)
        self._tpot, self._ttft, self._itl = (
            MetricHistogram(_TOKEN_BOUNDS_S),
            MetricHistogram(_TTFT_BOUNDS_S),
            MetricHistogram(_TOKEN_BOUNDS_S),
        )

    def record_itl(self, seconds: float, tokens: int) -> None:
        """Record `tokens` tokens, each `seconds` after the one before."""
        self._itl.observe(seconds, tokens)

    def record_first_token(self, prompt: int, cached: int, transferred: int, ttft_s: float) -> None:
        """Record a first token."""
        self.local_prompt_tokens += prompt - cached - transferred
        self.cached_prompt_tokens += cached
        self.transferred_prompt_tokens += transferred
        self._ttft.observe(ttft_s)

    def record_completion(self, prompt: int, output: int, stream_s: float) -> None:
        """Record a last token, stream_s after the first one."""
        self._prompt.observe(prompt)
        self._output.observe(output)
        if output > 1:
            self._tpot.observe(stream_s / (output - 1))

    def reading(self, pod: str, at_s: float, running: int, waiting: int, kv_used: float) -> EngineReading:
        """The reading of a scrape at at_s (seconds since the epoch)."""
        return EngineReading(
            pod=pod,
            at_s=at_s,
            instance_id=pod,
            running=running,
            waiting=waiting,
            kv_used=kv_used,
            steps=self.steps,
            computed_tokens=self.local_prompt_tokens + self.generated_tokens,
            generated_tokens=self.generated_tokens,
            local_prompt_tokens=self.local_prompt_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens,
            transferred_prompt_tokens=self.transferred_prompt_tokens,
            preemptions=self.preemptions,
            post_s=self.post_s,
            transfer_s=self.transfer_s,
            prompt_tokens=self._prompt.buckets(),
            output_tokens=self._output.buckets(),
            tpot_s=self._tpot.buckets(),
            ttft_s=self._ttft.buckets(),
            itl_s=self._itl.buckets(),
        )
