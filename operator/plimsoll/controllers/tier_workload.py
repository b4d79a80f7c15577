"""The workload of a tier: the Deployment that runs its engines. Pure.

Problem: many steps read a tier's workload, each another field of it: where its pod template is, how many replicas it
orders, whether Kubernetes has replaced its pods. Kinds of workloads differ in these.

Idea: this module is the only one that knows the kinds. All others get the object and ask here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from plimsoll.adapters.kube_client import BY_KIND, DEPLOYMENTS, Resource
from plimsoll.adapters.normalize import epoch_s
from plimsoll.resources import object_meta

Object = dict[str, Any]

TIER_WORKLOADS: Final = (DEPLOYMENTS,)
_REPLACED: Final = "NewReplicaSetAvailable"  # Kubernetes' reason of a Deployment's condition Progressing


def find_workload(children: Mapping[tuple[str, str], Object], service: str, role: str) -> Object | None:
    """The workload of a tier among the objects of its service, by kind and name; None before it is created."""
    name = object_meta.tier_name(service, role)
    return next((children[one.kind, name] for one in TIER_WORKLOADS if (one.kind, name) in children), None)


def resource_of(workload: Object) -> Resource:
    """The kind of a workload, with its API path."""
    return BY_KIND[workload["kind"]]


def pod_template(workload: Object | None) -> Object:
    """The pod template of the engines; empty without a workload."""
    template: Object = (workload or {}).get("spec", {}).get("template") or {}
    return template


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
    """Whether the status is that of the newest spec."""
    return bool(_status(workload).get("observedGeneration", 0) >= workload["metadata"].get("generation", 0))


def is_replaced(workload: Object) -> bool:
    """Whether Kubernetes has replaced all pods of a former template."""
    return (
        is_observed(workload)
        and updated_replicas(workload) == counted_replicas(workload)
        and _condition(workload, "Progressing").get("reason") == _REPLACED
    )


def replaced_s(workload: Object) -> float | None:
    """When Kubernetes had replaced the pods, seconds since the epoch; None if it has not, or if that is unknown."""
    return epoch_s(_condition(workload, "Progressing").get("lastUpdateTime")) if is_replaced(workload) else None


def failure(workload: Object) -> tuple[str, object] | None:
    """That the workload does not progress, and since when, in the API's format; None if it does."""
    progressing = _condition(workload, "Progressing")
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


def _status(workload: Object | None) -> Object:
    status: Object = (workload or {}).get("status", {})
    return status


def _conditions(workload: Object | None) -> Sequence[Object]:
    conditions: Sequence[Object] = _status(workload).get("conditions", ())
    return conditions


def _condition(workload: Object, kind: str) -> Object:
    return next((one for one in _conditions(workload) if one.get("type") == kind), {})
