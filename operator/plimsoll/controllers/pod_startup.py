"""Start-up progress and start-up time of an engine, from its pod and its launcher. Pure.

Kubernetes knows the phases before the container runs (schedule, pull), the launcher those after. Together they form an
ordered list of phases whose sum is the time from the pod's creation to its readiness.
"""

from __future__ import annotations

from typing import Any

from plimsoll.adapters.adopted_engine import engine_container
from plimsoll.adapters.launcher import StartupProgress
from plimsoll.adapters.normalize import epoch_s
from plimsoll.api import labels
from plimsoll.api.contract import engine_contract
from plimsoll.core.autoscaling.startup_models import MAX_NAME_CHARACTERS, Variant
from plimsoll.core.autoscaling.startup_time import StartingPod

Object = dict[str, Any]
PhaseDurations = list[tuple[str, float]]

MAX_PROBE_S = 60.0  # from the end of the warm-up until the kubelet says so; after more, the pod became ready once more


def startup_variant(pod: Object) -> Variant:
    """The start-up variant of a pod or pod template: model, image, GPUs and node selector."""
    if labels.ADOPTED in pod:
        image = str(engine_container(pod).get("image", ""))
        adopted_parts = str(pod[labels.ADOPTED]["model"]), image, f"{pod[labels.ADOPTED]['gpus']} GPUs"
        return Variant(*(part[:MAX_NAME_CHARACTERS] for part in adopted_parts))
    spec = pod.get("spec") or {}
    engine: Object = next((c for c in spec.get("containers") or () if c.get("name") == "engine"), {})
    env = {entry.get("name"): entry.get("value", "") for entry in engine.get("env") or ()}
    names = engine_contract().env
    model, revision = env.get(names["model"], ""), env.get(names["model_revision"], "")
    limits = (engine.get("resources") or {}).get("limits") or {}
    gpus = [f"{count} {name}" for name, count in sorted(limits.items()) if "/" in name]
    nodes = [f"{name}={value}" for name, value in sorted((spec.get("nodeSelector") or {}).items())]
    node_suffix = f" on {', '.join(nodes)}" if nodes else ""
    parts = f"{model}@{revision}" if revision else model, engine.get("image", ""), ", ".join(gpus) + node_suffix
    return Variant(*(part[:MAX_NAME_CHARACTERS] for part in parts))


def is_ready(pod: Object) -> bool:
    return _condition(pod, "Ready").get("status") == "True"


def has_ended(pod: Object) -> bool:
    """Whether the pod has ended for good, as after an eviction. Kubernetes may keep such a pod for long."""
    return pod.get("status", {}).get("phase") in ("Failed", "Succeeded")


def is_terminating(pod: Object) -> bool:
    """Whether the pod is being deleted or has ended for good."""
    return bool(pod["metadata"].get("deletionTimestamp")) or has_ended(pod)


def ended_s(pod: Object) -> float:
    """When a pod that has ended last changed, seconds since the epoch; its creation if it never ran."""
    changes = [epoch_s(c.get("lastTransitionTime")) for c in pod.get("status", {}).get("conditions") or ()]
    return max(filter(None, changes), default=created_s(pod))


def created_s(pod: Object) -> float:
    """Creation time, seconds since the epoch; 0 if unknown, which makes its start-up overdue."""
    return epoch_s(pod["metadata"].get("creationTimestamp")) or 0.0


def has_restarted(pod: Object) -> bool:
    """Whether a container of the pod has terminated before, so that the pod is older than its start-up."""
    return any(container.get("lastState", {}).get("terminated") for container in _containers(pod))


def _began_s(pod: Object, progress: StartupProgress | None) -> float:
    """When the start-up began, seconds since the epoch: pod creation, or when a pod that was ready became unready.

    It was ready if it has restarted, or if its launcher reports the whole start-up: then its engine hangs, and is
    restarted soon.
    """
    was_ready = has_restarted(pod) or is_complete(progress)
    unready_s = _since_s(pod, "Ready") if was_ready and not is_ready(pod) else None
    return max(created_s(pod), unready_s or 0.0)


def startup_state(pod: Object, progress: StartupProgress | None) -> StartingPod:
    """The current start-up phase of a pod that is not ready. progress: the launcher's last report."""
    created_at_s = _began_s(pod, progress)
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") != "True":
        unschedulable_message = scheduled.get("message") if scheduled.get("reason") == "Unschedulable" else None
        return StartingPod(pod["metadata"]["name"], created_at_s, "schedule", created_at_s, unschedulable_message)
    scheduled_s = epoch_s(scheduled.get("lastTransitionTime"))
    running_s = _container_started_s(pod)
    if running_s is None:
        return StartingPod(pod["metadata"]["name"], created_at_s, "pull", scheduled_s)
    if progress is None or progress.phase is None:
        return StartingPod(pod["metadata"]["name"], created_at_s, "launch", max(created_at_s, running_s))
    phase_started_s = running_s + sum(seconds for _, seconds in progress.phases)
    return StartingPod(pod["metadata"]["name"], created_at_s, progress.phase, phase_started_s)


def phase_durations(pod: Object, progress: StartupProgress | None) -> PhaseDurations:
    """Phases of a ready pod with their seconds; empty if a time is missing or negative.

    Empty also for a pod that has restarted, or was unready for a time: its Ready is not the end of its start-up.
    """
    created_at_s = created_s(pod)
    ready_s, scheduled_s = _since_s(pod, "Ready"), _since_s(pod, "PodScheduled")
    running_s = _container_started_s(pod)
    if running_s is None or ready_s is None or scheduled_s is None or has_restarted(pod):
        return []
    phases: PhaseDurations = [("schedule", scheduled_s - created_at_s), ("pull", running_s - scheduled_s)]
    if progress is not None and progress.phases:
        phases += [(name, seconds) for name, seconds in progress.phases]
        probe_s = ready_s - running_s - sum(seconds for _, seconds in progress.phases)
        if probe_s > MAX_PROBE_S:
            return []
        phases.append(("probe", max(0.0, probe_s)))
    else:
        phases.append(("engine", ready_s - running_s))
    return phases if all(seconds >= 0.0 for _, seconds in phases) else []


def is_complete(progress: StartupProgress | None) -> bool:
    """Whether the launcher's report covers the whole start-up; an earlier one lacks the last phases."""
    return progress is not None and progress.phase is None and bool(progress.phases)


def ready_for_s(pod: Object, now_s: float) -> float:
    """Seconds since the pod became ready; 0 if unknown."""
    since_s = _since_s(pod, "Ready")
    return 0.0 if since_s is None else now_s - since_s


def _container_started_s(pod: Object) -> float | None:
    """Start time of the running container, seconds since the epoch; None if none runs."""
    for container in _containers(pod):
        began_s = epoch_s(container.get("state", {}).get("running", {}).get("startedAt"))
        if began_s is not None:
            return began_s
    return None


def _containers(pod: Object) -> list[Object]:
    containers: list[Object] = pod.get("status", {}).get("containerStatuses", [])
    return containers


def _condition(pod: Object, kind: str) -> Object:
    condition: Object = next((c for c in pod.get("status", {}).get("conditions", []) if c.get("type") == kind), {})
    return condition


def _since_s(pod: Object, kind: str) -> float | None:
    """Last transition time of a condition, seconds since the epoch; None if unknown."""
    return epoch_s(_condition(pod, kind).get("lastTransitionTime"))
