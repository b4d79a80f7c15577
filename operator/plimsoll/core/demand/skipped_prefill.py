"""Requests of a prefill/decode pair that no prefill engine has seen, from the engines' counters.

Problem: the router of a pair may send a request to a decode engine alone, for a short prompt or because no prefill
engine answers, and a client may do so too. Demand that is counted at prefill engines lacks it.

Idea: a request has one first token at a decode engine, and one at a prefill engine before that. First tokens of the
last minute that only decode engines counted are those of such requests. A queue of decode engines that has drained
meanwhile had requests whose prefill was earlier, so it is subtracted. Readings of the two tiers are seconds apart, so
a small difference shows nothing.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from plimsoll.core.demand.counter_delta import EngineInterval
from plimsoll.core.demand.sliding_window import SlidingWindow
from plimsoll.core.histogram import total_count
from plimsoll.core.ports import EngineReading
from plimsoll.core.types import Role

MIN_SHARE: Final = 0.05  # of decode engines' requests: a smaller one may be due to the times of readings
MIN_REQUESTS: Final = 5.0
MIN_OBSERVED_S: Final = 20.0
MAX_AGE_S: Final = 3.0  # of each engine's reading: the others count on meanwhile
MAX_HOLD_S: Final = 300.0  # a result without a newer comparison


class SkippedPrefill(NamedTuple):
    """Requests that skip prefill. share: of the decode engines' requests, above 0 and at most 1.

    prompt_tokens: mean prompt tokens that a decode engine computes for one, 0 where engines do not report them.
    """

    per_s: float
    share: float
    prompt_tokens: float


class _FirstTokens(NamedTuple):
    """First tokens by role. queue_growth: of the decode engines. prompt_tokens: that decode engines computed."""

    prefill: float = 0.0
    decode: float = 0.0
    queue_growth: float = 0.0
    prompt_tokens: float = 0.0


class SkippedPrefillEstimator:
    """Compares the two tiers of one service. Times are seconds since the epoch.

    While an engine of either tier is late or silent, the last result holds for MAX_HOLD_S. After a silence counting
    starts over.
    """

    def __init__(self) -> None:
        self._window: SlidingWindow[_FirstTokens] = SlidingWindow()
        self._since_s = math.inf
        self._waiting: dict[str, float] = {}  # last queue of each decode engine
        self._result: SkippedPrefill | None = None
        self._compared_s = -math.inf  # time of the result

    def observe(self, role: Role, reading: EngineReading, interval: EngineInterval | None) -> None:
        """Add a reading of an engine, with its counter increases since the one before."""
        previous = self._waiting.get(reading.pod)
        if role is Role.DECODE and reading.waiting is not None:
            self._waiting[reading.pod] = reading.waiting
        if interval is None or interval.ttft_s is None:
            return
        first_tokens = total_count(interval.ttft_s)
        if role is Role.PREFILL:
            self._window.add(reading.at_s, _FirstTokens(prefill=first_tokens))
        elif previous is not None and reading.waiting is not None:
            growth, prompt_tokens = reading.waiting - previous, interval.local_prompt_tokens or 0.0
            self._window.add(reading.at_s, _FirstTokens(0.0, first_tokens, growth, prompt_tokens))

    def collect(self, now_s: float, decode_pods: set[str], age_s: float | None) -> SkippedPrefill | None:
        """Return the requests of the last minute that skipped prefill; None for none.

        decode_pods: the ready ones. age_s: of the oldest reading of both tiers; None unless all engines report.
        """
        self._waiting = {pod: waiting for pod, waiting in self._waiting.items() if pod in decode_pods}
        if abs(now_s - self._compared_s) > MAX_HOLD_S:
            self._result = None
        if age_s is None:
            self._window, self._since_s = SlidingWindow(), math.inf
            return self._result
        if now_s < self._since_s:
            self._since_s = now_s
        observed_s = min(now_s - self._since_s, self._window.covered_s(now_s))
        if observed_s >= MIN_OBSERVED_S and age_s <= MAX_AGE_S:
            self._result = _compare(self._window.total(now_s) or _FirstTokens(), observed_s)
            self._compared_s = now_s
        return self._result


def _compare(counts: _FirstTokens, observed_s: float) -> SkippedPrefill | None:
    skipped = counts.decode + min(0.0, counts.queue_growth) - counts.prefill
    if skipped <= max(MIN_SHARE * counts.decode, math.sqrt(counts.decode), MIN_REQUESTS):
        return None
    return SkippedPrefill(skipped / observed_s, skipped / counts.decode, counts.prompt_tokens / skipped)
