"""Drift: what the server does to an object is not drift, what a person does is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from plimsoll.api import labels
from plimsoll.controllers.reconcile.applied_cache import AppliedCache, annotated, has_foreign_replicas_owner
from tests import builders

KEY = ("team", "chat")
LIVE = builders.deployment(builders.service(), "decode")
DESIRED = {
    **LIVE,
    "spec": {"replicas": 2, "paused": False, "template": {"spec": {"containers": [{"name": "engine", "image": ""}]}}},
}


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


def applied_by_earlier_process() -> dict[str, Any]:
    """The live object, with a default of the API server, and a quantity as it stores them."""
    live = copy.deepcopy(annotated(DESIRED))
    live["metadata"] |= {"managedFields": [{"manager": labels.FIELD_MANAGER, "operation": "Apply"}]}
    del live["spec"]["template"]["spec"]["containers"][0]["image"]
    live["spec"] |= {"revisionHistoryLimit": 10, "replicas": str(live["spec"]["replicas"])}
    return live


def test_is_in_sync_after_restart_if_live_has_all_of_it() -> None:
    live, later = applied_by_earlier_process(), AppliedCache()
    assert later.is_in_sync(KEY, DESIRED, live)
    live["spec"]["revisionHistoryLimit"] = 1  # nothing more is tolerated than after an apply of this process
    assert not later.is_in_sync(KEY, DESIRED, live)


@pytest.mark.parametrize(
    "change",
    [
        lambda live: live["spec"]["template"]["spec"]["containers"][0].update(name="other"),
        lambda live: live["spec"].pop("paused"),
        lambda live: live["metadata"]["annotations"].update({labels.APPLIED: "of another desired object"}),
        lambda live: live["metadata"].pop("annotations"),
        lambda live: live["metadata"]["managedFields"][0].update(manager="backup"),
        lambda live: live["metadata"]["managedFields"][0].update(operation="Update"),
    ],
)
def test_is_in_sync_false_after_restart_and_change(change: Callable[[Any], Any]) -> None:
    live = applied_by_earlier_process()
    change(live)
    assert not AppliedCache().is_in_sync(KEY, DESIRED, live)


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
