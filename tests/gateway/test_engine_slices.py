"""Engines as EndpointSlices have them, joined with what the operator publishes of their templates."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator

import pytest

from plimsoll.adapters.kube_client import (
    ENDPOINTSLICES,
    INFERENCESERVICEADMISSIONS,
    INFERENCESERVICES,
    Resource,
    WatchEvent,
    received,
)
from plimsoll.api import labels
from plimsoll.api.contract import engine_tls_name
from plimsoll.core.admission.request import MAX_REQUEST_SEQUENCES
from plimsoll.core.routing.endpoint import Endpoint, Leaving
from plimsoll.core.types import Role
from plimsoll.gateway import watch_cache
from plimsoll.gateway.service_catalog import CatalogBuilder
from plimsoll.gateway.watch_cache import WATCHED_RESOURCES, WatchCache, run_watches
from tests.gateway.kube_objects import (
    CatalogOfPods,
    Object,
    build_catalog,
    engine_slice,
    pod,
    published,
    service,
    target_pod,
    target_service,
    without_limits,
)


def endpoints(*pods: Object, obj: Object | None = None) -> tuple[Endpoint, ...]:
    return build_catalog([obj or service()], pods).services["team/chat"].endpoints


def of_slices(*slices: Object, pods: tuple[Object, ...]) -> tuple[Endpoint, ...]:
    """What a gateway makes of these slices, and of what the operator publishes of the pods."""
    _, admissions = published([service()], pods)
    by_name = {f"team/{one['metadata']['name']}": one for one in slices}
    known = CatalogBuilder().update({"team/chat": service()}, by_name, {"team/chat": admissions[0]})
    return known.services["team/chat"].endpoints


def test_engine_has_the_facts_of_its_slice_and_its_template() -> None:
    secured = pod("10.0.0.1:9000", revision="r7", ready=False)
    secured["metadata"]["labels"][labels.TLS] = labels.MUTUAL_TLS
    name = secured["metadata"]["name"]
    found = Endpoint("10.0.0.1:9000", name, Role.SERVE, "r7", ready=False, tls_name=engine_tls_name("team"))
    assert endpoints(secured) == (found,)


def test_address_of_ipv6_has_brackets() -> None:
    assert [one.address for one in endpoints(pod("fd00::1:8000"))] == ["[fd00::1]:8000"]


def test_engine_of_another_revision_has_that_of_its_own_template() -> None:
    owner = {"kind": "ReplicaSet", "name": "chat-decode-6f9", "uid": "rs", "controller": True}
    old = pod("10.0.0.1:8000", role="decode", revision="r1", ownerReferences=[owner])
    old["metadata"]["name"] = "chat-decode-6f9-x2x4z"
    new = pod("10.0.0.2:8000", role="decode", revision="r2")
    assert {one.address: one.revision for one in endpoints(old, new)} == {"10.0.0.1:8000": "r1", "10.0.0.2:8000": "r2"}
    sibling = {**old, "metadata": {**old["metadata"], "name": "chat-decode-6f9-bbbbb", "uid": "later"}}
    slice_ = engine_slice(sibling, service="chat", role="decode", port=8000)
    assert [one.revision for one in of_slices(slice_, pods=(old, new))] == ["r1"], "it appeared after the last write"


def test_engine_of_a_stopped_operator_has_the_current_template() -> None:
    slice_ = engine_slice(pod("10.0.0.2:8000", revision="r2"), service="chat", role="serve", port=8000)
    assert [one.revision for one in of_slices(slice_, pods=(pod("10.0.0.1:8000", revision="r1"),))] == ["r1"]


def test_engine_without_a_published_template_takes_no_requests() -> None:
    engine = pod("10.0.0.1:8000")
    slice_ = engine_slice(engine, service="chat", role="serve", port=8000)
    assert of_slices(slice_, pods=()) == ()
    assert [one.address for one in of_slices(slice_, pods=(engine,))] == ["10.0.0.1:8000"]


def test_last_publication_holds_while_there_is_none() -> None:
    """The object is deleted, or of a later release: what was read stays, as with the limits."""
    catalog = CatalogOfPods()
    catalog.set([service()], [pod("10.0.0.1:8000")])
    for worse in (None, {**without_limits(service()), "engines": {"version": 99}}, without_limits(service())):
        found = catalog.builder.update({}, {}, {"team/chat": worse}).services["team/chat"]
        assert [one.address for one in found.endpoints] == ["10.0.0.1:8000"]


@pytest.mark.parametrize("name", ["chat-decode", "mine", ""])
def test_slice_of_another_service_object_has_no_engines(name: str) -> None:
    """Anyone who may create a Service may give it these labels."""
    engine = pod("10.0.0.1:8000")
    slice_ = engine_slice(engine, service="chat", role="serve", port=8000)
    slice_["metadata"]["labels"][labels.SLICE_SERVICE] = name
    assert of_slices(slice_, pods=(engine,)) == ()


def test_slice_without_the_port_of_the_api_has_no_engines() -> None:
    engine = pod("10.0.0.1:8000")
    slice_ = engine_slice(engine, service="chat", role="serve", port=8000)
    assert of_slices({**slice_, "ports": [{"name": "launcher", "port": 8000}]}, pods=(engine,)) == ()


def test_engine_in_two_slices_is_one_until_both_are_gone() -> None:
    """Kubernetes moves engines from slice to slice, and they are in both for a moment."""
    engine, catalog = pod("10.0.0.1:8000", ready=False), CatalogOfPods()
    catalog.set([service()], [engine])
    ready = engine_slice(pod("10.0.0.1:8000"), service="chat", role="serve", port=8000, name="second")
    (found,) = catalog.builder.update({}, {"team/second": ready}, {}).services["team/chat"].endpoints
    assert found.ready
    (found,) = catalog.builder.update({}, {"team/chat-serve-8000": None}, {}).services["team/chat"].endpoints
    assert found.ready
    assert catalog.builder.update({}, {"team/second": None}, {}).services["team/chat"].endpoints == ()


def test_pods_of_a_target_become_endpoints_at_its_port() -> None:
    first, second = endpoints(target_pod("10.0.0.1"), target_pod("10.0.0.2", ready=False), obj=target_service())
    assert (first.address, first.pod, first.role, first.ready) == ("10.0.0.1:8000", "llm-10-0-0-1", Role.SERVE, True)
    assert (second.address, second.ready) == ("10.0.0.2:8000", False)


def test_terminating_pod_of_a_target_gets_no_requests() -> None:
    """No launcher of Plimsoll is in it, so nobody can ask it to stay."""
    going = target_pod("10.0.0.1", deletionTimestamp="2026-06-01T00:00:00Z")
    (endpoint,) = endpoints(going, obj=target_service())
    assert (endpoint.leaving, endpoint.available, endpoint.last) == (Leaving.AT_ONCE, False, False)


def test_limits_of_a_target_are_those_of_its_command_line() -> None:
    engine = target_pod("10.0.0.1", args=["serve", "m", "--max-model-len", "4096", "--max-num-seqs", "4"])
    entry = build_catalog([target_service()], [engine]).services["team/chat"]
    assert (entry.max_model_len, entry.max_queued) == (4096, MAX_REQUEST_SEQUENCES)


def test_stored_slice_has_only_what_is_read() -> None:
    """A thousand services with ten engines each take most of a gateway's memory."""
    engine = {
        "addresses": ["10.0.0.1", "10.0.0.2"],
        "conditions": {"ready": True, "serving": True, "terminating": False},
        "targetRef": {"kind": "Pod", "namespace": "team", "name": "a", "uid": "u"},
        "nodeName": "node",
        "zone": "z",
        "hints": {"forZones": [{"name": "z"}]},
    }
    meta = {"name": "s", "namespace": "team", "generateName": "s-", "managedFields": [{"manager": "m"}]}
    whole = {
        "kind": "EndpointSlice",
        "metadata": {**meta, "labels": {labels.SERVICE: "chat", "other": "x"}, "annotations": {"a": "b"}},
        "ports": [{"name": "api", "port": 8000, "protocol": "TCP"}],
        "endpoints": [engine],
    }
    assert received(whole) == {
        "kind": "EndpointSlice",
        "metadata": {"name": "s", "namespace": "team", "labels": {labels.SERVICE: "chat"}},
        "ports": [{"name": "api", "port": 8000}],
        "endpoints": [
            {
                "addresses": ["10.0.0.1"],
                "conditions": {"serving": True, "terminating": False},
                "targetRef": {"name": "a", "uid": "u"},
            }
        ],
    }


