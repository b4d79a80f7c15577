"""Time from a measurement that calls for a decision to the write of the replica count, without a cluster:
`python -m bench.controlplane.scale_latency`.

The operator's own loops run in real time: it polls the `/signals` of one gateway over HTTP, ticks after each round, and
writes to a client that keeps the objects in memory, so the time of an API server is not included. Two cases, each with
50 services whose load changes at a random moment:

- *request without an engine*: the gateway counts a queued request of a service that has no replica;
- *step*: a service with one replica gets 40 instead of 2 requests/s, as a Poisson process. The time counts from the
  moment of the step, so it includes the readings that the forecast needs to tell a step from noise.

Prints p50, p95 and the longest time from the change of the load to the write, and from the reading that the decision
used. Other load of the machine adds to both.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from random import Random
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from plimsoll.adapters.kube_client import PODS, Resource, WatchEvent
from plimsoll.controllers.object_cache import ObjectCache
from plimsoll.controllers.operator import OperatorProcess
from plimsoll.controllers.operator_config import OperatorConfig
from plimsoll.core.types import Role
from tests import builders
from tests.controllers.single_service import ABOUT, InMemoryKube
from tests.controllers.test_autoscale import PROMISED, engine, ready
from tests.ports import free_port

Object = dict[str, Any]

SERVICES = 50
BEFORE_PER_S, AFTER_PER_S = 2.0, 40.0
WARM_UP_S, IDLE_WARM_UP_S = 60.0, 5.0
TARGET_S = 2.0
CHANGES_S = 30.0  # the changes come within it
TIMEOUT_S = 30.0  # after the last change
ENGINE_INTERVAL_S = 5.0


@dataclass
class Load:
    """Requests of one service. changes_s: monotonic time of the change. queues: one request, which waits."""

    changes_s: float
    counted_s: float
    queues: bool
    arrived: int = 0

    def count(self, now_s: float, random: np.random.Generator) -> None:
        """Count the requests up to now_s."""
        if self.queues:
            self.arrived = int(now_s >= self.changes_s)
            return
        change_s = min(max(self.changes_s, self.counted_s), now_s)
        expected = BEFORE_PER_S * (change_s - self.counted_s) + AFTER_PER_S * (now_s - change_s)
        self.arrived, self.counted_s = self.arrived + int(random.poisson(expected)), now_s

    @property
    def served(self) -> int:
        return 0 if self.queues else self.arrived

    def signals(self) -> Object:
        """The service in the gateway's `/signals`."""
        requests = {"arrived": self.arrived, "retried": 0, "succeeded": self.served, "failed": 0, "cancelled": 0}
        queued = self.arrived - self.served
        admission = {"queued": queued, "queued_work_s": float(queued), "in_use": 0, "outcomes": {}}
        counted = {**requests, "rejected": {}, "arrived_tokens": 500 * self.arrived}
        return {"endpoints": [], "requests": counted, "admission": admission}


class RecordingKube(InMemoryKube):
    """Records the monotonic time of the first scale-up of each service."""

    def __init__(self) -> None:
        super().__init__(ObjectCache())
        self.scaled_s: dict[str, float] = {}
        self.are_all_scaled = asyncio.Event()

    async def watch(self, resource: Resource, *_: Any) -> AsyncIterator[WatchEvent]:
        assert resource is PODS
        pod = {"metadata": {"uid": "gw", "name": "gw"}, "status": {"podIP": "127.0.0.1", "phase": "Running"}}
        yield WatchEvent("SYNC", objects=(pod,))
        await asyncio.Event().wait()

    async def scale(self, resource: Resource, namespace: str, name: str, replicas: int, manager: str) -> None:
        live = self.cache.get("Deployment", (namespace, name))
        assert live is not None
        if replicas > live["spec"]["replicas"]:
            self.scaled_s.setdefault(name.removesuffix("-serve"), time.monotonic())
        if len(self.scaled_s) == SERVICES:
            self.are_all_scaled.set()
        await super().scale(resource, namespace, name, replicas, manager)


class SyncedOperator(OperatorProcess):
    """An operator whose caches are filled by hand."""

    is_synced = True

    def _make_autoscaler(self, history: Any) -> Any:
        self.engine_poller.engine_info = lambda namespace, pod: ABOUT  # type: ignore[method-assign]
        return super()._make_autoscaler(history)


