"""Leader election by a Lease, with every write of the leader fenced by its last renewal.

Problem: the client's election renews with calls that may fail in ways it does not expect, or hang. A leader that hangs
must stop within the renew deadline, because another process takes over when the lease expires.

Idea: each call has a time limit, and a call that fails in any way is one that did not renew. A watchdog ends the
leadership at the renew deadline, whatever the election is waiting for.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from kubernetes.aio import client
from kubernetes.aio.leaderelection.electionconfig import Config as ElectionConfig
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

from plimsoll.adapters.kube_client import LEASES, KubeClient
from plimsoll.core.errors import ClusterError, PlimsollError
from plimsoll.telemetry.service_log import ServiceLog

log = ServiceLog(__name__)

STOP_SECONDS: Final = 10.0  # by then the work of a former leader has ended
_FAILURES: Final = (aiohttp.ClientError, TimeoutError, OSError, ValueError, TypeError, LookupError, AttributeError)


class WorkStillRunning(PlimsollError):
    """The work did not end with the leadership, so this process cannot become the leader again."""


@dataclass(frozen=True)
class LeaseTimes:
    """Whole seconds. A lease expires `duration` after its renewal; its holder stops writing after `renew_deadline`.

    call_timeout: time limit of one call.
    """

    duration: int = 15
    renew_deadline: int = 10
    retry_period: int = 2
    call_timeout: int = 3


class RenewalLeaseLock(LeaseLock):  # type: ignore[misc]
    """The client's lease lock, which records its last successful renewal to fence every write."""

    def __init__(
        self, name: str, namespace: str, identity: str, api: client.ApiClient | None, timeout_s: float
    ) -> None:
        super().__init__(name, namespace, identity, api)
        self.renewed_at = float("-inf")
        self._timeout_s = timeout_s

    async def get(self, name: str, namespace: str) -> tuple[bool, Any]:
        """The election record. A lease that cannot be read is retried like a failed request."""
        try:
            async with asyncio.timeout(self._timeout_s):
                found: tuple[bool, Any] = await super().get(name, namespace)
        except _FAILURES as error:
            return False, client.ApiException(status=0, reason=f"{type(error).__name__}: {error}")
        return found

    async def create(self, name: str, namespace: str, election_record: Any) -> bool:
        return await self._record_renewal(self._create(name, namespace, election_record))

    async def _create(self, name: str, namespace: str, record: Any) -> bool:
        """Create the lease; the client's own `create` passes pretty=True, which its argument check rejects (37.0.2)."""
        lease = client.V1Lease(metadata=client.V1ObjectMeta(name=name), spec=self.update_lease(record))
        await self.api_instance.create_namespaced_lease(namespace, lease)
        return True

    async def update(self, name: str, namespace: str, updated_record: Any) -> bool:
        return await self._record_renewal(super().update(name, namespace, updated_record))

    async def _record_renewal(self, write: Awaitable[bool]) -> bool:
        sent_at = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                is_renewed = await write
        except (client.ApiException, *_FAILURES) as error:
            log.warning(None, "cannot write the lease", error=f"{type(error).__name__}: {error}")
            return False
        if is_renewed:
            self.renewed_at = sent_at
        return is_renewed


async def lead_while_leased(
    kube: KubeClient, namespace: str, name: str, identity: str, work: Callable[[], Awaitable[None]], times: LeaseTimes
) -> bool:
    """Wait for the lease, then run `work` while holding it. Returns False if the lease was lost, True if work ended.

    Writes through `kube` are blocked once another process may hold the lease. A holder that ends by itself releases the
    lease, so that its successor does not wait for the expiry. Raises the error of `work`, or WorkStillRunning.
    """
    lock = RenewalLeaseLock(name, namespace, identity, kube._api, times.call_timeout)
    kube.may_write = lambda: time.monotonic() - lock.renewed_at < times.renew_deadline
    finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    tasks: list[asyncio.Task[Any]] = []

    async def started() -> None:
        tasks.extend(filter(None, [asyncio.current_task()]))
        tasks.append(asyncio.create_task(_set_when_expired(lost, lock, times.renew_deadline)))
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - carried to the caller below
            finished.set_exception(error)
        else:
            finished.set_result(None)

    lost = asyncio.Event()
    election = LeaderElection(
        ElectionConfig(lock, times.duration, times.renew_deadline, times.retry_period, started, None)
    )
    election_task, lost_task = asyncio.create_task(election.run()), asyncio.create_task(lost.wait())
    tasks += election_task, lost_task
    try:
        await asyncio.wait((election_task, lost_task, finished), return_when=asyncio.FIRST_COMPLETED)
        if finished.done():
            finished.result()
            return True
        if election_task.done():
            election_task.result()
        return False
    finally:
        await _cancel(tasks)
        if finished.done() and not finished.cancelled():
            finished.exception()  # seen: a failure while the work is being cancelled is of no interest
        if kube.may_write():
            await _release(kube, namespace, name, identity)


async def _set_when_expired(lost: asyncio.Event, lock: RenewalLeaseLock, renew_deadline_s: float) -> None:
    """Set `lost` when the last renewal is older than the deadline."""
    while True:
        left_s = lock.renewed_at + renew_deadline_s - time.monotonic()
        if left_s <= 0.0:
            lost.set()
            return
        await asyncio.sleep(left_s)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    _, running = await asyncio.wait(tasks, timeout=STOP_SECONDS)
    if running:
        raise WorkStillRunning(f"work still runs {STOP_SECONDS:.0f} s after the end of this replica's leadership")


async def _release(kube: KubeClient, namespace: str, name: str, identity: str) -> None:
    with contextlib.suppress(ClusterError, TimeoutError):
        lease = await kube.get(LEASES, namespace, name)
        if lease["spec"].get("holderIdentity") == identity:
            lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
            await kube.replace(LEASES, namespace, name, lease)
