"""One target as last read, and the fence: who else sets its replica count. Pure.

Problem: a fleet that exists often has an autoscaler already. Two that write one count undo each other for ever, and the
fleet's owner sees replicas come and go.

Idea: Plimsoll yields to every other writer, and names it. Four facts show one: a HorizontalPodAutoscaler of the object
(KEDA makes one too), a kind with an autoscaler of its own (KubeAI's Model), a field manager that applies
`spec.replicas`, and a count that changed after Plimsoll had set it.
A field manager that merely created the object with a count is no writer: the first write takes the count over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from plimsoll.adapters.kube_client import Resource
from plimsoll.adapters.normalize import value_at
from plimsoll.api import labels
from plimsoll.api.conditions import ConditionReason
from plimsoll.api.v1alpha1 import EngineTarget, ScaleTargetRef
from plimsoll.controllers.object_cache import resource_version
from plimsoll.controllers.replicas_owner import (
    CONTROLLER_MANAGER,
    UNNAMED_CLIENT,
    is_kubeai_model,
    is_scaled_by_kubeai,
    replicas_owners,
)

Object = dict[str, Any]

_KEDA_LABEL: Final = "scaledobject.keda.sh/name"
_OWN: Final = frozenset({labels.FIELD_MANAGER, labels.SCALER_FIELD_MANAGER})


@dataclass(frozen=True)
class TargetProblem:
    """Why a target cannot be read or scaled. message: a sentence with the remedy.

    has_engines: whether its pods may be engines of the service all the same. Else they are those of another one, or of
    none, or no Service can select them.
    """

    reason: ConditionReason
    message: str
    has_engines: bool = True


@dataclass(frozen=True)
class ScaledObject:
    """An object with a `scale` subresource. metadata: that of the object. replicas: of the spec.

    is_owned: whether it is a tier's workload, and no target. counted: replicas of the status.
    """

    resource: Resource
    metadata: Object
    replicas: int
    is_owned: bool = False
    counted: int = 0

    @property
    def label(self) -> str:
        """KIND NAME, for messages."""
        return f"{self.resource.kind} {self.metadata['name']}"

    @property
    def resource_version(self) -> int:
        """The object's resourceVersion; 0 if it is unknown."""
        return resource_version({"metadata": self.metadata})


class WriterCause(StrEnum):
    """What shows that something else sets a count. The values are those of `yieldedCause` in the status."""

    AUTOSCALER = "Autoscaler"
    APPLY = "Apply"
    LATER_WRITE = "LaterWrite"


@dataclass(frozen=True)
class OtherWriter:
    """Who else sets the count of a target. name: for messages."""

    cause: WriterCause
    name: str


@dataclass(frozen=True)
class TargetState:
    """A target as last read. scaled: None until it was read. other_writer: who else sets the count, or None.

    selector: of the pods; None until it was read, and while they are not to be engines of the service.
    """

    target: EngineTarget
    scaled: ScaledObject | None = None
    problem: TargetProblem | None = None
    other_writer: OtherWriter | None = None
    selector: str | None = None


def published_selector(service_object: Object, role: str) -> str | None:
    """The selector of a target's pods that the status has for the present spec; None without one."""
    status, generation = service_object.get("status") or {}, service_object["metadata"].get("generation", 0)
    found = value_at(status, "tiers", role, "podSelector") if status.get("observedGeneration") == generation else None
    return found if isinstance(found, str) else None


def routed_selector(service_object: Object, targets: Mapping[str, TargetState], role: str) -> str | None:
    """The selector of a target's pods as last read; before the first reading, that of an earlier process."""
    state = targets.get(role)
    return published_selector(service_object, role) if state is None else state.selector


def is_unread(targets: Mapping[str, TargetState], role: str) -> bool:
    """Whether nothing says which pods the engines of a target are now: what gateways have of them stays."""
    state = targets.get(role)
    return state is None or (state.problem is not None and state.problem.has_engines)


def other_writer_of(targets: Mapping[str, TargetState]) -> str | None:
    """Who else sets a replica count of a service, as a clause; None without one."""
    for state in targets.values():
        if state.other_writer is not None:
            return f"{state.target.scale_target_ref.label} is scaled by {state.other_writer.name}"
    return None


def autoscaler_of(ref: ScaleTargetRef, autoscalers: Iterable[Object]) -> OtherWriter | None:
    """The HorizontalPodAutoscaler of a target, by its name and that of its KEDA ScaledObject; None without one."""
    for one in autoscalers:
        found = value_at(one, "spec", "scaleTargetRef") or {}
        same_group = _group(str(found.get("apiVersion", ""))) == _group(ref.api_version)
        if same_group and (found.get("kind"), found.get("name")) == (ref.kind, ref.name):
            keda = one["metadata"].get("labels", {}).get(_KEDA_LABEL)
            made_by = f" of KEDA's ScaledObject {keda}" if keda else ""
            return OtherWriter(WriterCause.AUTOSCALER, f"HorizontalPodAutoscaler {one['metadata']['name']}{made_by}")
    return None


def built_in_autoscaler(ref: ScaleTargetRef, obj: Object) -> OtherWriter | None:
    """The autoscaler that a kind has in its own controller; None without one that is on. obj: the target."""
    if not is_kubeai_model(ref.api_version, ref.kind) or not is_scaled_by_kubeai(obj):
        return None
    return OtherWriter(
        WriterCause.AUTOSCALER, "KubeAI's autoscaler (spec.autoscalingDisabled of the Model is not true)"
    )


def applying_manager(obj: Object) -> OtherWriter | None:
    """A field manager other than Plimsoll's that applies spec.replicas; None without one.

    To set the count would take the field from it by force, and its next apply would set the count again.
    """
    for entry in obj["metadata"].get("managedFields", []):
        is_applied = entry.get("operation") == "Apply" and "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {})
        manager = str(entry.get("manager", ""))
        if is_applied and manager not in _OWN:
            return OtherWriter(WriterCause.APPLY, f"the field manager {manager}, which applies spec.replicas")
    return None


def later_writer(obj: Object) -> OtherWriter | None:
    """Who has set the count since Plimsoll did; None without one. obj: one whose count Plimsoll has set before."""
    owners = replicas_owners(obj)
    if _OWN & {*owners}:
        return None
    names = [owner for owner in owners if owner]
    if not names:
        return OtherWriter(WriterCause.LATER_WRITE, UNNAMED_CLIENT)
    writer = " and ".join(names)
    hint = " (a HorizontalPodAutoscaler that is gone)" if writer == CONTROLLER_MANAGER else ""
    return OtherWriter(
        WriterCause.LATER_WRITE, f"the field manager {writer}{hint}, which has changed spec.replicas since"
    )


def _group(api_version: str) -> str:
    return api_version.rpartition("/")[0]
