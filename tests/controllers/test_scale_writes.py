"""Replica counts are written beside the ticks: slow, late, failed and repeated writes."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from plimsoll.adapters.kube_client import KubeClient, Resource
from plimsoll.api.events import Event
from plimsoll.controllers.autoscale.autoscaler import SLICE_SIZE, Autoscaler
from plimsoll.controllers.autoscale.scale_action import MAX_WRITES
from plimsoll.controllers.autoscale.signal_sources import SignalSources
from plimsoll.controllers.autoscale.tracked_service import IDLE_INTERVAL_SECONDS
from plimsoll.controllers.object_cache import ObjectCache
from plimsoll.core.errors import BackendUnavailable
from plimsoll.telemetry import operator_metrics
from tests import builders

Object = dict[str, Any]
NOW_S = 1.8e9


async def no_event(_: Object, __: Event) -> None:
    return None


class SlowApi(KubeClient):
    """Each write of a replica count ends when `go` is set."""

    def __init__(self) -> None:
        self.go, self.begun, self.ended = asyncio.Event(), list[tuple[str, int]](), list[tuple[str, int]]()

    async def scale(self, resource: Resource, namespace: str, name: str, replicas: int, manager: str) -> None:
        self.begun.append((name, replicas))
        await self.go.wait()
        self.ended.append((name, replicas))


def scaler_of(services: list[Object], api: KubeClient, store: ObjectCache, replicas: int = 1) -> Autoscaler:
    for parent in services:
        store.put(parent)
        store.put(builders.deployment(parent, "serve", replicas=replicas))
    sources = SignalSources(lambda: ((), ()), lambda namespace, pod: None, lambda namespace, pod: None)
    return Autoscaler(store, api, sources, no_event, lambda key: None)


async def test_tick_of_many_services_has_slices() -> None:
    api, store = SlowApi(), ObjectCache()
    names = [f"chat-{n:03d}" for n in range(2 * SLICE_SIZE)]
    scaler = scaler_of([builders.service(name, tiers={"serve": {"minReplicas": 2}}) for name in names], api, store)
    slices = scaler.slices(NOW_S)
    for _ in range(3):  # two slices of objects, then one of services
        next(slices)
    tracked = [name for name in names if scaler.explain(("team", name)) is not None]
    assert len(tracked) == SLICE_SIZE - 1
    store.remove(builders.service(names[-1], tiers={"serve": {"minReplicas": 2}}))  # while others run
    assert len(list(slices)) > 3
    api.go.set()
    await scaler.finish_writes()
    assert {name for name, _ in api.ended} >= {f"{name}-serve" for name in names[:-1]}


async def test_idle_services_are_due_at_different_ticks() -> None:
    store = ObjectCache()
    names = [f"chat-{n:02d}" for n in range(40)]
    services = [builders.service(name) for name in names]
    for service in services:
        service["metadata"]["uid"] = f"uid of {service['metadata']['name']}"
    scaler = scaler_of(services, SlowApi(), store)
    for second in (0.0, IDLE_INTERVAL_SECONDS):
        assert scaler.decide(NOW_S + second) == []
        pauses = [entry.idle_until_s - NOW_S - second for entry in scaler._entries.values()]
        assert {math.ceil(pause) for pause in pauses} == {1, 2, 3, 4}


async def test_ticks_do_not_wait_for_slow_api_server() -> None:
    names = [f"chat-{n:03d}" for n in range(100)]
    api = SlowApi()
    scaler = scaler_of(
        [builders.service(name, tiers={"serve": {"minReplicas": 2}}) for name in names], api, ObjectCache()
    )
    for second in range(5):
        scaler.tick(NOW_S + second)
        await asyncio.sleep(0)
    assert 1 < len(api.begun) == MAX_WRITES
    assert all(scaler.explain(("team", name))["at"] for name in names)
    assert pending_writes() == 100
    api.go.set()
    await scaler.finish_writes()
    assert sorted(api.ended) == [(f"{name}-serve", 2) for name in names]
    scaler.tick(NOW_S + 6)
    await scaler.finish_writes()
    assert len(api.begun) == 100, "what is written is not written again while the watch is late"
    assert pending_writes() == 0


async def test_second_write_of_a_tier_waits_for_the_first() -> None:
    api, store = SlowApi(), ObjectCache()
    scaler = scaler_of([builders.service(tiers={"serve": {"minReplicas": 2}})], api, store)
    scaler.tick(NOW_S)
    await asyncio.sleep(0)
    store.put(builders.service(tiers={"serve": {"minReplicas": 5}}))
    scaler.tick(NOW_S + 1)
    await asyncio.sleep(0)
    assert api.begun == [("chat-serve", 2)]
    api.go.set()
    await scaler.finish_writes()
    scaler.tick(NOW_S + 2)
    await scaler.finish_writes()
    assert api.ended == [("chat-serve", 2), ("chat-serve", 5)]


async def test_decision_that_no_longer_holds_is_not_written() -> None:
    names = [f"chat-{n:03d}" for n in range(MAX_WRITES + 1)]
    api, store = SlowApi(), ObjectCache()
    scaler = scaler_of([builders.service(name, tiers={"serve": {"minReplicas": 2}}) for name in names], api, store)
    scaler.tick(NOW_S)
    await asyncio.sleep(0)
    (waiting,) = {f"{name}-serve" for name in names} - {deployment for deployment, _ in api.begun}
    store.put(builders.service(waiting.removesuffix("-serve"), scaling={"paused": True}))
    scaler.tick(NOW_S + 1)
    api.go.set()
    await scaler.finish_writes()
    assert len(api.ended) == MAX_WRITES
    assert waiting not in dict(api.ended)


async def test_failed_write_is_repeated_by_next_tick() -> None:
    class Away(SlowApi):
        async def scale(self, resource: Resource, namespace: str, name: str, replicas: int, manager: str) -> None:
            self.begun.append((name, replicas))
            raise BackendUnavailable("away")

    api = Away()
    scaler = scaler_of([builders.service(tiers={"serve": {"minReplicas": 2}})], api, ObjectCache())
    for second in range(3):
        scaler.tick(NOW_S + second)
        await scaler.finish_writes()
    assert api.begun == [("chat-serve", 2)] * 3


async def test_former_leader_writes_nothing_more() -> None:
    api = SlowApi()
    scaler = scaler_of([builders.service(tiers={"serve": {"minReplicas": 2}})], api, ObjectCache())
    scaler.tick(NOW_S)
    await asyncio.sleep(0)
    scaler.cancel_writes()
    api.go.set()
    await scaler.finish_writes()
    assert (api.begun, api.ended) == ([("chat-serve", 2)], [])
    await asyncio.sleep(0)
    assert pending_writes() == 0


def pending_writes() -> float:
    return operator_metrics.OPERATOR.get_sample_value("plimsoll_operator_scale_writes_pending") or 0.0
