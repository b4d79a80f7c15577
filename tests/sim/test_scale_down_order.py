"""A simulated tier that shrinks loses the engines that the operator takes for the emptiest, or else the youngest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import NamedTuple

import pytest

from plimsoll.core.picking.endpoint import Role
from plimsoll.core.scaling.leaving import Load
from plimsoll.sim.fleet import Replica, Tier
from plimsoll.sim.gateway import Gateway
from plimsoll.sim.operator import Operator
from plimsoll.sim.policies.base import Look, Plimsoll, Policy, Static
from plimsoll.sim.visit import Asked
from tests.sim import lab

BURST = lab.Load(1800, 40.0, seed=1).asked()
FALLING_LOAD = BURST + [
    replace(one, at_s=one.at_s + BURST[-1].at_s) for one in lab.Load(400, 1.0, output=1500.0, seed=2).asked()
]


def tier(replicas: int) -> Tier:
    of = Tier(Role.SERVE, lab.plant(start_s=20.0), Random(1))
    of.begin(1)
    for number, one in enumerate(of.set(replicas, 0.0)[0]):
        of.place(one, float(number))
        one.ready = True
    return of


def test_tier_scale_down_drains_least_loaded() -> None:
    of = tier(4)
    sent = {"serve-1": 3.0, "serve-2": 0.0, "serve-3": 7.0, "serve-4": 1.0}
    _, drained = of.set(2, 60.0, lambda name: Load(sent[name], None))
    assert [one.name for one in drained] == ["serve-2", "serve-4"]


def test_tier_scale_down_without_load_drains_youngest() -> None:
    _, drained = tier(4).set(2, 60.0)
    assert [one.name for one in drained] == ["serve-4", "serve-3"]


def test_tier_scale_down_removes_starting_replica_first() -> None:
    of = tier(3)
    [late], _ = of.set(4, 50.0)
    of.place(late, 50.0)
    _, drained = of.set(2, 60.0, lambda name: Load(0.0, 0.0) if name == "serve-1" else Load(5.0, 5.0))
    assert late.gone_s == 60.0
    assert [one.name for one in drained] == ["serve-1"]


def test_operator_load_is_that_of_last_readings() -> None:
    operator = Operator(lab.service())
    assert operator.load("a") == Load(None, None)
    reading = replace(Gateway("g", (), {}, 0, 0.0).reading(), inflight={"a": 2})
    operator.hear_gateway("g1", 1.0, reading)
    operator.hear_gateway("g2", 1.0, replace(reading, inflight={"a": 3, "b": 1}))
    assert (operator.load("a"), operator.load("c")) == (Load(5.0, None), Load(0.0, None))
    operator.hear_gateway("g2", 2.0, replace(reading, inflight={"b": 4}))
    engine = lab.engine(lab.H200)
    engine.add(lab.jobs([(0.0, 100, 50)])[0], 0.0)
    operator.hear_engine(Role.SERVE, engine.scraped("a", 0.01, 2.0))
    engine.advance(1e3)
    assert engine.idle
    assert operator.load("a") == Load(2.0, 1.0)


class Shrinking(NamedTuple):
    """known: of each ready engine, None where nobody knows. truth: requests at each, in the order of their start."""

    known: dict[str, Load] | None
    truth: dict[str, int]
    drained: set[str]


def scale_downs(monkeypatch: pytest.MonkeyPatch, policy: Policy, asked: list[Asked]) -> list[Shrinking]:
    found: list[Shrinking] = []
    usual = Tier.set

    def noted(
        of: Tier, wanted: int, now_s: float, load: Callable[[str], Load] | None = None
    ) -> tuple[list[Replica], list[Replica]]:
        live = [one for one in of.replicas.values() if one.live]
        known = None if load is None else {one.name: load(one.name) for one in live}
        truth = {one.name: len(one.visits) for one in live}
        made, drained = usual(of, wanted, now_s, load)
        if drained:
            found.append(Shrinking(known, truth, {one.name for one in drained}))
        return made, drained

    monkeypatch.setattr(Tier, "set", noted)
    lab.simulate(asked, policy, gateways=2)
    return found


def test_plimsoll_scale_down_drains_least_loaded_as_last_read(monkeypatch: pytest.MonkeyPatch) -> None:
    found = scale_downs(monkeypatch, Plimsoll(), FALLING_LOAD)
    assert found
    for known, _, drained in found:
        assert known is not None
        stay = [load.rank for name, load in known.items() if name not in drained]
        assert max(known[name].rank for name in drained) <= min(stay)
    assert any(drained != set(list(truth)[-len(drained) :]) for _, truth, drained in found)
    assert any(load.sent != one.truth[name] for one in found for name, load in (one.known or {}).items())


class FallingPolicy(Static):
    """One engine, one by one four, then two, whatever the operator makes of it."""

    def wanted(self, look: Look) -> dict[Role, int]:
        return {Role.SERVE: min(4, 1 + int(look.now_s / 10.0)) if look.now_s < 60.0 else 2}


@pytest.mark.parametrize("gated", [False, True])
def test_other_policies_scale_down_drains_youngest(monkeypatch: pytest.MonkeyPatch, *, gated: bool) -> None:
    [only] = scale_downs(monkeypatch, FallingPolicy({Role.SERVE: 1}, gated), FALLING_LOAD[: len(BURST) + 100])
    assert only.known is None
    assert only.drained == {"serve-3", "serve-4"}
