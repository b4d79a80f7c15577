"""Who owns a workload's replica count, by the API server's record of field managers. Pure."""

from __future__ import annotations

from typing import Any

from plimsoll.api import labels

Object = dict[str, Any]

_OWN_MANAGERS = frozenset({labels.FIELD_MANAGER, labels.SCALER_FIELD_MANAGER})
CONTROLLER_MANAGER = "kube-controller-manager"  # sets the count for every HorizontalPodAutoscaler, also KEDA's
UNNAMED_CLIENT = "another client (such as kubectl scale)"


def replicas_owners(workload: Object) -> list[str]:
    """The field managers that own spec.replicas, also through the scale subresource."""
    return [
        str(entry.get("manager", ""))
        for entry in workload["metadata"].get("managedFields", [])
        if "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {})
    ]


def describe_owner(owner: str) -> str:
    """A field manager that owns spec.replicas, for messages."""
    return f"{owner} (a HorizontalPodAutoscaler)" if owner == CONTROLLER_MANAGER else owner


def is_kubeai_model(api_version: str, kind: str) -> bool:
    """Whether this is KubeAI's Model, whose own controller may set its replica count."""
    return kind == "Model" and api_version.partition("/")[0] == "kubeai.org"


def is_scaled_by_kubeai(model: Object) -> bool:
    """Whether KubeAI's autoscaler sets the count of its Model."""
    return (model.get("spec") or {}).get("autoscalingDisabled") is not True


def replicas_set_by(workload: Object) -> str | None:
    """The field manager that ordered the count; None if Plimsoll did, or if it is unknown.

    `kubectl scale --replicas=0` leaves no owner, because the Scale object omits a count of 0. Plimsoll's own writes to
    Deployments are applied, and keep theirs; those to other kinds do not.
    """
    owners = replicas_owners(workload)
    is_known = workload["metadata"].get("managedFields") and workload.get("kind") != labels.SET_KIND
    if not owners and is_known and workload["spec"].get("replicas") == 0:
        return UNNAMED_CLIENT
    return None if _OWN_MANAGERS & {*owners} else next((owner for owner in owners if owner), None)
