"""Pods whose node no longer reports: Kubernetes calls them unready, and nothing about them starts."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll.api import labels
from plimsoll.api.conditions import ConditionReason, ConditionType
from plimsoll.controllers.pod_startup import silent_node, startup_state
from plimsoll.controllers.reconcile import service_status
from plimsoll.controllers.reconcile.pod_diagnosis import pod_problem
from plimsoll.controllers.reconcile.tier_health import tier_health
from tests import builders
from tests.controllers.status_inputs import PARENT, by_type, status_inputs, tier

SINCE = "2026-01-02T00:00:00Z"
GATE = "target-health.example.com/balancer"


def silent_pod(**conditions: str) -> Any:
    """As Kubernetes leaves it 50 s after the node's last word; `conditions` are changed."""
    statuses = {"PodScheduled": "True", "ContainersReady": "True", "Ready": "False"} | conditions
    made = builders.pod(PARENT, "decode", "decode-lost", phase="Running")
    made["spec"] = {
        "nodeName": "node-3",
        "tolerations": [{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute", "tolerationSeconds": 300}],
    }
    made["status"]["conditions"] = [
        {"type": kind, "status": status, "lastTransitionTime": SINCE} for kind, status in statuses.items()
    ]
    running = {"name": "engine", "ready": True, "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
    made["status"]["containerStatuses"] = [running]
    return made


def test_silent_node_is_named_with_its_replacement() -> None:
    problem = pod_problem(silent_pod())
    assert problem is not None
    assert problem.reason is ConditionReason.NODE_NOT_READY
    assert problem.message == (
        "pod decode-lost: its node node-3 does not report; Kubernetes replaces the pod 300 s after it noticed, "
        "if the node does not come back"
    )


def test_tier_does_not_call_its_pods_starting() -> None:
    short = tier("decode", ready=0, pods=(silent_pod(),))
    assert (short.starting, short.pending) == (0, 0)
    found = by_type(service_status.build_conditions(status_inputs(tier("prefill"), short, routable_endpoints=0)))
    assert found[ConditionType.READY].reason is ConditionReason.NODE_NOT_READY
    assert "starting" not in found[ConditionType.RECONCILING].message


@pytest.mark.parametrize(
    "changes",
    [{"ContainersReady": "False"}, {"Ready": "True"}, {GATE: "False"}],
    ids=["kubelet says unready", "ready", "readiness gate"],
)
def test_other_unready_pods_are_not_on_a_silent_node(changes: dict[str, str]) -> None:
    pod = silent_pod(**changes)
    if GATE in changes:
        pod["spec"]["readinessGates"] = [{"conditionType": GATE}]
    assert silent_node(pod) is None


def test_unready_for_a_reason_is_not_on_a_silent_node() -> None:
    """The gate's condition may be newer than what the kubelet concluded from it."""
    pod = silent_pod(**{GATE: "True"})
    pod["spec"]["readinessGates"] = [{"conditionType": GATE}]
    assert silent_node(pod) == "node-3"
    next(one for one in pod["status"]["conditions"] if one["type"] == "Ready")["reason"] = "ReadinessGatesNotReady"
    assert silent_node(pod) is None


def test_message_does_not_call_silent_pods_missing() -> None:
    """Of an old template, they are no problem of the rollout."""
    short = tier("decode", ready=0, pods=(silent_pod(),))
    assert short.workload is not None
    short.workload["spec"]["template"] = {"metadata": {"labels": {labels.REVISION: "new"}}}
    assert tier_health(short, None).message == "0 of 1 ready: 1 on nodes that do not report"


def test_pod_that_kubernetes_gave_up_is_terminating_not_silent() -> None:
    pod = silent_pod()
    pod["metadata"]["deletionTimestamp"] = SINCE
    assert (silent_node(pod), pod_problem(pod)) == (None, None)


def test_snapshot_has_the_node_for_the_sizing() -> None:
    state = startup_state(silent_pod(), None)
    assert (state.silent_node, state.phase) == ("node-3", None)
