"""The store: newest version wins, children are found by their service, late news is ignored."""

from __future__ import annotations

import copy

from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.controllers.store import Key, Store
from plimsoll.core.errors import InvalidSpec
from tests import builders


def test_an_older_version_that_arrives_late_is_ignored() -> None:
    store, live = Store(), builders.deployment(builders.service(), "decode", replicas=2)
    old = copy.deepcopy(live)
    old["metadata"]["resourceVersion"], old["spec"]["replicas"] = "9", 1
    store.put(live)
    store.put(old)
    found = store.get("Deployment", ("team", "chat-decode"))
    assert found is not None
    assert found["spec"]["replicas"] == 2


def test_the_deletion_of_an_object_of_the_same_name_before_ours_is_ignored() -> None:
    store, live = Store(), builders.deployment(builders.service(), "decode")
    before = copy.deepcopy(live)
    before["metadata"]["uid"] = "earlier"
    store.put(live)
    store.drop(before)
    assert store.get("Deployment", ("team", "chat-decode")) is not None


def test_a_list_drops_what_is_gone_and_only_in_its_namespace() -> None:
    store = Store()
    here, there = builders.service(namespace="here"), builders.service(namespace="there")
    store.put(builders.deployment(here, "decode"))
    store.put(builders.deployment(there, "decode"))
    store.replace("Deployment", (), "here")
    assert store.get("Deployment", ("here", "chat-decode")) is None
    assert store.get("Deployment", ("there", "chat-decode")) is not None


def test_children_belong_to_the_service_of_their_label_and_tell_it() -> None:
    told: list[Key] = []
    store, parent = Store(told.append), builders.service()
    store.put(builders.deployment(parent, "decode"))
    store.put(builders.pod(parent, "decode"))
    assert told == [("team", "chat")] * 2
    assert [o["metadata"]["name"] for o in store.children("Pod", ("team", "chat"))] == ["p"]
    store.drop(builders.pod(parent, "decode"))
    assert store.children("Pod", ("team", "chat")) == []


def test_a_service_is_read_once_per_version() -> None:
    store = Store()
    raw, other = builders.service(), builders.service(tiers={})
    store.put(raw)
    first = store.typed(raw)
    assert isinstance(first, InferenceService)
    assert store.typed(raw) is first
    store.put(other)
    assert isinstance(store.typed(other), InvalidSpec)
