"""An unexpected error about one object in a tick or in a poll: all other objects go on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from plimsoll.adapters.kube_client import Resource, WatchEvent
from plimsoll.adapters.normalize import normalize
from plimsoll.api import labels
from plimsoll.api.events import Event
from plimsoll.controllers import engine_poller, kopf_handlers
from plimsoll.controllers.autoscale.autoscaler import Autoscaler
from plimsoll.controllers.autoscale.signal_sources import SignalSources
from plimsoll.controllers.autoscale.tracked_service import FAILURE_BACKOFF_SECONDS
from plimsoll.controllers.engine_poller import EnginePoller
from plimsoll.controllers.gateway_poller import GatewayPoller
from plimsoll.controllers.isolation import ObjectErrors, Stage
from plimsoll.controllers.object_cache import Key, ObjectCache
from plimsoll.core.errors import BackendUnavailable
from plimsoll.telemetry import gateway_metrics
from tests import builders
from tests.controllers.isolation_faults import CHAT, OTHER, Cluster, Object, error_count, fail
from tests.controllers.test_autoscale import NOW_S, PROMISED
from tests.gateway.kube_objects import CatalogOfPods, published


def scaler(
    kube: Cluster,
    errors: ObjectErrors,
    record_event: Callable[[Object, Event], Awaitable[None]] | None = None,
    store: ObjectCache | None = None,
) -> Autoscaler:
    """Two services with a tier that has two replicas more than it may have."""
    store = store or ObjectCache()
    for name in ("chat", "other"):
        parent = builders.service(name, **PROMISED | {"tiers": {"serve": {"minReplicas": 1, "maxReplicas": 1}}})
        store.put(parent)
        store.put(builders.deployment(parent, "serve", replicas=3))

    async def ignore(*_: Any) -> None:
        return None

    sources = SignalSources(lambda: ((), ()), lambda namespace, pod: None, lambda namespace, pod: None)
    return Autoscaler(store, kube, sources, record_event or ignore, lambda key: None, errors=errors)


async def test_tick_without_an_event_scales_all_services() -> None:
    async def unavailable(*_: Any) -> None:
        raise BackendUnavailable("away")

    kube, errors = Cluster(), ObjectErrors()
    working = scaler(kube, errors, unavailable)
    working.tick(NOW_S)
    await working.finish_writes()
    assert kube.scaled == ["chat-serve", "other-serve"]
    assert errors.condition(CHAT) is None


async def test_tick_error_while_one_is_set_stops_no_other() -> None:
    class Faulty(Cluster):
        is_faulty = True

        async def scale(self, resource: Resource, namespace: str, name: str, replicas: int, manager: str) -> None:
            if self.is_faulty and name == "chat-serve":
                fail()
            await super().scale(resource, namespace, name, replicas, manager)

    kube, errors = Faulty(), ObjectErrors()
    working = scaler(kube, errors)
    working.tick(NOW_S)
    await working.finish_writes()
    kube.is_faulty = False
    assert kube.scaled == ["other-serve"]
    condition = errors.condition(CHAT)
    assert condition is not None
    assert "InferenceService team/chat: KeyError while its replicas were decided" in condition.message
    assert errors.condition(OTHER) is None
    working.tick(NOW_S + FAILURE_BACKOFF_SECONDS)
    await working.finish_writes()
    assert errors.condition(CHAT) is None
    assert "chat-serve" in kube.scaled


async def test_tick_with_a_service_that_cannot_be_read() -> None:
    class Unreadable(ObjectCache):
        def parsed(self, raw: Object) -> Any:
            return fail() if raw["metadata"]["name"] == "chat" else super().parsed(raw)

    kube, errors = Cluster(), ObjectErrors()
    working = scaler(kube, errors, store=Unreadable())
    working.tick(NOW_S)
    await working.finish_writes()
    assert kube.scaled == ["other-serve"]
    assert errors.condition(CHAT) is not None


async def test_engines_error_about_one_pod_stops_no_other() -> None:
    store, errors, clock, reported = ObjectCache(), ObjectErrors(), [0.0], list[str]()
    parent = builders.service("chat")
    for name in ("bad", "good"):
        pod = builders.pod(parent, "decode", name, podIP=name, conditions=[{"type": "Ready", "status": "True"}])
        store.put(pod)

    async def http_get(address: str, port: int, path: str, tls_name: str = "") -> bytes:
        return fail() if address == "bad" else b"vllm:num_requests_running 1\n"

    def take(key: Key, role: Any, reading: Any) -> None:
        reported.append(reading.pod)

    asking = EnginePoller(store, http_get, take, monotonic=lambda: clock[0], errors=errors)
    for _ in range(12):
        await asking.poll_due()
        clock[0] += 1.0
    assert len(reported) > 1
    condition = errors.condition(CHAT)
    assert condition is not None
    assert "Pod team/bad: KeyError" in condition.message
    before = error_count(Stage.ENGINE_METRICS)
    clock[0] += engine_poller.FOREIGN_ENGINE_INTERVAL_S
    await asking.poll_due()
    assert error_count(Stage.ENGINE_METRICS) == before + 1
    for pod in list(store.all("Pod")):
        store.remove(pod)
    clock[0] += 1.0
    await asking.poll_due()
    assert errors.condition(CHAT) is None


def test_engines_pod_that_cannot_be_read_keeps_its_times() -> None:
    store, errors = ObjectCache(), ObjectErrors()
    pod = builders.pod(builders.service("chat"), "decode", "p", podIP="1")
    store.put(pod)
    asking = EnginePoller(store, lambda *_: asyncio.sleep(0, b""), lambda *_: None, errors=errors)
    asyncio.run(asking._relist(0.0))
    (before,) = asking._pods.values()
    due_s = before.info_due_s
    store.put({**pod, "status": {**pod["status"], "conditions": 7}})
    asyncio.run(asking._relist(50.0))
    (after,) = asking._pods.values()
    assert (after is before, after.info_due_s) == (True, due_s)
    assert errors.condition(CHAT) is not None


async def test_gateways_error_about_one_replica_stops_no_other() -> None:
    requested: list[str] = []

    async def http_get(address: str, port: int, path: str, tls_name: str = "") -> bytes:
        requested.append(address)
        return fail()

    gateways = GatewayPoller(None, builders.PLATFORM.gateway, http_get, lambda key: None)  # type: ignore[arg-type]
    pods = [{"metadata": {"name": name, "uid": name}, "status": {"podIP": name}} for name in ("a", "b")]
    before = error_count(Stage.GATEWAY)
    gateways.on_pod_event(WatchEvent("ADDED", {"metadata": {}, "status": {}}))
    for pod in pods:
        gateways.on_pod_event(WatchEvent("ADDED", pod))
    for _ in range(2):
        await gateways.poll_round()
    assert requested == ["a", "b", "a", "b"]
    assert error_count(Stage.GATEWAY) == before + 5


def test_fleet_leaves_out_what_cannot_be_read() -> None:
    parent, name = builders.service("chat"), "plimsoll_gateway_unreadable_objects_total"
    good = builders.pod(parent, "decode", "good", podIP="10.0.0.1")
    (whole,), _ = published([parent], [good])
    bad = {**whole, "metadata": {"name": "bad", "labels": whole["metadata"]["labels"]}}
    odd: Object = {"kind": labels.KIND, "metadata": {"uid": "u"}, "spec": {}}
    before = {
        kind: gateway_metrics.GATEWAY.get_sample_value(name, {"kind": kind}) or 0.0
        for kind in ("EndpointSlice", labels.KIND)
    }
    catalog = CatalogOfPods()
    catalog.set([parent], [good])
    found = catalog.builder.update({"team/odd": odd}, {"team/bad": bad}, {})
    assert [one.pod for one in found.services["team/chat"].endpoints] == ["good"]
    assert set(found.services) == {"team/chat"}
    after = {kind: gateway_metrics.GATEWAY.get_sample_value(name, {"kind": kind}) for kind in before}
    assert after == {kind: count + 1 for kind, count in before.items()}


async def test_kopf_object_is_normalised() -> None:
    taken: list[Object] = []
    made = kopf_handlers.build_registry(lambda obj, gone: taken.append(obj), namespaced=False)
    (handler,) = made._watching.get_all_handlers()
    raw = {**builders.service("chat"), "status": {"conditions": 7}}
    await handler.fn(event={"type": "MODIFIED", "object": raw})
    assert taken[0] == normalize({**raw, "status": {}})
