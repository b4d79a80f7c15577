"""The workload of a tier: a Deployment, or a LeaderWorkerSet if its engines have several nodes. Pure.

Problem: many steps read a tier's workload, each another field of it: where its pod template is, how many replicas it
orders, whether Kubernetes has replaced its pods. Kinds of workloads differ in these.

Idea: this module is the only one that knows the kinds. All others get the object and ask here. The status of a
Deployment says which spec it is of. That of a LeaderWorkerSet says so only since release 0.9, so the label of the
template on its leaders decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from plimsoll.adapters.kube_client import BY_KIND, DEPLOYMENTS, LEADERWORKERSETS, Resource
from plimsoll.adapters.normalize import epoch_s
from plimsoll.api import labels
from plimsoll.controllers import pod_startup
from plimsoll.resources import object_meta

Object = dict[str, Any]

TIER_WORKLOADS: Final = (DEPLOYMENTS, LEADERWORKERSETS)
_TEMPLATE_HASH: Final = "pod-template-hash"  # Kubernetes' label of the ReplicaSet that a pod belongs to
_SET_UPDATES: Final = "UpdateInProgress"  # condition of a LeaderWorkerSet, until the last new group is ready
_REPLACED: Final = "NewReplicaSetAvailable"  # Kubernetes' reason of a Deployment's condition Progressing


def find_workload(children: Mapping[tuple[str, str], Object], service: str, role: str) -> Object | None:
    """The workload of a tier among the objects of its service, by kind and name; None before it is created."""
    name = object_meta.tier_name(service, role)
    return next((children[one.kind, name] for one in TIER_WORKLOADS if (one.kind, name) in children), None)


def is_set(workload: Object) -> bool:
    """Whether it is a LeaderWorkerSet."""
    return bool(workload["kind"] == LEADERWORKERSETS.kind)


def resource_of(workload: Object) -> Resource:
    """The kind of a workload, with its API path."""
    return BY_KIND[workload["kind"]]


def pod_template(workload: Object | None) -> Object:
    """The pod template of the engines, of their leaders if they have several pods; empty without a workload."""
    spec = (workload or {}).get("spec", {})
    template: Object = spec.get("template") or (spec.get("leaderWorkerTemplate") or {}).get("leaderTemplate") or {}
    return template


def has_set_template(workload: Object, pod: Object) -> bool:
    """Whether a pod of a LeaderWorkerSet has its present template."""
    desired = pod_template(workload).get("metadata", {}).get("labels", {}).get(labels.TEMPLATE)
    return bool(pod["metadata"].get("labels", {}).get(labels.TEMPLATE) == desired)


def template_hash(pod: Object) -> str | None:
    """The label by which Kubernetes says of which template a Deployment's pod is."""
    value: str | None = pod["metadata"].get("labels", {}).get(_TEMPLATE_HASH)
    return value


def ordered_replicas(workload: Object) -> int:
    """`spec.replicas`, with its default."""
    return int(workload["spec"].get("replicas", 1))


def counted_replicas(workload: Object | None) -> int:
    """Replicas that exist, by the workload's status."""
    return int(_status(workload).get("replicas", 0))


def unselected_replicas(counted: int, pods: Sequence[Object]) -> int:
    """Replicas that an object counts, if no pod has the labels by which its engines are found; else 0."""
    return 0 if pods else counted


def updated_replicas(workload: Object | None) -> int:
    """Replicas of the present template, by the workload's status."""
    return int(_status(workload).get("updatedReplicas", 0))


def runs_exactly(workload: Object, engines: Iterable[Object], replicas: int) -> bool:
    """Whether the workload orders that many replicas, and has exactly these, all of its present template.

    engines: the pods of the tier that serve, so the leaders of a LeaderWorkerSet.
    """
    if ordered_replicas(workload) != replicas:
        return False
    if is_set(workload):
        present = _present(engines)
        return len(present) == replicas and all(has_set_template(workload, pod) for pod in present)
    return is_observed(workload) and updated_replicas(workload) == replicas == counted_replicas(workload)


def is_replaced(workload: Object, engines: Iterable[Object]) -> bool:
    """Whether all pods of a former template are replaced. engines: as for `runs_exactly`."""
    if is_set(workload):
        present = _present(engines)
        is_updating = _condition(workload, _SET_UPDATES).get("status") == "True"
        is_started = bool(present) or ordered_replicas(workload) == 0
        return is_started and not is_updating and all(has_set_template(workload, pod) for pod in present)
    if not is_observed(workload) or updated_replicas(workload) != counted_replicas(workload):
        return False
    return _condition(workload, "Progressing").get("reason") == _REPLACED


def replaced_s(workload: Object, engines: Iterable[Object], ordered_s: float) -> float | None:
    """When the pods were replaced, seconds since the epoch; None if they are not, or if that is unknown.

    engines: as for `runs_exactly`. ordered_s: when the present template was made. A LeaderWorkerSet that has had no
    rollout since then had no group, so that there was nothing to replace.
    """
    if not is_replaced(workload, engines):
        return None
    if is_set(workload):
        return max(ordered_s, epoch_s(_condition(workload, _SET_UPDATES).get("lastTransitionTime")) or ordered_s)
    return epoch_s(_condition(workload, "Progressing").get("lastUpdateTime"))


def progressed_s(workload: Object) -> float:
    """When the rollout of a Deployment last made progress, seconds since the epoch; 0 if it makes none."""
    progressing = _condition(workload, "Progressing")
    if not is_observed(workload) or progressing.get("status") != "True":
        return 0.0
    return epoch_s(progressing.get("lastUpdateTime")) or 0.0


def failure(workload: Object) -> tuple[str, object] | None:
    """That the workload does not progress, and since when, in the API's format; None if it does."""
    progressing = _condition(workload, "Progressing")
    if is_set(workload):
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


def is_observed(workload: Object) -> bool:
    """Whether the status of a Deployment is that of its newest spec."""
    return bool(_status(workload).get("observedGeneration", 0) >= workload["metadata"].get("generation", 0))


def _present(engines: Iterable[Object]) -> list[Object]:
    return [pod for pod in engines if not pod_startup.is_terminating(pod)]


def _status(workload: Object | None) -> Object:
    status: Object = (workload or {}).get("status", {})
    return status


def _conditions(workload: Object | None) -> Sequence[Object]:
    conditions: Sequence[Object] = _status(workload).get("conditions", ())
    return conditions


def _condition(workload: Object, kind: str) -> Object:
    return next((one for one in _conditions(workload) if one.get("type") == kind), {})
