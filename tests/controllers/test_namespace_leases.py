"""Two releases whose scopes overlap: one manages a namespace, the other waits until it is gone."""

from __future__ import annotations

import asyncio
import copy
import logging
from typing import Any

import pytest

from plimsoll.adapters.kube_client import LEASES, KubeClient, Resource
from plimsoll.controllers.namespace_leases import DURATION_SECONDS, LEASE_NAME, RENEW_SECONDS, NamespaceLeases
from plimsoll.core.errors import BackendUnavailable, Conflict, Forbidden, NotFound
from plimsoll.telemetry import operator_metrics
from tests.controllers.conftest import ControllerHarness

Object = dict[str, Any]


class LeaseServer(KubeClient):
    """An API server of Leases. error: what every call raises."""

    def __init__(self) -> None:
        self.leases: dict[str, Object] = {}
        self.version = 0
        self.writes = 0
        self.error: Exception | None = None

    def _store(self, namespace: str, obj: Object) -> Object:
        self.version += 1
        self.writes += 1
        meta = {"uid": f"uid-{self.version}"} | obj["metadata"] | {"resourceVersion": str(self.version)}
        self.leases[namespace] = {**copy.deepcopy(obj), "metadata": meta}
        return self.leases[namespace]

    async def _answer(self) -> None:
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        await self._answer()
        assert (resource, name) == (LEASES, LEASE_NAME)
        if namespace not in self.leases:
            raise NotFound(name)
        return copy.deepcopy(self.leases[str(namespace)])

    async def create(self, obj: Object) -> Object:
        await self._answer()
        if obj["metadata"]["namespace"] in self.leases:
            raise Conflict("exists")
        return self._store(obj["metadata"]["namespace"], obj)

    async def replace(self, resource: Resource, namespace: str | None, name: str, obj: Object) -> None:
        await self._answer()
        if self.leases[str(namespace)]["metadata"]["resourceVersion"] != obj["metadata"]["resourceVersion"]:
            raise Conflict("changed")
        self._store(str(namespace), obj)

    async def delete(self, resource: Resource, namespace: str | None, name: str, uid: str) -> None:
        await self._answer()
        assert self.leases[str(namespace)]["metadata"]["uid"] == uid
        del self.leases[str(namespace)]

    def holder(self, namespace: str = "team") -> str:
        return str(self.leases[namespace]["spec"]["holderIdentity"])


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Release:
    """A release of Plimsoll; taken: the namespaces that it took over; lost: those that another one manages."""

    def __init__(self, server: LeaseServer, clock: Clock, name: str) -> None:
        self.taken: list[str] = []
        self.lost: list[str] = []
        self.leases = NamespaceLeases(server, name, self._take, clock, self.lost.append)

    async def _take(self, namespace: str) -> None:
        self.taken.append(namespace)


@pytest.fixture
def server() -> LeaseServer:
    return LeaseServer()


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def test_lease_second_release_leaves_namespace_alone(server: LeaseServer, clock: Clock) -> None:
    first, second = Release(server, clock, "one"), Release(server, clock, "two")
    assert await first.leases.acquire("team")
    assert not await second.leases.acquire("team")
    for _ in range(20):
        clock.now_s += RENEW_SECONDS
        await first.leases.renew({"team"})
        await second.leases.renew({"team"})
        assert (first.leases.manages("team"), second.leases.manages("team")) == (True, False)
    assert server.holder() == "one"
    assert second.taken == []
    assert await second.leases.acquire("other")


async def test_lease_second_release_takes_over_when_first_is_gone(server: LeaseServer, clock: Clock) -> None:
    first, second = Release(server, clock, "one"), Release(server, clock, "two")
    await first.leases.acquire("team")
    await second.leases.acquire("team")
    clock.now_s += DURATION_SECONDS - 1
    await second.leases.renew({"team"})
    assert not second.leases.manages("team")
    clock.now_s += 1
    await second.leases.renew({"team"})
    assert second.leases.manages("team")
    assert (server.holder(), second.taken) == ("two", ["team"])
    await first.leases.renew({"team"})
    assert not first.leases.manages("team")
    assert first.taken == []


@pytest.mark.parametrize("duration_s", [2147483647, DURATION_SECONDS + 1, 0, None, "long"])
async def test_lease_no_longer_duration_counts(duration_s: object, server: LeaseServer, clock: Clock) -> None:
    release = Release(server, clock, "one")
    await release.leases.acquire("team")
    server.leases["team"]["spec"] |= {"holderIdentity": "evil", "leaseDurationSeconds": duration_s}
    server.leases["team"]["metadata"]["resourceVersion"] = "1000"
    for _ in range(2):
        await release.leases.renew({"team"})
        assert (release.leases.manages("team"), release.leases.foreign_release("team")) == (False, "evil")
    assert release.lost == ["team"]
    clock.now_s += DURATION_SECONDS
    await release.leases.renew({"team"})
    assert (release.leases.manages("team"), release.leases.foreign_release("team")) == (True, "")
    assert (server.holder(), release.taken) == ("one", ["team"])


