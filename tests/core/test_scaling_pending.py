"""Replicas that start: estimates, overdue pods and their replacements, and pods on silent nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plimsoll.core.autoscaling.decision_state import DecisionState, TierDecisionState, TimedReplicas
from plimsoll.core.autoscaling.startup_time import StartingPod
from plimsoll.core.types import Unavailable
from tests.core.scaling_fixtures import (
    decide_one,
    observed_tier,
    step_message,
)


def _ready_since(at_s: float | None) -> DecisionState:
    """The last start ended then."""
    return DecisionState(0.0, {"serve": TierDecisionState(ready_increased_s=at_s)})


def test_pending_replicas_count_with_eta() -> None:
    pods = (StartingPod("a", 0.0, "pull", 0.0), StartingPod("b", -15.0, "load", -5.0))
    found = decide_one(observed_tier(3.5, 4, 2, starting=pods))
    assert found.replicas == 4
    assert len(found.etas_s) == 2
    assert found.etas_s[0] < found.etas_s[1]
    assert "2 ready, 2 starting, the next in" in step_message(found, "pending").reason


def test_overdue_replicas_are_reported_and_replaced_once() -> None:
    late = (StartingPod("a", -1000.0), StartingPod("b", -900.0))
    found = decide_one(observed_tier(3.5, 4, 2, starting=late), state=_ready_since(-800.0))
    assert found.overdue == ("a", "b")
    assert found.replicas == 6
    assert "2 overdue by" in found.summary
    every = (*late, StartingPod("c", -500.0), StartingPod("d", -500.0))
    assert decide_one(observed_tier(3.5, 6, 2, starting=every), state=_ready_since(-800.0)).replicas == 6
    assert decide_one(observed_tier(3.5, 6, 4, starting=late)).overdue == ("a", "b")


@pytest.mark.parametrize("ready_s", [None, -1000.0])
def test_one_overdue_replica_is_replaced_if_all_may_be_slow(ready_s: float | None) -> None:
    late = tuple(StartingPod(f"p{n}", -1000.0) for n in range(3))
    found = decide_one(observed_tier(3.5, 4, 1, starting=late), state=_ready_since(ready_s))
    assert (found.replicas, len(found.overdue)) == (5, 3)
    assert (
        "replacements ordered: 1, until a start in time shows that they hang" in step_message(found, "pending").reason
    )


def test_one_overdue_replica_is_replaced_after_a_slow_start() -> None:
    late = tuple(StartingPod(f"p{n}", -1000.0) for n in range(3))
    tier = observed_tier(3.5, 4, 1, starting=late)
    slow = replace(tier, startup_model=tier.startup_model._replace(slow_starts=1))
    assert decide_one(slow, state=_ready_since(-10.0)).replicas == 5
    assert decide_one(tier, state=_ready_since(-10.0)).replicas == 7


def test_hanging_replicas_are_replaced_until_enough_are_ready() -> None:
    """Three pods hang, and the replacements start one after the other."""
    hanging = tuple(StartingPod(f"p{n}", -1000.0) for n in range(3))
    ordered = [
        decide_one(observed_tier(3.5, 7, ready, starting=hanging), state=_ready_since(-10.0)).replicas
        for ready in (2, 3)
    ]
    assert ordered == [7, 7]


def test_replica_on_silent_node_is_replaced_and_told_by_its_node() -> None:
    lost = (StartingPod("a", -1.0, silent_node="node-3"),)
    found = decide_one(observed_tier(3.5, 4, 3, starting=lost))
    assert found.replicas == 5
    assert (
        "1 on nodes that do not report, not counted (node-3), replacements ordered: 1"
        in step_message(found, "pending").reason
    )


@pytest.mark.parametrize(
    ("silent", "ready", "since_s", "replicas"),
    [(2, 2, -1.0, 6), (3, 1, -1.0, 4), (4, 0, -1.0, 4), (3, 1, -1000.0, 7)],
    ids=["half", "most", "all", "most, beyond the start-up limit"],
)
def test_most_replicas_on_silent_nodes_are_awaited(silent: int, ready: int, since_s: float, replicas: int) -> None:
    """Lost reports of all nodes do not double the fleet; lost nodes are replaced after the start-up limit."""
    lost = tuple(StartingPod(f"p{n}", since_s, silent_node=f"node-{n}") for n in range(silent))
    found = decide_one(observed_tier(3.5, 4, ready, starting=lost))
    assert found.replicas == replicas
    is_awaited = "because most replicas are on such nodes" in step_message(found, "pending").reason
    assert is_awaited == (replicas == 4)


def test_overdue_replicas_of_frozen_tier_are_reported_only() -> None:
    found = decide_one(
        observed_tier(Unavailable("lost"), 4, 2, starting=(StartingPod("a", -1000.0), StartingPod("b", -900.0)))
    )
    assert (found.replicas, found.overdue) == (4, ("a", "b"))


def test_overdue_replacement_is_removed_once_enough_are_ready() -> None:
    late = (StartingPod("a", -1000.0),)
    state = DecisionState(0.0, {"serve": TierDecisionState(downscale_candidates=(TimedReplicas(4, -1000.0),))})
    assert decide_one(observed_tier(3.5, 5, 4, starting=late), state=state).replicas == 4
