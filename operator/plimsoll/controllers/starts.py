"""How far an engine's start has come, and what it took: from its pod and from its launcher. Pure.

Before the container runs only Kubernetes knows (scheduling, pulling); after it, only the launcher does. Together they
are one list of phases, in order, whose sum is the time from the pod's creation to its readiness.
"""

from __future__ import annotations

from typing import Any

from plimsoll.adapters.about import Start
from plimsoll.adapters.normalize import epoch_s
from plimsoll.api.contract import contract
from plimsoll.core.lifecycle import Starting
from plimsoll.core.variants import MOST_CHARACTERS, Variant

Object = dict[str, Any]
Phases = list[tuple[str, float]]


def variant(pod: Object) -> Variant:
    """What a pod, or a template of one, is made of, as far as it tells: model, image, GPUs and the nodes asked for."""
    spec = pod.get("spec") or {}
    engine: Object = next((c for c in spec.get("containers") or () if c.get("name") == "engine"), {})
    env = {entry.get("name"): entry.get("value", "") for entry in engine.get("env") or ()}
    names = contract().env
    model, revision = env.get(names["model"], ""), env.get(names["model_revision"], "")
    limits = (engine.get("resources") or {}).get("limits") or {}
    gpus = [f"{count} {name}" for name, count in sorted(limits.items()) if "/" in name]
    nodes = [f"{name}={value}" for name, value in sorted((spec.get("nodeSelector") or {}).items())]
    where = f" on {', '.join(nodes)}" if nodes else ""
    parts = f"{model}@{revision}" if revision else model, engine.get("image", ""), ", ".join(gpus) + where
    return Variant(*(part[:MOST_CHARACTERS] for part in parts))


def is_ready(pod: Object) -> bool:
    return _condition(pod, "Ready").get("status") == "True"


def is_leaving(pod: Object) -> bool:
    """Being deleted, or ended for good: nothing starts there any more."""
    return bool(pod["metadata"].get("deletionTimestamp")) or pod.get("status", {}).get("phase") in (
        "Failed",
        "Succeeded",
    )


def created_s(pod: Object) -> float:
    """When it was made, seconds since the epoch; 0 where that is not known, so that its start is overdue."""
    return epoch_s(pod["metadata"].get("creationTimestamp")) or 0.0


def starting(pod: Object, told: Start | None) -> Starting:
    """A pod that is not ready yet; told: its launcher's last word."""
    made_s = created_s(pod)
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") != "True":
        refused = scheduled.get("message") if scheduled.get("reason") == "Unschedulable" else None
        return Starting(pod["metadata"]["name"], made_s, "schedule", made_s, refused)
    placed_s = epoch_s(scheduled.get("lastTransitionTime"))
    running_s = _running_s(pod)
    if running_s is None:
        return Starting(pod["metadata"]["name"], made_s, "pull", placed_s)
    if told is None or told.phase is None:
        return Starting(pod["metadata"]["name"], made_s, "launch", running_s)
    began_s = running_s + sum(seconds for _, seconds in told.phases)
    return Starting(pod["metadata"]["name"], made_s, told.phase, began_s)


def took(pod: Object, told: Start | None) -> Phases:
    """The phases of a pod that has become ready, seconds; empty where its times make no sense (a restart, a clock)."""
    made_s = created_s(pod)
    ready_s, placed_s = _since_s(pod, "Ready"), _since_s(pod, "PodScheduled")
    running_s = _running_s(pod)
    if running_s is None or ready_s is None or placed_s is None:
        return []
    phases: Phases = [("schedule", placed_s - made_s), ("pull", running_s - placed_s)]
    if told is not None and told.phases:
        phases += [(name, seconds) for name, seconds in told.phases]
        phases.append(("probe", max(0.0, ready_s - running_s - sum(seconds for _, seconds in told.phases))))
    else:
        phases.append(("engine", ready_s - running_s))
    return phases if all(seconds >= 0.0 for _, seconds in phases) else []


def told_whole(told: Start | None) -> bool:
    """Has the launcher said all of its start? Its word from before the end is without the last phases."""
    return told is not None and told.phase is None and bool(told.phases)


def ready_for_s(pod: Object, now_s: float) -> float:
    """Since when a ready pod is ready, seconds ago; 0 where that is not told."""
    since_s = _since_s(pod, "Ready")
    return 0.0 if since_s is None else now_s - since_s


def _running_s(pod: Object) -> float | None:
    """When the engine's container last began to run, seconds since the epoch; None if it does not."""
    for container in pod.get("status", {}).get("containerStatuses", []):
        began_s = epoch_s(container.get("state", {}).get("running", {}).get("startedAt"))
        if began_s is not None:
            return began_s
    return None


def _condition(pod: Object, kind: str) -> Object:
    found: Object = next((c for c in pod.get("status", {}).get("conditions", []) if c.get("type") == kind), {})
    return found


def _since_s(pod: Object, kind: str) -> float | None:
    """When a condition got its present status, seconds since the epoch."""
    return epoch_s(_condition(pod, kind).get("lastTransitionTime"))
