"""A new process goes on where the one before it ended: what was learned, decisions, advice."""

from __future__ import annotations

import pytest

from plimsoll.controllers.reconcile.service_status import StatusInputs, scaling_fields
from tests import builders
from tests.controllers.test_autoscale import ABOUT, NOW_S, PROMISED, Object, World, ready


def test_checkpoint_in_report_is_restored_after_restart() -> None:
    parent = builders.service(**PROMISED)
    world = World(parent)
    world.store.put(builders.deployment(parent, "serve", replicas=1, ready=1))
    world.store.put(ready(parent, "serve"))
    world.load(("team", "chat"), 40.0, 60, NOW_S)
    report = world.scaler.report(("team", "chat"))
    assert report is not None
    again = World(parent)
    again.checkpoint = report.checkpoint
    again.store.put(builders.deployment(parent, "serve", replicas=5, ready=1))
    assert again.scaler.decide(NOW_S + 100.0) == [], "5 are ordered, and a fresh process knows no better"
    told = again.scaler.explain(("team", "chat"))
    assert told is not None
    assert told["tiers"]["serve"]["engine"]["accelerator"] == ABOUT.accelerator, "no engine has told this process"


def shown(world: World, parent: Object) -> Object:
    """The part of the status that shows decisions."""
    report = world.scaler.report(("team", "chat"))
    assert report is not None
    return scaling_fields(StatusInputs(service_object=parent, scaling_report=report), {})


def test_earlier_decisions_are_shown_after_restart() -> None:
    parent = builders.service(**PROMISED)
    world, key = World(parent), ("team", "chat")
    world.store.put(builders.deployment(parent, "serve", replicas=1, ready=1))
    world.store.put(ready(parent, "serve"))
    world.load(key, 40.0, 60, NOW_S)
    status = shown(world, parent)
    again = World({**parent, "status": status})
    again.store.put(world.store.get("Deployment", ("team", "chat-serve")) or {})
    again.store.put(ready(parent, "serve"))
    again.scaler.decide(NOW_S + 100.0)
    told = again.scaler.explain(key)
    assert told is not None
    first, *before = told["decisions"]
    assert first["at"] == "2027-01-15T08:01:40Z", "its own, of this tick"
    assert [one["at"] for one in before] == [one["time"] for one in [status["lastDecision"], *status["decisions"]]]
    assert before[0]["tiers"]["serve"]["why"] == status["lastDecision"]["tiers"]["serve"]["why"]
    again.scaler.decide(NOW_S + 120.0)
    after = shown(again, parent)
    assert after["lastDecision"] == status["lastDecision"], "nothing has changed since"
    assert after["decisions"] == status["decisions"]
    more = {**PROMISED, "tiers": {"serve": {"minReplicas": 20, "maxReplicas": 20}}}
    again.store.put({**builders.service(**more), "status": status})
    again.scaler.decide(NOW_S + 121.0)
    grown = shown(again, parent)
    assert grown["lastDecision"]["time"] > status["lastDecision"]["time"]
    assert status["lastDecision"] in grown["decisions"]


def test_unchanged_recommendation_over_restarts_is_one_decision() -> None:
    tiers = {"prefill": {"minReplicas": 2, "maxReplicas": 9}, "decode": {"minReplicas": 1, "maxReplicas": 9}}
    parent = builders.service(**{**PROMISED, "tiers": tiers}, scaling={"mode": "Recommend"})
    status: Object = {}
    for process in range(3):
        world = World({**parent, "status": status})
        for tier in tiers:
            world.store.put(builders.deployment(parent, tier, replicas=1, ready=1))
            world.store.put(ready(parent, tier))
        for second in (0.0, 20.0):
            world.scaler.decide(NOW_S + 100.0 * process + second)
        status = shown(world, parent)
        assert status["lastDecision"]["tiers"]["prefill"]["to"] == 2
        assert "decisions" not in status


@pytest.mark.parametrize(
    "status",
    [
        {"lastDecision": None, "decisions": 3},
        {"lastDecision": "what", "decisions": ["ever"]},
        {"lastDecision": {"time": "yesterday", "tiers": {}}},
        {"lastDecision": {"time": 5, "tiers": {}}},
        {"lastDecision": {"time": "2026-01-01T00:00:00Z", "tiers": 4}},
        {"lastDecision": {"time": "2026-01-01T00:00:00Z", "tiers": {"serve": {"from": None, "to": 3, "why": ""}}}},
        {"lastDecision": {"time": "2026-01-01T00:00:00Z"}},
    ],
)
def test_unreadable_stored_decision_is_dropped(status: Object) -> None:
    kept = {"time": "2026-01-01T00:00:00Z", "tiers": {"serve": {"from": 1, "to": 3, "why": "{braces} stay"}}}
    shown_before = status["decisions"] if isinstance(status.get("decisions"), int) else [kept]
    world = World({**builders.service(**PROMISED), "status": {**status, "decisions": shown_before}})
    world.scaler.decide(NOW_S)
    told = world.scaler.explain(("team", "chat"))
    assert told is not None
    assert [one["tiers"]["serve"]["why"] for one in told["decisions"][1:]] == (
        ["{braces} stay"] if shown_before == [kept] else []
    )
