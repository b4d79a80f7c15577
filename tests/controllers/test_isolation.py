"""An unexpected error about one object: its service shows it, and everything else goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from plimsoll.adapters.kube_client import PODS, SERVICES, KubeClient, WatchEvent
from plimsoll.api.conditions import ConditionReason, ConditionType
from plimsoll.controllers.gateway_poller import GatewayView
from plimsoll.controllers.isolation import NAMED, ObjectErrors, Stage, supervise
from plimsoll.controllers.object_cache import Key, ObjectCache
from plimsoll.controllers.operator import OperatorProcess
from plimsoll.controllers.operator_config import OperatorConfig
from plimsoll.controllers.reconcile.drain_reports import DrainReports
from plimsoll.controllers.reconcile.reconciler import Reconciler
from plimsoll.telemetry import operator_metrics
from tests import builders
from tests.controllers.isolation_faults import CHAT, OTHER, Cluster, Object, error_count, fail
from tests.controllers.test_autoscale import ready
from tests.controllers.test_drain_reports import DRAIN_MESSAGE
from tests.controllers.test_drain_reports import pod as ended_pod


def never_started(parent: Object) -> Object:
    """A pod whose container never ran, as the API server sends it after its deletion."""
    found = ready(parent, "serve")
    found["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "name": "broken", "uid": "broken"}
    ended = {"exitCode": 137, "reason": "ContainerStatusUnknown", "startedAt": None, "finishedAt": None}
    found["status"]["containerStatuses"] = [{"name": "engine", "state": {"terminated": ended}}]
    return found


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

        async def discover(self, *_: Any) -> None:  # no kind of another project
            pass

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
