"""Start-up progress and start-up time of an engine, from its pod and its launcher. Pure.

Kubernetes knows the phases before the container runs (schedule, pull), the launcher those after. Together they form an
ordered list of phases whose sum is the time from the pod's creation to its readiness. If the engine's container ends
and the kubelet starts it again, the phases are those of a restart: their sum is the time from the end to the readiness.
"""

from __future__ import annotations

from typing import Any

from plimsoll.adapters.engine_of_pod import engine_container
from plimsoll.adapters.launcher import StartupProgress
from plimsoll.adapters.normalize import epoch_s
from plimsoll.api import labels
from plimsoll.api.contract import engine_contract
from plimsoll.core.autoscaling.startup_models import MAX_NAME_CHARACTERS, Variant
from plimsoll.core.autoscaling.startup_time import RESTART_PHASE, StartingPod

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


def silent_node(pod: Object) -> str | None:
    """The pod's node if it no longer reports to Kubernetes, else None.

    Kubernetes sets such a pod's Ready to False after some 50 s, and leaves what the kubelet said last: that all its
    containers are ready. It gives no reason, and the kubelet always gives one, such as a readiness gate.
    """
    ready = _condition(pod, "Ready")
    if pod["metadata"].get("deletionTimestamp") or ready.get("status") != "False" or ready.get("reason"):
        return None
    gates = [str(gate.get("conditionType")) for gate in pod.get("spec", {}).get("readinessGates") or ()]
    reported = ("ContainersReady", *gates)
    if any(_condition(pod, kind).get("status") != "True" for kind in reported):
        return None
    return str(pod.get("spec", {}).get("nodeName", ""))


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
    """Whether the engine's container has ended before, so that the pod is older than its start-up."""
    status = _engine_status(pod)
    return any(status.get(state, {}).get("terminated") for state in ("state", "lastState"))


def startup_state(pod: Object, progress: StartupProgress | None) -> StartingPod:
    """The current start-up phase of a pod that is not ready. progress: the report of its running container.

    A pod whose running container was ready before waits for the restart of its engine, which hangs.
    """
    name, made_s = pod["metadata"]["name"], created_s(pod)
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") != "True":
        unschedulable_message = scheduled.get("message") if scheduled.get("reason") == "Unschedulable" else None
        return StartingPod(name, made_s, "schedule", made_s, unschedulable_message)
    running_s, unready_s = container_started_s(pod), None if is_ready(pod) else _since_s(pod, "Ready")
    if (node := silent_node(pod)) is not None:
        return StartingPod(name, unready_s or made_s, silent_node=node)
    is_starting = progress is not None and progress.phase is not None
    was_ready = has_restarted(pod) or is_complete(progress)
    if was_ready and running_s is not None and running_s < (unready_s or 0.0) and not is_starting:
        return StartingPod(name, max(made_s, unready_s or 0.0), RESTART_PHASE, unready_s, restart_since_s=unready_s)
    began_s, restart_since_s = max(made_s, _since_s(pod, "PodScheduled") or 0.0), None
    if has_restarted(pod):
        began_s = max(made_s, unready_s or 0.0)
        restart_since_s = _container_ended_s(pod) or began_s
    if running_s is None:
        phase, since_s = (
            (RESTART_PHASE, restart_since_s) if restart_since_s else ("pull", _since_s(pod, "PodScheduled"))
        )
    elif progress is None or not (progress.phase or progress.phases):
        phase, since_s = "launch", running_s
    else:
        phase = progress.phase or "probe"
        since_s = running_s + sum(seconds for _, seconds in progress.phases)
    return StartingPod(name, began_s, phase, since_s, restart_since_s=restart_since_s)


def phase_durations(pod: Object, progress: StartupProgress | None) -> PhaseDurations:
    """Phases of a ready pod with their seconds; empty if a time is missing or negative.

    Of a pod that `has_restarted`, the phases of its engine's last restart. Empty also for a pod that was unready for a
    time while its container ran: its Ready is not the end of a start-up.
    """
    ready_s, scheduled_s = _since_s(pod, "Ready"), _since_s(pod, "PodScheduled")
    running_s = container_started_s(pod)
    if running_s is None or ready_s is None or scheduled_s is None:
        return []
    phases: PhaseDurations = [("schedule", scheduled_s - created_s(pod)), ("pull", running_s - scheduled_s)]
    if has_restarted(pod):
        ended_before_s = _container_ended_s(pod)
        if ended_before_s is None:
            return []
        phases = [(RESTART_PHASE, running_s - ended_before_s)]
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


def container_started_s(pod: Object) -> float | None:
    """Start time of the engine's running container, seconds since the epoch; None if it does not run."""
    return epoch_s(_engine_status(pod).get("state", {}).get("running", {}).get("startedAt"))


def _container_ended_s(pod: Object) -> float | None:
    """When the engine's container ended the last time, seconds since the epoch; None if it has not, or if unknown."""
    status = _engine_status(pod)
    ended = (status.get(state, {}).get("terminated", {}).get("finishedAt") for state in ("state", "lastState"))
    return epoch_s(next(filter(None, ended), None))


def _engine_status(pod: Object) -> Object:
    """The status of the container that runs the engine; empty before there is one."""
    name = engine_container(pod).get("name") if labels.ADOPTED in pod else "engine"
    statuses: list[Object] = pod.get("status", {}).get("containerStatuses", [])
    return next((status for status in statuses if status.get("name") == name), statuses[0] if statuses else {})


def _condition(pod: Object, kind: str) -> Object:
    condition: Object = next((c for c in pod.get("status", {}).get("conditions", []) if c.get("type") == kind), {})
    return condition


def _since_s(pod: Object, kind: str) -> float | None:
    """Last transition time of a condition, seconds since the epoch; None if unknown."""
    return epoch_s(_condition(pod, kind).get("lastTransitionTime"))