def make_service(operator: OperatorProcess, name: str, replicas: int) -> None:
    """Put a service with one tier into the caches of the operator."""
    tiers = {"serve": {"minReplicas": replicas, "maxReplicas": 9}}
    parent = builders.service(name, **{**PROMISED, "tiers": tiers})
    operator.cache.put(parent)
    operator.cache.put(builders.deployment(parent, "serve", replicas=replicas, ready=replicas))
    if replicas:
        pod = ready(parent, "serve")
        pod["metadata"] |= {"name": f"{name}-0", "uid": f"uid-{name}"}
        operator.cache.put(pod)


async def feed_engines(operator: OperatorProcess, loads: dict[str, Load]) -> None:
    """Report the engines' counters, as their poller would. Never returns."""
    while True:
        for name, load in loads.items():
            operator.autoscaler.observe_engine(("team", name), Role.SERVE, engine(float(load.served), time.time()))
            await asyncio.sleep(ENGINE_INTERVAL_S / len(loads))


async def measure(*, queues: bool) -> tuple[list[float], list[float]]:
    """Return the seconds from the change and from the reading to the write; infinity if not scaled in time."""
    random, generator, started_s = Random(1), np.random.default_rng(1), time.monotonic()
    first_s = started_s + (IDLE_WARM_UP_S if queues else WARM_UP_S)
    loads = {f"s{n}": Load(first_s + random.uniform(0.0, CHANGES_S), started_s, queues=queues) for n in range(SERVICES)}
    read_s: list[float] = []

    async def serve_signals(_: web.Request) -> web.Response:
        read_s.append(time.monotonic())
        for load in loads.values():
            load.count(read_s[-1], generator)
        services = {f"team/{name}": load.signals() for name, load in loads.items()}
        document = {"version": 3, "gateway": "gw", "instance_id": "a", "synced": True, "services": services}
        return web.json_response(document)

    app, port = web.Application(), free_port()
    app.router.add_get("/signals", serve_signals)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    gateway = builders.PLATFORM.gateway.model_copy(update={"picker_port": port})
    platform = builders.PLATFORM.model_copy(update={"gateway": gateway})
    kube = RecordingKube()
    async with aiohttp.ClientSession() as session:
        operator = SyncedOperator(kube, OperatorConfig(platform, "plimsoll-system", "me"), session)
        kube.cache = operator.cache
        operator.namespace_leases.manages = lambda namespace: True  # type: ignore[method-assign]
        for name in loads:
            make_service(operator, name, 0 if queues else 1)
        parts = dict(operator._parts())
        tasks = [asyncio.ensure_future(parts[name]()) for name in ("gateways", "scaling")]
        if not queues:
            tasks.append(asyncio.create_task(feed_engines(operator, loads)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(first_s + CHANGES_S + TIMEOUT_S - time.monotonic()):
                await kube.are_all_scaled.wait()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    await runner.cleanup()
    early = sum(at_s < loads[name].changes_s for name, at_s in kube.scaled_s.items())
    assert not early, f"{early} services were scaled before their change"
    scaled_s = [kube.scaled_s.get(name, math.inf) for name in loads]
    since_change_s = [at_s - load.changes_s for at_s, load in zip(scaled_s, loads.values(), strict=True)]
    since_reading_s = [at_s - read_s[bisect.bisect(read_s, at_s) - 1] for at_s in scaled_s]
    return sorted(since_change_s), sorted(since_reading_s)


def main() -> None:
    for label, queues in (("request without an engine", True), ("step of 2 to 40 requests/s", False)):
        for since, found in zip(("the load changed", "the reading"), asyncio.run(measure(queues=queues)), strict=True):
            p50, p95 = found[len(found) // 2], found[int(0.95 * (len(found) - 1))]
            within = sum(seconds <= TARGET_S for seconds in found)
            print(
                f"{label}, since {since}: p50 {p50:.2f} s, p95 {p95:.2f} s, max {found[-1]:.2f} s; "
                f"{within} of {len(found)} within {TARGET_S:.0f} s"
            )


if __name__ == "__main__":
    main()
