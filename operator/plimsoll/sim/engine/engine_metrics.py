"""Engine counters with vLLM's buckets and semantics, as a scrape would read them.

Steps count when they generated a token, a prompt's computed tokens with its first token, and a request's lengths when
it completed. The figures lag the work as in a real engine.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate
from typing import Final

from plimsoll.sim.engine.quantile_sketch import QuantileSketch

TTFT_BOUNDS_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_BOUNDS_S: Final = (
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

    def cumulative(self) -> list[float]:
        """Observations at or below each edge; the last one is all."""
        return [*accumulate(self.counts)]


def token_bounds(max_tokens: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to the model's context."""
    series = [float(step * 10**power) for power in range(len(str(max_tokens))) for step in (1, 2, 5)]
    return tuple(value for value in series if value <= max_tokens)


class EngineMetrics:
    """Metrics of one engine. post_s, transfer_s: time spent in posting KV reads, and until the KV arrived.
    prefill_s: time of requests from the queue to the first token; decode_s: of completed ones from there to the last.

    single_token_tpot: whether a response of one token counts as a TPOT of 0, as in vLLM. Sizing from TPOT needs only
    the others, so the simulator omits them.
    """

    def __init__(self, max_model_len: int, *, single_token_tpot: bool = False) -> None:
        tokens = token_bounds(max_model_len)
        self.steps = self.generated_tokens = self.local_prompt_tokens = self.cached_prompt_tokens = (
            self.transferred_prompt_tokens
        ) = 0
        self.queried_tokens = self.hit_tokens = 0  # of admitted prompts: all, and those in the prefix cache
        self.preemptions = 0
        self.post_s = self.transfer_s = self.prefill_s = self.decode_s = 0.0
        self.itl = QuantileSketch()  # inter-token latencies
        self.prompt_tokens, self.output_tokens = MetricHistogram(tokens), MetricHistogram(tokens)
        self.tpot_s, self.ttft_s, self.itl_s = (
            MetricHistogram(TOKEN_BOUNDS_S),
            MetricHistogram(TTFT_BOUNDS_S),
            MetricHistogram(TOKEN_BOUNDS_S),
        )
        self._single_token_tpot = single_token_tpot

    def record_admission(self, prompt: int, cached: int) -> None:
        """Record a sequence that left the queue for the first time."""
        self.queried_tokens += prompt
        self.hit_tokens += cached

    def record_itl(self, seconds: float, tokens: int) -> None:
        """Record `tokens` tokens, each `seconds` after the one before."""
        self.itl_s.observe(seconds, tokens)

    def record_first_token(self, prompt: int, cached: int, transferred: int, ttft_s: float) -> None:
        """Record a first token."""
        self.local_prompt_tokens += prompt - cached - transferred
        self.cached_prompt_tokens += cached
        self.transferred_prompt_tokens += transferred
        self.ttft_s.observe(ttft_s)

    def record_completion(self, prompt: int, output: int, stream_s: float) -> None:
        """Record a last token, stream_s after the first one."""
        self.decode_s += stream_s
        self.prompt_tokens.observe(prompt)
        self.output_tokens.observe(output)
        if output > 1:
            self.tpot_s.observe(stream_s / (output - 1))
        elif self._single_token_tpot:
            self.tpot_s.observe(0.0)
