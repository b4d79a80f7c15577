"""Sentences and figures about starting pods, paused rollouts and rejected requests agree with the objects."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from plimsoll.api.conditions import ConditionType
from plimsoll.controllers.autoscale import scaling_conditions, tracked_service
from plimsoll.controllers.object_cache import key_of
from plimsoll.core.autoscaling.inputs import ServiceSnapshot, TierSnapshot
from plimsoll.core.autoscaling.observations import Constraint, SizingResult
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.demand.service_metrics import ServiceMetrics
from plimsoll.core.ports import GatewayReading
from plimsoll.core.types import Unavailable
from tests import builders
from tests.controllers.status_walk import Walk
from tests.controllers.test_autoscale import NOW_S, PROMISED, World, arrivals
from tests.controllers.test_autoscale import ready as ready_pod

TICK_S = 10.5


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.004, "less than 1%"), (0.05, "5%"), (0.986, "99%"), (0.997, "99%"), (1.0, "100%")],
)
def test_sentences_shedding_is_never_none_or_all(share: float, expected: str) -> None:
    """The condition lasts until a minute has passed without a rejection, so also with one in a thousand."""
    assert scaling_conditions.format_rejected(share) == expected


@pytest.mark.parametrize(
    ("ready", "sized", "expected"),
    [
        ((1, 0), ("prefill", "decode"), "no decode replica is ready"),
        ((1, 0), ("prefill",), "no decode replica is ready"),
        ((0, 0), (), "no prefill and no decode replica is ready"),
        ((1, 2), ("prefill", "decode"), "SLO capacity 10 req/s with 1 ready prefill replica"),
        ((1, 2), ("prefill",), None),
    ],
)
def test_sentences_shedding_names_the_tier_that_binds(
    ready: tuple[int, int], sized: tuple[str, ...], expected: str | None
) -> None:
    """When the only decode engine dies, the capacity of the prefill tier explains nothing."""
    state = ServiceState.for_roles(["prefill", "decode"])
    size = SizingResult(1, 1, 1.0, 0.1, 1.0, Constraint.SLOTS, 0.9, 0.9, None, None)
    state.sizings = {tier: size if tier in sized else Unavailable("no figure") for tier in ("prefill", "decode")}
    tiers = {tier: TierSnapshot(2, count) for tier, count in zip(("prefill", "decode"), ready, strict=True)}
    metrics = ServiceMetrics(1.0, rejected_share=0.25, arrivals=61.0)
    found = scaling_conditions.shedding(state, ServiceSnapshot(metrics, tiers), (), {})
    assert found is not None
    rejected = "25% of the last minute's requests were rejected (of 1.02 req/s)"
    assert found.message == "; ".join(filter(None, (rejected, expected)))


def test_figures_follow_the_load_within_ten_seconds() -> None:
    walk = Walk()
    walk.routable = 1
    walk.pod("a", "ready")
    walk.serve(1.0, 70)
    before = walk.render()["slo"]["offered"]
    walk.serve(10.0, 11)
    assert walk.render()["slo"]["offered"] != before


def test_figures_of_many_services_have_a_bounded_write_rate() -> None:
    intervals = {n: tracked_service.report_interval_s(n) for n in (1, 100, 1000, 10_000)}
    assert intervals[1] == 10.0
    assert all(n / interval_s <= tracked_service.FIGURE_WRITES_PER_SECOND for n, interval_s in intervals.items())
    assert math.isclose(intervals[1000], 59.0, abs_tol=1.0)


def test_figures_of_many_shedding_services_have_a_bounded_rate() -> None:
    """All shed load, so the figures of each change with every tick, and are due every 11 s."""
    parents = [builders.service(f"s{n}", **PROMISED) for n in range(187)]
    world = World(*parents)
    for parent in parents:
        world.store.put(builders.deployment(parent, "serve", replicas=1, ready=1))
        world.store.put(ready_pod(parent, "serve"))
    writes = []
    for tick in range(8):
        now_s, count = NOW_S + TICK_S * tick, 100.0 * tick**2
        counted = replace(arrivals(count), rejected={"overloaded": 0.5 * count})
        services = {"/".join(key_of(parent)): counted for parent in parents}
        world.readings = (GatewayReading("gw-1", now_s, "a", services),)
        before = len(world.received)
        world.scaler.decide(now_s)
        writes.append(len(world.received) - before)
    report = world.scaler.report(key_of(parents[-1]))
    assert report is not None
    assert ConditionType.SHEDDING in {one.type for one in report.conditions}
    settled = sum(writes[-4:])
    assert 0 < settled / (4 * TICK_S) <= tracked_service.FIGURE_WRITES_PER_SECOND


def test_sentences_overdue_are_at_most_the_starting() -> None:
    """The report is older than the pods: what became ready or left meanwhile is not overdue."""
    walk = Walk()
    walk.order(2)
    for name in ("a", "b"):
        walk.pod(name, "starting")
    walk.now_s += 86_400.0
    walk.serve(0.0, 2)
    assert walk.render()["tiers"]["serve"]["startingPods"] == "2, 2 overdue"
    walk.pod("a", "ready")
    assert walk.render()["tiers"]["serve"]["startingPods"] == "1, 1 overdue"


def test_sentences_paused_rollout_is_named() -> None:
    """Somebody ran `kubectl rollout pause`: Kubernetes begins no change before they resume it."""
    walk = Walk()
    walk.routable = 1
    walk.pod("a", "ready")
    walk.order(1, updatedReplicas=0)
    walk.store.put({**walk.deployment, "spec": {**walk.deployment["spec"], "paused": True}})
    message = walk.condition("Reconciling", walk.render())["message"]
    assert message == (
        "serve: 1 of 1 ready; the rollout of Deployment chat-serve is paused: resume it with kubectl -n team rollout"
        " resume deployment chat-serve"
    )
    walk.order(1)
    walk.store.put({**walk.deployment, "spec": {**walk.deployment["spec"], "paused": True}})
    assert "Reconciling" not in walk.kinds(walk.render())
