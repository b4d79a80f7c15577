"""What re-tuning is fed from a service's metrics and Deployment, and where the chunk that it wants is reported."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from plimsoll.api import labels
from plimsoll.api.conditions import ConditionReason
from plimsoll.api.v1alpha1 import parse
from plimsoll.core.autoscaling.retuning_state import RetuningState
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.planning import retuning
from plimsoll.resources import engine_pod, objects
from plimsoll.resources.engine_tuning import MeasuredChunk
from plimsoll.telemetry import operator_metrics
from tests import builders
from tests.controllers.test_autoscale import NOW_S, World

Object = dict[str, Any]
KEY = ("team", "chat")
SPEC: Object = {
    "model": {"uri": "hf://example/unknown"},
    "engine": {"tuning": "Auto"},
    "slo": {"ttft": "2s", "tpot": "50ms", "itl": "40ms"},
    "tiers": {"serve": {"minReplicas": 1, "maxReplicas": 1}},
}


def loaded(seconds: int = 200, updated: int = 1, **spec: Any) -> tuple[World, ServiceState]:
    """A service after some seconds of load, and what is known of it. updated: replicas with the present template."""
    parent = builders.service(**{**SPEC, **spec})
    world = World.with_engine(parent)
    deployment = world.store.get("Deployment", ("team", "chat-serve"))
    assert deployment is not None
    template = engine_pod.pod_template(parse(parent), "serve", builders.PLATFORM)
    status = {**deployment["status"], "updatedReplicas": updated, "replicas": 1, "observedGeneration": 1}
    meta = {**deployment["metadata"], "generation": 1}
    world.store.put({**deployment, "metadata": meta, "spec": {"replicas": 1, "template": template}, "status": status})
    world.load(KEY, 4.0, seconds, NOW_S)
    state = world.scaler._state_of(KEY)
    assert state is not None
    return world, state


def test_minutes_have_load_and_slo_of_settled_engines() -> None:
    _, state = loaded()
    assert state.retuning.own == 2048
    assert (state.retuning.hour.minutes, state.retuning.hour.met) == (3, 3)
    assert state.retuning.hour.load_per_s == pytest.approx(4.0, rel=0.1)
    assert state.retuning.revision == objects.revision_name(parse(builders.service(**SPEC)), "serve")


def test_minutes_of_a_rollout_do_not_count() -> None:
    _, state = loaded(updated=0)
    assert (state.retuning.hour.minutes, state.retuning.own) == (0, 0)


@pytest.mark.parametrize(
    "spec",
    [
        {"engine": {}},
        {"engine": {"tuning": "Off"}},
        {"engine": {"tuning": "Auto", "args": ["--max-num-batched-tokens=4096"]}},
        {"scaling": {"mode": "Recommend"}},
        {"scaling": {"paused": True}},
    ],
)
def test_service_that_may_not_change_is_not_measured(spec: Object) -> None:
    _, state = loaded(70, **spec)
    assert state.retuning == RetuningState()


def test_wanted_chunk_is_reported_until_engines_have_it() -> None:
    world, state = loaded()
    report = world.scaler.report(KEY)
    assert report is not None
    assert report.measured_chunk is None
    due = replace(state.retuning, wanted=2048, reason="measured", changed_s=NOW_S, former=0)
    state.retuning = due
    world.load(KEY, 4.0, 2, NOW_S + 200)
    report = world.scaler.report(KEY)
    assert report is not None
    assert report.measured_chunk == MeasuredChunk(due.revision, 2048, "measured", NOW_S)
    explained = world.scaler.explain(KEY)
    assert explained is not None
    assert explained["tiers"]["serve"]["retuning"] == "to be rolled out: measured"


@pytest.mark.parametrize("scaling", [{"mode": "Recommend"}, {"paused": True}])
def test_stored_change_waits_while_paused(scaling: Object) -> None:
    world, state = loaded(2, scaling=scaling)
    state.retuning = RetuningState("chat-serve-1", wanted=2048, changed_s=NOW_S, reason="measured")
    world.load(KEY, 4.0, 20, NOW_S + 2)
    report = world.scaler.report(KEY)
    assert report is not None
    assert report.measured_chunk is None


def test_failed_retuning_does_not_stop_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(retuning, "update", fail)
    world, state = loaded(120)
    report = world.scaler.report(KEY)
    assert report is not None
    assert ConditionReason.DECISION_FAILED not in {one.reason for one in report.conditions}
    assert (state.retuning.wanted, state.retuning.hours) == (None, ())


def test_other_services_change_after_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one in twenty services changes at a time, and at least one may."""
    turns = list[bool]()

    def update(state: RetuningState, minute: retuning.Minute, *_: float) -> RetuningState:
        turns.append(minute.has_turn)
        return replace(state, wanted=2048 if minute.has_turn else None, changed_s=NOW_S)

    monkeypatch.setattr(retuning, "update", update)
    monkeypatch.setattr(retuning, "is_due", lambda *_: True)
    world, _ = loaded(2)
    other = builders.service("other", **SPEC)
    deployment = world.store.get("Deployment", (*KEY[:1], "chat-serve"))
    assert deployment is not None
    made = builders.deployment(other, "serve", replicas=1, ready=1)
    world.store.put(other)
    world.store.put({**made, "spec": deployment["spec"]})
    turns.clear()
    world.load(KEY, 4.0, 1, NOW_S + 2)
    assert turns == [True, False]


@pytest.mark.parametrize(
    ("reason", "updated", "expected"), [("NewReplicaSetAvailable", 2, None), ("ReplicaSetUpdated", 1, 2048)]
)
def test_change_ends_when_all_engines_are_replaced(reason: str, updated: int, expected: int | None) -> None:
    """One of two engines is not ready, for more than two hours after the change."""
    world, state = loaded()
    live = world.store.get("Deployment", (*KEY[:1], "chat-serve"))
    assert live is not None
    progressing = {
        "type": "Progressing",
        "status": "True",
        "reason": reason,
        "lastUpdateTime": datetime.fromtimestamp(NOW_S, UTC).isoformat().replace("+00:00", "Z"),
    }
    status = {**live["status"], "replicas": 2, "updatedReplicas": updated, "conditions": [progressing]}
    meta = {**live["metadata"], "labels": {**live["metadata"]["labels"], labels.MEASURED_CHUNK: "2048"}}
    world.store.put({**live, "metadata": meta, "spec": {**live["spec"], "replicas": 2}, "status": status})
    state.retuning = replace(state.retuning, wanted=2048, preferred=2048, changed_s=NOW_S - 8000.0)
    state_before = state.retuning
    world.settle = lambda due: None  # type: ignore[method-assign]
    world.load(KEY, 4.0, 70, NOW_S + 200)
    assert state.retuning.minute_s > state_before.minute_s
    assert (state.retuning.wanted, state.retuning.is_undo) == (expected, False)


def test_start_of_a_rollout_is_counted() -> None:
    world, state = loaded()
    engines_late = replace(state.retuning, wanted=2048, preferred=2048, changed_s=NOW_S - 8000.0, before=())
    state.retuning = engines_late
    world.load(KEY, 4.0, 70, NOW_S + 200)
    series = {"service": "team/chat", "outcome": "undone"}
    assert operator_metrics.OPERATOR.get_sample_value("plimsoll_operator_engine_retunings_total", series) == 1
    assert (state.retuning.wanted, state.retuning.is_undo) == (0, True)
    operator_metrics.remove_scaling_series("team/chat")
    assert operator_metrics.OPERATOR.get_sample_value("plimsoll_operator_engine_retunings_total", series) is None
