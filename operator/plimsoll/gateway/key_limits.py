"""Limits of an API key in requests and tokens per minute, with token buckets of one minute.

Problem: several gateways serve one key, and none sees what the others admit.

Idea: one gateway owns the key and enforces the whole limit for all of them. A gateway that does not reach the owner
enforces an equal share, by the number of ready gateways. The figures in its response headers are then extrapolated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final

from plimsoll.core.admission.retry_advice import advise_retry
from plimsoll.core.admission.token_bucket import RateBucket, RateLimits, Spent, per_second
from plimsoll.core.units import MINUTE_S
from plimsoll.gateway.errors import Rejection, RejectionReason
from plimsoll.gateway.identity import Identity
from plimsoll.gateway.request_context import RequestContext

RATE_LIMIT_HEADERS: Final = tuple(
    f"x-ratelimit-{what}-{unit}" for unit in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)


class KeyLimits:
    """The buckets of all keys that have limits. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.gateways: Callable[[str], int] = lambda key_name: 1  # among which the limit of a key is divided
        self._buckets: dict[str, RateBucket] = {}
        self._identities: dict[str, Identity] = {}  # the last one of each bucket
        self.on_use: Callable[[str], None] = lambda key_name: None  # called before something is taken of a limit

    def take(self, identity: Identity, tokens: int, now: float) -> Rejection | None:
        """Take one request of `tokens` tokens. Returns its rejection, None if it may pass."""
        limits = self._share(identity)
        if limits is None:
            return None
        bucket = self._bucket(identity, limits, now)
        self.on_use(identity.key_name)
        wait_s = bucket.take(limits, tokens, now)
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

    def take_spent(self, is_moved: Callable[[str], bool], now: float) -> list[tuple[Identity, Spent]]:
        """Returns what is spent of the keys that another gateway owns now, and forgets it."""
        moved = [name for name in self._buckets if is_moved(name)]
        spent = [(self._identities.pop(name), self._buckets.pop(name).spent(now)) for name in moved]
        return [(identity, found) for identity, found in spent if any(found)]

    def spent(self, names: Iterable[str], now: float) -> list[tuple[Identity, Spent]]:
        """Returns what is spent of these keys' limits."""
        return [(self._identities[name], self._buckets[name].spent(now)) for name in names if name in self._buckets]

    @property
    def names(self) -> list[str]:
        """The keys in use that have limits."""
        return list(self._buckets)

    def spend(self, identity: Identity, spent: Spent, now: float) -> None:
        """Count what another gateway has admitted of a key."""
        if (limits := self._share(identity)) is not None:
            self._bucket(identity, limits, now).spend(limits, spent, now)

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
                left_by_all = math.floor(left * self.gateways(identity.key_name))
                found[f"x-ratelimit-remaining-{unit}"] = str(max(0, min(limit, left_by_all)))
                found[f"x-ratelimit-reset-{unit}"] = f"{max(0, math.ceil((full - left) / rate))}s"
        return found

    def expire(self, now: float) -> None:
        """Drop the buckets that are full again: their keys are not in use."""
        for name in [name for name, bucket in self._buckets.items() if now - bucket.refilled_s > MINUTE_S]:
            bucket, limits = self._buckets[name], self._share(self._identities[name])
            assert limits is not None
            bucket.refill(limits, now)
            if bucket.requests >= limits.max_requests and bucket.tokens >= limits.max_tokens:
                del self._buckets[name], self._identities[name]

    def _bucket(self, identity: Identity, limits: RateLimits, now: float) -> RateBucket:
        bucket = self._buckets.get(identity.key_name)
        if bucket is None:
            bucket = self._buckets[identity.key_name] = RateBucket.full(limits, now)
        self._identities[identity.key_name] = identity
        return bucket

    def _share(self, identity: Identity) -> RateLimits | None:
        """Returns the limits of this gateway, None for a key without limits."""
        if not identity.is_limited:
            return None
        seconds = MINUTE_S * self.gateways(identity.key_name)
        return RateLimits(
            per_second(identity.requests_per_minute, seconds), per_second(identity.tokens_per_minute, seconds), MINUTE_S
        )


def charged_tokens(ctx: RequestContext, mean_output: float, max_model_len: int | None) -> int:
    """Returns the tokens that a request counts: its prompts, and what all its sequences may generate.

    `mean_output` is the output of one sequence if the request does not limit it, and `max_model_len` the longest
    sequence, None if unknown. Both are in tokens.
    """
    output = mean_output if ctx.max_tokens is None else ctx.max_tokens
    if max_model_len is not None:
        output = min(output, max_model_len)
    return ctx.estimate.total + math.ceil(output * ctx.prompt.sequences)
