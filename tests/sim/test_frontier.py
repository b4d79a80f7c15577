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
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.slo import Slo
from plimsoll.sim import frontier, screen
from plimsoll.sim.errors import BadInput
from plimsoll.sim.frontier import Field, Point
from plimsoll.sim.policies import clairvoyant, registry
from plimsoll.sim.policies.base import Scene
from plimsoll.sim.screen import Ground
from plimsoll.sim.visit import Asked
from tests import builders
from tests.sim import lab

ASKED = lab.Load(200, 2.0, 4000, 400, seed=1).asked()
ASKED += [replace(one, at_s=one.at_s + ASKED[-1].at_s) for one in lab.Load(1200, 12.0, 4000, 400, seed=2).asked()]
SLO = Slo(0.95, 2.0, tpot_s=0.05)
LENGTH_S = ASKED[-1].at_s
ONE = Ground(Scene({Role.SERVE: (1, 4)}, lab.plant(), SLO, {}, ASKED), {Role.SERVE: 1}, LENGTH_S)
TWO = Ground(
    Scene({Role.PREFILL: (1, 3), Role.DECODE: (1, 3)}, lab.plant(), SLO, {}, ASKED),
    {Role.PREFILL: 1, Role.DECODE: 1},
    LENGTH_S,
)
POINTS = [Point("a", 0.8, 1.0), Point("b", 0.9, 1.5), Point("c", 0.85, 1.6), Point("d", 0.9, 2.0), Point("e", 1.0, 3.0)]


def test_the_front_is_whom_nobody_beats() -> None:
    assert [one.word for one in frontier.front(POINTS[::-1])] == ["a", "b", "e"]
    assert frontier.front([]) == []


def test_the_best_at_a_cost() -> None:
    assert [(frontier.best_at(POINTS, cost) or POINTS[-1]).word for cost in (1.0, 1.7, 2.5, 9.0)] == [
        "a",
        "b",
        "b",
        "e",
    ]
    assert frontier.best_at(POINTS, 0.9) is None


def test_how_far_behind() -> None:
    own = Point("own", 0.89, 1.55)
    assert frontier.behind(own, POINTS) == pytest.approx(0.01)
    assert frontier.behind(own, POINTS, 1 / 1.05) == pytest.approx(-0.09)
    assert frontier.behind(Point("own", 0.1, 0.5), POINTS) == -math.inf


def test_the_cheapest_that_is_good_enough() -> None:
    windowed = [Point("x", 0.96, 1.0, 0.5), Point("y", 0.97, 2.0, 1.0), Point("z", 0.99, 3.0, 1.0)]
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
        registry.parse(word, ONE.scene)
        return {
            "attainment_offered": 0.9 + seed / 100 + ("gated=1" in word) / 50,
            "gpu_hours": 1.0 + len(word) / 100,
            "windows": {"n": 2, "passed": 0 if "gated=1" in word else 2},
        }


def test_each_is_run_once_with_every_seed_and_its_mean_counts() -> None:
    plant = Plant()
    field = Field(frontier.playing(plant), (1, 3))
    [one, again] = [field.points(["static:2", "static:2"]), field.points(["static:2"])]
    assert again == one
    assert one[0].attainment == pytest.approx(0.92)
    assert plant.ran == [("static:2", 1), ("static:2", 3)]


def test_processes_give_the_same() -> None:
    runs = [(f"static:{n}", n) for n in (1, 2, 3)]
    assert frontier.playing(Plant(), 2)(runs) == frontier.playing(Plant())(runs)


def test_other_policies_are_themselves() -> None:
    for word in ("plimsoll", "follower:margin=0.7", "clairvoyant:plan=0@1"):
        assert frontier.words(word, ONE, frontier.playing(Plant())) == [word]


def test_hindsight_looks_at_enough_settings_and_takes_the_cheapest_that_passes() -> None:
    assert len(list(screen.followings(60.0))) >= 200
    plant = Plant()
    [best] = frontier.words("hindsight:runs=6", ONE, frontier.playing(plant), (6,))
    words = {word for word, _ in plant.ran}
    assert {"gated=1", "cap="} <= {kind for kind in ("gated=1", "cap=") for word in words if kind in word}
    passing = [word for word in words if "cap=" in word]
    assert best in passing
    assert len(best) == min(map(len, passing))
    [rich] = frontier.words("hindsight:runs=6,gpu-hours=9", ONE, frontier.playing(Plant()), (6,))
    assert "gated=1" in rich


