"""What is stored of an object's managed fields: the managers, and who owns the replica count."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll.adapters.kube_client import received
from plimsoll.adapters.object_size import measure
from plimsoll.adapters.object_trim import trimmed
from plimsoll.controllers.replicas_owner import replicas_owners
from plimsoll.controllers.targets.target_state import applying_manager

TEMPLATE = {f"f:field{number}": {".": {}, "f:name": {}} for number in range(50)}


def deployment(*managers: dict[str, Any]) -> dict[str, Any]:
    meta = {"name": "chat", "namespace": "team", "managedFields": list(managers)}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": {}, "status": {}}


def entry(manager: str, *fields: str, **more: Any) -> dict[str, Any]:
    spec = {"f:template": {"f:spec": TEMPLATE}} | {f"f:{name}": {} for name in fields}
    return {"manager": manager, "time": "2026-01-01T00:00:00Z", "fieldsV1": {"f:metadata": {}, "f:spec": spec}, **more}


def test_owners_of_the_count_are_kept_and_other_fields_are_not() -> None:
    whole = deployment(
        entry("plimsoll", operation="Apply"),
        entry("gitops", "replicas", operation="Apply"),
        entry("kubectl", "replicas", operation="Update", subresource="scale"),
    )
    stored = received(whole)
    assert replicas_owners(stored) == replicas_owners(whole) == ["gitops", "kubectl"]
    assert applying_manager(stored) == applying_manager(whole) is not None
    assert [one.get("subresource") for one in stored["metadata"]["managedFields"]] == [None, None, "scale"]
    assert measure(stored)[0] < measure(whole)[0] / 10


@pytest.mark.parametrize("fields", [None, "x", 7, ["x", None, {"fieldsV1": 3}, {"fieldsV1": {"f:spec": []}}]])
def test_unexpected_types_raise_nothing(fields: Any) -> None:
    whole = deployment()
    whole["metadata"]["managedFields"] = fields
    assert replicas_owners(received(whole)) == []
    assert trimmed({"metadata": None}) == {"metadata": None}


def test_object_without_managed_fields_is_the_same() -> None:
    whole = {"metadata": {"name": "a"}}
    assert trimmed(whole) is whole
