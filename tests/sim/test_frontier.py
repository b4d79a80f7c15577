"""Comparisons over runs: who is on the front, how far behind the others are, and which words come of a search."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from plimsoll.cli.main import main
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.sim import frontier, screening
from plimsoll.sim.attempt import TraceRequest
from plimsoll.sim.errors import BadInput
from plimsoll.sim.frontier import EvaluatedPolicies, FrontierPoint
from plimsoll.sim.policies import clairvoyant, registry
from plimsoll.sim.policies.base import PolicyContext
from plimsoll.sim.screening import SearchSpace
from tests import builders
from tests.sim import sim_harness

ASKED = sim_harness.PoissonLoad(200, 2.0, 4000, 400, seed=1).requests_drawn()
ASKED += [
    replace(one, at_s=one.at_s + ASKED[-1].at_s)
    for one in sim_harness.PoissonLoad(1200, 12.0, 4000, 400, seed=2).requests_drawn()
]
SLO = Slo(0.95, 2.0, tpot_s=0.05)
LENGTH_S = ASKED[-1].at_s
ONE_TIER = SearchSpace(
    PolicyContext({Role.SERVE: (1, 4)}, sim_harness.make_plant(), SLO, {}, ASKED), {Role.SERVE: 1}, LENGTH_S
)
TWO_TIERS = SearchSpace(
    PolicyContext({Role.PREFILL: (1, 3), Role.DECODE: (1, 3)}, sim_harness.make_plant(), SLO, {}, ASKED),
    {Role.PREFILL: 1, Role.DECODE: 1},
    LENGTH_S,
)
POINTS = [
    FrontierPoint("a", 0.8, 1.0),
    FrontierPoint("b", 0.9, 1.5),
    FrontierPoint("c", 0.85, 1.6),
    FrontierPoint("d", 0.9, 2.0),
    FrontierPoint("e", 1.0, 3.0),
]


def test_front_is_the_set_of_undominated_points() -> None:
    assert [one.policy for one in frontier.pareto_front(POINTS[::-1])] == ["a", "b", "e"]
    assert frontier.pareto_front([]) == []


def test_best_at_returns_best_point_within_cost() -> None:
    assert [(frontier.best_at(POINTS, cost) or POINTS[-1]).policy for cost in (1.0, 1.7, 2.5, 9.0)] == [
        "a",
        "b",
        "b",
        "e",
    ]
    assert frontier.best_at(POINTS, 0.9) is None


def test_behind_measures_attainment_gap() -> None:
    own = FrontierPoint("own", 0.89, 1.55)
    assert frontier.attainment_gap(own, POINTS) == pytest.approx(0.01)
    assert frontier.attainment_gap(own, POINTS, 1 / 1.05) == pytest.approx(-0.09)
    assert frontier.attainment_gap(FrontierPoint("own", 0.1, 0.5), POINTS) == -math.inf


def test_cheapest_returns_least_cost_meeting_target() -> None:
    windowed = [
        FrontierPoint("x", 0.96, 1.0, 0.5),
        FrontierPoint("y", 0.97, 2.0, 1.0),
        FrontierPoint("z", 0.99, 3.0, 1.0),
    ]
    assert frontier.cheapest(windowed, 0.95, 0.99) == windowed[1]
    assert frontier.cheapest(windowed, 0.95) == windowed[0]
    assert frontier.cheapest(POINTS, 0.9, 0.99) == POINTS[1]  # no windows: by attainment alone
    assert frontier.cheapest(windowed, 0.999) is None


class Plant:
    """Attains by what a word says; keeps count of what was run."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, int]] = []

    def __call__(self, word: str, seed: int) -> dict[str, Any]:
        self.ran.append((word, seed))
        registry.parse(word, ONE_TIER.context)
        return {
            "attainment_offered": 0.9 + seed / 100 + ("gated=1" in word) / 50,
            "gpu_hours": 1.0 + len(word) / 100,
            "windows": {"n": 2, "passed": 0 if "gated=1" in word else 2},
        }


def test_field_runs_each_policy_once_per_seed_and_averages() -> None:
    plant = Plant()
    field = EvaluatedPolicies(frontier.runner(plant), (1, 3))
    [one, again] = [field.points(["static:2", "static:2"]), field.points(["static:2"])]
    assert again == one
    assert one[0].attainment == pytest.approx(0.92)
    assert plant.ran == [("static:2", 1), ("static:2", 3)]


def test_playing_with_processes_gives_same_results() -> None:
    runs = [(f"static:{n}", n) for n in (1, 2, 3)]
    assert frontier.runner(Plant(), 2)(runs) == frontier.runner(Plant())(runs)


def test_words_ordinary_policy_is_unchanged() -> None:
    for word in ("plimsoll", "follower:margin=0.7", "clairvoyant:plan=0@1"):
        assert frontier.expand(word, ONE_TIER, frontier.runner(Plant())) == [word]


