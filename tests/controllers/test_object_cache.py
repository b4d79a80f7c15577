"""The store: newest version wins, children are found by their service, late news is ignored."""

from __future__ import annotations

import asyncio
import copy
import gc
import weakref
from typing import Any

import pytest

from plimsoll.api import labels
from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.controllers import object_cache
from plimsoll.controllers.object_cache import SLICE_SIZE, Key, ObjectCache
from plimsoll.core.errors import InvalidSpec
from tests import builders


def test_put_older_version_is_ignored() -> None:
    store, live = ObjectCache(), builders.deployment(builders.service(), "decode", replicas=2)
    old = copy.deepcopy(live)
    old["metadata"]["resourceVersion"], old["spec"]["replicas"] = "9", 1
    store.put(live)
    store.put(old)
    found = store.get("Deployment", ("team", "chat-decode"))
    assert found is not None
    assert found["spec"]["replicas"] == 2


def test_put_of_deleted_predecessor_is_ignored() -> None:
    """The answer to a write of a service may come after its successor's event, which comes only once."""
    store, live = ObjectCache(), builders.service()
    before = copy.deepcopy(live)
    before["metadata"] |= {"uid": "earlier", "resourceVersion": "19"}
    live["metadata"]["resourceVersion"] = "20"
    store.put(live)
    store.put(before, notify=False)
    store.remove(before)
    found = store.get(labels.KIND, ("team", "chat"))
    assert found is not None
    assert found["metadata"]["uid"] == live["metadata"]["uid"]


def with_version(obj: dict[str, Any], version: int) -> dict[str, Any]:
    return obj | {"metadata": obj["metadata"] | {"resourceVersion": str(version)}}


def test_put_of_deleted_object_is_ignored() -> None:
    """The answer to a write may come after the watch has brought the deletion."""
    store, live = ObjectCache(), builders.deployment(builders.service(), "decode")
    store.put(with_version(live, 10))
    store.delete(with_version(live, 12))
    store.put(with_version(live, 11))
    assert store.get("Deployment", ("team", "chat-decode")) is None
    successor = with_version(live, 11)
    successor["metadata"]["uid"] = "successor"
    store.put(successor)
    assert store.get("Deployment", ("team", "chat-decode")) is not None


def test_put_after_delete_of_a_later_version_returns() -> None:
    """A watch says that an object is deleted, too, if its labels are not selected any more."""
    store, live = ObjectCache(), builders.deployment(builders.service(), "decode")
    store.put(with_version(live, 10))
    store.delete(with_version(live, 12))
    store.put(with_version(live, 13))
    assert store.get("Deployment", ("team", "chat-decode")) is not None


def test_memory_of_deleted_objects_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_cache, "MAX_DELETED", 2)
    store, live = ObjectCache(), builders.deployment(builders.service(), "decode")
    for uid in ("a", "b", "c"):
        one = with_version(live, 10)
        one["metadata"]["uid"] = uid
        store.delete(one)
    assert list(store._deleted) == ["b", "c"]


def test_remove_of_earlier_uid_is_ignored() -> None:
    store, live = ObjectCache(), builders.deployment(builders.service(), "decode")
    before = copy.deepcopy(live)
    before["metadata"]["uid"] = "earlier"
    store.put(live)
    store.remove(before)
    assert store.get("Deployment", ("team", "chat-decode")) is not None


def test_parsed_keeps_nothing_of_a_deleted_service() -> None:
    """A tick in slices still reads the services that it began with."""
    store, raw = ObjectCache(), builders.service()
    store.put(raw)
    (read,) = store.all(labels.KIND)
    store.remove(raw)
    assert isinstance(store.parsed(read), InferenceService)
    successor = copy.deepcopy(raw)
    successor["metadata"]["uid"] = "successor"
    store.put(successor)
    store.parsed(read)
    assert store._parsed == {}