def test_hindsight_that_nobody_can_afford_is_refused() -> None:
    with pytest.raises(BadInput, match=r"gpu-hours=0\.1: the cheapest follower that was run costs 1\.\d+ GPU-hours"):
        frontier.words("hindsight:runs=6,gpu-hours=0.1", ONE, frontier.playing(Plant()), (6,))


def test_every_gateway_has_a_part_of_every_cap() -> None:
    plant, scene = Plant(), replace(ONE.scene, gateways=1000)
    frontier.words("hindsight:runs=6", replace(ONE, scene=scene), frontier.playing(plant), (6,))
    assert {word.partition("cap=")[2] for word, _ in plant.ran} == {"", "1000"}
    for word, _ in plant.ran:
        registry.parse(word, scene)


def test_the_frontier_is_of_one_admission() -> None:
    found = frontier.words("follower-frontier:runs=6", ONE, frontier.playing(Plant()))
    assert found
    assert all(word.startswith("follower:") and word.endswith("gated=1") for word in found)


@pytest.mark.parametrize(
    "text", ["hindsight:warp=1", "hindsight:plan=1", "follower-frontier:runs=0", "clairvoyant:attainment=2"]
)
def test_comparisons_refuse_what_they_do_not_know(text: str) -> None:
    with pytest.raises(BadInput):
        frontier.words(text, ONE, frontier.playing(Plant()))


def _by_replicas(word: str, seed: int) -> dict[str, Any]:
    """Attains all with two replicas from second 95 to 190; replica-seconds cost."""
    plan = clairvoyant.read(word.partition("plan=")[2].partition(",")[0], 1)
    assert plan is not None
    ends_s = [*(at_s for at_s, _ in plan[1:]), LENGTH_S]
    pieces = [(at_s, end_s, count) for (at_s, (count,)), end_s in zip(plan, ends_s, strict=True)]
    good = all(count >= 2 for at_s, end_s, count in pieces if end_s > 95.0 and at_s < 190.0)
    cost = sum((end_s - at_s) * count for at_s, end_s, count in pieces)
    return {"attainment_offered": 1.0 if good else 0.5, "gpu_hours": cost / 3600, "windows": {"n": 0, "passed": 0}}


def test_a_schedule_is_shaped_until_nothing_can_be_left_out() -> None:
    first = frontier.achievable(ONE, Field(frontier.playing(_by_replicas), (0,)), 0.99, 12)
    best = frontier.achievable(ONE, Field(frontier.playing(_by_replicas), (0,)), 0.99, 120)
    assert best.attainment == 1.0
    assert best.gpu_hours <= first.gpu_hours
    least_s = LENGTH_S + 95.0
    assert least_s <= 3600 * best.gpu_hours <= least_s + 2 * 60.0


def test_where_nothing_attains_it_the_most_is_taken() -> None:
    ran: list[tuple[float, float]] = []

    def short(word: str, seed: int) -> dict[str, Any]:
        registry.parse(word, ONE.scene)
        found = {**_by_replicas(word, seed), "attainment_offered": 0.9 if "@3" in word else 0.5}
        ran.append((found["attainment_offered"], found["gpu_hours"]))
        return found

    taken = frontier.achievable(ONE, Field(frontier.playing(short), (0,)), 0.999, 8)
    most = sorted(cost for attained, cost in ran if attained == 0.9)
    assert most[0] < most[-1]
    assert (taken.attainment, taken.gpu_hours) == (0.9, most[0])
    assert any(attained == 0.5 and cost < most[0] for attained, cost in ran)


def test_a_cap_for_the_promise_is_below_slots_and_cache() -> None:
    most = frontier.most_resident(ONE.scene)
    assert 20 < most < 256
    tight = replace(ONE.scene, plant=lab.plant(replace(lab.H200, max_num_seqs=8)))
    assert frontier.most_resident(tight) == 8
    small = replace(ONE.scene, plant=lab.plant(replace(lab.H200, kv_tokens=42_000)))
    assert 8 < frontier.most_resident(small) < 14


# -------------------------------------------------------------------- screening


def test_screened_orders_are_those_of_a_run() -> None:
    found = screen.followers(ONE, 5)
    assert 0 < len(found.words) <= 5
    assert found.settings >= 200
    settings = list(screen.followings(ONE.scene.plant.start.mean_s))
    courses = {one.word: one for one in screen._followed(ONE, Role.SERVE, settings[::97])}
    for text, course in list(courses.items())[::9]:
        done = lab.simulate(ASKED, registry.parse(f"follower:{text},gated=0", ONE.scene))
        asked = {int(at_s): desired for at_s, _, desired, *_ in done.world.log.replicas}
        ordered, now = [], 1
        for tick in range(ONE.ticks):
            now = asked.get(tick, now)
            ordered.append(now)
        assert ordered == course.orders.tolist()


