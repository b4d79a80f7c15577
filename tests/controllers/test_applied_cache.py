"""Drift: what the server does to an object is not drift, what a person does is."""

from __future__ import annotations

import copy

from plimsoll.controllers.drift import Memory, replicas_owned_elsewhere
from tests import builders

KEY = ("team", "chat")
LIVE = builders.deployment(builders.service(), "decode")


def test_is_in_sync_ignores_server_side_changes() -> None:
    memory, wish = Memory(), copy.deepcopy(LIVE)
    assert not memory.settled(KEY, wish, LIVE)
    memory.applied(KEY, wish, LIVE)
    changed = copy.deepcopy(LIVE)
    changed["metadata"] |= {"resourceVersion": "99", "annotations": {"deployment.kubernetes.io/revision": "2"}}
    changed["status"]["readyReplicas"] = 1
    assert memory.settled(KEY, wish, changed)


def test_is_in_sync_false_after_edit_deletion_or_new_desired() -> None:
    memory, wish = Memory(), copy.deepcopy(LIVE)
    memory.applied(KEY, wish, LIVE)
    edited = copy.deepcopy(LIVE)
    edited["spec"]["paused"] = True
    other = copy.deepcopy(wish)
    other["spec"]["replicas"] = 4
    assert not memory.settled(KEY, wish, edited)
    assert not memory.settled(KEY, wish, None)
    assert not memory.settled(KEY, other, LIVE)
    memory.forget(KEY)
    assert not memory.settled(KEY, wish, LIVE)


def test_has_foreign_replicas_owner_detects_other_managers() -> None:
    def owned_by(manager: str) -> dict[str, object]:
        live = copy.deepcopy(LIVE)
        live["metadata"]["managedFields"] = [{"manager": manager, "fieldsV1": {"f:spec": {"f:replicas": {}}}}]
        return live

    assert not replicas_owned_elsewhere(None)
    assert not replicas_owned_elsewhere(LIVE)
    assert not replicas_owned_elsewhere(owned_by("plimsoll"))
    assert replicas_owned_elsewhere(owned_by("plimsoll-scaler"))
    assert replicas_owned_elsewhere(owned_by("horizontal-pod-autoscaler"))
