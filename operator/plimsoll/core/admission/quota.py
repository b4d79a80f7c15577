"""Tenant quotas in requests per second and tokens per minute, as token buckets.

Problem: a tenant's quota protects the other tenants, so it applies whether replicas are full or not.

Idea: one pair of token buckets per tenant, with a burst of `QUOTA_BURST_S`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from plimsoll.core.admission.token_bucket import RateBucket, RateLimits, Spent, per_second
from plimsoll.core.units import MINUTE_S

QUOTA_BURST_S: Final = 10.0  # bucket size in seconds of its rate, at least one request


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


class TenantQuotas:
    """The buckets of tenants with a quota. Times are of the controller's clock."""

    def __init__(self) -> None:
        self._buckets: dict[str, RateBucket] = {}
        self._changed: set[str] = set()  # tenants of whose quota something was taken since `changed`

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, tenant: str, policy: TenantPolicy, tokens: float, now: float) -> float:
        """Take one request of `tokens` tokens. Returns 0, or the seconds until the quota allows a retry."""
        if policy.requests_per_s is None and policy.tokens_per_min is None:
            return 0.0
        limits = _limits(policy)
        self._changed.add(tenant)
        return self._bucket(tenant, limits, now).take(limits, tokens, now)

    def take_spent(self, now: float) -> dict[str, Spent]:
        """Returns what is spent of each tenant's quota, and forgets it: another controller counts it from now on."""
        spent = {tenant: bucket.spent(now) for tenant, bucket in self._buckets.items()}
        self._buckets.clear()
        self._changed.clear()
        return {tenant: found for tenant, found in spent.items() if any(found)}

    def changed(self, now: float, *, is_all: bool = False) -> dict[str, Spent]:
        """Returns what is spent of each quota from which something was taken since the last call, or of all."""
        names = self._buckets.keys() if is_all else self._changed & self._buckets.keys()
        spent = {tenant: self._buckets[tenant].spent(now) for tenant in names}
        self._changed.clear()
        return spent

    def spend(self, tenant: str, policy: TenantPolicy, spent: Spent, now: float) -> None:
        """Count what another controller has admitted."""
        limits = _limits(policy)
        self._changed.add(tenant)
        self._bucket(tenant, limits, now).spend(limits, spent, now)

    def _bucket(self, tenant: str, limits: RateLimits, now: float) -> RateBucket:
        if (bucket := self._buckets.get(tenant)) is None:
            bucket = self._buckets[tenant] = RateBucket.full(limits, now)
        return bucket

    def keep_only(self, policies: dict[str, TenantPolicy]) -> None:
        """Drop the buckets of tenants without a policy."""
        for tenant in [name for name in self._buckets if name not in policies]:
            del self._buckets[tenant]
        self._changed &= self._buckets.keys()


def _limits(policy: TenantPolicy) -> RateLimits:
    return RateLimits(per_second(policy.requests_per_s), per_second(policy.tokens_per_min, MINUTE_S), QUOTA_BURST_S)
