"""How far a start has come, and what it took, from the pod and its launcher."""

from __future__ import annotations

from typing import Any

from plimsoll.adapters.launcher import StartupProgress
from plimsoll.api.v1alpha1 import parse
from plimsoll.controllers import pod_startup
from plimsoll.core.autoscaling.startup_models import UNKNOWN_VARIANT, Variant
from plimsoll.resources.engine_pod import pod_template
from tests import builders

Object = dict[str, Any]

CREATED_S = 1767225600.0  # 2026-01-01T00:00:00Z


def at(seconds: int) -> str:
    return f"2026-01-01T00:{seconds // 60:02d}:{seconds % 60:02d}Z"


def pod(*conditions: Object, running: int | None = None) -> Object:
    state = {"running": {"startedAt": at(running)}} if running is not None else {"waiting": {"reason": "x"}}
    return {
        "metadata": {"name": "p", "creationTimestamp": at(0)},
        "status": {"conditions": list(conditions), "containerStatuses": [{"state": state}]},
    }


def pod_condition(kind: str, status: str, when: int, **more: str) -> Object:
    return {"type": kind, "status": status, "lastTransitionTime": at(when), **more}


def startup_progress(phase: str | None, *phases: tuple[str, float]) -> StartupProgress:
    return StartupProgress(phase=phase, phase_s=0.0, phases=phases, ready=phase is None, draining=False)


def test_startup_state_reports_current_phase() -> None:
    words = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    unplaced = pod_startup.startup_state(
        pod(pod_condition("PodScheduled", "False", 0, reason="Unschedulable", message=words)), None
    )
    assert (unplaced.phase, unplaced.unschedulable_reason) == ("schedule", words)
    pulling = pod_startup.startup_state(pod(pod_condition("PodScheduled", "True", 2)), None)
    assert (pulling.phase, pulling.phase_since_s, pulling.unschedulable_reason) == ("pull", CREATED_S + 2, None)
    mute = pod_startup.startup_state(pod(pod_condition("PodScheduled", "True", 2), running=12), None)
    assert (mute.phase, mute.phase_since_s) == ("launch", CREATED_S + 12)
    loading = pod_startup.startup_state(
        pod(pod_condition("PodScheduled", "True", 2), running=12),
        startup_progress("load", ("launch", 1.0), ("import", 5.0)),
    )
    assert (loading.phase, loading.phase_since_s) == ("load", CREATED_S + 18)


def test_phase_durations_sum_to_total_startup_time() -> None:
    ready = pod(pod_condition("PodScheduled", "True", 2), pod_condition("Ready", "True", 40), running=12)
    reported = pod_startup.phase_durations(ready, startup_progress(None, ("launch", 1.0), ("load", 20.0)))
    assert [name for name, _ in reported] == ["schedule", "pull", "launch", "load", "probe"]
    assert sum(seconds for _, seconds in reported) == 40.0
    assert pod_startup.phase_durations(ready, None) == [("schedule", 2.0), ("pull", 10.0), ("engine", 28.0)]


def test_startup_variant_names_model_image_and_gpus() -> None:
    """Of what the operator renders, and of pods that tell nothing of it."""
    spec: Object = {"model": {"uri": "hf://Qwen/Qwen3-8B", "revision": "abc"}, "slo": {"tpot": "50ms"}}
    spec["tiers"] = {"serve": {"gpus": 2, "pod": {"nodeSelector": {"gpu": "h200"}}}}
    made = pod_template(parse(builders.service(**spec)), "serve", builders.PLATFORM)
    found = pod_startup.startup_variant(made)
    assert found == Variant("Qwen/Qwen3-8B@abc", "example.com/engine:1", "2 nvidia.com/gpu on gpu=h200")
    assert found.label == "Qwen/Qwen3-8B@abc, example.com/engine:1, 2 nvidia.com/gpu on gpu=h200"
    assert (
        pod_startup.startup_variant({"metadata": {}, "status": {}})
        == pod_startup.startup_variant({})
        == UNKNOWN_VARIANT
    )


def test_pod_that_was_unready_for_a_time_is_no_start() -> None:
    whole = startup_progress(None, ("launch", 1.0), ("load", 20.0))
    scheduled = pod_condition("PodScheduled", "True", 2)
    stalled = pod(scheduled, pod_condition("Ready", "False", 3000), running=12)
    state = pod_startup.startup_state(stalled, whole)
    assert (state.phase, state.created_s, state.phase_since_s) == ("launch", CREATED_S + 3000, CREATED_S + 3000)
    assert pod_startup.phase_durations(pod(scheduled, pod_condition("Ready", "True", 3020), running=12), whole) == []


def test_phase_durations_invalid_times_return_empty() -> None:
    backwards = pod(pod_condition("PodScheduled", "True", 30), pod_condition("Ready", "True", 40), running=12)
    assert pod_startup.phase_durations(backwards, None) == []
    assert pod_startup.phase_durations(pod(pod_condition("PodScheduled", "True", 2)), None) == []
    assert pod_startup.phase_durations(pod(pod_condition("Ready", "True", 40), running=3), None) == []
