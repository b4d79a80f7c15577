"""One release of Plimsoll manages the services of a namespace, also where the scopes of two releases overlap.

Problem: two operators that apply the same objects with different settings undo each other's writes for ever.
Idea: a release holds a Lease in each namespace with services. Another release that sees it renewed leaves the namespace
alone. When the Lease expires, as after an uninstallation, the other release takes over. A replica that stops leading
stops all writes, so only the leader of a release renews.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from plimsoll.adapters.kube_client import LEASES, KubeClient
from plimsoll.api import labels
from plimsoll.core.errors import ClusterError, Conflict, Forbidden, NotFound, ObjectRejected
from plimsoll.telemetry import operator_metrics
from plimsoll.telemetry.service_log import ServiceLog

Object = dict[str, Any]

log = ServiceLog(__name__)

LEASE_NAME: Final = "plimsoll-release"
DURATION_SECONDS: Final = 60  # without a renewal, until another release takes over
RENEW_SECONDS: Final = 20.0  # between two renewals, and between two looks at another release's Lease
WARN_SECONDS: Final = 600.0  # between two log lines about one namespace


@dataclass
class _Namespace:
    """What is known of one namespace. managed: whether this release manages it. foreign: the release that does.

    version, version_at: the newest version of another release's Lease, and the monotonic time at which it was first
    seen.
    """

    managed: bool = False
    foreign: str = ""
    version: str = ""
    version_at: float = 0.0
    warned_at: float = float("-inf")
    uid: str = ""


class NamespaceLeases:
    """The Leases of one release. `release` is its namespace: there is at most one release in a namespace."""

    def __init__(
        self,
        kube: KubeClient,
        release: str,
        on_taken_over: Callable[[str], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
        on_foreign: Callable[[str], None] = lambda namespace: None,
    ) -> None:
        """on_taken_over: called with a namespace that another release managed until now. on_foreign: called with one
        that another release manages from now on."""
        self._kube = kube
        self._release = release
        self._on_taken_over = on_taken_over
        self._clock = clock
        self._on_foreign = on_foreign
        self._known: dict[str, _Namespace] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def manages(self, namespace: str) -> bool:
        """Whether this release is known to manage the namespace."""
        known = self._known.get(namespace)
        return known is not None and known.managed

    def foreign_release(self, namespace: str) -> str:
        """The other release that manages the namespace; "" without one."""
        known = self._known.get(namespace)
        return "" if known is None else known.foreign

    async def acquire(self, namespace: str) -> bool:
        """Whether this release manages the namespace; looks at its Lease if that is unknown. Raises ClusterError."""
        async with self._locks[namespace]:
            if namespace not in self._known:
                await self._check(namespace)
        return self.manages(namespace)

    async def run(self, namespaces: Callable[[], Set[str]], interval_s: float = RENEW_SECONDS) -> None:
        """Renew until cancelled. namespaces: those with services. interval_s: seconds between two renewals."""
        while True:
            await asyncio.sleep(interval_s)
            await self.renew(namespaces())

    async def renew(self, namespaces: Set[str]) -> None:
        """Renew the Leases of these namespaces, look at those of other releases, and give up all others."""
        for namespace in sorted(namespaces):
            try:
                async with self._locks[namespace]:
                    await self._check(namespace)
            except ClusterError as error:
                log.warning(None, "cannot renew the lease of a namespace", namespace=namespace, error=str(error))
                if namespace in self._known:
                    self._known[namespace].version = ""  # its holder may be cut off too: the time starts again
        for namespace in sorted(self._known.keys() - namespaces):
            await self.give_up(namespace)
        self._export()

    async def give_up(self, namespace: str) -> None:
        """Delete the Lease of a namespace without services, if this release holds it."""
        async with self._locks[namespace]:
            known = self._known.pop(namespace, _Namespace())
            if known.managed and known.uid:
                with contextlib.suppress(ClusterError):  # a Lease that stays expires
                    await self._kube.delete(LEASES, namespace, LEASE_NAME, known.uid)

    async def _check(self, namespace: str) -> None:
        known = self._known.get(namespace, _Namespace())
        before = known.foreign
        try:
            lease = await self._get(namespace)
            if lease is not None and not self._is_free(lease, known):
                self._set_foreign(namespace, known, lease["spec"]["holderIdentity"])
                return
            known.uid = await self._hold(namespace, lease)
        except Conflict:
            self._known.pop(namespace, None)  # another release was faster; look again
            return
        except (Forbidden, ObjectRejected) as error:  # a role without Leases, or a namespace that is being deleted
            if not known.managed:
                log.warning(None, "cannot hold the lease of a namespace", namespace=namespace, error=str(error))
        known.managed, known.foreign = True, ""
        self._known[namespace] = known
        if before:
            log.info(None, "took over a namespace", namespace=namespace, release_before=before)
            self._export()
            await self._on_taken_over(namespace)

    async def _get(self, namespace: str) -> Object | None:
        with contextlib.suppress(NotFound):
            return await self._kube.get(LEASES, namespace, LEASE_NAME)
        return None

    def _is_free(self, lease: Object, known: _Namespace) -> bool:
        """Whether this release may hold the Lease: it does, nobody does, or nobody has renewed it in its duration.

        The time runs by this process's clock from the first look at a version, since clocks differ. Whoever may write a
        Lease may write any duration into it, so none beyond that of a release counts.
        """
        spec = lease.get("spec") or {}
        if spec.get("holderIdentity") in (None, "", self._release):
            return True
        version = lease["metadata"]["resourceVersion"]
        if version != known.version:
            known.version, known.version_at = version, self._clock()
        written_s = spec.get("leaseDurationSeconds")
        duration_s = written_s if isinstance(written_s, int) and written_s > 0 else DURATION_SECONDS
        return self._clock() - known.version_at >= min(duration_s, DURATION_SECONDS)

    async def _hold(self, namespace: str, lease: Object | None) -> str:
        """Write the Lease; returns its UID. Raises Conflict if another release was faster."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": self._release, "leaseDurationSeconds": DURATION_SECONDS, "renewTime": now}
        if lease is None:
            meta = {"namespace": namespace, "name": LEASE_NAME, "labels": {labels.MANAGED_BY: "plimsoll"}}
            body = {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": meta}
            created = await self._kube.create({**body, "spec": {**spec, "acquireTime": now}})
            return str(created["metadata"]["uid"])
        old = lease.get("spec") or {}
        acquired = old.get("acquireTime", now) if old.get("holderIdentity") == self._release else now
        await self._kube.replace(
            LEASES, namespace, LEASE_NAME, {**lease, "spec": {**old, **spec, "acquireTime": acquired}}
        )
        return str(lease["metadata"]["uid"])

    def _set_foreign(self, namespace: str, known: _Namespace, release: str) -> None:
        now_s = self._clock()
        if release != known.foreign or now_s - known.warned_at >= WARN_SECONDS:
            known.warned_at = now_s
            log.warning(
                None,
                "another release manages a namespace; its services are left alone",
                namespace=namespace,
                release=release,
                advice="uninstall one release, or give them different watchNamespaces",
            )
        is_new = release != known.foreign
        known.managed, known.foreign = False, release
        self._known[namespace] = known
        self._export()
        if is_new:
            self._on_foreign(namespace)

    def _export(self) -> None:
        operator_metrics.OPERATOR_FOREIGN_NAMESPACES.set(sum(bool(known.foreign) for known in self._known.values()))
