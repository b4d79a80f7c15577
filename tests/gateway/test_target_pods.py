"""Pods that a target selects: which are watched, and what endpoints they become."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from plimsoll.adapters.kube_client import INFERENCESERVICES, PODS, Resource, WatchEvent
from plimsoll.api import labels
from plimsoll.core.admission.request import MAX_REQUEST_SEQUENCES
from plimsoll.core.routing.endpoint import Endpoint, Leaving
from plimsoll.core.types import Role
from plimsoll.gateway import watch_cache
from plimsoll.gateway.service_catalog import CatalogBuilder
from plimsoll.gateway.target_pods import TargetSelection, selection_of
from plimsoll.gateway.watch_cache import MAX_TARGETS, WATCHED_RESOURCES, WatchCache, run_watches
from tests.gateway.kube_objects import Object, pod, service, target_pod, target_service

SELECTION = TargetSelection("team", "chat", "serve", "app=llm", 8000)


def listed(*services: Object) -> WatchCache:
    """A cache in which all kinds are listed: these services, and nothing else."""
    cache = WatchCache()
    for resource, _ in WATCHED_RESOURCES:
        cache.apply(resource, None, WatchEvent("SYNC", objects=services if resource == INFERENCESERVICES else ()))
    return cache


class Gateway:
    """A cache, and the catalog that its changes make."""

    def __init__(self, *services: Object) -> None:
        self.cache = listed(*services)
        self._builder = CatalogBuilder()

    def set_service(self, obj: Object) -> None:
        self.cache.apply(INFERENCESERVICES, None, WatchEvent("MODIFIED", obj))

    def apply(self, event: WatchEvent, selection: TargetSelection = SELECTION) -> None:
        self.cache.apply_target(selection, event)

    def endpoints(self, key: str = "team/chat") -> tuple[Endpoint, ...]:
        changes = self.cache.take_changes()
        found = self._builder.update(changes.services, changes.pods, changes.admissions)
        return found.services[key].endpoints


def test_selected_pods_become_endpoints_at_the_port_of_the_target() -> None:
    gateway = Gateway(target_service())
    gateway.apply(WatchEvent("SYNC", objects=(target_pod("10.0.0.1"), target_pod("10.0.0.2", ready=False))))
    first, second = gateway.endpoints()
    assert (first.address, first.pod, first.role, first.ready) == ("10.0.0.1:8000", "llm-10-0-0-1", Role.SERVE, True)
    assert (second.address, second.ready) == ("10.0.0.2:8000", False)
    gateway.apply(WatchEvent("MODIFIED", target_pod("10.0.0.2")))
    assert [one.available for one in gateway.endpoints()] == [True, True]
    gateway.apply(WatchEvent("DELETED", target_pod("10.0.0.1")))
    assert [one.address for one in gateway.endpoints()] == ["10.0.0.2:8000"]


def test_terminating_pod_of_a_target_gets_no_requests() -> None:
    """No launcher of Plimsoll is in it, so nobody can ask it to stay."""
    gateway = Gateway(target_service())
    gateway.apply(WatchEvent("SYNC", objects=(target_pod("10.0.0.1", deletionTimestamp="2026-06-01T00:00:00Z"),)))
    (endpoint,) = gateway.endpoints()
    assert (endpoint.leaving, endpoint.available, endpoint.last) == (Leaving.AT_ONCE, False, False)


def test_limits_of_a_target_are_those_of_its_command_line() -> None:
    gateway = Gateway(target_service())
    args = ["serve", "m", "--max-model-len", "4096", "--max-num-seqs", "4"]
    gateway.apply(WatchEvent("SYNC", objects=(target_pod("10.0.0.1", args=args),)))
    gateway.endpoints()
    entry = gateway._builder._states["team/chat"].entry
    assert entry is not None
    assert (entry.max_model_len, entry.max_queued) == (4096, MAX_REQUEST_SEQUENCES)


@pytest.mark.parametrize("place", [labels.ROLE, labels.WORKER_OF])
def test_pods_of_a_tier_are_no_endpoints_of_a_target(place: str) -> None:
    gateway = Gateway(target_service(), service("other"))
    own = target_pod("10.0.0.1", labels={"app": "llm", labels.MANAGED_BY: "plimsoll", place: "serve"})
    gateway.apply(WatchEvent("SYNC", objects=(own,)))
    assert gateway.endpoints() == ()
    gateway.apply(WatchEvent("ADDED", own))
    assert gateway.endpoints() == ()


def test_two_selectors_that_match_one_pod_share_nothing() -> None:
    """The operator refuses the younger service; until its status says so, neither loses a pod of the other."""
    gateway = Gateway(target_service(), target_service("wide", selector="team=x"))
    wide = TargetSelection("team", "wide", "serve", "team=x", 8000)
    both = WatchEvent("SYNC", objects=(target_pod("10.0.0.1"),))
    gateway.apply(both)
    gateway.apply(both, wide)
    gateway.set_service(target_service("wide", selector=None))
    assert [one.address for one in gateway.endpoints()] == ["10.0.0.1:8000"]
    assert gateway.cache.selections == {SELECTION}


def test_changed_port_moves_endpoints_once_the_pods_are_listed() -> None:
    gateway = Gateway(target_service())
    gateway.apply(WatchEvent("SYNC", objects=(target_pod("10.0.0.1", resourceVersion="7"),)))
    gateway.endpoints()
    gateway.set_service(target_service(port=9000))
    assert [one.address for one in gateway.endpoints()] == ["10.0.0.1:8000"], "no moment without an engine"
    gateway.apply(WatchEvent("DELETED", target_pod("10.0.0.1")))
    assert [one.address for one in gateway.endpoints()] == ["10.0.0.1:8000"], "an event of the former watch"
    (selection,) = gateway.cache.selections
    gateway.apply(WatchEvent("SYNC", objects=(target_pod("10.0.0.1", resourceVersion="7"),)), selection)
    assert [one.address for one in gateway.endpoints()] == ["10.0.0.1:9000"]


def test_withdrawn_selector_removes_the_endpoints() -> None:
    gateway = Gateway(target_service())
    gateway.apply(WatchEvent("SYNC", objects=(target_pod("10.0.0.1"),)))
    gateway.endpoints()
    gateway.set_service(target_service(selector=None))
    assert gateway.endpoints() == ()


def test_first_catalog_awaits_pods_of_targets() -> None:
    """Else a restarted picker would take the engines from an Envoy that still has them."""
    cache = listed(target_service())
    assert not cache.synced
    cache.apply_target(SELECTION, WatchEvent("SYNC"))
    assert cache.synced
    cache.apply(INFERENCESERVICES, None, WatchEvent("ADDED", target_service("later")))
    assert cache.synced, "a new target holds up no other service"


@pytest.mark.parametrize(
    "obj",
    [
        service(),
        target_service(port=None),
        target_service(selector=None),
        target_service(selector=""),
        target_service(deletionTimestamp="2026-06-01T00:00:00Z"),
        {**target_service(), "status": {"tiers": {"serve": {"podSelector": 5}}}},
        {**target_service(), "spec": {"targets": {"serve": {"port": "8000"}}}},
        {**target_service(), "spec": {"targets": "serve"}},
    ],
)
def test_service_without_port_or_selector_selects_nothing(obj: Object) -> None:
    assert selection_of(obj) is None


class Source:
    """An API server: one list for each watch, and then changes as a test makes them."""

    def __init__(self, *services: Object) -> None:
        self.services: asyncio.Queue[WatchEvent] = asyncio.Queue()
        self.services.put_nowait(WatchEvent("SYNC", objects=services))
        self.watched: list[str | None] = []

    async def watch(
        self, resource: Resource, namespace: str | None = None, selector: str | None = None
    ) -> AsyncIterator[WatchEvent]:
        if resource == INFERENCESERVICES:
            while True:
                yield await self.services.get()
        if resource != PODS or selector == labels.ROLE:
            yield WatchEvent("SYNC")
            await asyncio.Event().wait()
        self.watched.append(selector)
        try:
            yield WatchEvent("SYNC", objects=(target_pod("10.0.0.1"),))
            await asyncio.Event().wait()
        finally:
            self.watched.remove(selector)


async def test_each_target_is_watched_while_it_has_a_selector() -> None:
    source, cache, changed = Source(target_service()), WatchCache(), asyncio.Event()
    watches = asyncio.create_task(run_watches(source, cache, changed.set))

    async def wait_for(watched: list[str]) -> None:
        while source.watched != watched or not cache.synced:
            changed.clear()
            await asyncio.wait_for(changed.wait(), 30)
            await asyncio.sleep(0)

    try:
        await wait_for(["app=llm"])
        assert cache.take_changes().pods.keys() == {"team/chat/llm-10-0-0-1"}
        source.services.put_nowait(WatchEvent("MODIFIED", target_service(selector="app=new")))
        await wait_for(["app=new"])
        source.services.put_nowait(WatchEvent("DELETED", target_service(selector="app=new")))
        await wait_for([])
        assert cache.take_changes().pods == {"team/chat/llm-10-0-0-1": None}
    finally:
        watches.cancel()


def test_watches_of_targets_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever may write the status of services in one namespace could else fill every gateway."""
    cache = listed(*(target_service(f"chat-{number}") for number in range(MAX_TARGETS + 1)))
    assert len(cache.selections) == MAX_TARGETS
    (warning,) = caplog.messages
    assert warning.startswith(f"InferenceService team/chat-{MAX_TARGETS} gets no requests: {MAX_TARGETS} others")
    cache.apply(INFERENCESERVICES, None, WatchEvent("DELETED", target_service("chat-0")))
    cache.apply(INFERENCESERVICES, None, WatchEvent("MODIFIED", target_service(f"chat-{MAX_TARGETS}")))
    assert len(cache.selections) == MAX_TARGETS


