"""Request lengths where engines count tokens, but no lengths of requests.

Problem: llama.cpp and TensorRT-LLM have no histograms of prompt and output lengths. Sizing needs their distribution:
the spread decides how long requests wait.

Idea: tokens over requests are the means. The requests are the first tokens, where an engine counts them, else the
answers that the gateways saw succeed. The spread is assumed, that of the lengths of a chat, and both are independent.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Final, NamedTuple

import numpy as np

from plimsoll.core.demand.counter_delta import EngineInterval
from plimsoll.core.demand.derived_windows import generated_tokens
from plimsoll.core.demand.sliding_window import DecayingSum
from plimsoll.core.histogram import total_count
from plimsoll.core.types import Unavailable
from plimsoll.core.workload import LengthHistogram, Workload, from_histograms

ASSUMED_LOG_SD: Final = 0.7  # of lognormal lengths: a squared coefficient of variation of 0.63, as of chats
_MEMORY_S: Final = 300.0
_MIN_REQUESTS: Final = 5.0
_REUSE_TOLERANCE: Final = 0.03  # of a mean; finer changes are not worth a new table
_EDGES: Final = np.arange(-3.0, 3.01, 0.25)  # standard deviations


class _Requests(NamedTuple):
    requests: float


class _Tokens(NamedTuple):
    requests: float | None
    prompt: float
    output: float


class MeanLengths:
    """Mean lengths of the requests of one service."""

    def __init__(self) -> None:
        self._tokens: DecayingSum[_Tokens] = DecayingSum(_MEMORY_S, 0.0)
        self._served: DecayingSum[_Requests] = DecayingSum(_MEMORY_S, 0.0)
        self._built: tuple[tuple[float, ...], Workload] | None = None  # means, and the lengths

    @property
    def is_known(self) -> bool:
        """Whether engines count tokens without lengths."""
        return self._tokens.sum is not None

    def on_served(self, at_s: float, requests: float) -> None:
        """Add requests that gateways saw succeed until at_s."""
        self._served.add(at_s, 1.0, _Requests(requests))

    def on_tokens(self, at_s: float, interval: EngineInterval) -> None:
        """Add what an engine counted until at_s, if it counts tokens but no lengths."""
        prompts = [interval.local_prompt_tokens, interval.cached_prompt_tokens, interval.transferred_prompt_tokens]
        if interval.all_prompt_tokens is not None:
            prompts = [interval.all_prompt_tokens]
        known, output = [tokens for tokens in prompts if tokens is not None], generated_tokens(interval)
        if interval.prompt_tokens is not None or interval.output_tokens is not None or not known or output is None:
            return
        started = None if interval.ttft_s is None else total_count(interval.ttft_s)
        self._tokens.add(at_s, 1.0, _Tokens(started, math.fsum(known), output))

    def workload(self, cached_share: float) -> Workload | Unavailable:
        """The lengths, prompts with this share of cached tokens; Unavailable before a few requests."""
        tokens, served = self._tokens.sum, self._served.sum
        requests = 0.0 if served is None else served.requests
        if tokens is not None and tokens.requests is not None:
            requests = tokens.requests
        if tokens is None or requests < _MIN_REQUESTS or tokens.prompt <= 0.0 or tokens.output <= 0.0:
            return Unavailable(
                f"request lengths are unknown: fewer than {_MIN_REQUESTS:.0f} requests have completed in the last"
                f" {_MEMORY_S:.0f} s"
            )
        prompt = tokens.prompt / requests
        means = tuple(max(1.0, mean) for mean in (prompt * (1.0 - cached_share), tokens.output / requests))
        means = *means, prompt * cached_share
        if self._built is None or any(
            abs(new - old) > _REUSE_TOLERANCE * max(old, 1.0) for new, old in zip(means, self._built[0], strict=True)
        ):
            uncached, output, cached = means
            cached_lengths = _lognormal(cached) if cached >= 1.0 else None
            self._built = means, from_histograms(_lognormal(uncached), _lognormal(output), cached_lengths)
        return self._built[1]


def _lognormal(mean: float) -> LengthHistogram:
    cumulative = np.array([NormalDist().cdf(edge) for edge in _EDGES])
    edges = mean * np.exp(ASSUMED_LOG_SD * _EDGES - ASSUMED_LOG_SD**2 / 2.0)
    return LengthHistogram(edges, np.diff(cumulative, prepend=0.0), mean)
