"""Who is not heard is told when it is news, with what it means; what has just begun is no silence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from plimsoll.api.conditions import Condition, Reason, Type, merge
from plimsoll.api.events import EventReason
from plimsoll.controllers import status
from plimsoll.controllers.hearing import BEHIND_SECONDS, UNHEARD_SECONDS
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.ports import GatewayReading, Taken
from plimsoll.core.signals.intervals import GAP_S
from tests import builders
from tests.controllers.test_autoscale import NOW_S, PROMISED, World, arrivals, engine, ready

KEY = ("team", "chat")
Object = dict[str, Any]


def serving(**spec: Any) -> tuple[World, Object]:
    """One replica, ready."""
    parent = builders.service(**{**PROMISED, **spec})
    world = World(parent)
    world.store.put(builders.deployment(parent, "serve", replicas=1, ready=1))
    world.store.put(ready(parent, "serve"))
    return world, parent


def second(
    world: World, at: float, gateway: bool = True, answers: bool = True, taken: Taken | None = None
) -> list[Condition]:
    """One tick, with a word of the gateway and, every fifth, of the engine; returns the conditions."""
    if gateway:
        reading = replace(arrivals(2.0 * at), taken=taken)
        world.readings = (GatewayReading("gw-1", NOW_S + at, "a", {"/".join(KEY): reading}),)
    if answers and at % 5 == 0:
        world.scaler.hear_engine(KEY, Role.SERVE, engine(2.0 * at, NOW_S + at))
    world.settle(world.scaler.decide(NOW_S + at))
    report = world.scaler.report(KEY)
    return [] if report is None else list(report.conditions)


def told(world: World, kind: Type) -> Condition:
    report = world.scaler.report(KEY)
    assert report is not None
    return next(c for c in report.conditions if c.type is kind)


def test_an_engine_that_has_just_become_ready_has_not_fallen_silent() -> None:
    world, _ = serving()
    for at in range(1, 5):
        second(world, at, answers=False)
        assert told(world, Type.METRICS_AVAILABLE).holds, f"lost after {at} s"


def test_one_that_never_says_a_word_is_told() -> None:
    world, _ = serving()
    for at in range(1, 10):
        second(world, at, answers=False)
    assert told(world, Type.METRICS_AVAILABLE).reason is Reason.METRICS_MISSING


def test_engines_that_fall_silent_are_told_though_nothing_else_changes_and_so_is_their_return() -> None:
    world, _ = serving()
    for at in range(120):
        second(world, at)
    seen = [told(world, Type.METRICS_AVAILABLE).holds]
    lost_s = None
    for at in range(120, 180):
        second(world, at, answers=False)
        if not told(world, Type.METRICS_AVAILABLE).holds and lost_s is None:
            lost_s = at - 115.0
    for at in range(180, 186):
        second(world, at)
    seen.append(told(world, Type.METRICS_AVAILABLE).holds)
    assert lost_s is not None
    assert lost_s <= GAP_S + UNHEARD_SECONDS + 2.0
    assert seen == [True, True]


def test_engines_that_only_prometheus_hears_are_told_at_once_with_where_to_look() -> None:
    world, _ = serving()
    for at in range(60):
        second(world, at)
    assert told(world, Type.METRICS_AVAILABLE).message == "gateways and engines answer"
    world.second_hand = ("serve",)
    second(world, 60)
    found = told(world, Type.METRICS_AVAILABLE)
    assert (found.holds, found.reason) == (True, Reason.METRICS_FRESH)
    assert found.message.startswith("gateways answer; engines of serve do not answer the operator, Prometheus tells")
    world.second_hand = ()
    second(world, 61)
    assert told(world, Type.METRICS_AVAILABLE).message == "gateways and engines answer"


def test_gateways_that_fall_silent_leave_scaling_inactive_in_the_same_words_as_the_decision() -> None:
    world, _ = serving()
    for at in range(120):
        second(world, at)
    assert told(world, Type.SCALING_ACTIVE).holds
    for at in range(120, 165):
        second(world, at, gateway=False)
    active = told(world, Type.SCALING_ACTIVE)
    assert (active.holds, active.reason) == (False, Reason.DEMAND_UNKNOWN)
    assert "the last sample is" in active.message
    assert told(world, Type.METRICS_AVAILABLE).reason is Reason.METRICS_MISSING


def test_a_pod_that_fits_on_no_node_limits_scaling_in_the_schedulers_words() -> None:
    words = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
    world, parent = serving()
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
    pod = builders.pod(parent, "serve", "q", conditions=[refused])
    pod["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    world.store.put(builders.deployment(parent, "serve", replicas=2, ready=1))
    world.store.put(pod)
    for at in range(30):
        second(world, at)
    found = told(world, Type.SCALING_LIMITED)
    assert (found.holds, found.reason) == (True, Reason.UNSCHEDULABLE)
    assert found.message.startswith("serve: ")
    assert words in found.message


# ---------------------------------------------------------------- gateways that do not go by what they are told

GATED, UNREAD = Taken("7", True), Taken("7", False, "status.admission: a model of version 4, not of version 3")


def admitting(world: World, start: int, seconds: int, taken: Taken | None) -> Condition:
    """What the condition is after so many seconds in which the gateway goes by this."""
    found: list[Condition] = []
    for at in range(start, start + seconds):
        found = second(world, at, taken=taken)
    return next(c for c in found if c.type is Type.ADMITTING)


def versioned(version: str = "7") -> World:
    world, parent = serving()
    world.store.put({**parent, "metadata": {**parent["metadata"], "resourceVersion": version}})
    return world


def test_a_gateway_that_cannot_read_what_it_is_told_is_told_with_the_remedy_until_it_can() -> None:
    world = versioned()
    assert admitting(world, 0, 60, GATED).holds
    before = admitting(world, 60, int(BEHIND_SECONDS), UNREAD)
    assert (before.holds, before.reason) == (True, Reason.LETTING_ALL_IN)
    found = admitting(world, 60 + int(BEHIND_SECONDS), 2, UNREAD)
    assert (found.holds, found.reason) == (None, Reason.GATEWAYS_BEHIND)
    assert found.message == (
        "of 1 gateways 1 lets in whatever comes, since it cannot read status.admission: a model of version 4, not of"
        " version 3: gateways and operator are to be of one release (helm upgrade)"
    )
    after = admitting(world, 100, 2, GATED)
    assert (after.holds, after.reason) == (True, Reason.LETTING_ALL_IN)
    told = [merge([], (one,), 1, "2026-01-01T00:00:00Z") for one in (before, found)]
    assert [event.reason for event in status.events(told[0], (found,))] == [EventReason.GATEWAYS_BEHIND]
    assert [event.reason for event in status.events(told[1], (after,))] == [EventReason.GATEWAYS_IN_LINE]
    assert status.events(told[1], (found,)) == []


def test_a_gateway_without_a_gate_is_no_news_before_there_is_a_model_nor_while_one_is_on_its_way() -> None:
    """Engines tell what they are after a while; from then on a gateway has its time."""
    world = versioned()
    none = Taken("7", False)
    assert admitting(world, 0, 30, none).holds
    assert "1 lets in whatever comes, though status.admission is there" in admitting(world, 30, 200, none).message


def test_a_gateway_that_stays_at_an_older_version_is_told_and_one_that_follows_is_not() -> None:
    world = versioned("9")
    for at in range(120):
        now = second(world, at, taken=Taken(str(at // 20), True))  # always some versions behind, yet coming after
    assert next(c for c in now if c.type is Type.ADMITTING).holds
    stuck = admitting(world, 120, int(BEHIND_SECONDS) + 2, Taken("6", True))
    assert stuck.reason is Reason.GATEWAYS_BEHIND
    assert "has an older version of this service than the operator" in stuck.message
    assert admitting(world, 200, 60, Taken("12", True)).holds  # it is the operator that is behind


def test_gateways_that_are_gone_or_too_old_to_tell_are_not_blamed() -> None:
    world = versioned()
    assert admitting(world, 0, 120, None).holds
    admitting(world, 120, 40, UNREAD)
    for at in range(160, 164):
        world.readings = ()
        world.gateways = ("gw-2",)
        now = second(world, at, gateway=False)
    assert next(c for c in now if c.type is Type.ADMITTING).reason is not Reason.GATEWAYS_BEHIND
