"""What one request of a client may do to a fleet of three replicas under a steady load."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plimsoll.core.ports import GatewayReading
from plimsoll.core.types import Role
from tests import builders
from tests.controllers.test_autoscale import ABOUT, NOW_S, World, arrivals, engine

STEADY_S, AFTER_S = 120, 90


def replicas_over_time(hostile_tokens: float, rejected: dict[str, float] | None = None) -> list[int]:
    """Replicas by second: 10 requests per second, and after `STEADY_S` one request of so many tokens, 0 for none."""
    parent = builders.service(
        slo={"ttft": "2s", "tpot": "50ms"}, tiers={"serve": {"minReplicas": 1, "maxReplicas": 50}}
    )
    world = World.with_engine(parent)
    replicas = []
    for second in range(STEADY_S + AFTER_S):
        now_s, reading = NOW_S + second, arrivals(10.0 * second)
        if second >= STEADY_S and hostile_tokens:
            assert reading.arrived_tokens is not None
            reading = replace(
                reading, arrived=reading.arrived + 1, arrived_tokens=reading.arrived_tokens + hostile_tokens
            )
        if rejected is not None and second >= STEADY_S:
            reading = replace(reading, rejected={name: n * (second - STEADY_S) for name, n in rejected.items()})
        world.readings = (GatewayReading("gw-1", now_s, "a", {"team/chat": reading}),)
        if second % 5 == 0:
            world.scaler.observe_engine(("team", "chat"), Role.SERVE, engine(10.0 * second, now_s))
        world.settle(world.scaler.decide(now_s))
        deployment = world.store.get("Deployment", ("team", "chat-serve"))
        assert deployment is not None
        replicas.append(deployment["spec"]["replicas"])
    return replicas


@pytest.fixture(scope="module")
def undisturbed() -> list[int]:
    return replicas_over_time(0.0)


def test_one_request_of_an_engine_moves_no_replica(undisturbed: list[int]) -> None:
    """A gateway counts at most the KV cache of one engine for it."""
    assert ABOUT.kv_tokens is not None
    disturbed = replicas_over_time(float(ABOUT.kv_tokens))
    assert max(disturbed) == max(undisturbed)
    assert all(replicas <= usual for replicas, usual in zip(disturbed, undisturbed, strict=True)), "nor earlier"
    assert max(replicas_over_time(128_000_000.0)) > max(undisturbed), "uncapped, it would"


def test_rejections_no_capacity_cures_move_no_replica(undisturbed: list[int]) -> None:
    assert replicas_over_time(0.0, {"quota_exceeded": 100.0, "request_too_large": 1.0}) == undisturbed
