"""Token buckets for requests and tokens: the rule of every rate limit.

Problem: a client's rate is limited over time, not at each moment, and the output length of a request is known late.

Idea: two buckets, each refilled at its rate, up to a burst. A request takes one from the first and its tokens from the
second, or nothing from either. The second may go below zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple


class RateLimits(NamedTuple):
    """Refill rates, infinite without a limit. `burst_s`: size of each bucket in seconds of its rate, at least one."""

    requests_per_s: float
    tokens_per_s: float
    burst_s: float

    @property
    def max_requests(self) -> float:
        return max(1.0, self.requests_per_s * self.burst_s)

    @property
    def max_tokens(self) -> float:
        return max(1.0, self.tokens_per_s * self.burst_s)


class Spent(NamedTuple):
    """What was taken from buckets and is not refilled yet."""

    requests: float
    tokens: float


@dataclass(slots=True)
class RateBucket:
    """What is left at `refilled_s`, a time of the caller's clock in seconds. `limits` are the last ones."""

    requests: float
    tokens: float
    refilled_s: float
    limits: RateLimits

    @classmethod
    def full(cls, limits: RateLimits, now: float) -> RateBucket:
        return cls(limits.max_requests, limits.max_tokens, now, limits)

    def refill(self, limits: RateLimits, now: float) -> None:
        """Add what the rates give since the last refill."""
        self.limits = limits
        elapsed_s = max(0.0, now - self.refilled_s)
        if elapsed_s:
            self.requests = min(limits.max_requests, self.requests + elapsed_s * limits.requests_per_s)
            self.tokens = min(limits.max_tokens, self.tokens + elapsed_s * limits.tokens_per_s)
            self.refilled_s = now

    def take(self, limits: RateLimits, tokens: float, now: float) -> float:
        """Take one request of `tokens` tokens. Returns 0, or the seconds until the limits allow a retry."""
        self.refill(limits, now)
        if self.requests < 1.0 or self.tokens <= 0.0:
            waits_s = [1e-3]
            if self.requests < 1.0:
                waits_s.append((1.0 - self.requests) / limits.requests_per_s)
            if self.tokens <= 0.0:
                waits_s.append(-self.tokens / limits.tokens_per_s)
            return max(waits_s)
        self.requests -= 1.0
        self.tokens -= tokens
        return 0.0

    def spent(self, now: float) -> Spent:
        """Returns what full buckets of the last limits have more; 0 without a limit."""
        self.refill(self.limits, now)
        full = self.limits.max_requests, self.limits.max_tokens
        left = self.requests, self.tokens
        return Spent(*(most - some if math.isfinite(most) else 0.0 for most, some in zip(full, left, strict=True)))

    def spend(self, limits: RateLimits, spent: Spent, now: float) -> None:
        """Take what was admitted elsewhere, even if that is more than is left."""
        self.refill(limits, now)
        self.requests -= spent.requests
        self.tokens -= spent.tokens


def per_second(limit: float | None, seconds: float = 1.0) -> float:
    """Returns the rate of a limit per `seconds`, infinite for None."""
    return math.inf if limit is None else limit / seconds
