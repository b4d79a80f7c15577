"""Why a pod does not get ready, in the words of whoever refused: scheduler, kubelet, engine, or the API server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from plimsoll.api.conditions import Reason

Object = dict[str, Any]

IMAGE_REASONS = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})
CONFIG_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
LAST_WORDS = 400  # characters of an engine's log that fit into a message

# The most telling first: what keeps pods from existing, then from running, then from staying up.
ORDER = (
    Reason.PODS_REFUSED,
    Reason.CONFIG_ERROR,
    Reason.IMAGE_UNAVAILABLE,
    Reason.ENGINE_FAILING,
    Reason.UNSCHEDULABLE,
)


@dataclass(frozen=True)
class Trouble:
    """One reason why a replica is missing."""

    reason: Reason
    message: str


def worst(deployment: Object | None, pods: Iterable[Object]) -> Trouble | None:
    """The most telling trouble of a tier; None if its pods are merely on their way."""
    found = [trouble for pod in pods if (trouble := of_pod(pod)) is not None]
    refused = _refused(deployment)
    if refused is not None:
        found.append(refused)
    return min(found, key=lambda t: (ORDER.index(t.reason), t.message), default=None)


def of_pod(pod: Object) -> Trouble | None:
    """What is wrong with one pod that is not ready and not being deleted."""
    if pod["metadata"].get("deletionTimestamp"):
        return None
    name, status = pod["metadata"]["name"], pod.get("status", {})
    for condition in status.get("conditions", []):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            words = condition.get("message", "")
            return Trouble(Reason.UNSCHEDULABLE, f"{name} fits on no node: {words}")
    for container in (*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])):
        trouble = _of_container(name, container)
        if trouble is not None:
            return trouble
    return None


def _of_container(pod: str, container: Object) -> Trouble | None:
    state = container.get("state", {})
    waiting = state.get("waiting", {})
    reason, words = waiting.get("reason", ""), waiting.get("message", "")
    if reason in CONFIG_REASONS:
        return Trouble(Reason.CONFIG_ERROR, f"{pod}: {words or reason}")
    if reason in IMAGE_REASONS:
        return Trouble(Reason.IMAGE_UNAVAILABLE, f"{pod}: {words or reason} (image {container.get('image', '')})")
    ended = state.get("terminated") or container.get("lastState", {}).get("terminated")
    if ended and not container.get("ready"):
        return Trouble(Reason.ENGINE_FAILING, f"{pod}: {_last_words(ended)}")
    return None


def _last_words(ended: Object) -> str:
    reason, code = ended.get("reason", "Error"), ended.get("exitCode")
    message = " ".join(ended.get("message", "").split())[-LAST_WORDS:]
    tail = f": {message}" if message else ""
    return f"the engine ended ({reason}, exit code {code}){tail}"


def _refused(deployment: Object | None) -> Trouble | None:
    for condition in (deployment or {}).get("status", {}).get("conditions", []):
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            return Trouble(Reason.PODS_REFUSED, condition.get("message", ""))
    return None
