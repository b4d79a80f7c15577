"""The operator's CPU time by the number of services, without a cluster.

`python -m bench.controlplane.loop_steps [SERVICES ...]`.

The operator's own parts run in this process: work queue, engine poller, gateway poller and scaling. The API server is
objects in memory, whose answers take no time; one gateway reports all services; ten ready engines of each service
never answer. Prints the CPU time of a resync by a new leader, of a second at rest, and of the longest steps of the
event loop. All are seconds of CPU, so other load of the machine does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import heapq
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import aiohttp
import orjson
from aiohttp.test_utils import make_mocked_request

from plimsoll.adapters.kube_client import PODS, Resource, WatchEvent
from plimsoll.api import labels
from plimsoll.cli import gc_tuning
from plimsoll.controllers import http_server
from plimsoll.controllers.object_cache import ObjectCache, owning_service
from plimsoll.controllers.operator import OperatorProcess
from plimsoll.controllers.operator_config import OperatorConfig
from plimsoll.core.errors import BackendUnavailable
from plimsoll.telemetry import operator_metrics
from tests import builders
from tests.controllers.single_service import InMemoryKube

Object = dict[str, Any]

SIZES = (100, 1000)
PODS_PER_TIER, TIERS = 5, ("prefill", "decode")
SERVICES_PER_NODE = 10
SETTLE_S, REST_S = 15.0, 20.0
ENGINE_TIMEOUT_S = 2.0
SHOWN = 6
SLO = {"ttft": "2s", "tpot": "50ms"}


class Step(NamedTuple):
    """A step of the event loop. seconds: of CPU."""

    seconds: float
    name: str


class StepTimer:
    """The longest steps of the event loop."""

    def __init__(self) -> None:
        self.longest: list[Step] = []

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Time each step meanwhile."""
        run = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            callback, began_s = handle._callback, time.thread_time()  # type: ignore[attr-defined]
            run(handle)
            seconds = time.thread_time() - began_s
            if len(self.longest) < SHOWN or seconds > self.longest[0].seconds:
                add = heapq.heappush if len(self.longest) < SHOWN else heapq.heapreplace
                add(self.longest, Step(seconds, _name(callback)))

        asyncio.Handle._run = timed  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            asyncio.Handle._run = run  # type: ignore[method-assign]

    def lines(self) -> Iterator[str]:
        """Yields the longest steps, the longest first."""
        for step in sorted(self.longest, reverse=True):
            yield f"    {1e3 * step.seconds:6.0f} ms  {step.name}"


def _name(callback: Any) -> str:
    """What a step belongs to: the innermost coroutine of this product that waits."""
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return getattr(callback, "__qualname__", repr(callback))
    current: Any = task.get_coro()
    names = list[str]()
    while current is not None and hasattr(current, "cr_code"):
        names.append(current.__qualname__)
        current = current.cr_await
    return " > ".join(names[-3:])


class Cluster(InMemoryKube):
    """The API server: what one operator writes is there for the next."""

    def list_of(self, kind: str) -> tuple[Object, ...]:
        """All objects of a kind, as a list call returns them."""
        return tuple(orjson.loads(orjson.dumps(one)) for one in self.cache.all(kind))

    async def apply(self, obj: Object, manager: str, **options: Any) -> Object:
        """Apply, and record the manager as the API server does."""
        live = await super().apply(obj, manager, **options)
        if options.get("subresource") is None:
            live["metadata"]["managedFields"] = [{"manager": manager, "operation": "Apply"}]
        return live

    async def watch(self, resource: Resource, *_: Any) -> AsyncIterator[WatchEvent]:
        assert resource is PODS
        pod = {"metadata": {"uid": "gw", "name": "gw"}, "status": {"podIP": "127.0.0.1", "phase": "Running"}}
        yield WatchEvent("SYNC", objects=(pod,))
        await asyncio.Event().wait()


def _signals(services: list[str]) -> bytes:
    """The page of a gateway without traffic."""
    requests = {"arrived": 0, "retried": 0, "succeeded": 0, "failed": 0, "cancelled": 0, "rejected": {}}
    admission = {"queued": 0, "queued_work_s": 0.0, "in_use": 0, "outcomes": {}}

    def of(name: str) -> Object:
        endpoints = [
            {"pod": f"{name}-{tier}-{number}", "role": tier, "routable": True, "inflight": 0}
            for tier in TIERS
            for number in range(PODS_PER_TIER)
        ]
        found = {"arrived_tokens": 0, **requests}
        return {"endpoints": endpoints, "requests": found, "admission": admission, "models": [name]}

    document = {"version": 3, "gateway": "gw", "instance_id": "a", "synced": True}
    return orjson.dumps({**document, "services": {f"team/{name}": of(name) for name in services}})


class Operator(OperatorProcess):
    """An operator whose caches are filled by hand."""

    is_synced = True


def make_operator(kube: Cluster, session: aiohttp.ClientSession, page: bytes) -> Operator:
    """Returns an operator with an empty cache."""

    async def get_gateway_page(*_: Any) -> bytes:
        return page

    async def never_answer(*_: Any) -> bytes:
        await asyncio.sleep(ENGINE_TIMEOUT_S)
        raise BackendUnavailable("did not answer within 2 s")

    operator = Operator(kube, OperatorConfig(builders.PLATFORM, "plimsoll-system", "me"), session)
    kube.cache = operator.cache
    operator.gateway_poller._http_get = get_gateway_page
    operator.engine_poller._http_get = never_answer

    async def acquire(namespace: str) -> bool:
        return True

    operator.namespace_leases.manages = lambda namespace: True  # type: ignore[method-assign]
    operator.namespace_leases.acquire = acquire  # type: ignore[method-assign]
    return operator


