"""Who is not heard is told when it is news, with what it means; what has just begun is no silence."""

from __future__ import annotations

from typing import Any

from plimsoll.api.conditions import Condition, Reason, Type
from plimsoll.controllers.autoscale import UNHEARD_SECONDS
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.ports import GatewayReading
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


def second(world: World, at: float, gateway: bool = True, answers: bool = True) -> None:
    """One tick, with a word of the gateway and, every fifth, of the engine."""
    if gateway:
        world.readings = (GatewayReading("gw-1", NOW_S + at, "a", {"/".join(KEY): arrivals(2.0 * at)}),)
    if answers and at % 5 == 0:
        world.scaler.hear_engine(KEY, Role.SERVE, engine(2.0 * at, NOW_S + at))
    world.settle(world.scaler.decide(NOW_S + at))


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
