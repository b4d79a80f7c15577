"""Tenant quotas in requests per second and tokens per minute, as token buckets.

Problem: a tenant's quota protects the other tenants, so it applies whether replicas are full or not.

Idea: two buckets per tenant, each refilled at its rate, up to `QUOTA_BURST_S` worth. A request takes one from the first
and its tokens from the second, or nothing from either. The second may go below zero, because the output length is
known late.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

QUOTA_BURST_S: Final = 10.0  # bucket size in seconds of its rate, at least one request
_MINUTE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """A tenant's fairness weight and its quotas, None for no quota. Raises ValueError that names the field."""

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
    refilled_s: float


class TenantQuotas:
    """The buckets of tenants with a quota. Times are of the controller's clock."""

    def __init__(self) -> None:
        self._buckets: dict[str, _Bucket] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, tenant: str, policy: TenantPolicy, tokens: float, now: float) -> float:
        """Take one request of `tokens` tokens. Returns 0, or the seconds until the quota allows a retry."""
        request_limit, token_limit = policy.requests_per_s, policy.tokens_per_min
        if request_limit is None and token_limit is None:
            return 0.0
        requests_per_s = math.inf if request_limit is None else request_limit
        tokens_per_s = math.inf if token_limit is None else token_limit / _MINUTE_S
        bucket = self._buckets.get(tenant)
        max_requests, max_tokens = max(1.0, requests_per_s * QUOTA_BURST_S), max(1.0, tokens_per_s * QUOTA_BURST_S)
        if bucket is None:
            bucket = self._buckets[tenant] = _Bucket(max_requests, max_tokens, now)
        elapsed_s = max(0.0, now - bucket.refilled_s)
        if elapsed_s:
            bucket.requests = min(max_requests, bucket.requests + elapsed_s * requests_per_s)
            bucket.tokens = min(max_tokens, bucket.tokens + elapsed_s * tokens_per_s)
            bucket.refilled_s = now
        if bucket.requests < 1.0 or bucket.tokens <= 0.0:
            waits_s = [1e-3]
            if bucket.requests < 1.0:
                waits_s.append((1.0 - bucket.requests) / requests_per_s)
            if bucket.tokens <= 0.0:
                waits_s.append(-bucket.tokens / tokens_per_s)
            return max(waits_s)
        bucket.requests -= 1.0
        bucket.tokens -= tokens
        return 0.0

    def keep_only(self, policies: dict[str, TenantPolicy]) -> None:
        """Drop the buckets of tenants without a policy."""
        for tenant in [name for name in self._buckets if name not in policies]:
            del self._buckets[tenant]