def running_pods(kube: Cluster) -> list[Object]:
    """The pods of all Deployments, ready."""
    made = []
    for number, deployment in enumerate(kube.cache.all("Deployment")):
        template = deployment["spec"]["template"]
        for at in range(PODS_PER_TIER):
            name = f"{deployment['metadata']['name']}-{at}"
            meta = {"name": name, "namespace": "team", "uid": f"uid-{name}", "resourceVersion": "5"}
            node = f"node-{number // len(TIERS) // SERVICES_PER_NODE}"
            conditions = [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]
            status = {"phase": "Running", "podIP": "127.1.0.1", "conditions": conditions}
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {**template["metadata"], **meta, "creationTimestamp": "2026-01-01T00:00:00Z"},
                "spec": {**template["spec"], "nodeName": node},
                "status": status,
            }
            made.append(pod)
        live = {"replicas": PODS_PER_TIER, "readyReplicas": PODS_PER_TIER, "updatedReplicas": PODS_PER_TIER}
        generation = deployment["metadata"]["generation"]
        kube._store({**deployment, "status": {"observedGeneration": generation, **live}})
    return made


async def _reconcile_all(operator: Operator) -> None:
    for one in operator.cache.all(labels.KIND):
        operator.queue.add(owning_service(one))  # type: ignore[arg-type]
    worker = asyncio.create_task(operator.queue.run())
    while len(operator.queue) or operator.queue._active:  # noqa: ASYNC110 - the queue has no event for it
        await asyncio.sleep(0.01)
    worker.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await worker


async def measure(services: int) -> None:
    """Print the figures of a fleet."""
    names = [f"s-{number}" for number in range(services)]
    page = _signals(names)
    kube = Cluster(ObjectCache())
    async with aiohttp.ClientSession() as session:
        operator = make_operator(kube, session, page)
        for name in names:
            tiers = {tier: {"minReplicas": PODS_PER_TIER} for tier in TIERS}
            operator.cache.put(builders.service(name, slo=SLO, tiers=tiers))
        began_s = time.thread_time()
        await _reconcile_all(operator)
        print(f"{services} services: all objects made by {time.thread_time() - began_s:.1f} s of CPU", flush=True)
        pods = running_pods(kube)
        kinds = [kind for kind in kube.cache._objects if kind != "Pod"]
        lists = {kind: kube.list_of(kind) for kind in kinds}
        lists["Pod"] = tuple(orjson.loads(orjson.dumps(pod)) for pod in pods)
        del pods, operator
        gc.collect()
        operator = make_operator(kube, session, page)
        await _resync(operator, lists)
        lists.clear()
        await _rest(operator, services)


async def _resync(operator: Operator, lists: dict[str, tuple[Object, ...]]) -> None:
    steps, began_s = StepTimer(), time.thread_time()
    written = operator._kube._version  # type: ignore[attr-defined]
    with steps.measuring():
        for kind in sorted(lists, key=lambda one: one != labels.KIND):
            await operator.cache.replace_in_slices(kind, lists[kind])
        listed_s = time.thread_time() - began_s
        await _reconcile_all(operator)
    total_s = time.thread_time() - began_s
    written = operator._kube._version - written  # type: ignore[attr-defined]
    print(f"  resync: {total_s:.1f} s of CPU, of which lists {listed_s:.1f} s; {written} writes; longest steps:")
    print(*steps.lines(), sep="\n", flush=True)


async def _rest(operator: Operator, services: int) -> None:
    parts = dict(operator._parts())
    names = "gateways", "engines", "scaling", "work queue"
    tasks = [asyncio.ensure_future(parts[name]()) for name in names]
    await asyncio.sleep(SETTLE_S)
    steps = StepTimer()
    with steps.measuring():
        began_s, began = time.thread_time(), time.monotonic()
        await asyncio.sleep(REST_S)
        share = (time.thread_time() - began_s) / (time.monotonic() - began)
    print(f"  at rest: {100 * share:.1f} % of a core; longest steps:")
    print(*steps.lines(), sep="\n", flush=True)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    began_s = time.thread_time()
    body = (await http_server._metrics(make_mocked_request("GET", "/metrics"))).body
    assert isinstance(body, bytes)
    print(f"  /metrics: {1e3 * (time.thread_time() - began_s):.0f} ms of CPU, {body.count(b'{')} series")
    for one in list(operator.cache.all(labels.KIND)):
        operator.cache.remove(one)
    began_s = time.thread_time()
    operator.autoscaler.tick(time.time())
    print(f"  a tick after all {services} services were deleted: {1e3 * (time.thread_time() - began_s):.0f} ms of CPU")


async def main(sizes: tuple[int, ...]) -> None:
    """Measure each size."""
    gc_tuning.reduce_full_collections()
    for size in sizes:
        await measure(size)
        with operator_metrics.leading():
            pass  # its series end


if __name__ == "__main__":
    asyncio.run(main(tuple(int(word) for word in sys.argv[1:]) or SIZES))