def test_slice_of_a_thousand_engines_is_stored() -> None:
    """Kubernetes allows as many in one slice, and the fields that nobody reads exceed the limit of an object."""
    engine = {
        "addresses": ["10.0.0.1"],
        "conditions": {"ready": True, "serving": True, "terminating": False},
        "targetRef": {"kind": "Pod", "namespace": "team", "name": "a" * 60, "uid": "u" * 36},
        "hints": {"forZones": [{"name": "z" * 63} for _ in range(8)]},
    }
    whole = {
        "kind": "EndpointSlice",
        "metadata": {"name": "s", "namespace": "team"},
        "ports": [],
        "endpoints": [engine] * 1000,
    }
    assert len(json.dumps(whole)) > 512 * 1024
    assert len(received(whole)["endpoints"]) == 1000


def listed(*services: Object, pods: tuple[Object, ...] = (), admissions: tuple[Object, ...] = ()) -> WatchCache:
    """A cache in which all kinds are listed."""
    cache, (slices, _) = WatchCache(), published(services, pods)
    found = {INFERENCESERVICES: services, INFERENCESERVICEADMISSIONS: admissions, ENDPOINTSLICES: tuple(slices)}
    for resource, _ in WATCHED_RESOURCES:
        cache.apply(resource, None, WatchEvent("SYNC", objects=found[resource]))
    return cache