def test_replace_drops_missing_objects_of_namespace_only() -> None:
    store = ObjectCache()
    here, there = builders.service(namespace="here"), builders.service(namespace="there")
    store.put(builders.deployment(here, "decode"))
    store.put(builders.deployment(there, "decode"))
    store.replace("Deployment", (), "here")
    assert store.get("Deployment", ("here", "chat-decode")) is None
    assert store.get("Deployment", ("there", "chat-decode")) is not None


async def test_replace_in_slices_lets_others_run() -> None:
    store = ObjectCache()
    store.put(builders.deployment(builders.service("gone"), "decode"))
    listed = tuple(builders.deployment(builders.service(f"s-{n}"), "decode") for n in range(4 * SLICE_SIZE))
    counts = list[int]()

    async def count() -> None:
        while True:
            counts.append(len(list(store.all("Deployment"))))
            await asyncio.sleep(0)

    other = asyncio.create_task(count())
    await store.replace_in_slices("Deployment", listed)
    other.cancel()
    assert counts == [n * SLICE_SIZE for n in range(1, 5)]
    assert store.get("Deployment", ("team", "gone-decode")) is None


def test_service_namespaces_are_those_with_services() -> None:
    store, services = ObjectCache(), [builders.service(name, "here") for name in ("a", "b")]
    for service in (*services, services[0], builders.service("c", "there")):
        store.put(service)
    assert set(store.service_namespaces) == {"here", "there"}
    store.remove(services[0])
    assert set(store.service_namespaces) == {"here", "there"}
    store.remove(services[1])
    assert set(store.service_namespaces) == {"there"}


def test_children_are_found_by_label_and_notify_service() -> None:
    reported: list[Key] = []
    store, parent = ObjectCache(reported.append), builders.service()
    store.put(builders.deployment(parent, "decode"))
    store.put(builders.pod(parent, "decode"))
    assert reported == [("team", "chat")] * 2
    assert [o["metadata"]["name"] for o in store.children("Pod", ("team", "chat"))] == ["p"]
    store.remove(builders.pod(parent, "decode"))
    assert store.children("Pod", ("team", "chat")) == []


def test_object_of_another_service_leaves_its_former_one() -> None:
    store, first, second = ObjectCache(), builders.service(), builders.service("other")
    pod, moved = builders.pod(first, "decode", "p"), builders.pod(second, "decode", "p")
    moved["metadata"]["uid"] = pod["metadata"]["uid"]
    store.put(pod)
    store.put(moved)
    assert store.children("Pod", ("team", "chat")) == []
    store.remove(moved)
    assert store.children("Pod", ("team", "other")) == store.children("Pod", ("team", "chat")) == []


def test_parsed_reads_each_version_once() -> None:
    store = ObjectCache()
    raw, other = builders.service(), builders.service(tiers={})
    store.put(raw)
    (cached,) = store.all(labels.KIND)
    first = store.parsed(cached)
    assert isinstance(first, InferenceService)
    assert store.parsed(cached) is first
    store.put(other)
    assert isinstance(store.parsed(*store.all(labels.KIND)), InvalidSpec)


def test_pods_of_a_tier_share_their_equal_parts() -> None:
    store, service = ObjectCache(), builders.service()
    first, second = (builders.pod(service, "decode", name) for name in ("chat-decode-1", "chat-decode-2"))
    other = builders.pod(service, "prefill", "chat-prefill-1")
    for pod in (first, other, second):
        pod["spec"] = {"containers": [{"name": "engine", "args": [pod["metadata"]["name"], "--same"]}]}
        pod["spec"]["nodeSelector"] = {"tier": pod["metadata"]["name"].split("-")[1]}
        store.put(copy.deepcopy(pod))
    stored = {pod["metadata"]["name"]: pod for pod in store.children("Pod", ("team", "chat"))}
    assert stored == {pod["metadata"]["name"]: pod for pod in (first, other, second)}
    selectors = {name: pod["spec"]["nodeSelector"] for name, pod in stored.items()}
    assert selectors["chat-decode-1"] is selectors["chat-decode-2"]
    assert selectors["chat-decode-1"] is not selectors["chat-prefill-1"]


