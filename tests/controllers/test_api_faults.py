"""An API server that misbehaves ends no operator process: it backs off, steps down, and goes on when it is back.

The operator is a process of its own, as in a pod, on a real API server behind a proxy that injects the fault.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from plimsoll.adapters.kube_client import DEPLOYMENTS, INFERENCESERVICES, LEASES, KubeClient
from plimsoll.controllers.kopf_handlers import RequestPacer
from plimsoll.controllers.operator import LEASE_NAME
from plimsoll.core.errors import NotFound
from tests import builders
from tests.apiserver import ApiServer, api_server
from tests.controllers.faulty_api import Fault, FaultyApi, faulty_api
from tests.ports import free_port

# The proxy drops connections as a server does that dies: aiohttp leaves sockets of that moment to the collector.
pytestmark = [
    pytest.mark.api,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

Object = dict[str, Any]

SYSTEM = "plimsoll-system"
FAULT_SECONDS = 6.0  # longer than the lease of PROGRAM
BACK_SECONDS = 60.0  # by then everything is right again, on a busy machine too
MAX_REQUESTS = 400  # while the server misbehaves: eight watches, the lease and kopf, each with its back-off
# A case takes about 12 s, so `make test` has each fault once. `make test-all` has the others too.
FAULTS = set(Fault) - {Fault.NONE}
USUAL_OF_TWO = {Fault.FAILED_WATCH}
USUAL_AT_START = {Fault.REFUSE}
PROGRAM = """
import asyncio, sys
from plimsoll.adapters.lease import LeaseTimes
from plimsoll.controllers.operator import run
from plimsoll.controllers.operator_config import OperatorConfig
from plimsoll.telemetry import json_logging
from tests.builders import PLATFORM

json_logging.configure("INFO")
namespace, identity, probes, metrics = sys.argv[1:]
config = OperatorConfig(PLATFORM, namespace, identity, int(probes), int(metrics))
asyncio.run(run(config, LeaseTimes(duration=4, renew_deadline=3, retry_period=1, call_timeout=1)))
"""


class OperatorRun:
    """One operator process; its log is printed if a test fails."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process, self.log = process, log

    @property
    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def count(self, text: str) -> int:
        return sum(text in line for line in self.lines)


@asynccontextmanager
async def operator(proxy: FaultyApi, folder: Path, name: str = "op-1") -> AsyncIterator[OperatorRun]:
    log = folder / f"{name}.log"
    environment = {**os.environ, "KUBECONFIG": str(proxy.kubeconfig(folder))}
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROGRAM, SYSTEM, name, str(free_port()), str(free_port()),
            env=environment, stdout=out, stderr=out,
        )  # fmt: skip
    try:
        yield OperatorRun(process, log)
        assert process.returncode is None, "the operator has ended"
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(BACK_SECONDS):
            assert await process.wait() == 0
    finally:
        print(log.read_text()[-6000:])
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.fixture(scope="module")
def cluster() -> Iterator[ApiServer]:
    """An API server without the services of other tests."""
    with api_server() as server:
        server.install_crds()
        yield server


@pytest.fixture
async def kube(cluster: ApiServer) -> AsyncIterator[KubeClient]:
    connected = await KubeClient.connect(str(cluster.kubeconfig))
    if SYSTEM not in await namespaces(connected):
        await connected._json("POST", "/api/v1/namespaces", None, {"metadata": {"name": SYSTEM}}, "application/json")
    yield connected
    for service in (await connected.list(INFERENCESERVICES, "default"))[0]:
        await connected.delete(INFERENCESERVICES, "default", service["metadata"]["name"], service["metadata"]["uid"])
    for lease in (await connected.list(LEASES, SYSTEM))[0]:
        await connected.delete(LEASES, SYSTEM, lease["metadata"]["name"], lease["metadata"]["uid"])
    await connected.close()


async def namespaces(kube: KubeClient) -> set[str]:
    page = await kube._json("GET", "/api/v1/namespaces")
    return {item["metadata"]["name"] for item in page["items"]}


async def until(what: str, holds: Callable[[], Awaitable[bool]], seconds: float = BACK_SECONDS) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while not await holds():
        assert asyncio.get_running_loop().time() < deadline, f"not within {seconds:.0f} s: {what}"
        await asyncio.sleep(0.2)


async def create(kube: KubeClient, name: str) -> None:
    desired = builders.service(name, "default")
    desired["metadata"] = {"name": name, "namespace": "default"}
    await kube.create(desired)


def has_deployment(kube: KubeClient, name: str) -> Callable[[], Awaitable[bool]]:
    async def holds() -> bool:
        try:
            await kube.get(DEPLOYMENTS, "default", f"{name}-decode")
        except NotFound:
            return False
        return True

    return holds


