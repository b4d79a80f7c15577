"""The operator by the number of services: `python -m bench.controlplane.fleet_curve [--kwok] [SERVICES ...]`.

A real API server, one operator as a process of its own, and ten pods for each service. With `--kwok` the pods are
running and ready on nodes that KWOK simulates, and their engines accept each connection and never answer. Without it
they wait for a node, so the cost of reading engines is not in it. Prints for 10, 100 and 1,000 services, or those
named: the time until all have their objects, memory and share of a core at rest, the time of a full resync by a new
process, the longest answer of the health endpoint at rest (a bound on how long the event loop is blocked) and of
`/metrics`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from e2e.cluster.settings import BIN
from plimsoll.adapters.kube_client import DEPLOYMENTS, PODS, KubeClient
from plimsoll.api.contract import engine_contract
from tests import builders
from tests.apiserver import ApiServer, api_server
from tests.ports import free_port

SYSTEM = "plimsoll-system"
PROGRAM = """
import asyncio, sys
from plimsoll.cli import gc_tuning
from plimsoll.controllers.operator import run
from plimsoll.controllers.operator_config import OperatorConfig
from plimsoll.telemetry import json_logging
from tests.builders import PLATFORM

json_logging.configure("INFO")
gc_tuning.reduce_full_collections()
namespace, identity, probes, metrics = sys.argv[1:]
asyncio.run(run(OperatorConfig(PLATFORM, namespace, identity, int(probes), int(metrics))))
"""

SIZES = (10, 100, 1000)
PODS_PER_SERVICE, TIERS = 10, 2
SERVICES_PER_NODE = 10
STAGES = Path(__file__).with_name("running_pods.yaml")
POD_NETWORK = "127.1.0.1/16"  # addresses of this machine, at which the silent engines listen
AT_ONCE = 8
SETTLE_S, MEASURE_S = 15.0, 30.0
MAX_WAIT_S = 900.0
ROW = "{:>9} {:>6} {:>11} {:>6} {:>9} {:>16} {:>12} {:>11}"
HEAD = ("services", "pods", "objects in", "MB", "% core", "resync, CPU", "loop at most", "/metrics")


class Operator:
    """The process, and what it says of itself."""

    def __init__(self, process: asyncio.subprocess.Process, http: aiohttp.ClientSession, probes: int, metrics: int):
        self.process, self._http = process, http
        self._probes, self._metrics = probes, metrics

    async def metric(self, name: str) -> float:
        """The sum of the samples of a metric; 0 before it answers."""
        try:
            async with self._http.get(f"http://127.0.0.1:{self._metrics}/metrics") as answer:
                page = await answer.text()
        except aiohttp.ClientError:
            return 0.0
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE))

    async def longest_s(self, path: str, port: int, seconds: float) -> float:
        """The longest of the answers at a path within some seconds."""
        longest, end = 0.0, time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.monotonic()
            async with self._http.get(f"http://127.0.0.1:{port}{path}") as answer:
                await answer.read()
            longest = max(longest, time.monotonic() - began)
            await asyncio.sleep(0.02)
        return longest

    async def at_rest(self) -> tuple[float, float, float, float]:
        """Megabytes, per cent of a core, and the longest answers of the health endpoint and of /metrics in seconds."""
        before = self.cpu_s()
        loop_s = await self.longest_s("/healthz", self._probes, MEASURE_S)
        share = 100 * (self.cpu_s() - before) / MEASURE_S
        return self._resident_mb(), share, loop_s, await self.longest_s("/metrics", self._metrics, 2.0)

    def cpu_s(self) -> float:
        """CPU time of the process in seconds."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _resident_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) / 1024


@asynccontextmanager
async def running(kubeconfig: Path, log: Path) -> AsyncIterator[Operator]:
    """An operator, which is stopped at the end."""
    probes, metrics = free_port(), free_port()
    with log.open("ab") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROGRAM, SYSTEM, "op-1", str(probes), str(metrics),
            env={**os.environ, "KUBECONFIG": str(kubeconfig)}, stdout=out, stderr=out,
        )  # fmt: skip
    async with aiohttp.ClientSession() as http:
        try:
            yield Operator(process, http, probes, metrics)
        finally:
            process.terminate()
            await process.wait()