def test_tiers_of_two_services_share_their_equal_parts() -> None:
    store = ObjectCache()
    for name in ("one", "two"):
        pod = builders.pod(builders.service(name), "decode", f"{name}-decode-1")
        store.put(copy.deepcopy(pod | {"spec": {"containers": [{"name": "engine", "args": [name, "--same"]}]}}))
    first, second = (store.get("Pod", ("team", f"{name}-decode-1")) for name in ("one", "two"))
    assert first is not None
    assert second is not None
    assert first["spec"]["containers"][0]["args"] == ["one", "--same"]
    assert second["spec"]["containers"][0]["args"] == ["two", "--same"]
    assert first["status"] is second["status"]


class _Part:
    """A part of an object, to which there can be weak references."""


def test_objects_that_left_are_kept_nowhere() -> None:
    """A tier's label can have any value, so one object for each would be without bound."""
    store, service = ObjectCache(), builders.service()
    parts: list[weakref.ref[_Part]] = []
    for number in range(3):
        for pod in (
            builders.pod(service, f"a-{number}", "moving"),
            builders.pod(service, f"b-{number}", f"p-{number}"),
        ):
            store.put(pod | {"spec": {"part": (part := _Part())}})
            parts.append(weakref.ref(part))
        store.remove(pod)
    assert list(store.all_pods())
    store.replace("Pod", ())
    del part
    gc.collect()
    assert [part() for part in parts] == [None] * 6


def test_next_version_shares_what_has_not_changed() -> None:
    store, pod = ObjectCache(), builders.pod(builders.service(), "decode", "chat-decode-1")
    pod["metadata"]["resourceVersion"] = "10"
    store.put(pod)
    before = store.get("Pod", ("team", "chat-decode-1"))
    after = copy.deepcopy(pod) | {"status": {"phase": "Failed"}}
    after["metadata"]["resourceVersion"] = "11"
    store.put(after)
    found = store.get("Pod", ("team", "chat-decode-1"))
    assert found == after
    assert found is not None
    assert before is not None
    assert found["metadata"]["labels"] is before["metadata"]["labels"]


def test_object_that_is_put_again_notifies_nobody() -> None:
    """As the watch brings back what the answer to a write has brought."""
    changed = list[Key]()
    store = ObjectCache(changed.append)
    service = builders.service()
    for one in (service, builders.deployment(service, "decode")):
        store.put(one)
        store.put(copy.deepcopy(one))
    assert changed == [("team", "chat")] * 2
    newer = copy.deepcopy(service)
    newer["metadata"]["resourceVersion"] = "2"
    store.put(newer, notify=False)
    assert (store.get("InferenceService", ("team", "chat")), len(changed)) == (newer, 2)


def test_claims_of_names_follow_their_services() -> None:
    store = ObjectCache()

    def claimants(*names: str) -> set[str]:
        return {claim.qualified_name for claim in store.claims_of(names)}

    model = {"uri": "file:///models/tiny", "name": "shared"}
    for name in ("a", "b"):
        store.put(builders.service(name, model=model))
    assert claimants("shared") == claimants("shared", "team/a", "none") == {"team/a", "team/b"}
    renamed = builders.service("a")
    renamed["metadata"]["resourceVersion"] = "2"
    store.put(renamed)
    assert (claimants("shared"), claimants("a")) == ({"team/b"}, {"team/a"})
    successor = builders.service("a", model=model)
    successor["metadata"] |= {"uid": "later", "resourceVersion": "3"}
    store.put(successor)
    assert (claimants("shared"), claimants("a")) == ({"team/a", "team/b"}, set())
    for one in (successor, builders.service("b", model=model)):
        store.remove(one)
    assert store._claims_by_name == {}