def leads(kube: KubeClient, *names: str) -> Callable[[], Awaitable[bool]]:
    async def holds() -> bool:
        try:
            lease = await kube.get(LEASES, SYSTEM, LEASE_NAME)
        except NotFound:
            return False
        return lease["spec"].get("holderIdentity") in names

    return holds


def cases(faults: set[Fault], usual: set[Fault]) -> list[Any]:
    """The faults; those that are not usual are `extended`."""
    return [
        pytest.param(fault, id=fault.name, marks=() if fault in usual else pytest.mark.extended)
        for fault in Fault
        if fault in faults
    ]


def test_pacer_lets_burst_pass_and_then_spreads_requests() -> None:
    pacer = RequestPacer(burst=3, per_second=2.0)
    assert [pacer.delay_s(100.0) for _ in range(5)] == [0.0, 0.0, 0.0, 0.5, 1.0]
    assert [pacer.delay_s(200.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]


@pytest.mark.parametrize("fault", cases(FAULTS, FAULTS - USUAL_OF_TWO - USUAL_AT_START))
async def test_fault_while_leading_ends_no_process(
    cluster: ApiServer, kube: KubeClient, tmp_path: Path, fault: Fault
) -> None:
    before, during = f"a-{fault.name.lower().replace('_', '-')}", f"b-{fault.name.lower().replace('_', '-')}"
    async with faulty_api(cluster) as proxy, operator(proxy, tmp_path) as run:
        await create(kube, before)
        await until("the operator reconciles", has_deployment(kube, before))
        proxy.requests.clear()
        await proxy.set(fault)
        await create(kube, during)
        await asyncio.sleep(FAULT_SECONDS)
        assert run.process.returncode is None
        assert proxy.requests.total() < MAX_REQUESTS, proxy.requests.most_common(5)
        await proxy.set(Fault.NONE)
        await until("the operator leads", leads(kube, "op-1"))
        await until("a service of the outage is reconciled", has_deployment(kube, during))


@pytest.mark.parametrize("fault", cases({Fault.REFUSE, Fault.THROTTLE, Fault.ERROR, Fault.FAILED_WATCH}, USUAL_OF_TWO))
async def test_fault_ends_neither_of_two_replicas(
    cluster: ApiServer, kube: KubeClient, tmp_path: Path, fault: Fault
) -> None:
    """Both meet the fault. Afterwards one of them leads."""
    name = f"d-{fault.name.lower().replace('_', '-')}"
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    async with (
        faulty_api(cluster) as one,
        faulty_api(cluster) as two,
        operator(one, tmp_path / "one", "op-1") as first,
        operator(two, tmp_path / "two", "op-2") as second,
    ):
        await until("one leads", leads(kube, "op-1", "op-2"))
        await asyncio.gather(one.set(fault), two.set(fault))
        await create(kube, name)
        await asyncio.sleep(FAULT_SECONDS)
        assert (first.process.returncode, second.process.returncode) == (None, None)
        await asyncio.gather(one.set(Fault.NONE), two.set(Fault.NONE))
        await until("one leads again", leads(kube, "op-1", "op-2"))
        await until("a service of the outage is reconciled", has_deployment(kube, name))


@pytest.mark.parametrize("fault", cases({Fault.REFUSE, Fault.HANG, Fault.GARBAGE}, USUAL_AT_START))
async def test_fault_at_start_ends_no_process(
    cluster: ApiServer, kube: KubeClient, tmp_path: Path, fault: Fault
) -> None:
    name = f"c-{fault.name.lower()}"
    async with faulty_api(cluster) as proxy:
        await proxy.set(fault)
        await create(kube, name)
        async with operator(proxy, tmp_path) as run:
            await asyncio.sleep(FAULT_SECONDS)
            assert run.process.returncode is None
            await proxy.set(Fault.NONE)
            await until("the service is reconciled", has_deployment(kube, name))


async def test_hanging_leader_steps_down_before_successor_leads(
    cluster: ApiServer, kube: KubeClient, tmp_path: Path
) -> None:
    async with faulty_api(cluster) as first_way, faulty_api(cluster) as second_way:
        (tmp_path / "one").mkdir()
        (tmp_path / "two").mkdir()
        async with operator(first_way, tmp_path / "one", "op-1") as first:
            await until("the first leads", leads(kube, "op-1"))
            async with operator(second_way, tmp_path / "two", "op-2") as second:
                lost = first.count("lease lost")
                await first_way.set(Fault.HANG)
                await until("the second leads", leads(kube, "op-2"))
                assert first.count("lease lost") == lost + 1, "it stepped down before"
                await create(kube, "handed-over")
                await until("the second reconciles", has_deployment(kube, "handed-over"))
                await first_way.set(Fault.NONE)
                assert second.count("lease acquired") == 1
            await until("the first leads again", leads(kube, "op-1"))
            await create(kube, "handed-back")
            await until("the first reconciles", has_deployment(kube, "handed-back"))
