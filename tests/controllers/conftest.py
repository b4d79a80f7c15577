"""The operator's parts against a real API server: no kubelet and no controllers, so nothing moves by itself."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from plimsoll.adapters.kube_client import BY_KIND, EVENTS, INFERENCESERVICES, KubeClient, WatchEvent
from plimsoll.api import labels
from plimsoll.controllers.autoscale.autoscaler import Autoscaler
from plimsoll.controllers.autoscale.signal_sources import SignalSources
from plimsoll.controllers.engine_rollout.rollout_controller import EngineRollout
from plimsoll.controllers.gateway_poller import GatewayView
from plimsoll.controllers.inference_pools.pool_watch import PoolWatch
from plimsoll.controllers.leader_worker_sets import LeaderWorkerSetWatch
from plimsoll.controllers.object_cache import ObjectCache
from plimsoll.controllers.reconcile.drain_reports import DrainReports
from plimsoll.controllers.reconcile.observe import CHILD_KINDS
from plimsoll.controllers.reconcile.reconciler import Reconciler
from plimsoll.core.errors import BackendUnavailable
from plimsoll.resources.platform_config import PlatformConfig
from tests import builders
from tests.apiserver import ApiServer

Object = dict[str, Any]

NOW_S = 1.8e9
WATCHED = (*(kind for kind in CHILD_KINDS if kind != labels.SET_KIND), "ControllerRevision", labels.KIND)


class FaultyKube(KubeClient):
    """A connection that breaks at the n-th write from now: before it (as a crash would) or after it was done."""

    writes_until_fault: int | None = None
    fault_after_write = False
    writes = 0

    def break_at(self, write: int, *, after: bool) -> None:
        self.writes_until_fault, self.fault_after_write = write, after

    async def _json(self, method: str, *arguments: Any) -> Object:
        if method == "GET" or {"dryRun": "All"} in arguments:
            return await super()._json(method, *arguments)
        self.writes += 1
        if self.writes_until_fault is None:
            return await super()._json(method, *arguments)
        self.writes_until_fault -= 1
        last = self.writes_until_fault <= 0  # a killed process does not write on
        if last and not self.fault_after_write:
            raise BackendUnavailable("killed before the write")
        result = await super()._json(method, *arguments)
        if last:
            raise BackendUnavailable("killed after the write")
        return result


class OperatorParts(NamedTuple):
    """An operator without its watches."""

    store: ObjectCache
    reconciler: Reconciler
    scaler: Autoscaler
    endings: DrainReports
    engine_rollout: EngineRollout
    set_watch: LeaderWorkerSetWatch
    pool_watch: PoolWatch | None = None


@dataclass
class ControllerHarness:
    """One namespace of the API server, and an operator's parts that can be thrown away and made anew."""

    kube: FaultyKube
    namespace: str
    view: GatewayView = field(default_factory=GatewayView)
    platform: PlatformConfig = builders.PLATFORM

    def operator(self) -> OperatorParts:
        """A fresh operator that knows nothing, and to which nobody speaks."""
        store = ObjectCache()
        view, report = lambda: self.view, lambda key: scaler.report(key)
        endings = DrainReports(store)
        rollout = EngineRollout(store, self.platform.engine.rollout, lambda key: None)
        pools: PoolWatch | None = None
        if self.platform.inference_pools is not None:
            pools = PoolWatch(self.kube, store, self.platform.gateway.namespace, lambda key: None)
        sets = LeaderWorkerSetWatch(self.kube, store, self.namespace, lambda key: None)
        reconciler = Reconciler(
            self.kube,
            store,
            self.platform,
            view,
            report,
            endings,
            "operator-1",
            engine_rollout=rollout.of,
            pool_watch=pools,
            sets_problem=lambda namespace: sets.problem,
        )
        silence = SignalSources(lambda: ((), ()), lambda namespace, pod: None, lambda namespace, pod: None)
        scaler = Autoscaler(store, self.kube, silence, reconciler.status.record_event, lambda key: None)
        return OperatorParts(store, reconciler, scaler, endings, rollout, sets, pools)

    async def sync(self, store: ObjectCache) -> None:
        """Fill the store as the watches would."""
        for kind in WATCHED:
            items, _ = await self.kube.list(BY_KIND[kind], self.namespace)
            store.replace(kind, tuple(items))

    async def reconcile_once(self, name: str, operator: OperatorParts | None = None) -> OperatorParts:
        """One look, one round and one scaling tick for a service, by a fresh operator if none is given."""
        parts = operator or self.operator()
        await self.sync(parts.store)
        await parts.set_watch.update()
        if parts.pool_watch is not None:
            await parts.pool_watch.update()
        await parts.reconciler.reconcile((self.namespace, name))
        parts.scaler.tick(NOW_S)
        await parts.scaler.finish_writes()
        return parts

    async def create(self, name: str = "chat", **spec: Any) -> Object:
        desired = builders.service(name, self.namespace, **spec)
        desired["metadata"] = {"name": name, "namespace": self.namespace}
        return await self.kube.create(desired)

    async def edit(self, obj: Object) -> Object:
        """Apply as a person would: with a field manager of their own, and only what a manifest holds."""
        meta = {k: obj["metadata"][k] for k in ("name", "namespace", "annotations") if k in obj["metadata"]}
        return await self.kube.apply({**{k: v for k, v in obj.items() if k != "status"}, "metadata": meta}, "person")

    async def get(self, kind: str, name: str) -> Object:
        return await self.kube.get(BY_KIND[kind], self.namespace, name)

    async def service(self, name: str = "chat") -> Object:
        return await self.kube.get(INFERENCESERVICES, self.namespace, name)

    async def names(self, kind: str) -> list[str]:
        items, _ = await self.kube.list(BY_KIND[kind], self.namespace)
        return sorted(item["metadata"]["name"] for item in items)

    async def events(self) -> list[str]:
        items, _ = await self.kube.list(EVENTS, self.namespace)
        return sorted(item["reason"] for item in items)

    async def first(self, kind: str) -> WatchEvent:
        async with aclosing(self.kube.watch(BY_KIND[kind], self.namespace)) as events:  # type: ignore[type-var]
            async for event in events:
                return event
        raise AssertionError("a watch never ends")


_made = 0


@pytest.fixture
async def world(cluster: ApiServer) -> AsyncIterator[ControllerHarness]:
    global _made
    _made += 1
    connected = await KubeClient.connect(str(cluster.kubeconfig))
    kube = FaultyKube(connected._api)
    namespace = f"world-{_made}"
    await asyncio.to_thread(
        subprocess.run,
        [cluster.kubectl, f"--kubeconfig={cluster.kubeconfig}", "create", "namespace", namespace],
        check=True,
    )
    yield ControllerHarness(kube, namespace)
    await kube.close()
