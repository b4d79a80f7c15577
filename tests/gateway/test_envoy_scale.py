"""200 services, or 1,000 in `make test-all`, with 10 endpoints each: added, changed and removed under traffic.

Kernel limits are the default ones.

Envoy stays below the chart's memory limit. Its memory and the time from a change to Envoy are printed. The time has no
bound here, because other processes share the machine; what is sent for a change has one.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from queue import Queue

import aiohttp
import pytest

from plimsoll.gateway.envoy.access_log import AccessLogReader
from plimsoll.gateway.envoy.admin import EnvoyUnavailable
from plimsoll.gateway.envoy.ads_server import AdsServer
from plimsoll.gateway.envoy.bootstrap import write_files
from plimsoll.gateway.envoy.delta import AppliedEndpoints
from tests.gateway.background_load import BackgroundLoad
from tests.gateway.kube_objects import CatalogOfPods, Object, pod, published, service
from tests.gateway.quantity_attacks import ENVOY_MEMORY_BYTES, peak_bytes
from tests.gateway.stack import TIMEOUT_S, GatewayStack, stop, wait_until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

SERVICES = 1000
ENDPOINTS = 10
PORT = 9  # of endpoints that no request goes to
CHANGES = 20


class Fleet:
    """Services `s0` and so on beside the real one. Each change gives the changed objects a new version."""

    def __init__(self, engine: str, services: int) -> None:
        self._version = 0
        self.services = [self._versioned(service())]
        self.pods = [self._versioned(pod(engine))]
        self.by_service: dict[str, list[Object]] = {}
        for n in range(services):
            self.add(f"s{n}", n)

    def add(self, name: str, subnet: int) -> None:
        self.services.append(self._versioned(service(name)))
        self.move(name, subnet)

    def move(self, name: str, subnet: int) -> None:
        """Give a service ten endpoints in a subnet."""
        hosts = (f"127.{subnet // 250 + 1}.{subnet % 250}.{n + 1}:{PORT}" for n in range(ENDPOINTS))
        self.by_service[name] = [self._versioned(pod(host, service=name)) for host in hosts]

    def remove(self, name: str) -> None:
        self.services = [one for one in self.services if one["metadata"]["name"] != name]
        del self.by_service[name]

    @property
    def all_pods(self) -> list[Object]:
        return [*self.pods, *(one for pods in self.by_service.values() for one in pods)]

    @property
    def addresses(self) -> set[str]:
        return {
            f"{one['status']['podIP']}:{one['spec']['containers'][0]['ports'][0]['containerPort']}"
            for one in self.all_pods
        }

    def _versioned(self, obj: Object) -> Object:
        self._version += 1
        obj["metadata"]["resourceVersion"] = str(self._version)
        return obj


async def wait_applied(stack: GatewayStack, fleet: Fleet) -> None:
    """Wait until Envoy has exactly the endpoints of the fleet, within the chart's memory limit."""

    async def has_all() -> bool:
        try:
            return (await stack.admin.state()).active.keys() == fleet.addresses
        except EnvoyUnavailable:
            return False

    await wait_until(has_all, "Envoy has the endpoints")
    assert stack.envoy is not None
    assert peak_bytes(stack.envoy.pid) < ENVOY_MEMORY_BYTES


def by_key(objects: Iterable[Object]) -> dict[str, Object | None]:
    return {f"{one['metadata']['namespace']}/{one['metadata']['name']}": one for one in objects}


def inotify_instances(pid: int) -> int:
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(link))
        except FileNotFoundError:
            continue
    return sum("inotify" in link for link in links)


@pytest.mark.parametrize("services", [200, pytest.param(SERVICES, marks=pytest.mark.extended)])
async def test_many_services_change_under_traffic(lone: GatewayStack, services: int) -> None:
    engine = await lone.engine()
    fleet = Fleet(engine.address, services)
    assert lone.settings.envoy_memory_bytes == ENVOY_MEMORY_BYTES
    await lone.start(fleet.services, fleet.all_pods)
    await wait_applied(lone, fleet)
    assert lone.envoy is not None
    assert lone.picker is not None
    assert inotify_instances(lone.envoy.pid) <= 2

    load = BackgroundLoad(lone)
    for n in range(50):
        fleet.add(f"new{n}", services + n)
        fleet.move(f"s{n}", services + 50 + n)
        fleet.remove(f"s{n + 100}")
    lone.write_objects(fleet.services, fleet.all_pods)
    await wait_applied(lone, fleet)
    await load.more()

    stop(lone.picker)
    await load.more()
    fleet.move("s1", services + 200)
    fleet.remove("s2")
    lone.write_objects(fleet.services, fleet.all_pods)
    lone.start_picker()
    await lone.ready()
    await wait_applied(lone, fleet)
    await load.more()
    await load.end()

    stop(lone.envoy)
    lone.start_envoy()
    await wait_applied(lone, fleet)
    await lone.ready()
    assert (await lone.ask_fully())[0] == 200
    assert lone.envoy.poll() is None
    print(f"Envoy's peak RSS with {services} services: {peak_bytes(lone.envoy.pid) / 1e6:.0f} MB")


async def test_changed_endpoints_of_one_service_are_sent_alone(lone: GatewayStack) -> None:
    """Prints the time from the change of a pod to its acknowledgement by Envoy, without the API server's watch."""
    fleet, catalog = Fleet(f"127.0.0.1:{PORT}", SERVICES), CatalogOfPods()
    acknowledged: Queue[AppliedEndpoints] = Queue()
    lone.settings.directory.mkdir(parents=True)
    write_files(lone.settings)
    lone.http = aiohttp.ClientSession()
    server = AdsServer(lone.settings.ads_socket, lone.settings.pod, acknowledged.put)
    access_log = AccessLogReader(lone.settings.fifo, lambda record: None)
    access_log.open()  # Envoy waits for its reader
    server.start()
    try:
        server.publish(catalog.set(fleet.services, fleet.all_pods))
        lone.start_envoy()
        known: set[str] = set()
        while len(known) <= SERVICES:
            known |= (await asyncio.to_thread(acknowledged.get, timeout=TIMEOUT_S)).addresses.keys()
        seconds = []
        for n in range(CHANGES):
            fleet.move(f"s{n}", SERVICES + n)
            changed = fleet.by_service[f"s{n}"]
            slices, admissions = published([service(f"s{n}")], changed)
            started_s = time.monotonic()
            server.publish(catalog.builder.update({}, by_key(slices), by_key(admissions)))
            applied = await asyncio.to_thread(acknowledged.get, timeout=TIMEOUT_S)
            seconds.append(time.monotonic() - started_s)
            assert applied.addresses == {f"team/s{n}": {f"{one['status']['podIP']}:{PORT}" for one in changed}}
        assert lone.envoy is not None
        peak = peak_bytes(lone.envoy.pid)
        print(
            f"a change is in Envoy after {statistics.median(seconds) * 1e3:.0f} ms, at most {max(seconds) * 1e3:.0f} ms"
        )
        print(f"Envoy's peak RSS with {SERVICES} services: {peak / 1e6:.0f} MB")
        assert peak < ENVOY_MEMORY_BYTES
    finally:
        server.close()
        access_log.close()