async def test_lease_new_process_of_same_release_goes_on_at_once(server: LeaseServer, clock: Clock) -> None:
    await Release(server, clock, "one").leases.acquire("team")
    acquired = server.leases["team"]["spec"]["acquireTime"]
    again = Release(server, clock, "one")
    assert await again.leases.acquire("team")
    assert server.leases["team"]["spec"]["acquireTime"] == acquired
    assert again.taken == []


async def test_lease_is_read_once_until_renewal(server: LeaseServer, clock: Clock) -> None:
    release = Release(server, clock, "one")
    assert all(await asyncio.gather(*(release.leases.acquire("team") for _ in range(8))))
    assert server.writes == 1


async def test_lease_of_two_releases_at_once_has_one_holder(server: LeaseServer, clock: Clock) -> None:
    releases = [Release(server, clock, name) for name in ("one", "two")]
    first = await asyncio.gather(*(release.leases.acquire("team") for release in releases))
    again = [await release.leases.acquire("team") for release in releases]
    assert sorted(first) == sorted(again) == [False, True]


async def test_lease_without_services_is_deleted(server: LeaseServer, clock: Clock) -> None:
    release = Release(server, clock, "one")
    await release.leases.acquire("team")
    await release.leases.renew(set())
    assert server.leases == {}
    assert not release.leases.manages("team")


async def test_lease_of_other_release_is_not_deleted(server: LeaseServer, clock: Clock) -> None:
    first, second = Release(server, clock, "one"), Release(server, clock, "two")
    await first.leases.acquire("team")
    await second.leases.acquire("team")
    await second.leases.renew(set())
    await second.leases.give_up("team")
    assert server.holder() == "one"
    await first.leases.give_up("team")
    assert server.leases == {}


async def test_lease_that_may_not_be_written_stops_nothing(server: LeaseServer, clock: Clock) -> None:
    server.error = Forbidden("no role")
    release = Release(server, clock, "one")
    assert await release.leases.acquire("team")


async def test_lease_outage_changes_nothing(server: LeaseServer, clock: Clock) -> None:
    first, second = Release(server, clock, "one"), Release(server, clock, "two")
    await first.leases.acquire("team")
    await second.leases.acquire("team")
    server.error = BackendUnavailable("away")
    clock.now_s += 10 * DURATION_SECONDS
    for release in (first, second):
        await release.leases.renew({"team"})
    with pytest.raises(BackendUnavailable):
        await first.leases.acquire("other")
    assert (first.leases.manages("team"), second.leases.manages("team")) == (True, False)
    server.error = None
    await second.leases.renew({"team"})
    await first.leases.renew({"team"})
    assert (first.leases.manages("team"), second.leases.manages("team")) == (True, False)


async def test_lease_warning_is_rare_and_counted(
    server: LeaseServer, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    first, second = Release(server, clock, "one"), Release(server, clock, "two")
    await first.leases.acquire("team")
    await second.leases.acquire("team")
    for _ in range(60):  # 20 minutes
        clock.now_s += RENEW_SECONDS
        await first.leases.renew({"team"})
        await second.leases.renew({"team"})
    assert operator_metrics.OPERATOR_FOREIGN_NAMESPACES._value.get() == 1
    assert sum("another release manages" in record.getMessage() for record in caplog.records) == 3


async def test_lease_run_renews(server: LeaseServer, clock: Clock) -> None:
    release = Release(server, clock, "one")
    task = asyncio.create_task(release.leases.run(lambda: {"team"}, interval_s=0.001))
    while server.writes < 3:
        await asyncio.sleep(0.001)
    task.cancel()
    assert server.holder() == "one"


@pytest.mark.api
async def test_lease_at_a_real_api_server(world: ControllerHarness) -> None:
    clock, taken = Clock(), list[str]()

    async def take(namespace: str) -> None:
        taken.append(namespace)

    first, second = (NamespaceLeases(world.kube, name, take, clock) for name in ("one", "two"))
    assert await first.acquire(world.namespace)
    await first.renew({world.namespace})
    assert not await second.acquire(world.namespace)
    clock.now_s += DURATION_SECONDS
    await second.renew({world.namespace})
    assert second.manages(world.namespace)
    assert taken == [world.namespace]
    await second.renew(set())
    with pytest.raises(NotFound):
        await world.kube.get(LEASES, world.namespace, LEASE_NAME)
