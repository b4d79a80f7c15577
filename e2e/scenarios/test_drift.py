"""g. Hand edits: what the operator owns is put back, what others added stays, and no engine restarts."""

from __future__ import annotations

import pytest

from e2e.lib.kube import Cluster, Object, uids
from e2e.lib.service import Service
from e2e.lib.wait import wait_until

REVERT_TIMEOUT_S = 30.0


@pytest.mark.parametrize(
    ("plural", "suffix", "path", "edit"),
    [
        ("deployments", "-serve", ("spec", "template", "spec", "terminationGracePeriodSeconds"), 7),
        ("deployments", "-serve", ("metadata", "labels", "plimsoll.dev/role"), "gone"),
        ("services", "-serve", ("spec", "selector"), {"plimsoll.dev/role": "nobody"}),
        ("poddisruptionbudgets", "-serve", ("spec", "maxUnavailable"), 5),
        ("networkpolicies", "-engine", ("spec", "ingress"), []),
    ],
    ids=["deployment", "label", "service", "budget", "policy"],
)
def test_edited_owned_field_is_reverted(
    plural: str, suffix: str, path: tuple[str, ...], edit: object, solo: Service, cluster: Cluster
) -> None:
    name, engines = solo.name + suffix, uids(solo.pods())
    right = _at(cluster.get(plural, name, solo.namespace), path)
    assert right != edit
    cluster.patch(plural, name, solo.namespace, _nest(path, edit))
    where = ".".join(path)
    wait_until(
        f"{plural} {where} is {right} again",
        lambda: _at(cluster.get(plural, name, solo.namespace), path) == right,
        REVERT_TIMEOUT_S,
    )
    solo.wait_ready()
    assert uids(solo.pods()) == engines
    print(f"{plural}/{name} {where} put back; engines unchanged")


@pytest.mark.parametrize(
    ("plural", "suffix"),
    [
        ("services", "-serve"),
        ("poddisruptionbudgets", "-serve"),
        ("networkpolicies", "-engine"),
        ("serviceaccounts", "-engine"),
    ],
)
def test_deleted_owned_object_is_recreated(plural: str, suffix: str, solo: Service, cluster: Cluster) -> None:
    name, engines = solo.name + suffix, uids(solo.pods())
    before = cluster.get(plural, name, solo.namespace)
    assert before
    cluster.delete(plural, name, namespace=solo.namespace)
    after = wait_until(f"{plural}/{name} is back", lambda: cluster.get(plural, name, solo.namespace), REVERT_TIMEOUT_S)
    print(f"{plural}/{name}: {before['metadata']['uid']} -> {after['metadata']['uid']}")
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    solo.wait_ready()
    assert uids(solo.pods()) == engines


def test_foreign_fields_and_annotations_are_kept(solo: Service, cluster: Cluster) -> None:
    name = f"{solo.name}-serve"
    foreign = {
        "metadata": {"annotations": {"example.com/note": "kept"}, "labels": {"example.com/team": "a"}},
        "spec": {"minReadySeconds": 1},
    }
    cluster.patch("deployments", name, solo.namespace, foreign)
    # An owned field of the same object changes and is put back: so the operator has worked on it since.
    budget = ("spec", "progressDeadlineSeconds")
    right = _at(cluster.get("deployments", name, solo.namespace), budget)
    cluster.patch("deployments", name, solo.namespace, _nest(budget, 77))
    wait_until(
        "the owned field is put back",
        lambda: _at(cluster.get("deployments", name, solo.namespace), budget) == right,
        REVERT_TIMEOUT_S,
    )
    found = cluster.get("deployments", name, solo.namespace) or {}
    kept = [
        found["metadata"]["annotations"].get("example.com/note"),
        found["metadata"]["labels"].get("example.com/team"),
        found["spec"]["minReadySeconds"],
    ]
    print(f"kept: {kept}; progressDeadlineSeconds {right} again")
    assert kept == ["kept", "a", 1]


def _at(obj: Object | None, path: tuple[str, ...]) -> object:
    found: object = obj
    for step in path:
        found = found.get(step) if isinstance(found, dict) else None
    return found


def _nest(path: tuple[str, ...], value: object) -> Object:
    """The merge patch that sets one field."""
    for step in reversed(path):
        value = {step: value}
    assert isinstance(value, dict)
    return value
