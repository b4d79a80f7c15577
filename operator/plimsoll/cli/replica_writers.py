"""Who else writes the replica counts of a service: HorizontalPodAutoscalers and other clients. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from plimsoll.api import labels
from plimsoll.api.conditions import ConditionType
from plimsoll.cli.findings import NOTE, PROBLEM, Finding
from plimsoll.cli.json_access import get_list, get_mapping, get_text
from plimsoll.controllers.replicas_owner import describe_owner, replicas_set_by

KubeObject = dict[str, Any]


def foreign_writers(
    service: KubeObject, workloads: Sequence[KubeObject], autoscalers: Iterable[KubeObject], prefix: str = ""
) -> Iterable[Finding]:
    """Return autoscalers and clients that write the replica counts too. In other modes than Auto they may.

    All objects are of the service's namespace. prefix: of the subjects of findings.
    """
    scaling = get_mapping(service, "spec", "scaling")
    if get_text(scaling, "mode") not in (None, "Auto") or scaling.get("paused") is True:
        return
    owned = {(one["kind"], get_text(one, "metadata", "name")) for one in workloads}
    owned.add((labels.KIND, get_text(service, "metadata", "name")))
    for scaler in autoscalers:
        kind, target = (get_text(scaler, "spec", "scaleTargetRef", name) for name in ("kind", "name"))
        if (kind, target) in owned:
            name = get_text(scaler, "metadata", "name")
            message = f"it scales {kind} {target}, which Plimsoll scales too: the two undo each other"
            yield Finding(
                PROBLEM, f"{prefix}hpa {name}", message, f"kubectl delete hpa {name}, or spec.scaling.mode: Off"
            )
    conditions = get_list(service, "status", "conditions")
    if any(get_text(one, "type") == ConditionType.REPLICAS_CONTESTED for one in conditions):  # it names the writer
        return
    for workload in workloads:
        owner = replicas_set_by(workload)
        if owner is not None:
            message = f"its replica count was last set by {describe_owner(owner)}, not by Plimsoll"
            remedy = "set spec.tiers.*.minReplicas and maxReplicas instead"
            role = get_text(get_mapping(workload, "metadata", "labels"), labels.ROLE) or ""
            yield Finding(NOTE, f"{prefix}tier {role}", message, remedy)
