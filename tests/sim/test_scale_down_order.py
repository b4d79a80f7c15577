"""A simulated tier that shrinks loses the engines that the operator takes for the emptiest, or else the youngest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import NamedTuple

import pytest

from plimsoll.core.autoscaling.scale_down_candidates import ReplicaLoad
from plimsoll.core.ports import EngineReading
from plimsoll.core.types import Role
from plimsoll.sim.attempt import TraceRequest
from plimsoll.sim.engine_reading import scrape
from plimsoll.sim.fleet import FleetTier, SimulatedReplica
from plimsoll.sim.gateway import SimulatedGateway
from plimsoll.sim.operator import SimulatedOperator
from plimsoll.sim.policies.base import Observation, PlimsollPolicy, SimulatedPolicy, StaticPolicy
from tests.sim import sim_harness

BURST = sim_harness.PoissonLoad(1800, 40.0, seed=1).requests_drawn()
FALLING_LOAD = BURST + [
    replace(one, at_s=one.at_s + BURST[-1].at_s)
    for one in sim_harness.PoissonLoad(400, 1.0, output=1500.0, seed=2).requests_drawn()
]


def tier(replicas: int) -> FleetTier:
    of = FleetTier(Role.SERVE, sim_harness.make_plant(start_s=20.0), Random(1))
    of.start_initial(1)
    for number, one in enumerate(of.scale(replicas, 0.0)[0]):
        of.schedule(one, float(number))
        one.ready = True
    return of


def test_tier_scale_down_drains_least_loaded() -> None:
    of = tier(4)
    sent = {"serve-1": 3.0, "serve-2": 0.0, "serve-3": 7.0, "serve-4": 1.0}
    _, drained = of.scale(2, 60.0, lambda name: ReplicaLoad(sent[name], None))
    assert [one.name for one in drained] == ["serve-2", "serve-4"]


def test_tier_scale_down_without_load_drains_youngest() -> None:
    _, drained = tier(4).scale(2, 60.0)
    assert [one.name for one in drained] == ["serve-4", "serve-3"]


def test_tier_scale_down_removes_starting_replica_first() -> None:
    of = tier(3)
    [late], _ = of.scale(4, 50.0)
    of.schedule(late, 50.0)
    _, drained = of.scale(2, 60.0, lambda name: ReplicaLoad(0.0, 0.0) if name == "serve-1" else ReplicaLoad(5.0, 5.0))
    assert late.ended_s == 60.0
    assert [one.name for one in drained] == ["serve-1"]


def test_operator_load_is_that_of_last_readings() -> None:
    operator = SimulatedOperator(sim_harness.serve_manifest())
    assert operator.replica_load("a") == ReplicaLoad(None, None)
    reading = replace(SimulatedGateway("g", (), {}, 0, 0.0).reading(), inflight={"a": 2})
    operator.observe_gateway("g1", 1.0, reading)
    operator.observe_gateway("g2", 1.0, replace(reading, inflight={"a": 3, "b": 1}))
    assert (operator.replica_load("a"), operator.replica_load("c")) == (ReplicaLoad(5.0, None), ReplicaLoad(0.0, None))
    operator.observe_gateway("g2", 2.0, replace(reading, inflight={"b": 4}))
    engine = sim_harness.make_engine(sim_harness.H200)
    engine.add(sim_harness.make_sequences([(0.0, 100, 50)])[0], 0.0)
    operator.observe_engine(Role.SERVE, scrape(engine, "a", 0.01, 2.0))
    engine.advance(1e3)
    assert engine.idle
    assert operator.replica_load("a") == ReplicaLoad(2.0, 1.0)
    before = EngineReading("c", 3.0, "i", running=1.0, cached_prompt_tokens=10.0)
    for known in (before, replace(before, at_s=4.0, cached_prompt_tokens=50.0)):
        operator.observe_engine(Role.SERVE, known)
    assert operator.replica_load("c") == ReplicaLoad(0.0, 1.0, 40.0)


class Shrinking(NamedTuple):
    """known: of each ready engine, None where nobody knows. truth: requests at each, in the order of their start."""

    known: dict[str, ReplicaLoad] | None
    truth: dict[str, int]
    drained: set[str]


def scale_downs(
    monkeypatch: pytest.MonkeyPatch, policy: SimulatedPolicy, requests: list[TraceRequest]
) -> list[Shrinking]:
    found: list[Shrinking] = []
    usual = FleetTier.scale

    def recording_scale(
        of: FleetTier, desired: int, now_s: float, load: Callable[[str], ReplicaLoad] | None = None
    ) -> tuple[list[SimulatedReplica], list[SimulatedReplica]]:
        live = [one for one in of.replicas.values() if one.is_serving]
        known = None if load is None else {one.name: load(one.name) for one in live}
        truth = {one.name: len(one.attempts) for one in live}
        made, drained = usual(of, desired, now_s, load)
        if drained:
            found.append(Shrinking(known, truth, {one.name for one in drained}))
        return made, drained

    monkeypatch.setattr(FleetTier, "scale", recording_scale)
    sim_harness.simulate(requests, policy, gateways=2)
    return found


def test_plimsoll_scale_down_drains_least_loaded_as_last_read(monkeypatch: pytest.MonkeyPatch) -> None:
    found = scale_downs(monkeypatch, PlimsollPolicy(), FALLING_LOAD)
    assert found
    for known, _, drained in found:
        assert known is not None
        stay = [load.rank for name, load in known.items() if name not in drained]
        assert max(known[name].rank for name in drained) <= min(stay)
    assert any(drained != set(list(truth)[-len(drained) :]) for _, truth, drained in found)
    assert any(load.dispatched != one.truth[name] for one in found for name, load in (one.known or {}).items())


class FallingPolicy(StaticPolicy):
    """One engine, one by one four, then two, whatever the operator makes of it."""

    def desired_replicas(self, observation: Observation) -> dict[Role, int]:
        return {Role.SERVE: min(4, 1 + int(observation.now_s / 10.0)) if observation.now_s < 60.0 else 2}


@pytest.mark.parametrize("gated", [False, True])
def test_other_policies_scale_down_drains_youngest(monkeypatch: pytest.MonkeyPatch, *, gated: bool) -> None:
    [only] = scale_downs(monkeypatch, FallingPolicy({Role.SERVE: 1}, gated), FALLING_LOAD[: len(BURST) + 100])
    assert only.known is None
    assert only.drained == {"serve-3", "serve-4"}
