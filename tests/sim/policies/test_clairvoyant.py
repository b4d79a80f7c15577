"""Plans are followed to the letter, and nobody is below the bound: not any schedule, in arithmetic or on the plant."""

from __future__ import annotations

import math
from itertools import product
from random import Random

import numpy as np
import pytest

from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.sim import lower_bound as bounds
from plimsoll.sim.attempt import TraceRequest
from plimsoll.sim.errors import BadInput
from plimsoll.sim.lower_bound import CostLowerBound
from plimsoll.sim.policies import clairvoyant, registry
from plimsoll.sim.policies.base import Observation, PolicyContext
from plimsoll.sim.result import RunResult
from tests.sim import sim_harness

SLO = Slo(0.95, 2.0, tpot_s=0.05)
SERVE = PolicyContext({Role.SERVE: (1, 4)}, sim_harness.make_plant(), SLO)
BOTH = PolicyContext({Role.PREFILL: (1, 4), Role.DECODE: (1, 4)}, sim_harness.make_plant(), SLO)


def test_clairvoyant_plan_is_followed() -> None:
    policy = registry.parse("clairvoyant:plan=0@1/2;30@4/2;60.5@1/1", BOTH)
    desired = [policy.desired_replicas(Observation(at_s, {})) for at_s in (0.0, 29.0, 30.0, 60.0, 61.0, 9e9)]
    counts = [(one[Role.PREFILL], one[Role.DECODE]) for one in desired]
    assert counts == [(1, 2), (1, 2), (4, 2), (4, 2), (1, 1), (1, 1)]
    assert not policy.runs_operator
    assert registry.parse("clairvoyant:plan=0@1,gated=1", SERVE).runs_operator


@pytest.mark.parametrize(
    "plan", ["", "1", "0@", "0@x", "5@1", "0@1;0@2", "0@1;9@2;5@1", "0@1;inf@2", "0@1/2", "nan@1", "0@-1"]
)
def test_clairvoyant_malformed_plan_is_rejected(plan: str) -> None:
    with pytest.raises(BadInput, match="plan is like"):
        registry.parse(f"clairvoyant:plan={plan}", SERVE)


@pytest.mark.parametrize("plan", ["0@0", "0@1;10@5"])
def test_clairvoyant_plan_out_of_bounds_is_rejected(plan: str) -> None:
    with pytest.raises(BadInput, match="are not from 1 to 4"):
        registry.parse(f"clairvoyant:plan={plan}", SERVE)


def test_clairvoyant_plan_round_trips() -> None:
    plan = ((0.0, (1, 2)), (12.5, (3, 2)), (86_400.0, (1, 1)))
    assert clairvoyant.parse_plan(clairvoyant.format_plan(plan), 2) == plan


def test_clairvoyant_plans_of_two_tiers_are_merged() -> None:
    assert clairvoyant.join_plans(["plan=0@1;30@2;60@1", "plan=0@4;30@3"]) == "plan=0@1/4;30@2/3;60@1/3"


# -------------------------------------------------------------------- the bound, in arithmetic


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("start_s", [0.0, 1.0, 2.5])
def test_best_path_matches_exhaustive_search(ready: bool, start_s: float) -> None:
    random = Random(3)
    for _ in range(20):
        profit = np.array([random.uniform(-2.0, 3.0) for _ in range(7)])
        best, there = bounds._best_replica_path(profit, start_s, 1.0, ready)
        gains = [_gained(profit, path, start_s, ready) for path in product((0, 1), repeat=7)]
        assert best == pytest.approx(max(gains))
        assert _gained(profit, tuple(map(int, there)), start_s, ready) == pytest.approx(best)


def _gained(profit: bounds.Floats, path: tuple[int, ...], start_s: float, ready: bool) -> float:
    """Of one replica that is there in these slots; -inf: it could not be."""
    gain, before = 0.0, int(ready)
    for slot, here in enumerate(path):
        if here and not before:
            if slot < int(start_s):
                return -math.inf
            gain -= start_s
        gain += here * profit[slot]
        before = here
    return gain


def test_cheapest_slot_matches_exhaustive_search() -> None:
    random = Random(5)
    price = np.array([random.uniform(0.0, 2.0) for _ in range(13)])
    spans = [(first, last) for first in range(14) for last in range(first, 14)]
    first, last = (np.array(each) for each in zip(*spans, strict=True))
    found, place = bounds._min_price(price, first, last)
    whole = [*price, 0.0]
    assert [float(one) for one in found] == [min(whole[a : b + 1]) for a, b in spans]
    assert all(a <= at <= b and whole[at] == value for (a, b), at, value in zip(spans, place, found, strict=True))


def test_bound_constant_load_equals_its_work() -> None:
    requests = [TraceRequest(0.1 * n, 1000, 100) for n in range(6000)]
    found = CostLowerBound(
        requests, sim_harness.make_plant(spread=0.0, noise=0.0), SLO, {Role.SERVE: (0, 9)}, {Role.SERVE: 1}, 600.0
    )
    work = float(
        bounds._min_work(requests, sim_harness.make_plant(spread=0.0, noise=0.0), SLO, {Role.SERVE: (0, 9)})[
            Role.SERVE
        ].sum()
    )
    assert 0.97 * work <= 3600.0 * found.gpu_hours(1.0) <= 1.05 * work


