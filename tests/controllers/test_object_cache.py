"""The store: newest version wins, children are found by their service, late news is ignored."""

from __future__ import annotations

import copy

from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.controllers.object_cache import Key, ObjectCache
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


def test_remove_of_earlier_uid_is_ignored() -> None:
    store, live = ObjectCache(), builders.deployment(builders.service(), "decode")
    before = copy.deepcopy(live)
    before["metadata"]["uid"] = "earlier"
    store.put(live)
    store.remove(before)
    assert store.get("Deployment", ("team", "chat-decode")) is not None


def test_replace_drops_missing_objects_of_namespace_only() -> None:
    store = ObjectCache()
    here, there = builders.service(namespace="here"), builders.service(namespace="there")
    store.put(builders.deployment(here, "decode"))
    store.put(builders.deployment(there, "decode"))
    store.replace("Deployment", (), "here")
    assert store.get("Deployment", ("here", "chat-decode")) is None
    assert store.get("Deployment", ("there", "chat-decode")) is not None


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
    first = store.parsed(raw)
    assert isinstance(first, InferenceService)
    assert store.parsed(raw) is first
    store.put(other)
    assert isinstance(store.parsed(other), InvalidSpec)
