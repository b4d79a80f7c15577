"""Pods of a superseded pod template: they serve until they are replaced, but their problems are not the tier's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plimsoll.api import labels
from plimsoll.api.conditions import ConditionReason, ConditionType
from plimsoll.controllers.autoscale.scaling_status import initial_report
from plimsoll.controllers.reconcile import service_status
from plimsoll.controllers.reconcile.tier_health import TierStatusInputs
from tests import builders
from tests.controllers.status_inputs import PARENT, by_type, status_inputs
from tests.controllers.test_service_status import events, waiting

READY = {"conditions": [{"type": "Ready", "status": "True"}]}
BACK_OFF = waiting("ImagePullBackOff", "Back-off pulling image")
CRASHED = {
    "containerStatuses": [
        {
            "ready": False,
            "state": {},
            "lastState": {"terminated": {"reason": "Error", "exitCode": 1, "message": "boom"}},
        }
    ]
}
UNSCHEDULABLE = {"conditions": [{"type": "PodScheduled", "status": "False", "message": "no gpu left"}]}


def pod(name: str, revision: str, replica_set: str, second: int, **status: Any) -> Any:
    made = builders.pod(PARENT, "decode", name, **status)
    made["metadata"]["labels"] |= {labels.REVISION: revision, "pod-template-hash": replica_set}
    made["metadata"]["creationTimestamp"] = f"2026-01-01T00:00:{second:02}Z"
    return made


def rolling(*pods: Any, desired: int = 1, **status: Any) -> TierStatusInputs:
    """A tier whose template has revision "new"."""
    made = builders.deployment(PARENT, "decode", replicas=desired, status={"updatedReplicas": 1, **status})
    made["spec"]["template"] = {"metadata": {"labels": {labels.REVISION: "new"}}}
    return TierStatusInputs("decode", desired, made, pods)


@pytest.mark.parametrize(
    ("current", "lacks"),
    [
        ((pod("fixed", "new", "b", 9, phase="Pending"),), "1 starting"),
        ((), "1 not created yet"),
    ],
    ids=["corrected pod runs", "corrected pod not created"],
)
def test_superseded_pod_problem_is_not_reported(current: tuple[Any, ...], lacks: str) -> None:
    mistyped = pod("typo", "old", "a", 0, **BACK_OFF)
    inputs = status_inputs(rolling(mistyped, *current, replicas=2), routable_endpoints=0)
    found = by_type(service_status.build_conditions(inputs))
    assert ConditionType.DECODE_DEGRADED not in found
    assert found[ConditionType.RECONCILING].message == f"decode: 0 of 1 ready: {lacks}"
    assert found[ConditionType.READY].reason is ConditionReason.STARTING


def test_starting_pods_count_as_the_message_does() -> None:
    stuck = [pod(f"typo-{n}", "old", "a", n, **BACK_OFF) for n in range(2)]
    tier = rolling(*stuck, pod("fixed", "new", "b", 9, phase="Pending"), desired=2)
    report = replace(initial_report(None, 0.0), tiers={"decode": {"starting": {"count": 3, "overdue": 2}}})
    inputs = status_inputs(tier, routable_endpoints=0, scaling_report=report)
    assert service_status.tiers_status(inputs)["decode"]["startingPods"] == "1, 1 overdue"
    message = by_type(service_status.build_conditions(inputs))[ConditionType.RECONCILING].message
    assert message == "decode: 0 of 2 ready: 1 starting, 1 not created yet"


def test_superseded_pod_is_known_by_its_replica_set() -> None:
    """Memory, environment and nodes are in the template but not in the revision label."""
    pods = pod("small", "new", "a", 0, **CRASHED), pod("large", "new", "b", 9, phase="Pending")
    found = by_type(service_status.build_conditions(status_inputs(rolling(*pods), routable_endpoints=0)))
    assert ConditionType.DECODE_DEGRADED not in found


@pytest.mark.parametrize(
    ("status", "reason", "words"),
    [
        (CRASHED, ConditionReason.ENGINE_FAILING, "boom"),
        (BACK_OFF, ConditionReason.IMAGE_UNAVAILABLE, "Back-off pulling image"),
        (UNSCHEDULABLE, ConditionReason.UNSCHEDULABLE, "no gpu left; spec.tiers.decode.rollout.maxSurge"),
    ],
)
def test_new_revision_problem_degrades_serving_tier(status: Any, reason: ConditionReason, words: str) -> None:
    pods = pod("serving", "old", "a", 0, **READY), pod("sick", "new", "b", 9, **status)
    built = service_status.build_conditions(status_inputs(rolling(*pods, replicas=2)))
    found = by_type(built)
    assert found[ConditionType.READY].holds
    assert (found[ConditionType.DECODE_DEGRADED].reason, found[ConditionType.READY].reason) == (
        reason,
        ConditionReason.SERVING,
    )
    assert found[ConditionType.DECODE_DEGRADED].message.startswith("1 of 1 ready, 0 at the new revision: pod sick")
    assert words in found[ConditionType.DECODE_DEGRADED].message
    assert [event.reason.value for event in events([], built, "7") if event.reason.value == reason.value]


def test_rolling_tier_counts_ready_pods_of_the_new_revision() -> None:
    old, new = pod("a", "old", "a", 0, **READY), pod("b", "new", "b", 9, phase="Pending")
    found = by_type(service_status.build_conditions(status_inputs(rolling(old, new, replicas=2))))
    assert found[ConditionType.RECONCILING].message == "decode: 1 of 1 ready, 0 at the new revision"
    both = rolling(old, pod("b", "new", "b", 9, **READY), replicas=2)
    found = by_type(service_status.build_conditions(status_inputs(both)))
    assert found[ConditionType.RECONCILING].message == "decode: 2 ready, 1 desired, 1 at the new revision"


def test_rejected_pods_are_reported_with_the_ready_old_one() -> None:
    """The revision label lacks fields such as priorityClassName: the old pod passes for a current one."""
    words = 'pods "chat-decode-2-" is forbidden: no PriorityClass with name nope was found'
    failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": words}
    old = pod("old", "new", "a", 0, conditions=[{"type": "Ready", "status": "True"}])
    inputs = status_inputs(rolling(old, replicas=1, readyReplicas=1, updatedReplicas=0, conditions=[failure]))
    found = by_type(service_status.build_conditions(inputs))
    assert found[ConditionType.DECODE_DEGRADED].reason is ConditionReason.PODS_REJECTED
    assert "no PriorityClass" in found[ConditionType.DECODE_DEGRADED].message
    assert found[ConditionType.READY].holds


def test_missing_claim_is_a_configuration_error() -> None:
    words = '0/3 nodes are available: persistentvolumeclaim "noclaim" not found.'
    stuck = pod("stuck", "new", "b", 0, conditions=[{"type": "PodScheduled", "status": "False", "message": words}])
    found = by_type(service_status.build_conditions(status_inputs(rolling(stuck))))
    assert found[ConditionType.DECODE_DEGRADED].reason is ConditionReason.CONFIG_ERROR
