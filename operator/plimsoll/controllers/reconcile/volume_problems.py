"""Why the volumes of a pod are not there, in the words of the kubelet and of the attach controller.

Problem: a pod whose volume cannot be attached or mounted stays in `ContainerCreating`, and its status says no more.

Idea: the reason is in Events alone. Those of a pod that has waited for WAIT_S since it was scheduled are listed. The
newest Warning about a volume is quoted. The kubelet repeats it until the volume is there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from plimsoll.adapters.kube_client import EVENTS, KubeClient
from plimsoll.adapters.normalize import epoch_s, value_at
from plimsoll.api.conditions import ConditionReason
from plimsoll.controllers import pod_startup
from plimsoll.controllers.reconcile.pod_diagnosis import PodProblem
from plimsoll.controllers.reconcile.tier_health import TierStatusInputs
from plimsoll.core.errors import ClusterError, LeaseLost

Object = dict[str, Any]

# A volume that moves from a pod on another node is late by some seconds, which the attach controller warns of.
WAIT_S: Final = 30.0
LIST_AGAIN_S: Final = 30.0
_VOLUME_REASONS: Final = frozenset({"FailedAttachVolume", "FailedMount", "FailedMapVolume"})
_TIMES: Final = (("lastTimestamp",), ("series", "lastObservedTime"), ("eventTime",), ("metadata", "creationTimestamp"))


async def with_volume_problems(
    kube: KubeClient, namespace: str, tiers: Iterable[TierStatusInputs], now_s: float
) -> tuple[tuple[TierStatusInputs, ...], float | None]:
    """The tiers with what keeps the volumes of their longest waiting pod, and the seconds until the next list.

    The seconds are None if no pod waits. Events that cannot be read are no problem of the service.
    """
    found, next_s = [], math.inf
    for tier in tiers:
        waiting = [(since_s, pod) for pod in (*tier.current_pods, *tier.workers) if (since_s := _waits_since_s(pod))]
        if waiting:
            since_s, pod = min(waiting, key=lambda one: (one[0], one[1]["metadata"]["name"]))
            left_s = since_s + WAIT_S - now_s
            next_s = min(next_s, left_s if left_s > 0.0 else LIST_AGAIN_S)
            if left_s <= 0.0:
                tier = replace(tier, volume_problem=await _volume_problem(kube, namespace, pod))
        found.append(tier)
    return tuple(found), None if math.isinf(next_s) else next_s


def _waits_since_s(pod: Object) -> float | None:
    """When the pod was scheduled, seconds since the epoch, if no container can start yet; else None."""
    conditions = {one.get("type"): one for one in pod.get("status", {}).get("conditions") or ()}
    scheduled = conditions.get("PodScheduled", {})
    starts = conditions.get("PodReadyToStartContainers", {})
    if pod_startup.is_terminating(pod) or starts.get("status") != "False" or scheduled.get("status") != "True":
        return None
    return epoch_s(scheduled.get("lastTransitionTime"))


async def _volume_problem(kube: KubeClient, namespace: str, pod: Object) -> PodProblem | None:
    name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
    try:
        events, _ = await kube.list(EVENTS, namespace, fields=f"involvedObject.uid={uid},type=Warning")
    except LeaseLost:
        raise
    except ClusterError:
        return None
    about_volumes = [event for event in events if event.get("reason") in _VOLUME_REASONS]
    if not about_volumes:
        return None
    newest = max(about_volumes, key=_at_s)
    words = " ".join(str(newest.get("message") or "Kubernetes gives no message").split())
    message = f"pod {name} waits for a volume ({newest['reason']}): {words}"
    return PodProblem(ConditionReason.VOLUME_UNAVAILABLE, message)


def _at_s(event: Object) -> float:
    times = (epoch_s(value_at(event, *path)) for path in _TIMES)
    return max((at_s for at_s in times if at_s is not None), default=0.0)
