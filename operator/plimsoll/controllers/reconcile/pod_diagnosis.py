"""Why a pod does not become ready, quoting the scheduler, the kubelet, the engine or the API server."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from plimsoll.api import labels
from plimsoll.api.conditions import POD_PROBLEMS, ConditionReason
from plimsoll.controllers import pod_startup, tier_workload

Object = dict[str, Any]

IMAGE_REASONS = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})
CONFIG_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
MAX_TERMINATION_CHARS = 2000  # Kubernetes keeps the last 2,048 bytes of a log as the termination message
MAX_LOG_CHARS = 400  # characters of an engine's log in a message
OUT_OF_MEMORY = "OOMKilled"
RAISE_MEMORY = "; raise resources.limits.memory of the tier's pod"
UNREACHABLE = "node.kubernetes.io/unreachable"  # taint of a node that does not report
ENGINE = "engine"  # name of its container; meshes and policies may add others
MISSING_CLAIM = re.compile(r'persistentvolumeclaim "[^"]*" not found')
ERROR_LINE = re.compile(r"(?:.*?\W)??(?:error|\w*(?:Error|Exception)): ")
ERROR_LEVEL = re.compile(r"(?:\([^)]*\)\s*)*ERROR\b")
LOWER_LEVEL = re.compile(r"\s*(?:\([^)]*\)\s*)*(?:WARNING|INFO|DEBUG)\b")  # says nothing about why an engine ended


@dataclass(frozen=True)
class PodProblem:
    """One reason why a replica is missing."""

    reason: ConditionReason
    message: str


NAMESPACE_DELETED = PodProblem(
    ConditionReason.NAMESPACE_TERMINATING, "the namespace is being deleted, so no engine can be created"
)


def current_pods(workload: Object | None, pods: Iterable[Object]) -> tuple[Object, ...]:
    """The pods of the workload's present template; those of a superseded one are replaced.

    Only a part of the template is in the revision label. Among pods with the present label the newest one tells the
    template's hash, because a Deployment creates pods of its present template. Those of a LeaderWorkerSet name it.
    """
    if workload is not None and tier_workload.is_set(workload):
        return tuple(pod for pod in pods if tier_workload.has_set_template(workload, pod))
    revision = tier_workload.pod_template(workload).get("metadata", {}).get("labels", {}).get(labels.REVISION)
    same_label = [pod for pod in pods if revision is None or _label(pod, labels.REVISION) == revision]
    newest = max(same_label, key=pod_startup.created_s, default=None)
    if newest is None:
        return ()
    present = tier_workload.template_hash(newest)
    return tuple(pod for pod in same_label if tier_workload.template_hash(pod) == present)


def most_severe(workload: Object | None, pods: Iterable[Object]) -> PodProblem | None:
    """The most severe problem of the pods of a tier; None if they are only starting. pods: of the present template."""
    known = list(pods)
    replaced_s = _replaced_s(workload, known)
    problems = [
        problem
        for pod in known
        if (problem := pod_problem(pod)) is not None
        and (not pod_startup.has_ended(pod) or pod_startup.ended_s(pod) > replaced_s)
    ]
    replica_failure = _replica_failure(workload)
    if replica_failure is not None:
        problems.append(replica_failure)
    return min(problems, key=lambda candidate: (POD_PROBLEMS.index(candidate.reason), candidate.message), default=None)


def pod_problem(pod: Object) -> PodProblem | None:
    """The problem of one pod; None if it has none or is being deleted."""
    if pod["metadata"].get("deletionTimestamp"):
        return None
    name, status = pod["metadata"]["name"], pod.get("status", {})
    if status.get("phase") == "Failed":
        words = " ".join(str(status.get("message") or "the kubelet gives no message").split())
        return PodProblem(
            ConditionReason.POD_FAILED, f"pod {name} failed ({status.get('reason') or 'Failed'}): {words}"
        )
    if (node := pod_startup.silent_node(pod)) is not None:
        return PodProblem(
            ConditionReason.NODE_NOT_READY, f"pod {name}: its node {node} does not report{_replacement(pod)}"
        )
    for condition in status.get("conditions", []):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            message = condition.get("message") or condition.get("reason") or "the scheduler gives no reason"
            is_missing = MISSING_CLAIM.search(message) is not None
            reason = ConditionReason.CONFIG_ERROR if is_missing else ConditionReason.UNSCHEDULABLE
            return PodProblem(reason, f"pod {name} is unschedulable: {message}")
    problems = [
        problem
        for container in (*status.get("initContainerStatuses", []), *status.get("containerStatuses", []))
        if (problem := _container_problem(name, container, _memory_limit(pod, container))) is not None
    ]
    return min(problems, key=lambda problem: POD_PROBLEMS.index(problem.reason), default=None)


def _replacement(pod: Object) -> str:
    """When Kubernetes replaces a pod whose node does not report, as the end of a sentence; empty if it never does."""
    tolerations = pod.get("spec", {}).get("tolerations") or ()
    seconds = [one.get("tolerationSeconds") for one in tolerations if one.get("key") == UNREACHABLE]
    known = [int(one) for one in seconds if one is not None]
    if not known:
        return ""
    return f"; Kubernetes replaces the pod {min(known)} s after it noticed, if the node does not come back"


def _label(pod: Object, name: str) -> str | None:
    value: str | None = pod["metadata"].get("labels", {}).get(name)
    return value


def _replaced_s(workload: Object | None, pods: list[Object]) -> float:
    """The time until which failed pods are replaced, seconds since the epoch: Kubernetes keeps them for long.

    Each ready pod replaces those that failed before its creation. A tier with all its pods ready lacks none. A
    LeaderWorkerSet deletes failed pods before it replaces them, and its pods do not stand in for each other.
    """
    if workload is not None and tier_workload.is_set(workload):
        return -math.inf
    created_s = [
        pod_startup.created_s(pod) for pod in pods if pod_startup.is_ready(pod) and not pod_startup.is_terminating(pod)
    ]
    if workload is not None and len(created_s) >= tier_workload.ordered_replicas(workload):
        return math.inf
    return max(created_s, default=-math.inf)


def _memory_limit(pod: Object, container: Object) -> str:
    """The memory limit of a container as the pod says it; "" without one."""
    containers = (*pod.get("spec", {}).get("initContainers", []), *pod.get("spec", {}).get("containers", []))
    limits = (
        one.get("resources", {}).get("limits", {}) for one in containers if one.get("name") == container.get("name")
    )
    found: Object = next(limits, {})
    return str(found.get("memory", ""))


def _container_problem(pod: str, container: Object, memory_limit: str) -> PodProblem | None:
    state = container.get("state", {})
    waiting = state.get("waiting", {})
    reason, message = waiting.get("reason", ""), " ".join(str(waiting.get("message") or "").split())
    if reason in CONFIG_REASONS:
        return PodProblem(ConditionReason.CONFIG_ERROR, f"pod {pod}: {message or reason}")
    if reason in IMAGE_REASONS:
        return PodProblem(
            ConditionReason.IMAGE_UNAVAILABLE, f"pod {pod}: {message or reason} (image {container.get('image', '')})"
        )
    terminated = state.get("terminated") or container.get("lastState", {}).get("terminated")
    if not terminated or container.get("ready"):
        return None
    if container.get("name", ENGINE) == ENGINE:
        message = _termination_message("the engine", terminated, memory_limit, RAISE_MEMORY)
        return PodProblem(ConditionReason.ENGINE_FAILING, f"pod {pod}: {message}")
    if terminated.get("exitCode") == 0:  # it has done its work, and may run again after a restart of the node
        return None
    message = _termination_message(f"container {container['name']}", terminated, memory_limit)
    return PodProblem(ConditionReason.POD_FAILED, f"pod {pod}: {message}")


def _termination_message(subject: str, terminated: Object, memory_limit: str, remedy: str = "") -> str:
    """How a container ended. remedy: what to do about its memory limit."""
    reason, code = terminated.get("reason", "Error"), terminated.get("exitCode")
    if reason == OUT_OF_MEMORY:
        advice = f": its limit is {memory_limit}{remedy}" if memory_limit else ""
        return f"{subject} was killed, because it ran out of memory ({reason}){advice}"
    message = _log_excerpt(terminated.get("message", ""))
    tail = f": {message}" if message else ""
    return f"{subject} terminated ({reason}, exit code {code}){tail}"


def _log_excerpt(text: str) -> str:
    """The log from its last error line on, else its end: a log ends with what followed the error."""
    raw = text.splitlines()
    whole = raw[1:] if len(text) >= MAX_TERMINATION_CHARS and len(raw) > 1 else raw  # the first line is cut
    lines = [" ".join(line.split()) for line in whole if line.strip() and not LOWER_LEVEL.match(line)]
    for pattern in (ERROR_LINE, ERROR_LEVEL):
        at = next((n for n in range(len(lines) - 1, -1, -1) if pattern.match(lines[n])), None)
        if at is not None:
            return "; ".join(lines[at:])[:MAX_LOG_CHARS]
    return "; ".join(lines)[-MAX_LOG_CHARS:]


def _replica_failure(workload: Object | None) -> PodProblem | None:
    """What the API server says when it rejects pods."""
    message = tier_workload.rejection(workload)
    return None if message is None else PodProblem(ConditionReason.PODS_REJECTED, message)
