"""Sentences of a status that name who or what is the cause."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plimsoll.api.events import EventReason
from plimsoll.resources import object_meta
from tests import builders
from tests.controllers.status_walk import KEY, Walk


@pytest.mark.parametrize(
    ("name", "record", "expected"),
    [
        ("other/young", None, "the name is the NAMESPACE/NAME of service other/young;"),
        ("shared", None, None),
        ("shared", "2026-07-01T08:00:00.123456Z", "service other/young holds the name since 2026-07-01T08:00:00Z;"),
    ],
)
def test_sentences_name_holder_and_since_when(name: str, record: str | None, expected: str | None) -> None:
    walk = Walk(model={"uri": "file:///models/tiny", "name": name})
    other = builders.service("young", "other", model={"uri": "file:///models/tiny", "name": "shared"})
    other["metadata"]["creationTimestamp"] = "2026-06-01T00:00:00Z"
    other["status"] = {"nameClaim": f"shared since {record}"} if record else {}
    walk.store.put(other)
    status = walk.render()
    assert ("ModelNameRejected" in walk.kinds(status)) is (expected is not None)
    if expected is not None:
        found = walk.condition("ModelNameRejected", status)
        assert found["message"].startswith(f"spec.model.name {name}: {expected}")


def test_sentences_count_set_by_hand_names_who() -> None:
    walk = Walk(tiers={"serve": {"minReplicas": 3, "maxReplicas": 9}})
    walk.routable = 3
    for name in ("a", "b", "c"):
        walk.pod(name, "ready")
    walk.order(3)
    walk.serve(5.0, 90)
    walk.order(1, manager="kubectl")
    for name in ("b", "c"):
        walk.pod(name, "terminating")
    walk.now_s += 1.0
    [change] = walk.scaler.decide(walk.now_s)
    event = change.event()
    assert event.message.startswith("serve 1 -> 3: kubectl set the replica count to 1")
    assert "spec.tiers.serve.minReplicas" in event.message
    assert "ScalingInactive" not in walk.kinds(walk.render())


def test_sentences_scale_to_zero_by_hand_names_another_client() -> None:
    """The scale subresource omits a count of 0, so that no field manager owns it."""
    walk = Walk(tiers={"serve": {"minReplicas": 1, "maxReplicas": 3}}, scaling={"mode": "Auto"})
    walk.pod("a", "ready")
    walk.serve(0.0, 90)
    walk.order(0)
    deployment = walk.deployment
    deployment["metadata"]["managedFields"][0]["fieldsV1"] = {"f:metadata": {}}
    walk.store.put(deployment)
    walk.remove("a")
    walk.now_s += 1.0
    walk.readings = tuple(replace(reading, at_s=walk.now_s) for reading in walk.readings)
    (change,) = walk.scaler.decide(walk.now_s)
    event = change.event()
    assert event.reason is EventReason.SCALED_UP
    assert event.message.startswith(
        "serve 0 -> 1: another client (such as kubectl scale) set the replica count to 0; to keep a count,"
    )
    assert "needs 1" not in event.message
    assert walk.condition("Ready", walk.render())["message"].endswith(
        "; another client (such as kubectl scale) set the replica count to 0, and Plimsoll sets it to 1"
    )


def test_sentences_terminating_namespace_promises_nothing() -> None:
    walk = Walk()
    walk.routable = 1
    walk.pod("a", "ready")
    walk.serve(5.0, 30)
    walk.pod("a", "terminating")
    walk.routable = 0
    walk.order(1, replicas=0, updatedReplicas=0)
    walk.is_namespace_terminating = True
    walk.serve(5.0, 1)
    found = walk.condition("Ready", walk.render())
    assert (found["status"], found["reason"]) == ("False", "NamespaceTerminating")
    assert "starting" not in found["message"]


def test_sentences_without_metrics_blame_no_engine_that_is_away() -> None:
    walk = Walk()
    walk.routable = 1
    walk.pod("a", "ready")
    walk.serve(5.0, 60)
    walk.readings, walk.gateways = (), ()
    for _ in range(60):
        walk.now_s += 1.0
        walk.scaler.decide(walk.now_s)
    walk.routable = None
    status = walk.render()
    assert walk.condition("MetricsDegraded", status)["reason"] == "MetricsMissing"
    assert walk.condition("Ready", status)["status"] == "Unknown"


def test_sentences_zero_and_back() -> None:
    walk = Walk(tiers={"serve": {"minReplicas": 0, "maxReplicas": 3}})
    walk.routable = 1
    walk.pod("a", "ready")
    walk.serve(5.0, 60)
    walk.order(0, replicas=1, updatedReplicas=1)
    report = walk.scaler.report(KEY)
    assert report is not None
    zero = Walk(tiers={"serve": {"minReplicas": 0, "maxReplicas": 3}})
    zero.order(0)
    zero.pod("a", "ready")
    zero.order(0, replicas=1, updatedReplicas=1)
    found = zero.condition("Reconciling", zero.render())
    assert found["message"] == "serve: 1 ready, 0 desired: the surplus is removed"
    zero.remove("a")
    zero.order(0)
    assert "Reconciling" not in zero.kinds(zero.render())
    zero.order(1)
    zero.pod("b", "starting")
    assert zero.condition("Reconciling", zero.render())["message"] == "serve: 0 of 1 ready: 1 starting"
    assert object_meta.owner_uid(zero.deployment) == "uid-of-team-chat"
