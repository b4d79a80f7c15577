"""What a tier's workload says of its pods: a Deployment, and a LeaderWorkerSet, whose fields differ."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll.adapters.kube_client import DEPLOYMENTS, LEADERWORKERSETS
from plimsoll.api import labels
from plimsoll.controllers import tier_workload
from tests import builders

Object = dict[str, Any]

PARENT = builders.service(tiers={"serve": {"nodes": 2}})
SINCE, SINCE_S = "2026-01-01T00:00:00Z", 1767225600.0


def leader_worker_set(available: str = "True", **status: Any) -> Object:
    """A LeaderWorkerSet of two groups, as its controller has it after a rollout."""
    made = builders.deployment(PARENT, "serve", replicas=2, ready=2)
    conditions = [
        {"type": "Available", "status": available, "lastTransitionTime": SINCE},
        {"type": "Progressing", "status": "False", "lastTransitionTime": SINCE},
    ]
    own_status = {"replicas": 2, "updatedReplicas": 2, "readyReplicas": 2, "conditions": conditions}
    template = {"leaderTemplate": {"spec": {"x": "leader"}}, "workerTemplate": {"spec": {"x": "worker"}}}
    spec = {"replicas": 2, "leaderWorkerTemplate": {"size": 2, **template}}
    own = {"apiVersion": labels.SET_API_VERSION, "kind": labels.SET_KIND, "spec": spec, "status": own_status | status}
    return made | own


def test_set_is_replaced_once_available_at_present_template() -> None:
    found = leader_worker_set()
    assert tier_workload.is_observed(found)
    assert tier_workload.is_replaced(found)
    assert tier_workload.replaced_s(found) == SINCE_S


@pytest.mark.parametrize(
    "found",
    [
        leader_worker_set(available="False"),
        leader_worker_set(updatedReplicas=1),
        leader_worker_set(observedGeneration=0),
        leader_worker_set(conditions=[]),
    ],
)
def test_set_in_a_rollout_is_not_replaced(found: Object) -> None:
    assert not tier_workload.is_replaced(found)
    assert tier_workload.replaced_s(found) is None


def test_idle_set_does_not_fail() -> None:
    """Its condition Progressing is False once it has nothing to do; that of a Deployment says that it is stuck."""
    assert tier_workload.failure(leader_worker_set()) is None
    stuck = [{"type": "Progressing", "status": "False", "reason": "Deadline", "lastTransitionTime": SINCE}]
    found = tier_workload.failure(builders.deployment(PARENT, "serve", status={"conditions": stuck}))
    assert found == ("Deployment chat-serve does not progress (Deadline)", SINCE)


def test_template_of_engines_is_that_of_leaders() -> None:
    assert tier_workload.pod_template(leader_worker_set()) == {"spec": {"x": "leader"}}
    assert tier_workload.pod_template(None) == {}


def test_resource_follows_the_kind() -> None:
    assert tier_workload.resource_of(leader_worker_set()) == LEADERWORKERSETS
    assert tier_workload.resource_of(builders.deployment(PARENT, "serve")) == DEPLOYMENTS


def test_template_hash_is_that_of_the_controller() -> None:
    pod = builders.pod(PARENT, "serve")
    pod["metadata"]["labels"][labels.SET_REVISION] = "first"
    assert tier_workload.template_hash(pod) == "first"
    pod["metadata"]["labels"]["pod-template-hash"] = "second"
    assert tier_workload.template_hash(pod) == "second"
