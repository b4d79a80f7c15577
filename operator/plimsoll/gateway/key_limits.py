"""Limits of an API key in requests and tokens per minute, enforced at this gateway.

Problem: several gateways serve one key, and none sees what the others admit.

Idea: each gateway enforces an equal share of the limit, by the number of ready gateways, with token buckets of one
minute. The figures in the response headers are of all gateways, extrapolated from this one.
"""

from __future__ import annotations

import math
from typing import Final

from plimsoll.core.admission.retry_advice import advise_retry
from plimsoll.core.admission.token_bucket import RateBucket, RateLimits, per_second
from plimsoll.gateway.errors import Rejection, RejectionReason
from plimsoll.gateway.identity import Identity

MINUTE_S: Final = 60.0
RATE_LIMIT_HEADERS: Final = tuple(
    f"x-ratelimit-{what}-{unit}" for unit in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)


class KeyLimits:
    """The buckets of all keys that have limits. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.gateways = 1  # ready gateway pods, this one included
        self._buckets: dict[str, RateBucket] = {}

    def take(self, identity: Identity, tokens: int, now: float) -> Rejection | None:
        """Take one request of `tokens` tokens, at most a minute's worth. Returns its rejection, None if it may pass."""
        limits = self._share(identity)
        if limits is None:
            return None
        bucket = self._buckets.get(identity.key_name)
        if bucket is None:
            bucket = self._buckets[identity.key_name] = RateBucket.full(limits, now)
        wait_s = bucket.take(limits, min(tokens, identity.tokens_per_minute or 0), now)
        if wait_s <= 0.0:
            return None
        unit, limit = "requests", identity.requests_per_minute
        if bucket.requests >= 1.0:
            unit, limit = "tokens", identity.tokens_per_minute
        message = f"The API key '{identity.key_name}' has reached its limit of {limit} {unit} per minute."
        advice = advise_retry(wait_s, is_time_known=True)
        return Rejection(
            RejectionReason.RATE_LIMIT_EXCEEDED, message, retry=advice, headers=self.headers(identity, now)
        )

    def headers(self, identity: Identity, now: float) -> dict[str, str]:
        """Returns the limits of a key and what is left of them, as OpenAI's API names them."""
        limits = self._share(identity)
        bucket = self._buckets.get(identity.key_name)
        if limits is None or bucket is None:
            return {}
        bucket.refill(limits, now)
        found: dict[str, str] = {}
        for unit, limit, left, full, rate in (
            ("requests", identity.requests_per_minute, bucket.requests, limits.max_requests, limits.requests_per_s),
            ("tokens", identity.tokens_per_minute, bucket.tokens, limits.max_tokens, limits.tokens_per_s),
        ):
            if limit is not None:
                found[f"x-ratelimit-limit-{unit}"] = str(limit)
                found[f"x-ratelimit-remaining-{unit}"] = str(max(0, min(limit, math.floor(left * self.gateways))))
                found[f"x-ratelimit-reset-{unit}"] = f"{max(0, math.ceil((full - left) / rate))}s"
        return found

    def expire(self, now: float) -> None:
        """Drop the buckets of keys that are full because nobody uses them."""
        full_s = MINUTE_S * (self.gateways + 1)  # from a minute's worth below zero
        for name in [name for name, b in self._buckets.items() if now - b.refilled_s > full_s]:
            del self._buckets[name]

    def _share(self, identity: Identity) -> RateLimits | None:
        """Returns the limits of this gateway, None for a key without limits."""
        if identity.requests_per_minute is None and identity.tokens_per_minute is None:
            return None
        seconds = MINUTE_S * self.gateways
        return RateLimits(
            per_second(identity.requests_per_minute, seconds), per_second(identity.tokens_per_minute, seconds), MINUTE_S
        )