def test_first_catalog_awaits_published_engines() -> None:
    """Else a new gateway would take the engines from an Envoy that still has them."""
    engines = (pod("10.0.0.1:8000"),)
    cache = listed(service(), service("idle"), pods=engines, admissions=(without_limits(service()),))
    assert not cache.synced
    assert cache.not_ready_reason == (
        "the operator has not yet published the engines of 1 InferenceServices, such as team/chat; check that it runs"
    )
    _, (of_another, *_) = published([service(uid="earlier")], engines)
    cache.apply(INFERENCESERVICEADMISSIONS, None, WatchEvent("MODIFIED", of_another))
    assert not cache.synced
    _, (made, *_) = published([service()], engines)
    cache.apply(INFERENCESERVICEADMISSIONS, None, WatchEvent("MODIFIED", made))
    assert cache.synced
    assert cache.not_ready_reason == ""


def test_first_catalog_awaits_the_slices_of_a_routed_target() -> None:
    """After an upgrade, the operator has still to make the Service that selects the pods."""
    target = target_service()
    cache = listed(target, admissions=(without_limits(target),))
    assert not cache.synced
    (slice_,), _ = published([target], [target_pod("10.0.0.1")])
    cache.apply(ENDPOINTSLICES, None, WatchEvent("ADDED", {**slice_, "ports": [], "endpoints": []}))
    assert cache.synced


