"""What an engine counts, with vLLM's bounds and habits, as the scraper would have read it.

Steps count when they gave a token, a prompt's computed tokens when its first one came, and what a request was when it
ended: figures lag behind the work as the real ones do.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Final

from plimsoll.core.ports import Buckets, EngineReading
from plimsoll.sim.times import Times

_TTFT_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_S: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip


class Histogram:
    """Counts of values up to each bound, and their sum."""

    __slots__ = ("counts", "edges", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.edges = (*bounds, math.inf)
        self.counts = [0.0] * len(self.edges)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.edges, value)] += times
        self.total += value * times

    def buckets(self) -> Buckets:
        return Buckets(self.edges, tuple(self.counts), self.total)


def _token_bounds(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to the model's context."""
    series = [float(step * 10**power) for power in range(len(str(most))) for step in (1, 2, 5)]
    return tuple(value for value in series if value <= most)


class Meters:
    """Of one engine. post_s, transfer_s: spent in posting KV reads, and until the KV was there."""

    def __init__(self, max_model_len: int) -> None:
        tokens = _token_bounds(max_model_len)
        self.steps = self.generated = self.local = self.cached = self.moved = 0
        self.preemptions = 0
        self.post_s = self.transfer_s = 0.0
        self.gaps = Times()  # between the tokens of a stream
        self._prompt, self._output = Histogram(tokens), Histogram(tokens)
        self._tpot, self._ttft, self._gaps = Histogram(_TOKEN_S), Histogram(_TTFT_S), Histogram(_TOKEN_S)

    def gap(self, seconds: float, times: int) -> None:
        """So many tokens came out so long after those before them."""
        self._gaps.observe(seconds, times)

    def first(self, prompt: int, cached: int, moved: int, ttft_s: float) -> None:
        """A first token came out."""
        self.local += prompt - cached - moved
        self.cached += cached
        self.moved += moved
        self._ttft.observe(ttft_s)

    def ended(self, prompt: int, output: int, stream_s: float) -> None:
        """A last token came out, so long after the first one."""
        self._prompt.observe(prompt)
        self._output.observe(output)
        if output > 1:
            self._tpot.observe(stream_s / (output - 1))

    def reading(self, pod: str, at_s: float, running: int, waiting: int, kv_used: float) -> EngineReading:
        """As scraped at a moment (seconds since the epoch)."""
        return EngineReading(
            pod=pod,
            at_s=at_s,
            born=pod,
            running=running,
            waiting=waiting,
            kv_used=kv_used,
            steps=self.steps,
            computed_tokens=self.local + self.generated,
            generated_tokens=self.generated,
            local_prompt_tokens=self.local,
            cached_prompt_tokens=self.cached,
            moved_prompt_tokens=self.moved,
            preemptions=self.preemptions,
            post_s=self.post_s,
            transfer_s=self.transfer_s,
            prompt_tokens=self._prompt.buckets(),
            output_tokens=self._output.buckets(),
            tpot_s=self._tpot.buckets(),
            ttft_s=self._ttft.buckets(),
            gaps_s=self._gaps.buckets(),
        )
