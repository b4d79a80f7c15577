"""Requests at engines that take no capacity, such as of the token routes: how many there are, and how many may be.

Problem: they pass admission control by, so that a client could fill the engines with them. Idea: a limit per engine,
of which one client gets three quarters.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from plimsoll.gateway.gateway_limit import GatewayLimit

MAX_PER_ENGINE: Final = 64
MAX_CLIENT_PER_ENGINE: Final = 48


class UnbookedRequests:
    """Their numbers, by service (NAMESPACE/NAME) and by client (`identity.client_of`)."""

    def __init__(self) -> None:
        self.by_service: Counter[str] = Counter()
        self._by_client: Counter[tuple[str, str]] = Counter()

    def add(self, service: str, client: str, delta: int) -> None:
        """Count a request that begins, or with -1 one that ends."""
        self.by_service[service] += delta
        self._by_client[service, client] += delta
        if not self.by_service[service]:
            del self.by_service[service]
        if not self._by_client[service, client]:
            del self._by_client[service, client]

    def reached_limit(self, service: str, client: str, engines: int) -> tuple[GatewayLimit, int] | None:
        """Returns the limit that another request of the client exceeds, and its number per engine; None if none."""
        if self.by_service[service] >= engines * MAX_PER_ENGINE:
            return GatewayLimit.TOKEN_REQUESTS, MAX_PER_ENGINE
        if self._by_client[service, client] >= engines * MAX_CLIENT_PER_ENGINE:
            return GatewayLimit.CLIENT_TOKEN_REQUESTS, MAX_CLIENT_PER_ENGINE
        return None
