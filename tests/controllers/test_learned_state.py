"""A new process goes on where the one before it ended: what was learned, decisions, advice."""

from __future__ import annotations

import base64
import json
import zlib

import orjson
import pytest

from plimsoll.controllers.autoscale import learned_state
from plimsoll.controllers.reconcile.service_status import StatusInputs, scaling_fields
from tests import builders
from tests.controllers.test_autoscale import ABOUT, NOW_S, PROMISED, Object, World, ready

KEY = ("team", "chat")


def test_checkpoint_in_report_is_restored_after_restart() -> None:
    parent = builders.service(**PROMISED)
    world = World.with_engine(parent)
    world.load(("team", "chat"), 40.0, 60, NOW_S)
    report = world.scaler.report(("team", "chat"))
    assert report is not None
    again = World(parent)
    again.checkpoint = report.checkpoint
    again.store.put(builders.deployment(parent, "serve", replicas=5, ready=1))
    assert again.scaler.decide(NOW_S + 100.0) == [], "5 are ordered, and a fresh process knows no better"
    document = again.scaler.explain(("team", "chat"))
    assert document is not None
    assert document["tiers"]["serve"]["engine"]["accelerator"] == ABOUT.accelerator, "no engine has told this process"


def shown(world: World, parent: Object) -> Object:
    """The part of the status that shows decisions."""
    report = world.scaler.report(("team", "chat"))
    assert report is not None
    return scaling_fields(StatusInputs(service_object=parent, scaling_report=report), {})


def scaled_up_world(parent: Object) -> World:
    world = World.with_engine(parent)
    world.load(KEY, 40.0, 60, NOW_S)
    return world


def restarted(world: World, parent: Object, status: Object) -> World:
    """A new process: it knows the objects and the checkpoint."""
    report, again = world.scaler.report(KEY), World({**parent, "status": status})
    assert report is not None
    again.checkpoint = report.checkpoint
    again.store.put(world.store.get("Deployment", ("team", "chat-serve")) or {})
    again.store.put(ready(parent, "serve"))
    return again


def decided_at(world: World) -> list[str]:
    """The times of the decisions that `explain` shows, that of the last tick first."""
    document = world.scaler.explain(KEY)
    assert document is not None
    return [one["at"] for one in document["decisions"]]


def test_earlier_decisions_are_shown_after_restart() -> None:
    parent = builders.service(**PROMISED)
    world = scaled_up_world(parent)
    status, before = shown(world, parent), decided_at(world)[1:]
    assert len(before) > 1
    again = restarted(world, parent, status)
    again.scaler.decide(NOW_S + 100.0)
    assert decided_at(again) == ["2027-01-15T08:01:40Z", *before], "its own, of this tick, and those of the other"
    document = again.scaler.explain(KEY)
    assert document is not None
    again.scaler.decide(NOW_S + 120.0)
    assert decided_at(again)[-len(before) :] == before, "nothing has changed since"
    more = {**PROMISED, "tiers": {"serve": {"minReplicas": 20, "maxReplicas": 20}}}
    again.store.put({**builders.service(**more), "status": status})
    again.scaler.decide(NOW_S + 121.0)
    assert decided_at(again)[0] == "2027-01-15T08:02:01Z"
    assert decided_at(again)[-len(before) :] == before


def test_unchanged_recommendation_over_restarts_is_one_decision() -> None:
    tiers = {"prefill": {"minReplicas": 2, "maxReplicas": 9}, "decode": {"minReplicas": 1, "maxReplicas": 9}}
    parent = builders.service(**{**PROMISED, "tiers": tiers}, scaling={"mode": "Recommend"})
    checkpoint: str | None = None
    for process in range(3):
        world = World(parent)
        world.checkpoint = checkpoint
        for tier in tiers:
            world.store.put(builders.deployment(parent, tier, replicas=1, ready=1))
            world.store.put(ready(parent, tier))
        for second in (0.0, 20.0):
            world.scaler.decide(NOW_S + 100.0 * process + second)
        report = world.scaler.report(KEY)
        assert report is not None
        checkpoint = report.checkpoint
        (decision,) = world.scaler._entries[KEY].service_state.decisions
        assert decision.decision.tiers["prefill"].recommended == 2


@pytest.mark.parametrize("value", [-1e308, 1e308, 1e29, -1e19, 2**63])
def test_huge_number_in_the_checkpoint_stops_nothing(value: float) -> None:
    parent = builders.service(**PROMISED)
    world = scaled_up_world(parent)
    report = world.scaler.report(KEY)
    assert report is not None
    assert report.checkpoint is not None
    stored = orjson.loads(zlib.decompress(base64.b64decode(report.checkpoint)))
    tier = next(iter(stored["tiers"].values()))
    tier["demand"]["season"][0] = value
    again = restarted(world, parent, {})
    again.checkpoint = base64.b64encode(zlib.compress(json.dumps(stored).encode())).decode()
    again.load(KEY, 40.0, 5, NOW_S + 100.0)
    state = again.scaler._entries[KEY].service_state
    assert orjson.loads(zlib.decompress(base64.b64decode(learned_state.encode(state))))["version"] == 1


@pytest.mark.parametrize(
    "stored",
    [
        None,
        "what",
        {"time": "yesterday", "tiers": {}},
        {"time": 5, "tiers": {}},
        {"time": "2026-01-01T00:00:00Z", "tiers": 4},
        {"time": "2026-01-01T00:00:00Z", "tiers": {"serve": {"from": None, "to": 3, "reason": ""}}},
        {"time": "2026-01-01T00:00:00Z"},
        {"time": "2026-01-01T00:00:00Z", "serve": "from 1 to 3"},
        {"time": "2026-01-01T00:00:00Z", "serve": f"1 -> {'9' * 5000}: why"},
        {"time": "yesterday", "serve": "1 -> 3: why"},
    ],
)
def test_unreadable_stored_decision_is_dropped(stored: object) -> None:
    kept = {"time": "2026-01-01T00:00:00Z", "tiers": {"serve": {"from": 1, "to": 3, "reason": "{braces} stay"}}}
    for decisions, expected in (([kept, stored], ["{braces} stay"]), (stored, [])):
        world = World(builders.service(**PROMISED))
        state = {"version": 1, "decisions": decisions}
        world.checkpoint = base64.b64encode(zlib.compress(orjson.dumps(state))).decode()
        world.scaler.decide(NOW_S)
        document = world.scaler.explain(KEY)
        assert document is not None
        assert [one["tiers"]["serve"]["reason"] for one in document["decisions"][1:]] == expected
