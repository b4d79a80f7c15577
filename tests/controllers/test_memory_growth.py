"""Nothing grows: what an hour of ticks leaves behind is what the hour before it left."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest

from plimsoll.adapters.kube_client import KubeClient
from plimsoll.api import labels
from plimsoll.api.events import Event
from plimsoll.controllers.autoscale.autoscaler import Autoscaler
from plimsoll.controllers.autoscale.signal_sources import SignalSources
from plimsoll.controllers.object_cache import ObjectCache, key_of
from plimsoll.core.ports import GatewayReading, ServiceReading
from plimsoll.core.types import Role
from tests import builders
from tests.controllers.test_autoscale import ABOUT, NOW_S, PROMISED, arrivals, engine, ready

Object = dict[str, Any]
STEP_S = 15  # between two ticks here
HOUR = 3600 // STEP_S
FILLED = HOUR + HOUR // 12  # ticks until what is kept for an hour is full
SERVICE_TICKS = 80  # ticks at each of which a service comes that will go: each has its lines made, which takes its time
SERVICE_LIFETIME = 3  # ticks that it stays
AT_ONCE = 3  # gateways, and pods, that come and go at each tick
NOISE = 150  # blocks of memory; two left behind by each service that went would be 160


class Churn:
    """A service whose gateways are replaced at every tick, as are pods that never become ready."""

    def __init__(self, parent: Object) -> None:
        self.store, self.tick_no = ObjectCache(), 0
        self.parent, self.key = parent, (parent["metadata"]["namespace"], parent["metadata"]["name"])
        for obj in (parent, builders.deployment(parent, "serve", replicas=1, ready=1), ready(parent, "serve")):
            self.store.put(obj)
        sources = SignalSources(self._gateways, lambda namespace, pod: ABOUT, lambda namespace, pod: None)
        self.scaler = Autoscaler(self.store, KubeClient.__new__(KubeClient), sources, _ignore_report, lambda key: None)

    def tick(self) -> None:
        self.tick_no += 1
        pods = [builders.pod(self.parent, "serve", f"starts-{self.tick_no}-{n}") for n in range(AT_ONCE)]
        for pod in pods:
            pod["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
            self.store.put(pod)
        self.scaler.observe_engine(self.key, Role.SERVE, engine(4.0 * STEP_S * self.tick_no, self._now_s))
        for change in self.scaler.decide(self._now_s):
            meta = change.scaled.metadata
            deployment = self.store.get("Deployment", (meta["namespace"], meta["name"]))
            assert deployment is not None
            self.store.put({**deployment, "spec": {"replicas": change.decision.replicas}})
        for pod in pods:
            self.store.remove(pod)

    @property
    def _now_s(self) -> float:
        return NOW_S + STEP_S * self.tick_no

    def _gateways(self) -> tuple[tuple[GatewayReading, ...], tuple[str, ...]]:
        """One that stays, and some that are there for a tick."""
        reported = self._service_readings()
        names = ("gw-stays", *[f"gw-{self.tick_no}-{n}" for n in range(AT_ONCE)])
        return tuple(GatewayReading(name, self._now_s, "a", reported) for name in names), names

    def _service_readings(self) -> dict[str, ServiceReading]:
        return {"/".join(self.key): arrivals(4.0 * STEP_S * self.tick_no)}


class ServiceChurn(Churn):
    """Besides, services come with their pods, are asked for, and are deleted: each under a name of its own."""

    def __init__(self, parent: Object) -> None:
        super().__init__(parent)
        self.there: list[Object] = []

    def passed(self) -> None:
        """A tick at which one comes and one goes."""
        new = builders.service(f"passing-{self.tick_no}", **PROMISED)
        self.there += [new, builders.deployment(new, "serve", replicas=1, ready=1), ready(new, "serve")]
        for obj in self.there[-3:]:
            self.store.put(obj)
        self.tick()
        for obj in self.there:
            if obj["kind"] == labels.KIND:
                self.scaler.observe_engine(key_of(obj), Role.SERVE, engine(4.0 * STEP_S * self.tick_no, self._now_s))
        gone, self.there = self.there[: -3 * SERVICE_LIFETIME], self.there[-3 * SERVICE_LIFETIME :]
        for obj in gone:
            self.store.remove(obj)

    def _service_readings(self) -> dict[str, ServiceReading]:
        here = {"/".join(key_of(obj)) for obj in self.there if obj["kind"] == labels.KIND}
        return super()._service_readings() | {name: arrivals(4.0 * STEP_S * self.tick_no) for name in here}


async def _ignore_report(_: Object, __: Event) -> None:
    return None


def allocated_blocks() -> int:
    """Blocks of memory: Python's own count of them costs nothing; `bench.core.memory_growth` counts bytes."""
    gc.collect()
    sys._clear_type_cache()  # in it lie names that numpy makes anew at each call
    return sys.getallocatedblocks()


@pytest.mark.parametrize("spec", [PROMISED, {"tiers": PROMISED["tiers"]}], ids=["promised", "nothing promised"])
def test_autoscaler_memory_is_constant_over_an_hour(spec: Object) -> None:
    churn = Churn(builders.service(**spec))
    for _ in range(FILLED):
        churn.tick()
    before = allocated_blocks()
    for _ in range(HOUR):
        churn.tick()
    assert allocated_blocks() - before < NOISE


def test_autoscaler_memory_is_constant_over_deleted_services() -> None:
    churn = ServiceChurn(builders.service(**PROMISED))
    for _ in range(FILLED):
        churn.tick()
    first = churn.tick_no
    for _ in range(2 * SERVICE_LIFETIME):
        churn.passed()
    assert churn.scaler.report(("team", f"passing-{first}")) is None
    before = allocated_blocks()
    for _ in range(SERVICE_TICKS):
        churn.passed()
    assert churn.scaler.report(key_of(churn.there[-3])) is not None
    assert allocated_blocks() - before < NOISE


def test_object_cache_memory_is_constant_over_deleted_services() -> None:
    store, before = ObjectCache(), 0
    for n in range(3 * NOISE):
        if n == NOISE:
            before = allocated_blocks()
        parent = builders.service(f"chat-{n}")
        pod = builders.pod(parent, "decode")
        store.put(parent)
        store.put(pod)
        store.parsed(parent)
        store.remove(pod)
        store.remove(parent)
    assert allocated_blocks() - before < NOISE
