"""Pods that the kubelet has ended or refused: quoted while no ready pod replaces them, and never counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from plimsoll.api.conditions import ConditionReason, ConditionType
from plimsoll.controllers.autoscale.service_snapshot import tier_of
from plimsoll.controllers.reconcile import service_status
from plimsoll.controllers.reconcile.pod_diagnosis import most_severe
from plimsoll.controllers.reconcile.tier_health import TierStatusInputs, tier_health
from tests import builders
from tests.controllers.status_inputs import PARENT, by_type, status_inputs, tier

EVICTED = {
    "phase": "Failed",
    "reason": "Evicted",
    "message": "The node was low on resource: memory. Threshold quantity: 100Mi, available: 90Mi.",
    "conditions": [
        {"type": "DisruptionTarget", "status": "True", "lastTransitionTime": "2026-01-02T00:00:00Z"},
        {"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-02T00:00:00Z"},
    ],
    "containerStatuses": [{"ready": False, "state": {"terminated": {"reason": "Error", "exitCode": 137}}}],
}
READY = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}


def pod_created(name: str, created: str, **status: Any) -> Any:
    made = builders.pod(PARENT, "decode", name, **status)
    made["metadata"]["creationTimestamp"] = created
    return made


def test_evicted_pod_has_the_kubelets_words() -> None:
    evicted = pod_created("decode-old", "2026-01-01T00:00:00Z", **EVICTED)
    problem = most_severe(None, [evicted])
    assert problem is not None
    assert problem.reason is ConditionReason.POD_FAILED
    assert problem.message == f"pod decode-old failed (Evicted): {EVICTED['message']}"
    broken = tier("decode", ready=0, pods=(evicted,))
    ready = by_type(service_status.build_conditions(status_inputs(tier("prefill"), broken, routable_endpoints=0)))
    assert ready[ConditionType.READY].reason is ConditionReason.POD_FAILED
    assert problem.message in ready[ConditionType.READY].message


def test_refused_pod_without_conditions_is_reported() -> None:
    status = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "Allocate failed due to no GPU"}
    problem = most_severe(None, [pod_created("decode-0", "2026-01-03T00:00:00Z", **status)])
    assert problem is not None
    assert problem.message == "pod decode-0 failed (UnexpectedAdmissionError): Allocate failed due to no GPU"


def test_other_problem_of_replacement_comes_first() -> None:
    waits = {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/1 nodes: no GPU"}]}
    pods = [
        pod_created("old", "2026-01-01T00:00:00Z", **EVICTED),
        pod_created("new", "2026-01-02T00:00:01Z", phase="Pending", **waits),
    ]
    problem = most_severe(None, pods)
    assert problem is not None
    assert problem.reason is ConditionReason.UNSCHEDULABLE


def test_replaced_failed_pod_is_no_problem() -> None:
    """Kubernetes keeps it for long: what starts a day later is not explained by it."""
    old = pod_created("old", "2026-01-01T00:00:00Z", **EVICTED)
    starting = pod_created("starting", "2026-01-03T00:00:00Z", phase="Pending")
    assert most_severe(None, [old, starting, pod_created("new", "2026-01-02T00:00:05Z", **READY)]) is None
    assert most_severe(None, [old, starting, pod_created("other", "2026-01-01T00:00:05Z", **READY)]) is not None


def test_full_tier_is_not_degraded_by_failed_pod() -> None:
    """During a rollout, whose condition would give advice about a pod that waits."""
    old = pod_created("old", "2026-01-01T00:00:00Z", **EVICTED)
    rolling = tier("decode", pods=(old,), observedGeneration=0)
    found = service_status.build_conditions(status_inputs(tier("prefill"), rolling))
    assert not any("failed" in condition.message or "maxSurge" in condition.message for condition in found)


def test_failed_pods_never_count_as_replicas() -> None:
    old = tuple(pod_created(f"old-{n}", "2026-01-01T00:00:00Z", **EVICTED) for n in range(5))
    healthy = tier("decode", ready=1, pods=old)
    assert (healthy.ready, healthy.starting, healthy.terminating) == (1, 0, 0)


def test_scaling_decision_ignores_failed_pods() -> None:
    """Neither ready, nor starting, nor a candidate for removal."""
    assert tier_of(pod_created("old", "2026-01-01T00:00:00Z", **EVICTED)) is None
    assert tier_of(pod_created("new", "2026-01-01T00:00:00Z", phase="Pending")) == "decode"


ENDED = {"terminated": {"exitCode": 1, "reason": "Error", "message": "cannot reach the registry"}}
DONE = {"terminated": {"exitCode": 0, "reason": "Completed"}}
RUNS = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}


def test_other_containers_of_a_pod_are_named() -> None:
    """Meshes and policies inject containers, and their end is not the engine's."""
    engine = {"name": "engine", "ready": True, "state": RUNS}
    sidecar = {"name": "mesh", "ready": False, "state": RUNS, "lastState": ENDED}
    problem = most_severe(None, [pod_created("a", "2026-01-01T00:00:00Z", containerStatuses=[engine, sidecar])])
    assert problem is not None
    assert problem.reason is ConditionReason.POD_FAILED
    assert problem.message == "pod a: container mesh terminated (Error, exit code 1): cannot reach the registry"
    killed = {"name": "mesh", "ready": False, "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
    limits = {"containers": [{"name": "mesh", "resources": {"limits": {"memory": "64Mi"}}}]}
    pod = pod_created("a", "2026-01-01T00:00:00Z", containerStatuses=[engine, killed]) | {"spec": limits}
    problem = most_severe(None, [pod])
    assert problem is not None
    assert problem.message == (
        "pod a: container mesh was killed, because it ran out of memory (OOMKilled): its limit is 64Mi"
    )


NO_DRIVER = "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.9, please update your driver"
RUNTIME_ERROR = (
    "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed:"
    " unable to start container process: error during container init: error running prestart hook #0: exit status 1,"
    f" stdout: , stderr: Auto-detected mode as 'legacy'\n{NO_DRIVER} to a newer version: unknown"
)


def test_old_driver_is_told_by_the_container_runtime() -> None:
    waiting = {"name": "engine", "state": {"waiting": {"reason": "RunContainerError", "message": RUNTIME_ERROR}}}
    problem = most_severe(None, [pod_created("a", "2026-01-01T00:00:00Z", containerStatuses=[waiting])])
    assert problem is not None
    assert problem.reason is ConditionReason.CONFIG_ERROR
    assert problem.message == f"pod a: {RUNTIME_ERROR}".replace("\n", " ")
    ended = {"terminated": {"exitCode": 128, "reason": "StartError", "message": RUNTIME_ERROR}}
    backing_off = {"name": "engine", "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": ended}
    problem = most_severe(None, [pod_created("a", "2026-01-01T00:00:00Z", containerStatuses=[backing_off])])
    assert problem is not None
    assert problem.reason is ConditionReason.ENGINE_FAILING
    assert problem.message == (
        f"pod a: the engine terminated (StartError, exit code 128): {NO_DRIVER} to a newer version: unknown"
    )


def test_problem_of_the_engine_comes_before_that_of_others() -> None:
    engine = {"name": "engine", "ready": False, "state": RUNS, "lastState": ENDED}
    sidecar = {"name": "mesh", "ready": False, "state": RUNS, "lastState": ENDED}
    problem = most_severe(None, [pod_created("a", "2026-01-01T00:00:00Z", containerStatuses=[sidecar, engine])])
    assert problem is not None
    assert problem.message.startswith("pod a: the engine terminated")


def test_init_container_that_ended_well_is_no_problem() -> None:
    """After a restart of the node it runs again, and keeps its former end."""
    again = {"name": "mesh-init", "ready": False, "state": RUNS, "lastState": DONE}
    status = {"initContainerStatuses": [again], "containerStatuses": [{"name": "engine", "ready": False, "state": {}}]}
    assert most_severe(None, [pod_created("a", "2026-01-01T00:00:00Z", **status)]) is None
    failed = {**status, "initContainerStatuses": [{**again, "lastState": ENDED}]}
    problem = most_severe(None, [pod_created("a", "2026-01-01T00:00:00Z", **failed)])
    assert problem is not None
    assert "container mesh-init terminated (Error, exit code 1)" in problem.message


def test_problems_without_message_have_no_empty_end() -> None:
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
    problem = most_severe(None, [pod_created("a", "2026-01-01T00:00:00Z", conditions=[unscheduled])])
    assert problem is not None
    assert problem.message == "pod a is unschedulable: SchedulingGated"
    failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate"}
    refused = most_severe(builders.deployment(PARENT, "decode", status={"conditions": [failure]}), [])
    assert refused is not None
    assert refused.message == "FailedCreate"


def test_pod_with_a_failing_container_is_not_replaced() -> None:
    """Unlike one that has ended, it still is a replica that is missing."""
    mesh = {"name": "mesh", "lastState": ENDED}
    broken = pod_created("a", "2026-01-01T00:00:00Z", containerStatuses=[mesh])
    assert most_severe(None, [broken, pod_created("b", "2026-01-02T00:00:00Z", **READY)]) is not None


def test_ready_worker_hides_no_failed_leader() -> None:
    """The pods of an engine of several nodes do not stand in for each other."""
    parent = builders.service(tiers={"serve": {"nodes": 2}})
    leader = builders.group_pod(parent, "chat-serve-0", **EVICTED)
    worker = builders.group_pod(parent, "chat-serve-0-1", is_worker=True, **READY)
    for pod, created in ((leader, "2026-01-01T00:00:00Z"), (worker, "2026-01-03T00:00:00Z")):
        pod["metadata"]["creationTimestamp"] = created
    inputs = TierStatusInputs("serve", 1, builders.leader_worker_set(parent), (leader,), (worker,))
    assert tier_health(inputs, None).problem is ConditionReason.POD_FAILED
    failed, ready = worker | {"status": EVICTED}, leader | {"status": READY}
    assert tier_health(replace(inputs, desired=2, pods=(ready,), workers=(failed,)), None).message == (
        f"1 of 2 ready: pod chat-serve-0-1 failed (Evicted): {EVICTED['message']}"
    )
