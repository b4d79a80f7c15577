"""Grants model names to services, and records each grant in the status of its service.

Problem: two services that are reconciled at once may both find a name free, and a gateway that decides by itself may
disagree with another one.
Idea: the leading operator alone grants names, one at a time, before it writes any object of the service. It reads its
own writes from the cache. Gateways follow the records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from plimsoll.api import labels
from plimsoll.controllers.object_cache import Key, ObjectCache
from plimsoll.controllers.reconcile.observe import affected_services, related_claims
from plimsoll.controllers.reconcile.service_namespaces import ServiceNamespaces
from plimsoll.core.errors import Forbidden, ObjectRejected
from plimsoll.core.routing.model_names import NameClaim, NameRules, format_record, is_grantable, read_claims
from plimsoll.telemetry.service_log import ServiceLog

Object = dict[str, Any]

log = ServiceLog(__name__)

FIELD = "nameClaim"  # of the status
ADAPTERS = "adapters"  # of the status; an entry has `since` if its name is granted


def micro_time(at: datetime) -> str:
    """A time in RFC 3339 with microseconds, so that two grants differ."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def grant_time(claim: NameClaim, claims: list[NameClaim], rules: NameRules, now: datetime) -> str | None:
    """Since when the service holds the name: as recorded, now for a new grant, or None for no grant."""
    if not is_grantable(claim, claims, rules):
        return None
    return claim.since if claim.is_granted else micro_time(now)


def name_rules(cache: ObjectCache, short_name_namespaces: frozenset[str], namespaces: ServiceNamespaces) -> NameRules:
    """The rules as of now: a namespace counts if it has a service in the cache, or ever had one."""
    return NameRules(short_name_namespaces, namespaces.known.union(cache.service_namespaces))


class NameGrants:
    """Records the grant of each service's model name. `requeue` reconciles the services that a change concerns."""

    def __init__(
        self,
        cache: ObjectCache,
        short_name_namespaces: frozenset[str],
        namespaces: ServiceNamespaces,
        write_status: Callable[[Object, Object], Awaitable[None]],
        requeue: Callable[[Key], None],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._cache = cache
        self._short_name_namespaces = short_name_namespaces
        self._namespaces = namespaces
        self._write_status = write_status
        self._requeue = requeue
        self._now = now
        self._lock = asyncio.Lock()

    @property
    def rules(self) -> NameRules:
        """The rules as of now."""
        return name_rules(self._cache, self._short_name_namespaces, self._namespaces)

    async def update(self, key: Key) -> None:
        """Grant, keep or withdraw the name of a service. Raises ClusterError if it is worth a retry."""
        async with self._lock:
            before = self._cache.get(labels.KIND, key)
            claims = () if before is None else read_claims(before)
            if before is None or not claims:
                return
            claim, now = claims[0], self._now()
            await self._namespaces.add(key[0])
            status = before.get("status") or {}
            since = grant_time(claim, related_claims(self._cache, claim), self.rules, now)
            record = None if since is None else format_record(claim.model, since)
            adapters = [self._adapter_entry(status, one, now) for one in claims[1:]]
            if record == status.get(FIELD) and adapters == status.get(ADAPTERS, []):
                return
            others = {name: value for name, value in status.items() if name not in (FIELD, ADAPTERS)}
            granted = ({} if record is None else {FIELD: record}) | ({ADAPTERS: adapters} if adapters else {})
            try:
                await self._write_status(before, others | granted)
            except (Forbidden, ObjectRejected) as error:  # such as a CRD of an earlier release: engines need no name
                log.warning(key, "cannot record the model name", model_name=claim.model, error=str(error))
                return
            log.info(key, "model name claim changed", model_name=claim.model, since=since)
        for affected in affected_services(self._cache, before, self._cache.get(labels.KIND, key)):
            self._requeue(affected)

    def _adapter_entry(self, status: Object, claim: NameClaim, now: datetime) -> Object:
        """The entry of an adapter in the status, with the time of its grant, if it has one."""
        since = grant_time(claim, related_claims(self._cache, claim), self.rules, now)
        known = status.get(ADAPTERS)
        entries = [one for one in known if isinstance(one, dict)] if isinstance(known, list) else []
        before: Object = next((one for one in entries if one.get("name") == claim.model), {"name": claim.model})
        others = {name: value for name, value in before.items() if name != "since"}
        return others | ({} if since is None else {"since": since})
