"""How far a start has come, and what it took, from the pod and its launcher."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll.adapters.launcher import StartupProgress
from plimsoll.api.v1alpha1 import parse
from plimsoll.controllers import pod_startup
from plimsoll.core.autoscaling import startup_time
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
    silent = pod_startup.startup_state(pod(pod_condition("PodScheduled", "True", 2), running=12), None)
    assert (silent.phase, silent.phase_since_s) == ("launch", CREATED_S + 12)
    loading = pod_startup.startup_state(
        pod(pod_condition("PodScheduled", "True", 2), running=12),
        startup_progress("load", ("launch", 1.0), ("import", 5.0)),
    )
    assert (loading.phase, loading.phase_since_s) == ("load", CREATED_S + 18)


def test_pod_that_waited_long_for_a_node_is_not_overdue() -> None:
    learned = startup_time.record(startup_time.startup_prior(0.0, 0.0, 16e9, 1e9, 1e9), [("load", 50.0)])
    placed_s = round(2 * learned.overdue_s)
    state = pod_startup.startup_state(pod(pod_condition("PodScheduled", "True", placed_s)), None)
    for elapsed_s, expected in ((1.0, startup_time.Eta), (learned.overdue_s + 1.0, startup_time.Overdue)):
        assert isinstance(startup_time.eta(learned, state, CREATED_S + placed_s + elapsed_s), expected)


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
    assert (state.phase, state.created_s, state.phase_since_s) == ("restart", CREATED_S + 3000, CREATED_S + 3000)
    assert state.restart_since_s == CREATED_S + 3000
    assert pod_startup.phase_durations(pod(scheduled, pod_condition("Ready", "True", 3020), running=12), whole) == []


def restarted(ended: int | None, running: int | None, *, ready: int | None = None, unready: int = 3000) -> Object:
    """A pod whose engine's container ended at `ended`, with one that runs since `running`. A sidecar never ended."""
    change = pod_condition("Ready", "False", unready) if ready is None else pod_condition("Ready", "True", ready)
    made = pod(pod_condition("PodScheduled", "True", 2), change, running=running)
    terminated = {"exitCode": 137} if ended is None else {"exitCode": 137, "finishedAt": at(ended)}
    engine = {"name": "engine", "lastState": {"terminated": terminated}, **made["status"]["containerStatuses"][0]}
    made["status"]["containerStatuses"] = [{"name": "proxy", "state": {"running": {"startedAt": at(5)}}}, engine]
    return made


LOADING = startup_progress("load", ("launch", 1.0), ("import", 5.0))
WHOLE = startup_progress(None, ("launch", 1.0), ("load", 20.0))


@pytest.mark.parametrize(
    ("at_hand", "progress", "expected"),
    [
        (restarted(3001, None), None, ("restart", 3001, 3001)),  # back-off of the kubelet
        (restarted(3001, 3003), None, ("launch", 3003, 3001)),
        (restarted(3001, 3003), LOADING, ("load", 3009, 3001)),
        (restarted(3001, 3003), WHOLE, ("probe", 3024, 3001)),
        (restarted(40, 45, unready=0), LOADING, ("load", 51, 40)),  # ended in its first start
        (restarted(40, 45), WHOLE, ("restart", 3000, 3000)),  # hangs, long after its last restart
        (restarted(40, 45), None, ("restart", 3000, 3000)),
        (restarted(None, None), None, ("restart", 3000, 3000)),
        (restarted(2990, 2999), LOADING, ("load", 3005, 2990)),
    ],
)
def test_restart_state_has_times_of_the_container(
    at_hand: Object, progress: StartupProgress | None, expected: tuple[str, int, int]
) -> None:
    state = pod_startup.startup_state(at_hand, progress)
    assert state.phase_since_s is not None
    assert state.restart_since_s is not None
    assert (state.phase, state.phase_since_s - CREATED_S, state.restart_since_s - CREATED_S) == expected


def test_new_pod_waits_for_its_probe_after_the_last_phase() -> None:
    late = pod(pod_condition("PodScheduled", "True", 2), pod_condition("Ready", "False", 2), running=12)
    state = pod_startup.startup_state(late, WHOLE)
    assert (state.phase, state.created_s, state.phase_since_s) == ("probe", CREATED_S + 2, CREATED_S + 33)
    assert state.restart_since_s is None


def test_phase_durations_of_restart_begin_at_its_end() -> None:
    again = restarted(3001, 3003, ready=3026)
    expected = [("restart", 2.0), ("launch", 1.0), ("load", 20.0), ("probe", 2.0)]
    assert pod_startup.phase_durations(again, WHOLE) == expected
    assert pod_startup.phase_durations(again, None) == [("restart", 2.0), ("engine", 23.0)]
    assert pod_startup.has_restarted(again)
    assert pod_startup.phase_durations(restarted(None, 3003, ready=3026), WHOLE) == []
    assert pod_startup.phase_durations(restarted(3001, 3003, ready=3300), WHOLE) == []  # unready for a time since


def test_ended_sidecar_is_no_restart_of_the_engine() -> None:
    ready = pod(pod_condition("PodScheduled", "True", 2), pod_condition("Ready", "True", 40), running=12)
    engine = {"name": "engine", **ready["status"]["containerStatuses"][0]}
    ended = {"name": "proxy", "state": {"running": {"startedAt": at(30)}}, "lastState": {"terminated": {"exitCode": 1}}}
    ready["status"]["containerStatuses"] = [ended, engine]
    assert not pod_startup.has_restarted(ready)
    assert pod_startup.phase_durations(ready, None) == [("schedule", 2.0), ("pull", 10.0), ("engine", 28.0)]


def test_phase_durations_invalid_times_return_empty() -> None:
    backwards = pod(pod_condition("PodScheduled", "True", 30), pod_condition("Ready", "True", 40), running=12)
    assert pod_startup.phase_durations(backwards, None) == []
    assert pod_startup.phase_durations(pod(pod_condition("PodScheduled", "True", 2)), None) == []
    assert pod_startup.phase_durations(pod(pod_condition("Ready", "True", 40), running=3), None) == []
