"""An unexpected error about one object: its service shows it, and everything else goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from plimsoll.adapters.kube_client import INFERENCESERVICES, PODS, SERVICES, KubeClient, Resource, WatchEvent
from plimsoll.adapters.normalize import normalize
from plimsoll.api import labels
from plimsoll.api.conditions import ConditionReason, ConditionType
from plimsoll.api.events import Event
from plimsoll.controllers import engine_poller, kopf_handlers
from plimsoll.controllers.autoscale.autoscaler import Autoscaler
from plimsoll.controllers.autoscale.signal_sources import SignalSources
from plimsoll.controllers.autoscale.tracked_service import FAILURE_BACKOFF_SECONDS
from plimsoll.controllers.engine_poller import EnginePoller
from plimsoll.controllers.gateway_poller import GatewayPoller, GatewayView
from plimsoll.controllers.isolation import NAMED, ObjectErrors, Stage, supervise
from plimsoll.controllers.object_cache import Key, ObjectCache
from plimsoll.controllers.operator import OperatorProcess
from plimsoll.controllers.operator_config import OperatorConfig
from plimsoll.controllers.reconcile.drain_reports import DrainReports
from plimsoll.controllers.reconcile.reconciler import Reconciler
from plimsoll.core.errors import BackendUnavailable, NotFound
from plimsoll.gateway import service_catalog
from plimsoll.telemetry import gateway_metrics, operator_metrics
from tests import builders
from tests.controllers.test_autoscale import NOW_S, PROMISED, ready
from tests.controllers.test_drain_reports import DRAIN_MESSAGE
from tests.controllers.test_drain_reports import pod as ended_pod

Object = dict[str, Any]

CHAT, OTHER = ("team", "chat"), ("team", "other")


def error_count(stage: Stage) -> float:
    name = "plimsoll_operator_internal_errors_total"
    return operator_metrics.OPERATOR.get_sample_value(name, {"stage": stage.value}) or 0.0


def fail(*_: Any, **__: Any) -> Any:
    raise KeyError("finishedAt")


def never_started(parent: Object) -> Object:
    """A pod whose container never ran, as the API server sends it after its deletion."""
    found = ready(parent, "serve")
    found["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "name": "broken", "uid": "broken"}
    ended = {"exitCode": 137, "reason": "ContainerStatusUnknown", "startedAt": None, "finishedAt": None}
    found["status"]["containerStatuses"] = [{"name": "engine", "state": {"terminated": ended}}]
    return found


class Cluster(KubeClient):
    """An API server that keeps what is written; pod_events: what its watch of pods says."""

    def __init__(self, *pod_events: WatchEvent) -> None:
        self.pod_events = pod_events
        self.statuses: list[Object] = []
        self.scaled: list[str] = []
        self.service: Object = {}

    async def watch(self, resource: Any, *_: Any) -> AsyncIterator[WatchEvent]:  # type: ignore[override]
        for event in self.pod_events if resource is PODS else ():
            yield event

    async def apply(self, obj: Object, *_: Any, **options: Any) -> Object:
        if options.get("subresource") == "status":
            self.statuses.append(obj["status"])
            return {**self.service, "status": obj["status"]}
        return obj

    async def get(self, resource: Any, *_: Any) -> Object:
        if resource is INFERENCESERVICES and self.service:
            return self.service
        raise NotFound("no object is there before it is applied")

    async def create(self, obj: Object) -> Object:
        return obj

    async def is_terminating(self, namespace: str) -> bool:
        return False

    async def scale(self, resource: Resource, namespace: str, name: str, replicas: int, manager: str) -> None:
        self.scaled.append(name)


def test_contained_error_is_the_condition_of_its_service() -> None:
    changed: list[Key] = []
    errors, before = ObjectErrors(changed.append), error_count(Stage.POD_ENDING)
    for _ in range(2):
        with errors.contained(Stage.POD_ENDING, CHAT, "Pod team/p"):
            fail()
    found = errors.condition(CHAT)
    assert found is not None
    assert (found.type, found.holds, found.reason) == (
        ConditionType.INTERNAL_ERROR,
        True,
        ConditionReason.OPERATOR_ERROR,
    )
    assert found.message.startswith("Pod team/p: KeyError while the end of its container was read. ")
    assert "correct or delete the object" in found.message
    assert (changed, error_count(Stage.POD_ENDING) - before) == ([CHAT], 2)
    assert errors.condition(OTHER) is None


def test_contained_success_clears_the_condition() -> None:
    changed: list[Key] = []
    errors = ObjectErrors(changed.append)
    errors.record(Stage.SCALING, CHAT, "x", KeyError())
    with errors.contained(Stage.SCALING, CHAT, "another"):
        pass
    assert errors.condition(CHAT) is not None
    with errors.contained(Stage.SCALING, CHAT, "x"):
        pass
    assert errors.condition(CHAT) is None
    assert changed == [CHAT, CHAT]


def test_errors_of_objects_that_are_gone_are_cleared() -> None:
    errors = ObjectErrors()
    for name in ("a", "b"):
        errors.record(Stage.ENGINE_LIST, CHAT, name, KeyError())
    errors.record(Stage.SCALING, OTHER, "c", KeyError())
    errors.retain(Stage.ENGINE_LIST, {"b"})
    assert errors.condition(CHAT) is not None
    errors.retain(Stage.ENGINE_LIST, set())
    assert errors.condition(CHAT) is None
    assert errors.condition(OTHER) is not None


def test_condition_of_many_errors_lists_some() -> None:
    errors = ObjectErrors()
    for number in range(NAMED + 2):
        errors.record(Stage.POD_ENDING, CHAT, f"Pod team/p{number}", KeyError())
    found = errors.condition(CHAT)
    assert found is not None
    assert found.message.count("Pod team/") == NAMED
    assert "; 2 more. " in found.message


async def test_supervise_restarts_a_part_that_fails() -> None:
    runs: list[str] = []

    async def part() -> None:
        runs.append("run")
        if len(runs) == 1:
            raise KeyError("x")
        if len(runs) == 2:
            raise asyncio.CancelledError  # as of a task of its own

    before = error_count(Stage.PART)
    await supervise("part", part, ObjectErrors(), first_pause_s=0.001)
    assert (len(runs), error_count(Stage.PART) - before) == (3, 2)


async def test_supervise_ends_when_it_is_cancelled() -> None:
    running = asyncio.create_task(supervise("part", asyncio.Event().wait, ObjectErrors()))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_operator_with_a_container_never_started_goes_on() -> None:
    parent = builders.service("chat", tiers={"serve": {}})
    events = (
        WatchEvent("SYNC"),
        WatchEvent("MODIFIED", never_started(parent)),
        WatchEvent("ADDED", ready(parent, "serve")),
    )
    operator = OperatorProcess(Cluster(*events), OperatorConfig(builders.PLATFORM, "plimsoll-system", "me"), None)  # type: ignore[arg-type]
    operator.cache.put(parent)
    before = error_count(Stage.WATCH)
    await operator._follow(PODS, "", None)
    assert [pod["metadata"]["name"] for pod in operator.cache.all("Pod")] == ["broken", "p"]
    assert error_count(Stage.WATCH) == before
    assert operator.errors.condition(CHAT) is None


async def test_operator_event_that_fails_stops_no_later_one() -> None:
    parent = builders.service("chat", tiers={"serve": {}})
    events = (WatchEvent("ADDED", {"kind": "Pod", "metadata": {}}), WatchEvent("ADDED", ready(parent, "serve")))
    operator = OperatorProcess(Cluster(*events), OperatorConfig(builders.PLATFORM, "plimsoll-system", "me"), None)  # type: ignore[arg-type]
    before = error_count(Stage.WATCH)
    await operator._follow(PODS, "", None)
    assert [pod["metadata"]["name"] for pod in operator.cache.all("Pod")] == ["p"]
    assert error_count(Stage.WATCH) == before + 1


async def test_operator_part_that_fails_ends_no_other() -> None:
    """The watch of Services fails; after that, the watch of pods delivers a pod."""
    parent = builders.service("chat", tiers={"serve": {}})

    class PartlyBroken(Cluster):
        def __init__(self) -> None:
            super().__init__()
            self.has_failed, self.pod_was_taken = asyncio.Event(), asyncio.Event()

        async def list(self, *_: Any) -> tuple[list[Object], str]:  # type: ignore[override]
            return [], "1"

        async def watch(self, resource: Any, *_: Any) -> AsyncIterator[WatchEvent]:  # type: ignore[override]
            if resource is SERVICES:
                self.has_failed.set()
                fail()
            await self.has_failed.wait()
            if resource is PODS:
                yield WatchEvent("ADDED", ready(parent, "serve"))
                self.pod_was_taken.set()
            await asyncio.Event().wait()

    stop = asyncio.Event()

    async def watch_services(*_: Any) -> None:
        await stop.wait()

    kube, before = PartlyBroken(), error_count(Stage.PART)
    config = OperatorConfig(builders.PLATFORM, "plimsoll-system", "me")
    operator = OperatorProcess(kube, config, None, watch_services)  # type: ignore[arg-type]
    running = asyncio.create_task(operator.run())
    await kube.pod_was_taken.wait()
    assert [pod["metadata"]["name"] for pod in operator.cache.all("Pod")] == ["p"]
    assert error_count(Stage.PART) == before + 1
    assert not running.done()
    stop.set()
    await running


def test_drain_report_error_about_one_pod_stops_no_other() -> None:
    parent, store, errors = builders.service("chat"), ObjectCache(), ObjectErrors()
    bad, good = (ended_pod(name, message=DRAIN_MESSAGE) for name in ("bad", "good"))
    bad["status"]["containerStatuses"] = [{"name": "engine", "state": 7}]
    for obj in (parent, bad, good):
        store.put(obj)
    endings = DrainReports(store, errors)
    endings.on_pod_event(WatchEvent("SYNC", objects=(bad, good)))
    assert ["pod good," in event.message for event in endings.pending(CHAT)] == [True]
    condition = errors.condition(CHAT)
    assert condition is not None
    assert "Pod team/bad: AttributeError" in condition.message
    endings.on_pod_event(WatchEvent("DELETED", bad))
    assert errors.condition(CHAT) is None
    endings.forget(CHAT)


def make_reconciler(store: ObjectCache, kube: KubeClient, errors: ObjectErrors) -> Reconciler:
    endings = DrainReports(store)
    return Reconciler(kube, store, builders.PLATFORM, GatewayView, lambda key: None, endings, "me", errors)


async def test_reconcile_error_is_shown_beside_the_old_status() -> None:
    class Faulty(Cluster):
        async def apply(self, obj: Object, *arguments: Any, **options: Any) -> Object:
            return fail() if obj["kind"] == "Deployment" else await super().apply(obj, *arguments, **options)

    changed: list[Key] = []
    store, kube, errors = ObjectCache(), Faulty(), ObjectErrors(changed.append)
    raw = builders.service("chat")
    known = {"type": "Ready", "status": "True", "reason": "Serving", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    raw["status"] = {"url": "http://x", "conditions": [known]}
    kube.service = raw
    store.put(raw)
    working = make_reconciler(store, kube, errors)
    with pytest.raises(KeyError):
        await working.reconcile(CHAT)
    granted, status = kube.statuses
    assert granted.keys() == {"url", "conditions", "nameClaim"}
    assert status["nameClaim"] == granted["nameClaim"]
    assert (status["url"], status["conditions"][0]) == ("http://x", known)
    shown = status["conditions"][1]
    assert (shown["type"], shown["status"], shown["reason"]) == ("InternalError", "True", "OperatorError")
    assert shown["message"].startswith("InferenceService team/chat: KeyError while it was reconciled")
    series = {"service": "team/chat", "type": "InternalError", "reason": "OperatorError"}
    assert operator_metrics.OPERATOR.get_sample_value("plimsoll_service_condition", series) == 1


async def test_reconcile_success_removes_the_condition() -> None:
    changed: list[Key] = []
    store, kube, errors = ObjectCache(), Cluster(), ObjectErrors(changed.append)
    kube.service = builders.service("chat")
    store.put(kube.service)
    errors.record(Stage.RECONCILE, CHAT, "InferenceService team/chat", KeyError())
    working = make_reconciler(store, kube, errors)
    await working.reconcile(CHAT)
    assert changed == [CHAT, CHAT]  # so that one more round follows
    await working.reconcile(CHAT)
    stated = [{one["type"] for one in status["conditions"]} for status in kube.statuses if "conditions" in status]
    assert ["InternalError" in types for types in stated] == [True, False]


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

    async def http_get(address: str, port: int, path: str) -> bytes:
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
    asking._relist(0.0)
    (before,) = asking._pods.values()
    due_s = before.info_due_s
    store.put({**pod, "status": {**pod["status"], "conditions": 7}})
    asking._relist(50.0)
    (after,) = asking._pods.values()
    assert (after is before, after.info_due_s) == (True, due_s)
    assert errors.condition(CHAT) is not None


async def test_gateways_error_about_one_replica_stops_no_other() -> None:
    requested: list[str] = []

    async def http_get(address: str, port: int, path: str) -> bytes:
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
    bad = {"kind": "Pod", "metadata": {"labels": good["metadata"]["labels"]}, "status": {"podIP": "10.0.0.2"}}
    odd: Object = {"kind": labels.KIND, "metadata": {"uid": "u"}, "spec": {}}
    before = {
        kind: gateway_metrics.GATEWAY.get_sample_value(name, {"kind": kind}) or 0.0 for kind in ("Pod", labels.KIND)
    }
    found = service_catalog.build_catalog([parent, odd], [bad, good])
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
