"""Events about recommended counts that the fleet's owner sets: one per change, bounded, and never repeated."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from plimsoll.api.events import MAX_EVENT_MESSAGE_CHARS, Event
from plimsoll.api.v1alpha1 import parse
from plimsoll.controllers.autoscale.autoscaler import scaling_spec
from plimsoll.controllers.autoscale.recommendation_events import INTERVAL_SECONDS, RecommendationEvents
from tests.controllers.adopted_fleet import KEY, AdoptedFleet
from tests.controllers.test_autoscale import NOW_S

AUTO = {"spec.scaling.mode": "Auto"}


def messages(fleet: AdoptedFleet) -> list[str]:
    found = [event for event in fleet.events if event["reason"] == "Recommended"]
    assert all(event["type"] == "Normal" and len(event["message"]) <= MAX_EVENT_MESSAGE_CHARS for event in found)
    assert len({event["metadata"]["name"] for event in found}) == len(found)
    return [str(event["message"]) for event in found]


async def test_changed_recommendation_has_an_event_with_its_reason() -> None:
    fleet = AdoptedFleet(rate=40.0)
    await fleet.run(60)
    head, reason, *_ = messages(fleet)[0].split("; ")
    assert head.startswith("serve: ")
    assert head.endswith(" replicas recommended, 1 set")
    assert "mode is" not in "; ".join(messages(fleet))
    assert reason
    assert fleet.writes == []


async def test_recommendation_that_agrees_with_the_fleet_has_none() -> None:
    fleet = AdoptedFleet(rate=1.0)
    await fleet.run(180)
    assert messages(fleet) == []


async def test_steady_recommendation_is_announced_once() -> None:
    fleet = AdoptedFleet(rate=40.0)
    await fleet.run(150)
    count = len(messages(fleet))
    await fleet.run(150)
    assert len(messages(fleet)) == count >= 1


async def test_changing_recommendation_has_one_event_a_minute() -> None:
    """The load is high and low in turns of 20 s: many counts, and a bounded number of Events."""
    fleet, counts = AdoptedFleet(rate=5.0), set[int]()
    for turn in range(24):
        fleet.rate = 90.0 if turn % 2 else 0.0
        await fleet.run(20)
        counts.add(fleet.needed())
    assert len(counts) > 1
    assert 1 <= len(messages(fleet)) <= 24 * 20 / INTERVAL_SECONDS + 1


async def test_yielded_count_has_an_event_that_names_the_writer() -> None:
    fleet = AdoptedFleet(rate=40.0, **AUTO)
    ref = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "llm"}
    fleet.autoscalers = [{"metadata": {"name": "web"}, "spec": {"scaleTargetRef": ref}}]
    await fleet.run(60)
    assert fleet.writes == []
    assert "Deployment llm is scaled by HorizontalPodAutoscaler web" in messages(fleet)[0]


@pytest.mark.parametrize("edits", [AUTO, {"spec.scaling.mode": "Off"}, {"spec.scaling.paused": True}])
async def test_other_modes_have_none(edits: dict[str, Any]) -> None:
    fleet = AdoptedFleet(rate=40.0, **edits)
    await fleet.run(90)
    assert messages(fleet) == []


async def test_restart_does_not_repeat_the_event() -> None:
    fleet = AdoptedFleet(rate=28.0)
    await fleet.run(150)
    before = messages(fleet)
    report = fleet.scaler.report(KEY)
    assert report is not None
    fleet.checkpoint = report.checkpoint
    fleet.start_operator()
    await fleet.run(60)
    assert messages(fleet) == before != []


async def test_slow_api_server_has_one_event_of_a_tier_to_write() -> None:
    fleet, begun, may_end = AdoptedFleet(rate=40.0), list[Event](), asyncio.Event()
    await fleet.run(60)
    state, spec = fleet.scaler._entries[KEY].service_state, scaling_spec(parse(fleet.object), NOW_S)

    async def record(_: Any, event: Event) -> None:
        begun.append(event)
        await may_end.wait()

    events = RecommendationEvents(record)

    async def change(now_s: float) -> None:
        events.update(fleet.object, state, spec, {}, None, now_s)
        events.submit()
        await asyncio.sleep(0)

    for minute in range(3):
        await change(INTERVAL_SECONDS * minute)
    assert len(begun) == 1
    may_end.set()
    await events.finish()
    await change(4 * INTERVAL_SECONDS)
    assert len(begun) == 2