class Unlistable(Source):
    """An API server that rejects one selector."""

    async def watch(
        self, resource: Resource, namespace: str | None = None, selector: str | None = None
    ) -> AsyncIterator[WatchEvent]:
        if selector == "app=!":
            await asyncio.Event().wait()
        async for event in super().watch(resource, namespace, selector):
            yield event


async def test_target_that_cannot_be_listed_keeps_no_gateway_from_its_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch_cache, "TARGET_LIST_SECONDS", 0.01)
    source = Unlistable(target_service(), target_service("bad", selector="app=!"))
    cache, changed = WatchCache(), asyncio.Event()
    watches = asyncio.create_task(run_watches(source, cache, changed.set))
    try:
        while not cache.synced:
            await asyncio.wait_for(changed.wait(), 30)
            changed.clear()
    finally:
        watches.cancel()
    assert cache.take_changes().pods.keys() == {"team/chat/llm-10-0-0-1"}
    (warning,) = caplog.messages
    assert warning.startswith("InferenceService team/bad: the API server has not listed its pods for 0 s")
    assert warning.endswith("check status.tiers.serve.podSelector, which is app=!")


def test_own_pods_are_not_taken_for_those_of_targets() -> None:
    gateway = Gateway(service())
    gateway.cache.apply(PODS, None, WatchEvent("SYNC", objects=(pod("10.0.0.4:8000"),)))
    assert [one.address for one in gateway.endpoints()] == ["10.0.0.4:8000"]
    assert gateway.cache.selections == frozenset()