@pytest.mark.parametrize("selector", ["app=llm", "app in (llm, vllm)"], ids=["being deleted", "no pairs"])
def test_first_catalog_awaits_no_unpublished_kind_of_service(selector: str) -> None:
    target = target_service()
    target["status"]["tiers"]["serve"]["podSelector"] = selector
    leaving = service()
    leaving["metadata"]["deletionTimestamp"] = "2026-06-01T00:00:00Z"
    if selector == "app=llm":
        target["metadata"]["deletionTimestamp"] = "2026-06-01T00:00:00Z"
    cache = listed(target, pods=(), admissions=())
    assert cache.synced
    assert listed(leaving, pods=(pod("10.0.0.1:8000"),)).synced


def test_waiting_is_found_once_for_a_burst_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is about all objects: at each event it would take the picker's loop for long."""
    found = list[Object]()

    def counted(obj: Object) -> bool:
        found.append(obj)
        return True

    monkeypatch.setattr(watch_cache, "has_engines", counted)
    cache = listed(service(), pods=(pod("10.0.0.1:8000"),))
    for _ in range(50):
        cache.apply(INFERENCESERVICES, None, WatchEvent("MODIFIED", service()))
    assert found == []
    assert not cache.synced
    assert "team/chat" in cache.not_ready_reason
    assert len(found) == 1


class Sleeps:
    """The clock of the watches: a sleep ends when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self._may_end = asyncio.Queue[float](), asyncio.Queue[None]()
        self.get_running_loop, self.TaskGroup = asyncio.get_running_loop, asyncio.TaskGroup
        monkeypatch.setattr(watch_cache, "asyncio", self)

    async def sleep(self, seconds: float) -> None:
        self.begun.put_nowait(seconds)
        await self._may_end.get()

    def end(self) -> None:
        self._may_end.put_nowait(None)

    async def pass_one(self) -> None:
        """End a sleep, and await the next one."""
        self.end()
        await asyncio.wait_for(self.begun.get(), 30)


async def test_first_catalog_awaits_stragglers_after_publication(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without any publication the former gateways serve on, however long the new operator takes to start."""
    services = [service(name) for name in ("a", "b", "c")]
    engines = [pod(f"10.0.0.{n}:8000", service=name) for n, name in enumerate(("a", "b", "c"))]
    slices, admissions = published(services, engines)
    found = {INFERENCESERVICES: tuple(services), ENDPOINTSLICES: tuple(slices)}

    class Source:
        async def watch(
            self, resource: Resource, namespace: str | None = None, selector: str | None = None
        ) -> AsyncIterator[WatchEvent]:
            yield WatchEvent("SYNC", objects=found.get(resource, ()))
            await asyncio.Event().wait()

    sleeps, cache, changed = Sleeps(monkeypatch), WatchCache(), asyncio.Event()
    with caplog.at_level(logging.WARNING):
        watches = asyncio.create_task(run_watches(Source(), cache, changed.set))
        try:
            await sleeps.begun.get()
            for _ in range(100):
                await sleeps.pass_one()
            for n in range(2):
                assert not cache.synced
                cache.apply(INFERENCESERVICEADMISSIONS, None, WatchEvent("ADDED", admissions[n]))
                await sleeps.pass_one()
            assert not cache.synced, "the operator has just published another one"
            changed.clear()
            sleeps.end()
            await asyncio.wait_for(changed.wait(), 30)
            assert cache.synced
        finally:
            watches.cancel()
    (line,) = caplog.messages
    assert "such as team/c" in line


def test_service_of_a_target_counts_for_targets_alone() -> None:
    """Its name is free where there are tiers: who may create Services could send prompts to any pod with it."""
    own, foreign = pod("10.0.0.1:8000"), pod("10.0.0.9:8000")
    foreign["metadata"]["name"] = own["metadata"]["name"]  # it takes no place either
    slices = (
        engine_slice(own, service="chat", role="serve", port=8000),
        engine_slice(foreign, service="chat", role="serve", port=8000, targets=True),
    )
    assert [one.address for one in of_slices(*slices, pods=(own, foreign))] == ["10.0.0.1:8000"]
