"""ScalingLimited is about a limit: figures that follow the load are no news."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from plimsoll.api import conditions
from plimsoll.api.conditions import Condition, ConditionReason
from plimsoll.api.events import Event, EventReason
from plimsoll.controllers.autoscale.limit_status import LIMIT_RECOVERY_SECONDS, LimitTracker
from plimsoll.controllers.reconcile import condition_events, service_status
from plimsoll.controllers.reconcile.service_status import StatusInputs
from plimsoll.core.autoscaling.decision_state import DecisionState
from plimsoll.core.autoscaling.scaling_decision import LimitNote, ScalingDecision, ScalingLimit, TierDecision
from plimsoll.core.ports import GatewayReading
from plimsoll.core.types import Role
from tests import builders
from tests.controllers.test_autoscale import NOW_S, PROMISED, World, arrivals, engine, ready

Object = dict[str, Any]
KEY = ("team", "chat")
MAX_9 = LimitNote(ScalingLimit.MAX, "maxReplicas is 9", "12 needed")
RATE = LimitNote(ScalingLimit.RATE, "scaleUp allows 2 more in 60 s", "12 needed")


def decision(*notes: LimitNote, tier: str = "decode") -> ScalingDecision:
    return ScalingDecision({tier: TierDecision(9, (), limit_notes=notes)}, tier, DecisionState())


class StatusWriter:
    """A service's status as the reconciler writes it: the Events, and the number of writes."""

    def __init__(self) -> None:
        self.conditions: list[Object] = []
        self.events: list[Event] = []
        self.writes = 0

    def write(self, stated: tuple[Condition, ...], now: str) -> None:
        self.events += condition_events.changed_events(self.conditions, stated, {}, "7")
        merged = conditions.merge(self.conditions, stated, now)
        self.writes += merged != self.conditions
        self.conditions = merged

    def named(self, reason: EventReason) -> list[str]:
        return [event.message for event in self.events if event.reason is reason]


@pytest.mark.parametrize("swing", [0.3, 0.5], ids=["always above", "crosses the limit"])
def test_limited_service_with_changing_demand_emits_one_event(swing: float) -> None:
    parent = builders.service(**PROMISED | {"tiers": {"serve": {"minReplicas": 1, "maxReplicas": 2}}})
    world, writer = World(parent), StatusWriter()
    world.store.put(builders.deployment(parent, "serve", replicas=2, ready=2))
    for name in ("a", "b"):
        pod = ready(parent, "serve")
        pod["metadata"] |= {"name": name, "uid": name}
        world.store.put(pod)
    arrived, needed = 0.0, set()
    for second in range(420):
        now_s = NOW_S + second
        arrived += 60.0 * (1.0 + swing * math.sin(second / 7.0))
        world.readings = (GatewayReading("gw-1", now_s, "a", {"team/chat": arrivals(arrived)}),)
        if second % 5 == 0:
            world.scaler.observe_engine(KEY, Role.SERVE, replace(engine(arrived / 2, now_s), pod="a"))
            world.scaler.observe_engine(KEY, Role.SERVE, replace(engine(arrived / 2, now_s), pod="b"))
        world.settle(world.scaler.decide(now_s))
        report = world.scaler.report(KEY)
        if second < 120 or report is None:  # the first minutes show the load for the first time
            continue
        writer.write(service_status.build_conditions(StatusInputs(parent, scaling_report=report)), str(second))
        needed.add(report.tiers["serve"]["needed"])
    assert len(needed) > 2, "the demand changes"
    [message] = writer.named(EventReason.SCALING_LIMITED)
    assert message.startswith("serve: maxReplicas is 2; ")
    assert message.endswith("; raise spec.tiers.serve.maxReplicas if the cluster has room")
    assert writer.writes <= 8, "the figures of the conditions are refreshed about once a minute"


def stated(note: LimitNote) -> Condition:
    """The condition of a service that has just met the limit."""
    found = LimitTracker().update(decision(note), 0.0)
    assert found is not None
    return found


def limited_events(*notes: LimitNote) -> list[str]:
    """The Events of one decision after the other, with that limit each."""
    writer = StatusWriter()
    for number, note in enumerate(notes):
        writer.write((stated(note),), str(number))
    return [message.split(";")[0] for message in writer.named(EventReason.SCALING_LIMITED)]


def test_limit_event_of_new_figures_is_not_repeated() -> None:
    assert limited_events(MAX_9, MAX_9._replace(detail="13 needed")) == ["decode: maxReplicas is 9"]


def test_limit_event_of_new_bound_or_reason_is_emitted() -> None:
    other = MAX_9._replace(bound="maxReplicas is 99")
    assert limited_events(other, MAX_9, RATE, RATE) == [
        "decode: maxReplicas is 99",
        "decode: maxReplicas is 9",
        "decode: scaleUp allows 2 more in 60 s",
    ]


def test_limit_event_names_are_unique_per_bound() -> None:
    writer = StatusWriter()
    for number, note in enumerate((MAX_9, MAX_9._replace(bound="maxReplicas is 10"), MAX_9)):
        writer.write((stated(note),), str(number))
    names = {event.manifest(builders.service(), "o", "t")["metadata"]["name"] for event in writer.events}
    assert len(writer.events) == 3
    assert len(names) >= 2


def test_limit_condition_stays_for_a_minute_after_the_limit() -> None:
    limits = LimitTracker()
    first = limits.update(decision(MAX_9), 0.0)
    assert first is not None
    assert (first.holds, first.reason, first.message) == (
        True, ConditionReason.AT_MAX_REPLICAS, "decode: maxReplicas is 9; 12 needed",
    )  # fmt: skip
    assert limits.update(decision(), 10.0) == first
    assert limits.update(decision(RATE), 10.0 + LIMIT_RECOVERY_SECONDS - 1.0) == first
    again = limits.update(decision(MAX_9._replace(detail="11 needed")), 69.5)
    assert again is not None
    assert again.message == "decode: maxReplicas is 9; 11 needed"
    assert limits.update(decision(RATE), 70.0) == again
    other = limits.update(decision(RATE), 70.0 + LIMIT_RECOVERY_SECONDS)
    assert other is not None
    assert other.reason is ConditionReason.RATE_LIMITED
    assert limits.update(decision(), 200.0) == other
    assert limits.update(decision(), 200.0 + LIMIT_RECOVERY_SECONDS) is None


def test_limit_condition_follows_a_new_value_at_once() -> None:
    limits = LimitTracker()
    limits.update(decision(MAX_9), 0.0)
    found = limits.update(decision(MAX_9._replace(bound="maxReplicas is 10")), 1.0)
    assert found is not None
    assert found.bound == "decode: maxReplicas is 10"


def test_limit_bound_is_the_first_clause_of_its_message() -> None:
    for note in (MAX_9, RATE, MAX_9._replace(detail="")):
        found = stated(note)
        assert conditions.has_bound(found.message, found.bound)
    assert not conditions.has_bound("decode: maxReplicas is 99; 100 needed", "decode: maxReplicas is 9")


def test_limit_of_an_earlier_spec_does_not_stay() -> None:
    limits = LimitTracker()
    assert limits.update(decision(MAX_9), 0.0, 1) is not None
    assert limits.update(decision(), 1.0, 1) is not None
    assert limits.update(decision(), 2.0, 2) is None