def test_hindsight_screens_settings_and_takes_cheapest_passing() -> None:
    assert len(list(screening.follower_settings(60.0))) >= 200
    plant = Plant()
    [best] = frontier.expand("hindsight:runs=6", ONE_TIER, frontier.runner(plant), (6,))
    words = {word for word, _ in plant.ran}
    assert {"gated=1", "cap="} <= {kind for kind in ("gated=1", "cap=") for word in words if kind in word}
    passing = [word for word in words if "cap=" in word]
    assert best in passing
    assert len(best) == min(map(len, passing))
    [rich] = frontier.expand("hindsight:runs=6,gpu-hours=9", ONE_TIER, frontier.runner(Plant()), (6,))
    assert "gated=1" in rich


def test_hindsight_unaffordable_budget_is_rejected() -> None:
    with pytest.raises(BadInput, match=r"gpu-hours=0\.1: the cheapest follower that was run costs 1\.\d+ GPU-hours"):
        frontier.expand("hindsight:runs=6,gpu-hours=0.1", ONE_TIER, frontier.runner(Plant()), (6,))


def test_reactive_frontier_uses_one_admission_mode() -> None:
    found = frontier.expand("follower-frontier:runs=6", ONE_TIER, frontier.runner(Plant()))
    assert found
    assert all(word.startswith("follower:") and word.endswith("gated=1") for word in found)


@pytest.mark.parametrize(
    "text", ["hindsight:warp=1", "hindsight:plan=1", "follower-frontier:runs=0", "clairvoyant:attainment=2"]
)
def test_words_unknown_comparison_is_rejected(text: str) -> None:
    with pytest.raises(BadInput):
        frontier.expand(text, ONE_TIER, frontier.runner(Plant()))


def _by_replicas(word: str, seed: int) -> dict[str, Any]:
    """Attains all with two replicas from second 95 to 190; replica-seconds cost."""
    plan = clairvoyant.parse_plan(word.partition("plan=")[2].partition(",")[0], 1)
    assert plan is not None
    ends_s = [*(at_s for at_s, _ in plan[1:]), LENGTH_S]
    pieces = [(at_s, end_s, count) for (at_s, (count,)), end_s in zip(plan, ends_s, strict=True)]
    good = all(count >= 2 for at_s, end_s, count in pieces if end_s > 95.0 and at_s < 190.0)
    cost = sum((end_s - at_s) * count for at_s, end_s, count in pieces)
    return {"attainment_offered": 1.0 if good else 0.5, "gpu_hours": cost / 3600, "windows": {"n": 0, "passed": 0}}


def test_achievable_schedule_is_refined_until_minimal() -> None:
    first = frontier.best_schedule(ONE_TIER, EvaluatedPolicies(frontier.runner(_by_replicas), (0,)), 0.99, 12)
    best = frontier.best_schedule(ONE_TIER, EvaluatedPolicies(frontier.runner(_by_replicas), (0,)), 0.99, 120)
    assert best.attainment == 1.0
    assert best.gpu_hours <= first.gpu_hours
    least_s = LENGTH_S + 95.0
    assert least_s <= 3600 * best.gpu_hours <= least_s + 2 * 60.0


def test_achievable_unreachable_target_takes_best_attainment() -> None:
    ran: list[tuple[float, float]] = []

    def short(word: str, seed: int) -> dict[str, Any]:
        registry.parse(word, ONE_TIER.context)
        found = {**_by_replicas(word, seed), "attainment_offered": 0.9 if "@3" in word else 0.5}
        ran.append((found["attainment_offered"], found["gpu_hours"]))
        return found

    taken = frontier.best_schedule(ONE_TIER, EvaluatedPolicies(frontier.runner(short), (0,)), 0.999, 8)
    most = sorted(cost for attained, cost in ran if attained == 0.9)
    assert most[0] < most[-1]
    assert (taken.attainment, taken.gpu_hours) == (0.9, most[0])
    assert any(attained == 0.5 and cost < most[0] for attained, cost in ran)


def test_most_resident_is_below_slots_and_kv_cache() -> None:
    most = frontier.max_resident_sequences(ONE_TIER.context)
    assert 20 < most < 256
    tight = replace(ONE_TIER.context, plant=sim_harness.make_plant(replace(sim_harness.H200, max_num_seqs=8)))
    assert frontier.max_resident_sequences(tight) == 8
    small = replace(ONE_TIER.context, plant=sim_harness.make_plant(replace(sim_harness.H200, kv_tokens=42_000)))
    assert 8 < frontier.max_resident_sequences(small) < 14


# -------------------------------------------------------------------- screening


def test_screening_orders_equal_those_of_a_run() -> None:
    found = screening.screen_followers(ONE_TIER, 5)
    assert 0 < len(found) <= 5
    settings = list(screening.follower_settings(ONE_TIER.context.plant.startup.mean_s))
    courses = {one.options: one for one in screening._follower_schedules(ONE_TIER, Role.SERVE, settings[::97])}
    for text, course in list(courses.items())[::9]:
        done = sim_harness.simulate(ASKED, registry.parse(f"follower:{text},gated=0", ONE_TIER.context))
        body = {int(at_s): desired for at_s, _, desired, *_ in done.world.log.replicas}
        ordered, now = [], 1
        for tick in range(ONE_TIER.ticks):
            now = body.get(tick, now)
            ordered.append(now)
        assert ordered == course.orders.tolist()