def test_ready_replicas_and_cost_of_orders() -> None:
    ground = replace(ONE, length_s=12.0)
    orders = np.array([1, 1, 3, 3, 3, 3, 2, 1, 1, 2, 2, 2, 2])
    ready, paid_s = screen._played(orders, 1, 3.0, ground)
    assert ready.tolist() == [1, 1, 1, 1, 1, 3, 2, 1, 1, 1, 1, 1, 2]
    assert paid_s == 12.0 + 5.0 + 4.0 + 3.0


def test_work_that_comes_too_fast_is_missed_after_the_patience() -> None:
    demand = np.array([1.0] * 10 + [3.0] * 10)
    missed = screen._missed(demand, np.array([[1.0] * 20, [3.0] * 20]), 5.0)
    assert missed.tolist() == [pytest.approx((2 * 10 - 5) / 40), 0.0]


@pytest.mark.parametrize("ticks", [0, 1, 2, 3, 5, 8, 50])
def test_the_most_ahead(ticks: int) -> None:
    values = np.random.default_rng(1).integers(0, 9, 20)
    found = screen._most_ahead(values, ticks)
    assert found.tolist() == [int(max(values[at : at + ticks + 1])) for at in range(20)]


def test_who_knows_the_future_orders_a_start_up_ahead_and_fills_short_valleys() -> None:
    demand = np.array([0.5] * 50 + [1.5] * 20 + [0.5] * 10 + [1.5] * 20 + [0.5] * 50)
    for gap_s, bottom in ((0.0, 1), (12.0, 2)):
        orders = screen._foreseen(demand, 1.0, 0.0, gap_s, 0, 8.0, (1, 4)).tolist()
        assert orders[:42] == [1] * 42
        assert orders[42:70] == [2] * 28
        assert orders[71] == bottom
        assert orders[101:] == [1] * 49


def test_pairs_of_two_tiers_have_a_word() -> None:
    found = screen.followers(TWO, 6)
    assert 0 < len(found.words) <= 6
    for word in (*found.words, *screen.plans(TWO, 4).words):
        registry.parse(word, TWO.scene)


def test_alike_orders_are_one() -> None:
    quiet = replace(ONE, scene=replace(ONE.scene, asked=[Asked(0.0, 10, 2), Asked(50.0, 10, 2)]), length_s=50.0)
    found = screen.followers(quiet, 100)
    assert found.schedules < 30 < found.settings
    assert len(found.words) <= found.schedules


def test_a_load_of_one_moment_costs_nothing_and_has_its_words() -> None:
    for ground in (ONE, TWO):
        moment = replace(ground, scene=replace(ground.scene, asked=[Asked(0.0, 1000, 10)]), length_s=0.0)
        for found in (screen.followers(moment, 6), screen.plans(moment, 4)):
            assert found.words
            for word in found.words:
                registry.parse(word, moment.scene)


def _fluid(cost: Sequence[float], missed: Sequence[float]) -> screen.Fluid:
    return screen.Fluid(np.array(cost), np.array([missed] * len(screen._RHOS)))


def test_every_range_of_cost_is_tried() -> None:
    cost = np.linspace(1.0, 9.0, 200)
    kept = screen._worth(_fluid(cost.tolist(), (1.0 / cost).tolist()), 12)
    assert len(kept) == 12
    assert max(np.diff(cost[kept])) < 1.5


def test_options_of_both_tiers_are_told_as_one() -> None:
    assert screen.together(["margin=0.5,hold=3", "margin=0.7,hold=3"]) == "margin=0.5/0.7,hold=3/3"


def test_comparisons_as_they_are_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"{at_s},{prompt},{output}" for at_s, prompt, output in lab.Load(150, 10.0, 4000, 400).draw()]
    (tmp_path / "t.csv").write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]))
    manifest = builders.service(tiers={"serve": {"maxReplicas": 3}}, slo={"ttft": "1s", "tpot": "50ms"})
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(manifest))
    typed = ["simulate", "--trace", str(tmp_path / "t.csv"), "--service", str(tmp_path / "s.yaml")]
    typed += ["--hardware", "h200-8b", "--start-up", "5", "--output", "json"]
    assert main([*typed, "--policy", "clairvoyant:runs=4,attainment=0.5", "--policy", "hindsight:runs=2"]) == 0
    found = [one["policy"] for one in json.loads(capsys.readouterr().out)]
    assert found[0].startswith("clairvoyant:plan=0@")
    assert found[1].startswith("follower:margin=")
