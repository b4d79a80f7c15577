"""The tenants of one service that have series of their own in metrics, in bounded number.

Problem: clients, or a proxy, name tenants. A series for each name would let them fill the memory of the gateway and of
Prometheus.

Idea: the first tenants of a service at a gateway are named. All others share one name.
"""

from __future__ import annotations

from typing import Final

MAX_NAMED_TENANTS: Final = 50  # of one service at one gateway
MAX_TENANT_CHARS: Final = 100
OTHER_TENANTS: Final = "other tenants"


class TenantLabels:
    """The labels of one service's tenants."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    def of(self, tenant: str) -> str:
        """Returns the label of a tenant, which is its name or `OTHER_TENANTS`. It never changes."""
        if tenant in self._named:
            return tenant
        if len(self._named) >= MAX_NAMED_TENANTS or len(tenant) > MAX_TENANT_CHARS:
            return OTHER_TENANTS
        self._named.add(tenant)
        return tenant