def test_screening_ready_replicas_and_cost_of_orders() -> None:
    ground = replace(ONE_TIER, length_s=12.0)
    orders = np.array([1, 1, 3, 3, 3, 3, 2, 1, 1, 2, 2, 2, 2])
    ready, paid_s = screening._simulate_orders(orders, 1, 3.0, ground)
    assert ready.tolist() == [1, 1, 1, 1, 1, 3, 2, 1, 1, 1, 1, 1, 2]
    assert paid_s == 12.0 + 5.0 + 4.0 + 3.0


def test_screening_overload_is_missed_after_patience() -> None:
    demand = np.array([1.0] * 10 + [3.0] * 10)
    missed = screening._missed_share(demand, np.array([[1.0] * 20, [3.0] * 20]), 5.0)
    assert missed.tolist() == [pytest.approx((2 * 10 - 5) / 40), 0.0]


@pytest.mark.parametrize("ticks", [0, 1, 2, 3, 5, 8, 50])
def test_most_ahead_is_maximum_of_following_ticks(ticks: int) -> None:
    values = np.random.default_rng(1).integers(0, 9, 20)
    found = screening._forward_max(values, ticks)
    assert found.tolist() == [int(max(values[at : at + ticks + 1])) for at in range(20)]


def test_foreseen_orders_one_startup_ahead_and_fills_gaps() -> None:
    demand = np.array([0.5] * 50 + [1.5] * 20 + [0.5] * 10 + [1.5] * 20 + [0.5] * 50)
    for gap_s, bottom in ((0.0, 1), (12.0, 2)):
        orders = screening._clairvoyant_orders(demand, 1.0, 0.0, gap_s, 0, 8.0, (1, 4)).tolist()
        assert orders[:42] == [1] * 42
        assert orders[42:70] == [2] * 28
        assert orders[71] == bottom
        assert orders[101:] == [1] * 49


def test_screening_policies_of_two_tiers_parse() -> None:
    found = screening.screen_followers(TWO_TIERS, 6)
    assert 0 < len(found) <= 6
    for word in (*found, *screening.screen_plans(TWO_TIERS, 4)):
        registry.parse(word, TWO_TIERS.context)


def test_screening_identical_schedules_are_merged() -> None:
    quiet = replace(
        ONE_TIER,
        context=replace(ONE_TIER.context, requests=[TraceRequest(0.0, 10, 2), TraceRequest(50.0, 10, 2)]),
        length_s=50.0,
    )
    found = screening.screen_followers(quiet, 100)
    settings = list(screening.follower_settings(quiet.context.plant.startup.mean_s))
    assert 0 < len(found) < 30 < len(settings)


def test_screening_load_of_one_moment_yields_policies() -> None:
    for ground in (ONE_TIER, TWO_TIERS):
        moment = replace(ground, context=replace(ground.context, requests=[TraceRequest(0.0, 1000, 10)]), length_s=0.0)
        for found in (screening.screen_followers(moment, 6), screening.screen_plans(moment, 4)):
            assert found
            for word in found:
                registry.parse(word, moment.context)


def _fluid(cost: Sequence[float], missed: Sequence[float]) -> screening.FluidEstimate:
    return screening.FluidEstimate(np.array(cost), np.array([missed] * len(screening._UTILISATIONS)))


def test_screening_selection_covers_every_cost_range() -> None:
    cost = np.linspace(1.0, 9.0, 200)
    kept = screening._best_per_cost_range(_fluid(cost.tolist(), (1.0 / cost).tolist()), 12)
    assert len(kept) == 12
    assert max(np.diff(cost[kept])) < 1.5


def test_together_merges_options_of_both_tiers() -> None:
    assert screening.join_tier_options(["margin=0.5,hold=3", "margin=0.7,hold=3"]) == "margin=0.5/0.7,hold=3/3"


def test_simulate_comparison_policies_run_from_cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        f"{at_s},{prompt},{output}" for at_s, prompt, output in sim_harness.PoissonLoad(150, 10.0, 4000, 400).draw()
    ]
    (tmp_path / "t.csv").write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]))
    manifest = builders.service(tiers={"serve": {"maxReplicas": 3}}, slo={"ttft": "1s", "tpot": "50ms"})
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(manifest))
    typed = ["simulate", "--trace", str(tmp_path / "t.csv"), "--service", str(tmp_path / "s.yaml")]
    typed += ["--hardware", "h200-8b", "--start-up", "5", "--output", "json"]
    assert main([*typed, "--policy", "clairvoyant:runs=4,attainment=0.5", "--policy", "hindsight:runs=2"]) == 0
    found = [one["policy"] for one in json.loads(capsys.readouterr().out)]
    assert found[0].startswith("clairvoyant:plan=0@")
    assert found[1].startswith("follower:margin=")