def test_bound_pays_startups_on_rise_and_minimum_when_low() -> None:
    requests = [TraceRequest(0.1 * n, 200, 20) for n in range(100)]
    requests += [TraceRequest(600.0 + 0.02 * n, 1500, 150) for n in range(15_000)]
    requests.append(TraceRequest(1500.0, 10, 2))
    found = {}
    for start_s in (5.0, 200.0):
        of = CostLowerBound(
            requests, sim_harness.make_plant(start_s=start_s), SLO, {Role.SERVE: (1, 9)}, {Role.SERVE: 1}, 1500.0
        )
        found[start_s] = 3600.0 * of.gpu_hours(1.0)
    work = float(bounds._min_work(requests, sim_harness.make_plant(), SLO, {Role.SERVE: (1, 9)})[Role.SERVE].sum())
    assert found[5.0] >= work + 0.9 * 1100.0  # the least fleet before and after
    assert found[200.0] >= found[5.0] + 0.5 * 195.0 * (work / 300.0 - 1.0)


def test_bound_initial_above_maximum_may_stay() -> None:
    requests = [TraceRequest(float(n), 200, 20) for n in range(1000)]
    of = CostLowerBound(
        requests, sim_harness.make_plant(start_s=50.0), SLO, {Role.SERVE: (1, 1)}, {Role.SERVE: 6}, 1000.0, slots=20
    )
    gained, supply = of._fleet_gain(of._tiers[0], np.array([1.5] * 10 + [3.0] * 10))
    assert supply.tolist() == [6.0] * 20
    assert gained == pytest.approx(6 * (500.0 * 0.5 + 500.0 * 2.0))


def test_bound_cost_and_attainment_are_monotonic() -> None:
    requests = sim_harness.PoissonLoad(600, 6.0, seed=9).requests_drawn()
    of = CostLowerBound(
        requests, sim_harness.make_plant(), SLO, {Role.SERVE: (1, 4)}, {Role.SERVE: 1}, requests[-1].at_s
    )
    costs = [of.gpu_hours(share) for share in (0.5, 0.9, 0.99, 1.0)]
    assert costs == sorted(costs)
    for share, cost in zip((0.5, 0.9, 0.99, 1.0), costs, strict=True):
        assert of.attainment(cost) >= share - 1e-9
    assert of.attainment(0.0) < 0.5


def test_bound_infeasible_slo_costs_infinity() -> None:
    requests = [TraceRequest(float(n), 100, 50) for n in range(100)]
    of = CostLowerBound(
        requests, sim_harness.make_plant(), Slo(0.9, 2.0, tpot_s=0.001), {Role.SERVE: (1, 4)}, {Role.SERVE: 1}, 100.0
    )
    assert of.gpu_hours(0.01) == math.inf
    assert of.gpu_hours(0.0) < math.inf


# -------------------------------------------------------------------- the bound, on the plant


@pytest.mark.parametrize("start_s", [0.0, 4.0])
def test_bound_no_simulated_schedule_beats_it(start_s: float) -> None:
    requests = sim_harness.PoissonLoad(30, 1.0, 6000, 100, seed=11).requests_drawn()
    requests += [TraceRequest(requests[-1].at_s + one.at_s, one.prompt_tokens, one.output_tokens) for one in
              sim_harness.PoissonLoad(400, 20.0, 6000, 100, seed=12).requests_drawn()]  # fmt: skip
    hardware, tiers = sim_harness.make_plant(start_s=start_s), {Role.SERVE: (1, 3)}
    service = sim_harness.serve_manifest(tiers={"serve": {"minReplicas": 1, "maxReplicas": 3}})
    length_s = requests[-1].at_s
    of = CostLowerBound(requests, hardware, SLO, tiers, {Role.SERVE: 1}, length_s, slots=20)
    thirds = [0.0, 24.0, 36.0]
    assert of.gpu_hours(1.0) > 1.1 * length_s / 3600  # more than the least fleet
    for counts in product((1, 3), repeat=3):
        plan = clairvoyant.format_plan(tuple((at_s, (n,)) for at_s, n in zip(thirds, counts, strict=True)))
        policy = registry.parse(f"clairvoyant:plan={plan}", PolicyContext(tiers, hardware, SLO))
        result = RunResult(hardware, tiers, SLO)
        done = sim_harness.simulate(requests, policy, service, hardware)
        for attempt in done.attempts:
            result.add(attempt)
        figures = result.summary(done.world, "", 0, length_s, 0.0)
        assert figures["gpu_hours"] >= of.gpu_hours(figures["attainment_offered"]) - 1e-5
        assert figures["attainment_offered"] <= of.attainment(figures["gpu_hours"] + 1e-5) + 1e-5
