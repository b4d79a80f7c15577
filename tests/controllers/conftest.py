"""The operator's parts against a real API server: no kubelet and no controllers, so nothing moves by itself."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from plimsoll.adapters.kube import BY_KIND, EVENTS, INFERENCESERVICES, Kube, WatchEvent
from plimsoll.api import labels
from plimsoll.controllers.autoscale import Autoscaler, Sources
from plimsoll.controllers.endings import Endings
from plimsoll.controllers.gateways import View
from plimsoll.controllers.observe import CHILDREN
from plimsoll.controllers.reconcile import Reconciler
from plimsoll.controllers.store import Store
from plimsoll.core.errors import Unavailable
from tests import builders
from tests.apiserver import ApiServer

Object = dict[str, Any]

NOW_S = 1.8e9
WATCHED = (*CHILDREN, "ControllerRevision", labels.KIND)


class Breaking(Kube):
    """A connection that breaks at the n-th write from now: before it (as a crash would) or after it was done."""

    left: int | None = None
    after = False
    writes = 0

    def break_at(self, write: int, *, after: bool) -> None:
        self.left, self.after = write, after

    async def _json(self, method: str, *arguments: Any) -> Object:
        if method == "GET":
            return await super()._json(method, *arguments)
        self.writes += 1
        if self.left is None:
            return await super()._json(method, *arguments)
        self.left -= 1
        last = self.left <= 0  # a killed process does not write on
        if last and not self.after:
            raise Unavailable("killed before the write")
        result = await super()._json(method, *arguments)
        if last:
            raise Unavailable("killed after the write")
        return result


class Parts(NamedTuple):
    """An operator without its watches."""

    store: Store
    reconciler: Reconciler
    scaler: Autoscaler
    endings: Endings


@dataclass
class World:
    """One namespace of the API server, and an operator's parts that can be thrown away and made anew."""

    kube: Breaking
    namespace: str
    view: View = field(default_factory=View)

    def operator(self) -> Parts:
        """A fresh operator that knows nothing, and to which nobody speaks."""
        store = Store()
        view, report = lambda: self.view, lambda key: scaler.report(key)
        endings = Endings(store)
        reconciler = Reconciler(self.kube, store, builders.PLATFORM, view, report, endings, "operator-1")
        silence = Sources(lambda: ((), ()), lambda pod: None, lambda pod: None)
        scaler = Autoscaler(store, self.kube, silence, reconciler.tell, lambda key: None)
        return Parts(store, reconciler, scaler, endings)

    async def look(self, store: Store) -> None:
        """Fill the store as the watches would."""
        for kind in WATCHED:
            items, _ = await self.kube.list(BY_KIND[kind], self.namespace)
            store.replace(kind, tuple(items))

    async def round(self, name: str, operator: Parts | None = None) -> Parts:
        """One look, one round and one scaling tick for a service, by a fresh operator if none is given."""
        parts = operator or self.operator()
        await self.look(parts.store)
        await parts.reconciler.reconcile((self.namespace, name))
        await parts.scaler.tick(NOW_S)
        return parts

    async def create(self, name: str = "chat", **spec: Any) -> Object:
        wish = builders.service(name, self.namespace, **spec)
        wish["metadata"] = {"name": name, "namespace": self.namespace}
        return await self.kube.create(wish)

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
async def world(cluster: ApiServer) -> AsyncIterator[World]:
    global _made
    _made += 1
    connected = await Kube.connect(str(cluster.kubeconfig))
    kube = Breaking(connected._api)
    namespace = f"world-{_made}"
    await asyncio.to_thread(
        subprocess.run,
        [cluster.kubectl, f"--kubeconfig={cluster.kubeconfig}", "create", "namespace", namespace],
        check=True,
    )
    yield World(kube, namespace)
    await kube.close()
