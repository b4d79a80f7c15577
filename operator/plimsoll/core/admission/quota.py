"""What tenants may use: requests a second and tokens a minute, as token buckets.

Problem: a tenant's quota is a promise of the platform to the others, which holds whether replicas are full or not.

Idea: two buckets a tenant, each filled at its rate, up to a few seconds' worth; a request takes one from the first and
its tokens from the second, or nothing from either. The second may go below zero: the size of an answer is known late.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

BURST_S: Final = 10.0  # a bucket holds what its rate makes in so many seconds, and one request at least
_MINUTE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """weight: of its turns while requests wait. The others are its quota, None for none. Raises ValueError."""

    weight: float = 1.0
    requests_per_s: float | None = None
    tokens_per_min: float | None = None

    def __post_init__(self) -> None:
        for name in ("weight", "requests_per_s", "tokens_per_min"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be finite and above 0, not {value}")


@dataclass(slots=True)
class _Bucket:
    requests: float
    tokens: float
    at_s: float


class Quotas:
    """Buckets of the tenants that have a quota. Times of the gate's clock."""

    def __init__(self) -> None:
        self._buckets: dict[str, _Bucket] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, tenant: str, policy: TenantPolicy, tokens: float, now: float) -> float:
        """Take one request of so many tokens; returns 0, or in how many seconds it may be tried again."""
        rate, token_rate = policy.requests_per_s, policy.tokens_per_min
        if rate is None and token_rate is None:
            return 0.0
        per_s = math.inf if rate is None else rate
        tokens_per_s = math.inf if token_rate is None else token_rate / _MINUTE_S
        bucket = self._buckets.get(tenant)
        most, most_tokens = max(1.0, per_s * BURST_S), max(1.0, tokens_per_s * BURST_S)
        if bucket is None:
            bucket = self._buckets[tenant] = _Bucket(most, most_tokens, now)
        passed = max(0.0, now - bucket.at_s)
        if passed:
            bucket.requests = min(most, bucket.requests + passed * per_s)
            bucket.tokens = min(most_tokens, bucket.tokens + passed * tokens_per_s)
            bucket.at_s = now
        if bucket.requests < 1.0 or bucket.tokens <= 0.0:
            waits_s = [1e-3]
            if bucket.requests < 1.0:
                waits_s.append((1.0 - bucket.requests) / per_s)
            if bucket.tokens <= 0.0:
                waits_s.append(-bucket.tokens / tokens_per_s)
            return max(waits_s)
        bucket.requests -= 1.0
        bucket.tokens -= tokens
        return 0.0

    def forget(self, policies: dict[str, TenantPolicy]) -> None:
        """Drop the buckets of tenants that have no policy any more."""
        for tenant in [name for name in self._buckets if name not in policies]:
            del self._buckets[tenant]
