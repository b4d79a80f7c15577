"""Reads how far one service is in the platform's rollout of engines. Pure.

Problem: a rollout must survive a restart of the operator and a change of the leader, so nothing may be only in memory.
Idea: everything is in objects. The workloads have the generation in use, a ControllerRevision says that the rollout
made it and when, the workloads' conditions and pods say when Kubernetes had replaced them, and the conditions of the
service say what fails since when. What began to fail before the rollout reached the service is not its fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from plimsoll.adapters.normalize import epoch_s
from plimsoll.api import labels
from plimsoll.api.conditions import TIER_DEGRADED_TYPES, ConditionReason, ConditionType
from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.controllers import tier_workload
from plimsoll.controllers.object_cache import Key, ObjectCache, key_of, role_of
from plimsoll.core.demand.standby_value import MISS_COST
from plimsoll.core.errors import InvalidSpec
from plimsoll.resources import object_meta, objects
from plimsoll.resources.platform_config import EngineRolloutSettings

Object = dict[str, Any]
Importance = tuple[bool, float]

_DEGRADED: Final = frozenset(kind.value for kind in TIER_DEGRADED_TYPES.values())
_NOT_ITS_FAULT: Final = frozenset({ConditionReason.SCALED_TO_ZERO.value, ConditionReason.NO_GATEWAY.value})


@dataclass(frozen=True)
class RolloutState:
    """One service in a rollout.

    importance: a service without an SLO has less, then one with a lower miss cost. is_current: its templates have the
    present generation. rolled_at_s: when the rollout gave it the templates of the present generation, seconds since
    the epoch; None if it has not. is_settled: Kubernetes has replaced its engines, `min_ready_seconds` ago or longer.
    failure: what fails since the present or an earlier rollout reached it. was_failing: something fails for longer.
    obstacle: why it cannot be rolled out now.
    """

    key: Key
    importance: Importance
    is_current: bool
    rolled_at_s: float | None = None
    is_settled: bool = True
    failure: str = ""
    was_failing: bool = False
    obstacle: str = ""


def rollout_state(
    cache: ObjectCache, service_object: Object, settings: EngineRolloutSettings, now_s: float
) -> RolloutState | None:
    """The state of a service; None for one without engine pods of its own, or that has none yet."""
    key, service = key_of(service_object), cache.parsed(service_object)
    if isinstance(service, InvalidSpec):
        workloads = _workloads(cache, key)
    elif service.spec.targets is not None:
        return None
    else:
        names = {object_meta.tier_name(key[1], kind) for kind, _ in service.spec.tiers.items()}
        workloads = [one for one in _workloads(cache, key) if one["metadata"]["name"] in names]
    if not workloads or service_object["metadata"].get("deletionTimestamp"):
        return None
    is_current = all(objects.template_generation(one) == settings.generation for one in workloads)
    rolled_out = [one for one in cache.children("ControllerRevision", key) if _is_rolled_out(one)]
    present = [one for one in rolled_out if objects.template_generation(one) == settings.generation]
    if is_current and not present:
        return RolloutState(key, _importance(service), is_current=True)
    pods, rolled_at_s = cache.tier_pods(key), _created_s(present)
    since_s = [tier_workload.replaced_s(one, _engines(one, pods), rolled_at_s or 0.0) for one in workloads]
    is_settled = all(one is not None and one <= now_s - settings.min_ready_seconds for one in since_s)
    failures = _failures(service_object, workloads, pods)
    began_s = _created_s(present or rolled_out)
    blamed = [text for text, since_s in failures if began_s is not None and since_s >= began_s]
    return RolloutState(
        key,
        _importance(service),
        is_current=is_current,
        rolled_at_s=rolled_at_s,
        is_settled=is_current and is_settled,
        failure=blamed[0] if blamed else "",
        was_failing=bool(failures) and not blamed,
        obstacle=_obstacle(service, workloads) or ("" if blamed else _stuck(service_object)),
    )


def _is_rolled_out(revision: Object) -> bool:
    return labels.ROLLED_OUT in revision["metadata"].get("labels", {})


def _created_s(revisions: Iterable[Object]) -> float | None:
    """When the first of the newest generation's revisions was created; None without any."""
    times = [
        (objects.template_generation(one), -created_s)
        for one in revisions
        if (created_s := epoch_s(one["metadata"].get("creationTimestamp"))) is not None
    ]
    return -max(times)[1] if times else None


def _importance(service: InferenceService | InvalidSpec) -> Importance:
    if isinstance(service, InvalidSpec):
        return True, MISS_COST
    cost = service.spec.scaling.slo_miss_cost
    return service.spec.slo is not None, MISS_COST if cost is None else float(cost)


def _obstacle(service: InferenceService | InvalidSpec, workloads: Sequence[Object]) -> str:
    if isinstance(service, InvalidSpec):
        return "its spec is valid"
    paused = tier_workload.paused(workloads)
    return "" if paused is None else f"{tier_workload.label(paused)} is no longer paused (kubectl rollout resume)"


def _stuck(service_object: Object) -> str:
    """The condition of a service whose objects the operator cannot write; "" if it can."""
    stored = (service_object.get("status") or {}).get("conditions") or ()
    true = {one.get("type") for one in stored if one.get("status") == "True"}
    found = next((kind for kind in (ConditionType.STALLED, ConditionType.INTERNAL_ERROR) if kind in true), None)
    return "" if found is None else f"its condition {found} ends"


def _workloads(cache: ObjectCache, key: Key) -> list[Object]:
    return [one for resource in tier_workload.TIER_WORKLOADS for one in cache.children(resource.kind, key)]


def _engines(workload: Object, pods: Iterable[Object]) -> list[Object]:
    """The pods of a workload that serve."""
    return [pod for pod in pods if role_of(pod) == role_of(workload)]


def _failures(service_object: Object, workloads: Sequence[Object], pods: Sequence[Object]) -> list[tuple[str, float]]:
    """What fails, and since when, seconds since the epoch."""
    found: list[tuple[str, object]] = []
    for one in (service_object.get("status") or {}).get("conditions") or ():
        kind, reason, is_true = one.get("type"), one.get("reason"), one.get("status") == "True"
        match kind:
            case ConditionType.STALLED:
                fails = is_true
            case ConditionType.SLO_MET:
                fails = one.get("status") == "False"
            case ConditionType.READY:
                is_down = one.get("status") == "False" and reason not in _NOT_ITS_FAULT
                fails = is_down and all(tier_workload.is_replaced(one, _engines(one, pods)) for one in workloads)
            case _:
                fails = kind in _DEGRADED and is_true and reason != ConditionReason.TRANSFER_SLOW
        if fails:
            found.append((f"condition {kind} is {one.get('status')} ({reason})", one.get("lastTransitionTime")))
    found += filter(None, map(tier_workload.failure, workloads))
    return [(text, since_s) for text, time in found if (since_s := epoch_s(time)) is not None]
