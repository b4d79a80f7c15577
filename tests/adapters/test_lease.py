"""The lease against a real API server: one at a time, given back at the end, writes fenced once it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from plimsoll.adapters.kube_client import EVENTS, LEASES, KubeClient
from plimsoll.adapters.lease import LeaseTimes, lead_while_leased
from plimsoll.core.errors import BackendUnavailable, LeaseLost, NotFound
from tests.apiserver import ApiServer

pytestmark = pytest.mark.api

SHORT_LEASE = LeaseTimes(duration=4, renew_deadline=3, retry_period=1, call_timeout=1)


@pytest.fixture
async def kubes(apiserver: ApiServer) -> AsyncIterator[list[KubeClient]]:
    made = [await KubeClient.connect(str(apiserver.kubeconfig)) for _ in range(2)]
    yield made
    for kube in made:
        await kube.close()


class Worker:
    """Work that says when it began and ends when told."""

    def __init__(self) -> None:
        self.began, self.end = asyncio.Event(), asyncio.Event()

    async def __call__(self) -> None:
        self.began.set()
        await self.end.wait()


async def test_lead_second_candidate_takes_over_when_first_ends(kubes: list[KubeClient]) -> None:
    first, second = Worker(), Worker()
    one = asyncio.create_task(lead_while_leased(kubes[0], "default", "handover", "one", first, SHORT_LEASE))
    await first.began.wait()
    two = asyncio.create_task(lead_while_leased(kubes[1], "default", "handover", "two", second, SHORT_LEASE))
    await asyncio.sleep(2 * SHORT_LEASE.retry_period)
    assert not second.began.is_set()
    first.end.set()
    await one
    async with asyncio.timeout(60):
        await second.began.wait()
    assert (await kubes[0].get(LEASES, "default", "handover"))["spec"]["holderIdentity"] == "two"
    second.end.set()
    await two
    assert not (await kubes[0].get(LEASES, "default", "handover"))["spec"].get("holderIdentity")


async def test_lead_cancelled_ends_work_and_releases_lease(kubes: list[KubeClient]) -> None:
    worker = Worker()
    leading = asyncio.create_task(lead_while_leased(kubes[0], "default", "cancelled", "one", worker, SHORT_LEASE))
    await worker.began.wait()
    leading.cancel()
    await asyncio.gather(leading, return_exceptions=True)
    assert not (await kubes[0].get(LEASES, "default", "cancelled"))["spec"].get("holderIdentity")


async def test_lead_work_failure_reaches_caller(kubes: list[KubeClient]) -> None:
    async def work() -> None:
        raise BackendUnavailable("the work broke")

    with pytest.raises(BackendUnavailable, match="the work broke"):
        await lead_while_leased(kubes[0], "default", "failing", "one", work, SHORT_LEASE)


async def test_write_past_renew_deadline_is_fenced(kubes: list[KubeClient]) -> None:
    kube = kubes[0]
    kube.may_write = lambda: False
    with pytest.raises(LeaseLost):
        await kube.create({"kind": "Event", "metadata": {"name": "x", "namespace": "default"}})
    with pytest.raises(NotFound):
        await kube.get(EVENTS, "default", "x")
