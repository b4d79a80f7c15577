"""Drift: what the server does to an object is not drift, what a person does is."""

from __future__ import annotations

import copy

from plimsoll.controllers.reconcile.applied_cache import AppliedCache, has_foreign_replicas_owner
from tests import builders

KEY = ("team", "chat")
LIVE = builders.deployment(builders.service(), "decode")


def test_is_in_sync_ignores_server_side_changes() -> None:
    memory, desired = AppliedCache(), copy.deepcopy(LIVE)
    assert not memory.is_in_sync(KEY, desired, LIVE)
    memory.record(KEY, desired, LIVE)
    changed = copy.deepcopy(LIVE)
    changed["metadata"] |= {"resourceVersion": "99", "annotations": {"deployment.kubernetes.io/revision": "2"}}
    changed["status"]["readyReplicas"] = 1
    assert memory.is_in_sync(KEY, desired, changed)


def test_is_in_sync_false_after_edit_deletion_or_new_desired() -> None:
    memory, desired = AppliedCache(), copy.deepcopy(LIVE)
    memory.record(KEY, desired, LIVE)
    edited = copy.deepcopy(LIVE)
    edited["spec"]["paused"] = True
    other = copy.deepcopy(desired)
    other["spec"]["replicas"] = 4
    assert not memory.is_in_sync(KEY, desired, edited)
    assert not memory.is_in_sync(KEY, desired, None)
    assert not memory.is_in_sync(KEY, other, LIVE)
    memory.forget(KEY)
    assert not memory.is_in_sync(KEY, desired, LIVE)


def test_has_foreign_replicas_owner_detects_other_managers() -> None:
    def owned_by(manager: str) -> dict[str, object]:
        live = copy.deepcopy(LIVE)
        live["metadata"]["managedFields"] = [{"manager": manager, "fieldsV1": {"f:spec": {"f:replicas": {}}}}]
        return live

    assert not has_foreign_replicas_owner(None)
    assert not has_foreign_replicas_owner(LIVE)
    assert not has_foreign_replicas_owner(owned_by("plimsoll"))
    assert has_foreign_replicas_owner(owned_by("plimsoll-scaler"))
    assert has_foreign_replicas_owner(owned_by("horizontal-pod-autoscaler"))


def test_has_foreign_replicas_owner_after_scale_to_zero() -> None:
    """`kubectl scale --replicas=0` leaves no owner: an apply of the 0 would make it Plimsoll's own."""
    live = copy.deepcopy(LIVE)
    live["spec"]["replicas"] = 0
    live["metadata"]["managedFields"] = [{"manager": "plimsoll", "fieldsV1": {"f:spec": {"f:template": {}}}}]
    assert has_foreign_replicas_owner(live)
