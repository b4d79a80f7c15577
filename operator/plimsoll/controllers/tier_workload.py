"""The workload of a tier: a Deployment, or a LeaderWorkerSet if its engines have several nodes. Pure.

Problem: many steps read a tier's workload, each another field of it: where its pod template is, how many replicas it
orders, whether Kubernetes has replaced its pods. Kinds of workloads differ in these.

Idea: this module is the only one that knows the kinds. All others get the object and ask here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from plimsoll.adapters.kube_client import BY_KIND, DEPLOYMENTS, LEADERWORKERSETS, Resource
from plimsoll.adapters.normalize import epoch_s
from plimsoll.api import labels
from plimsoll.resources import object_meta

Object = dict[str, Any]

TIER_WORKLOADS: Final = (DEPLOYMENTS, LEADERWORKERSETS)
_TEMPLATE_HASH: Final = "pod-template-hash"  # Kubernetes' label of the ReplicaSet that a pod belongs to
_SET_REPLACED: Final = "Available"  # condition of a LeaderWorkerSet whose groups are ready and of its present template
_REPLACED: Final = "NewReplicaSetAvailable"  # Kubernetes' reason of a Deployment's condition Progressing


def find_workload(children: Mapping[tuple[str, str], Object], service: str, role: str) -> Object | None:
    """The workload of a tier among the objects of its service, by kind and name; None before it is created."""
    name = object_meta.tier_name(service, role)
    return next((children[one.kind, name] for one in TIER_WORKLOADS if (one.kind, name) in children), None)


def resource_of(workload: Object) -> Resource:
    """The kind of a workload, with its API path."""
    return BY_KIND[workload["kind"]]


def pod_template(workload: Object | None) -> Object:
    """The pod template of the engines, of their leaders if they have several pods; empty without a workload."""
    spec = (workload or {}).get("spec", {})
    template: Object = spec.get("template") or (spec.get("leaderWorkerTemplate") or {}).get("leaderTemplate") or {}
    return template


def template_hash(pod: Object) -> str | None:
    """The label by which a workload's controller says of which template a pod is."""
    pod_labels = pod["metadata"].get("labels", {})
    value: str | None = pod_labels.get(_TEMPLATE_HASH, pod_labels.get(labels.SET_REVISION))
    return value


def ordered_replicas(workload: Object) -> int:
    """`spec.replicas`, with its default."""
    return int(workload["spec"].get("replicas", 1))


def counted_replicas(workload: Object | None) -> int:
    """Replicas that exist, by the workload's status."""
    return int(_status(workload).get("replicas", 0))


def updated_replicas(workload: Object | None) -> int:
    """Replicas of the present template, by the workload's status."""
    return int(_status(workload).get("updatedReplicas", 0))


def is_observed(workload: Object) -> bool:
    """Whether the status is that of the newest spec; True for a LeaderWorkerSet of a release that does not say it."""
    if _is_set(workload) and "observedGeneration" not in _status(workload):
        return True
    return bool(_status(workload).get("observedGeneration", 0) >= workload["metadata"].get("generation", 0))


def is_replaced(workload: Object) -> bool:
    """Whether all pods of a former template are replaced."""
    status = workload["status"]
    if not is_observed(workload) or status.get("updatedReplicas", 0) != status.get("replicas", 0):
        return False
    if _is_set(workload):
        return _condition(workload, _SET_REPLACED).get("status") == "True"
    return _condition(workload, "Progressing").get("reason") == _REPLACED


def replaced_s(workload: Object) -> float | None:
    """When the pods were replaced, seconds since the epoch; None if they are not, or if that is unknown."""
    if not is_replaced(workload):
        return None
    if _is_set(workload):
        return epoch_s(_condition(workload, _SET_REPLACED).get("lastTransitionTime"))
    return epoch_s(_condition(workload, "Progressing").get("lastUpdateTime"))


def failure(workload: Object) -> tuple[str, object] | None:
    """That the workload does not progress, and since when, in the API's format; None if it does."""
    progressing = _condition(workload, "Progressing")
    if _is_set(workload):
        return None  # its condition is False once it has nothing to do
    if progressing.get("status") != "False":
        return None
    text = f"{label(workload)} does not progress ({progressing.get('reason')})"
    return text, progressing.get("lastTransitionTime")


def rejection(workload: Object | None) -> str | None:
    """Why the API server rejects pods of the workload; None if it does not."""
    for condition in _conditions(workload):
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            return str(condition.get("message") or condition.get("reason") or "the API server gives no reason")
    return None


def paused(workloads: Iterable[Object]) -> Object | None:
    """The first workload whose rollout someone has paused; None without one."""
    return next((one for one in workloads if one["spec"].get("paused")), None)


def label(workload: Object) -> str:
    """KIND NAME, for messages."""
    return f"{workload['kind']} {workload['metadata']['name']}"


def _is_set(workload: Object) -> bool:
    return bool(workload["kind"] == LEADERWORKERSETS.kind)


def _status(workload: Object | None) -> Object:
    status: Object = (workload or {}).get("status", {})
    return status


def _conditions(workload: Object | None) -> Sequence[Object]:
    conditions: Sequence[Object] = _status(workload).get("conditions", ())
    return conditions


def _condition(workload: Object, kind: str) -> Object:
    return next((one for one in _conditions(workload) if one.get("type") == kind), {})