async def all_of(calls: Iterable[Awaitable[Any]]) -> None:
    """Run calls, some at once."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(call: Awaitable[Any]) -> None:
        async with slots:
            await call

    await asyncio.gather(*(one(call) for call in calls))


async def until(holds: Any) -> float:
    """Wait until it holds; returns the seconds."""
    began = time.monotonic()
    while not await holds():
        if time.monotonic() - began > MAX_WAIT_S:
            raise TimeoutError("the operator does not get there")
        await asyncio.sleep(0.5)
    return time.monotonic() - began


@asynccontextmanager
async def simulated_nodes(cluster: ApiServer, kube: KubeClient, names: Iterable[str]) -> AsyncIterator[None]:
    """Nodes whose pods are running and ready, by KWOK, with engines that accept and never answer."""

    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while await reader.read(65536):
                pass
        writer.close()

    for name in names:
        node = {"metadata": {"name": name}, "status": {"allocatable": {"pods": "1000"}}}
        await kube._json("POST", "/api/v1/nodes", None, node, "application/json")
    ports = engine_contract().ports
    servers = [await asyncio.start_server(never_answer, "0.0.0.0", ports[name]) for name in ("api", "launcher")]
    with (cluster.folder / "kwok.log").open("ab") as out:
        process = await asyncio.create_subprocess_exec(
            str(BIN / "kwok"), f"--kubeconfig={cluster.kubeconfig}", "--manage-all-nodes=true",
            f"--cidr={POD_NETWORK}", "--node-ip=127.0.0.1", f"--config={STAGES}", stdout=out, stderr=out,
        )  # fmt: skip
    try:
        yield
    finally:
        process.terminate()
        await process.wait()
        for server in servers:
            server.close()


def tier_pods(deployment: dict[str, Any], node: str | None) -> list[dict[str, Any]]:
    """Half of a service's pods, as a tier's Deployment makes them. node: that takes them, None for pending pods."""
    template, tier = deployment["spec"]["template"], deployment["metadata"]["name"]
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{tier}-{number}",
                "namespace": "default",
                "labels": template["metadata"]["labels"],
                "annotations": template["metadata"].get("annotations", {}),
            },
            "spec": template["spec"] | ({} if node is None else {"nodeName": node}),
        }
        for number in range(PODS_PER_SERVICE // TIERS)
    ]


async def measure(services: int, folder: Path, *, with_kwok: bool) -> tuple[float, ...]:
    """Returns seconds until all objects exist, megabytes, per cent, and seconds of a resync, its CPU, loop, page."""
    async with AsyncExitStack() as stack:
        cluster = stack.enter_context(api_server())
        cluster.install_crds()
        kube = await KubeClient.connect(str(cluster.kubeconfig))
        stack.push_async_callback(kube.close)
        system = {"metadata": {"name": SYSTEM}}
        await kube._json("POST", "/api/v1/namespaces", None, system, "application/json")
        made = [builders.service(f"s-{number}", "default") for number in range(services)]
        for one in made:
            one["metadata"] = {"name": one["metadata"]["name"], "namespace": "default"}

        async def is_complete() -> bool:
            return len((await kube.list(DEPLOYMENTS, "default"))[0]) >= TIERS * services

        async def are_ready() -> bool:
            pending = await kube._page(PODS.path(), {"fieldSelector": "status.phase=Pending", "limit": "1"}, whole=True)
            return pending is not None and not pending["items"]

        log = folder / f"operator-{services}.log"
        async with running(cluster.kubeconfig, log):
            await all_of(kube.create(one) for one in made)
            objects_s = await until(is_complete)
            tiers = (await kube.list(DEPLOYMENTS, "default"))[0]
            nodes = [f"node-{number}" for number in range(services // SERVICES_PER_NODE + 1)] if with_kwok else []
            if nodes:
                await stack.enter_async_context(simulated_nodes(cluster, kube, nodes))
            placed = [(tier, nodes[at % len(nodes)] if nodes else None) for at, tier in enumerate(tiers)]
            await all_of(kube.create(pod) for tier, node in placed for pod in tier_pods(tier, node))
            if nodes:
                await until(are_ready)
        async with running(cluster.kubeconfig, log) as operator:

            async def is_reconciled() -> bool:
                done = await operator.metric("plimsoll_operator_reconciles_total")
                synced = not await operator.metric("plimsoll_operator_unsynced_lists")
                return synced and done >= services and not await operator.metric("plimsoll_operator_queue_age_seconds")

            resync_s, resync_cpu_s = await until(is_reconciled), operator.cpu_s()
            await asyncio.sleep(SETTLE_S)
            resident_mb, share, loop_s, metrics_s = await operator.at_rest()
    return objects_s, resident_mb, share, resync_s, resync_cpu_s, loop_s, metrics_s


async def main(sizes: tuple[int, ...], *, with_kwok: bool) -> None:
    """Print the curve."""
    print(ROW.format(*HEAD), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            objects_s, resident_mb, share, resync_s, resync_cpu_s, loop_s, metrics_s = await measure(
                size, Path(folder), with_kwok=with_kwok
            )
            resync = f"{resync_s:.0f} s, {resync_cpu_s:.0f} s"
            cells = (f"{objects_s:.0f} s", f"{resident_mb:.0f}", f"{share:.1f}", resync)
            slowest = f"{1e3 * loop_s:.0f} ms", f"{1e3 * metrics_s:.0f} ms"
            print(ROW.format(size, size * PODS_PER_SERVICE, *cells, *slowest), flush=True)


if __name__ == "__main__":
    sizes = tuple(int(word) for word in sys.argv[1:] if word != "--kwok")
    asyncio.run(main(sizes or SIZES, with_kwok="--kwok" in sys.argv))
