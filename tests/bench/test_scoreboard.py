"""The scoreboard: what it draws, how it judges, what it keeps, and a short row against what it came to before."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.scoreboard import expect, judge, picture, play, search, table
from bench.scoreboard.loads import Lengths, Phase, Phases, Renewal, Sine
from bench.scoreboard.play import Task, replicas
from bench.scoreboard.rows import ROWS, SHORT, Reach
from bench.scoreboard.slices import Slice
from bench.scoreboard.store import Store
from plimsoll.api.v1alpha1 import parse
from plimsoll.core.picking.endpoint import Role
from plimsoll.sim import profile, startup
from plimsoll.sim.log import Log

TALK = Lengths(2048.0, 256.0)
STEP = ROWS["step-60"]
FAR = 0.2  # of a mean: several standard errors for the sizes below


def tickets(given: int, soon: tuple[int, int, int], later: tuple[int, int, int]) -> dict[str, Any]:
    """Of ten refusals. soon, later: tickets of up to 60 s and of up to 120 s, in at the first retry, at the second."""
    names = ("given", "first_ok", "second_ok")
    honoured = {
        name: dict(zip(names, counts, strict=True)) for name, counts in (("to_60_s", soon), ("to_120_s", later))
    }
    return {"refused": 10, "given": given, "honoured": honoured}


def a_board(later: float | None = None, shed: Sequence[int] = ()) -> dict[str, Any]:
    """What a run holds for the board. later: mean replicas after the first hour; shed: refused in each minute."""
    return {"mean_replicas_later": {"serve": later}, "minutes": {"shed": list(shed)}}


def a_run(offered: float, gpu_hours: float, **more: Any) -> dict[str, Any]:
    """Figures of one run."""
    return {
        "attainment_offered": offered,
        "attainment_admitted": 1.0,
        "attainment_tokens": offered,
        "gpu_hours": gpu_hours,
        "mean_replicas": {"serve": 2.0},
        "shed_share": 0.0,
        "shed_work_ratio": None,
        "p95_ttft_s": 0.5,
        "reversals": {"serve": [0, 1]},
        "windows": {"n": 10, "passed": 9},
        "tickets": tickets(given=9, soon=(8, 7, 1), later=(4, 2, 1)),
        "board": a_board(),
        **more,
    }


def a_score(policy: str, offered: float, gpu_hours: float, **more: Any) -> judge.Score:
    return judge.score(policy, [a_run(offered, gpu_hours, **more)])


def reached(checks: Sequence[judge.Check]) -> dict[str, bool]:
    return {one.name: one.passed for one in checks}


MANY = [a_score(f"follower:spare={n}", 0.1, 0.5) for n in range(20)]  # a frontier far below
NO_TICKETS = tickets(given=0, soon=(0, 0, 0), later=(0, 0, 0))


# ---------------------------------------------------------------- loads


@pytest.mark.parametrize("row", [*ROWS.values(), *SHORT.values()], ids=lambda row: row.name)
def test_every_row_is_a_service_on_a_machine(row: Any) -> None:
    service = parse(row.manifest())
    assert [name for name, _ in service.spec.tiers.items()] == [name for name, _, _ in row.tiers]
    assert len(row.initial) == len(row.tiers)
    profile.load(row.hardware)
    startup.parse(row.start_up)


def test_the_same_seed_draws_the_same_requests_and_another_one_others() -> None:
    load = Phases((Phase(60.0, 5.0, TALK), Phase(60.0, 50.0, TALK)))
    assert load.make(1) == load.make(1)
    assert load.make(1) != load.make(2)


def test_phases_have_their_rates_and_lengths() -> None:
    asked = Phases((Phase(300.0, 6.0, TALK), Phase(300.0, 36.0, Lengths(300.0, 1000.0)))).make(1)
    first = [one for one in asked if one.at_s < 300.0]
    assert len(first) == pytest.approx(1800, rel=FAR)
    assert len(asked) - len(first) == pytest.approx(10_800, rel=FAR)
    assert np.mean([one.prompt_tokens for one in first]) == pytest.approx(2048, rel=0.03)
    assert np.mean([one.output_tokens for one in asked[len(first) :]]) == pytest.approx(1000, rel=0.03)
    assert all(one.at_s <= other.at_s for one, other in itertools.pairwise(asked))


def test_lengths_without_spread_are_all_alike() -> None:
    asked = Phases((Phase(60.0, 5.0, Lengths(4000.0, 1000.0, sigma=0.0)),)).make(1)
    assert {(one.prompt_tokens, one.output_tokens) for one in asked} == {(4000, 1000)}


def test_a_sine_is_highest_in_its_middle() -> None:
    asked = Sine(5.0, 31.0, 1800.0, TALK).make(1)
    middle = sum(870.0 <= one.at_s < 930.0 for one in asked)
    assert middle == pytest.approx(36 * 60, rel=0.1)
    assert sum(one.at_s < 60.0 for one in asked) == pytest.approx(60 * (5 + 31 * np.pi / 60), rel=FAR)


@pytest.mark.parametrize("cv", [1.0, 2.0])
def test_gaps_of_a_constant_rate_vary_as_said(cv: float) -> None:
    asked = Renewal(5.0, cv, 3600.0, TALK).make(1)
    gaps = np.diff([one.at_s for one in asked])
    assert len(asked) == pytest.approx(18_000, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_a_slice_is_laid_over_itself_and_its_length_stays() -> None:
    single, triple = Slice("azure-code-2023.csv.gz", 3436.4), Slice("azure-code-2023.csv.gz", 3436.4, 2.5)
    assert len(single.make(1)) == 8819
    assert len(triple.make(1)) == pytest.approx(2.5 * 8819, rel=0.02)
    assert triple.make(1)[-1].at_s < 3436.4


def test_copies_of_prompts_that_share_beginnings_are_other_prompts() -> None:
    asked = Slice("synthetic.csv.gz", 1030.0, 2.0, blocks=True).make(1)
    assert len(asked) == 2 * 3993
    names = {one.ids[0] // 1_000_000_000 for one in asked}
    assert names == {0, 1}


# ---------------------------------------------------------------- judging


def test_a_mean_has_the_interval_of_students_t() -> None:
    found = judge.mean([1.0, 2.0, 3.0])
    assert found.value == 2.0
    assert found.half == pytest.approx(4.303 / 3**0.5)
    assert judge.mean([0.5]) == (0.5, None)


def test_a_row_asks_for_offered_and_admitted_and_gpu_hours() -> None:
    good = a_score("plimsoll", 0.96, 1.2)
    dear = a_score("follower", 1.0, 2.0)
    assert all(reached(judge.checks(STEP, good, [good, dear, *MANY], nominal=True)).values())
    worse = a_score("plimsoll", 0.94, 1.4, attainment_admitted=0.98)
    found = reached(judge.checks(STEP, worse, [worse, dear, *MANY], nominal=True))
    assert [name for name, passed in found.items() if not passed] == ["offered", "admitted", "GPU-hours"]


def test_a_better_follower_at_our_cost_is_told_and_a_dearer_one_is_not() -> None:
    own = a_score("plimsoll", 0.96, 1.2)
    better, dearer = a_score("follower:margin=0.8", 0.975, 1.2), a_score("follower:margin=0.5", 1.0, 1.3)
    assert reached(judge.checks(STEP, own, [own, dearer, *MANY], nominal=True))["followers"]
    assert not reached(judge.checks(STEP, own, [own, better, dearer, *MANY], nominal=True))["followers"]


def test_on_another_plant_followers_judge_and_absolute_figures_do_not() -> None:
    own, better = a_score("plimsoll", 0.70, 1.6), a_score("follower:margin=0.8", 0.73, 1.5)
    assert reached(judge.checks(STEP, own, [own], nominal=False)) == {"followers": False}, "nobody was played"
    few = [own, *MANY[:5]]
    assert reached(judge.checks(STEP, own, few, nominal=False)) == {"followers": False}, "too few to be a frontier"
    assert reached(judge.checks(STEP, own, [own, *MANY], nominal=False)) == {"followers": True}
    assert reached(judge.checks(STEP, own, [own, better, *MANY], nominal=False)) == {"followers": False}


def test_cost_is_held_against_the_cheapest_reference_that_is_as_good() -> None:
    row = replace(STEP, reach=Reach(times_best=1.10))
    own, cheap = a_score("plimsoll", 0.96, 1.2), a_score("follower:spare=1", 0.96, 1.0)
    bad, peer = a_score("follower:spare=0", 0.90, 0.8), a_score("hpa-queue", 0.99, 0.7)
    assert not reached(judge.checks(row, own, [own, cheap, bad, peer, *MANY], nominal=True))["cost"]
    assert reached(judge.checks(row, own, [own, bad, peer, *MANY], nominal=True))["cost"]


def test_a_constant_rate_is_held_against_the_least_fleet_that_keeps_the_promise() -> None:
    row = replace(STEP, reach=Reach(reversals=1, above_least=0.2))
    windows = {"n": 100, "passed": 99}
    two = a_score("static:2", 0.97, 12.0, windows=windows)
    one = a_score("static:1", 0.5, 6.0, mean_replicas={"serve": 1.0})
    for later, passed in ((2.1, True), (2.3, False)):
        own = a_score("plimsoll", 0.97, 12.0, board=a_board(later))
        found = reached(judge.checks(row, own, [own, one, two], nominal=True))
        assert found["mean replicas over 2"] is passed
        assert found["reversals"]
    nobody = reached(judge.checks(row, own, [own, one], nominal=True))
    assert nobody["mean replicas over the least fleet"] is False


def test_refusing_the_large_ones_is_told() -> None:
    own = a_score("plimsoll", 0.96, 1.2, shed_work_ratio=1.3)
    assert not reached(judge.checks(STEP, own, [own], nominal=True))["work of what was shed"]


def test_tickets_are_counted_over_all_seeds() -> None:
    row = replace(STEP, reach=Reach(tickets=0.95))
    own = judge.score("plimsoll", [a_run(0.9, 1.0), a_run(0.9, 1.0)])
    assert own.tickets == (20, 18, 16, 14, 8, 6)
    found = reached(judge.checks(row, own, [own], nominal=True))
    assert found == {
        "refusals that carry a ticket": True,
        "in at the first retry, to 60 s": False,
        "in by the second, 60 to 120 s": False,
    }


def test_tickets_of_a_minute_more_may_take_two_retries() -> None:
    row = replace(STEP, reach=Reach(tickets=0.95))
    own = judge.score("plimsoll", [a_run(0.9, 1.0, tickets=tickets(given=10, soon=(6, 6, 0), later=(4, 1, 3)))])
    assert all(reached(judge.checks(row, own, [own], nominal=True)).values())


def test_refusals_come_in_one_wave() -> None:
    row = replace(STEP, reach=Reach(), clients="ignore")
    for shed, waves in (((0, 0, 0), 0), ((0, 9, 4, 0), 1), ((9, 0, 4, 0), 2)):
        own = judge.score("plimsoll", [a_run(0.9, 1.0), a_run(0.9, 1.0, board=a_board(shed=shed))])
        assert own.waves == waves
        assert reached(judge.checks(row, own, [own], nominal=True)) == {"waves of refusals": waves <= 1}
        assert not judge.checks(replace(row, clients="none"), own, [own], nominal=True)


def test_a_row_of_tickets_without_any_is_not_reached() -> None:
    row = replace(STEP, reach=Reach(tickets=0.95))
    own = judge.score("plimsoll", [a_run(0.9, 1.0, tickets=NO_TICKETS)])
    assert reached(judge.checks(row, own, [own], nominal=True)) == {"refusals that carry a ticket": False}


def test_where_nobody_honours_a_ticket_it_is_to_be_told_all_the_same() -> None:
    row = replace(STEP, reach=Reach(tickets=0.95))
    for given, refused, passed in ((9, 10, True), (8, 10, False), (0, 0, False)):
        told = {**tickets(given, (0, 0, 0), (0, 0, 0)), "refused": refused}
        own = judge.score("plimsoll", [a_run(0.9, 1.0, tickets=told)])
        assert reached(judge.checks(row, own, [own], nominal=True)) == {"refusals that carry a ticket": passed}


def test_another_profile_is_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = play.code()
    real = Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: real(path) + (b" " if path.name == "h200-8b-hot.json" else b"")
    )
    assert play.code() != before


def test_the_best_setting_is_kept_for_any_cost_and_for_the_rows_cost() -> None:
    scores = [
        a_score("p:a", 0.999, 2.0),
        a_score("p:b", 0.9985, 1.8),
        a_score("p:c", 0.9, 1.25),
        a_score("p:d", 0.8, 1.0),
    ]
    assert search.best(STEP, scores) == ["p:b", "p:c"]
    assert search.best(STEP, scores[:2]) == ["p:b"]


def test_a_search_climbs_the_ladder_and_plays_those_that_lead_with_all_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attainment is highest at a target of 24, and with its second word only as long as one seed is asked."""
    monkeypatch.setattr(search, "_FOUND", tmp_path / "found.json")
    (tmp_path / "found.json").write_text("{}")
    made: list[Task] = []

    def played(tasks: Sequence[Task]) -> list[dict[str, Any]]:
        made.extend(tasks)
        return [a_run(*figures(one)) for one in tasks]

    def figures(task: Task) -> tuple[float, float]:
        target = float(task.policy.partition("target=")[2].partition(",")[0])
        quick = task.policy.endswith("down=60")
        return 0.9 - abs(target - 24.0) / 1000 + quick * (0.005 if task.seed == 1 else -0.02), 2.0

    search.search("hpa-concurrency", STEP, 2, played)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == {"step-60": {"hpa-concurrency": ["hpa-concurrency:target=24,down=300"]}}
    every = search.words("hpa-concurrency", STEP)
    assert len({one.policy for one in made}) == 13 + 2 < len(every)
    assert len([one for one in made if one.seed == 2]) == 2


@pytest.mark.parametrize("name", ["hpa-queue", "keda-ttft", "kpa", "apa", "wva", "static"])
def test_a_ladder_has_every_word_once(name: str) -> None:
    every = search.words(name, STEP)
    assert sorted(word for step in search.ladder(every) for word in step) == sorted(every)


def test_static_fleets_of_all_sizes_are_tried() -> None:
    assert search.words("static", STEP) == [f"static:{k}" for k in range(1, 9)]
    assert len(search.words("static", ROWS["step-60-pd"])) == 16


def test_everybody_is_played_at_its_defaults_where_nothing_was_searched() -> None:
    played = search.policies(replace(STEP, name="nobody searched here"))
    assert played[0] == "plimsoll"
    assert {"hpa-queue", "keda-ttft", "kpa", "apa", "wva", "follower", "static:8"} <= set(played)


def test_who_needs_a_package_that_is_not_there_is_left_out_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    played, told = search.policies(STEP), capsys.readouterr().err
    for word in ("dynamo-load", "dynamo-throughput"):
        assert (word in played) is (f"left out: {word}: " not in told)


def test_mean_replicas_count_starting_and_draining_ones() -> None:
    log = Log()
    log.replicas = [(0.0, Role.SERVE, 1, 1, 0, 0), (50.0, Role.SERVE, 2, 1, 1, 0), (80.0, Role.SERVE, 1, 1, 0, 1)]
    assert replicas(log, Role.SERVE, 0.0, 100.0) == 1.5
    assert replicas(log, Role.SERVE, 75.0, 100.0) == 2.0
    assert replicas(log, Role.SERVE, 100.0, 100.0) is None


# ---------------------------------------------------------------- runs that are kept


def test_the_key_is_that_of_what_is_played() -> None:
    task = Task(STEP, 1.0, "plimsoll", 1)
    assert task.key("a") == Task(replace(STEP, reach=Reach(), says="other", seeds=3), 1.0, "plimsoll", 1).key("a")
    others = [
        Task(replace(STEP, start_up="61"), 1.0, "plimsoll", 1),
        replace(task, plant=0.7),
        replace(task, policy="static:3"),
        replace(task, seed=2),
    ]
    assert len({task.key("a"), task.key("b"), *(one.key("a") for one in others)}) == 6


def test_runs_are_found_again_and_a_line_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    task = Task(STEP, 1.0, "plimsoll", 1)
    Store(tmp_path).put("one", "code", task, {"attainment_offered": 0.5})
    with (tmp_path / "runs.jsonl").open("a") as lines:
        lines.write('{"key": "two", "figu')
    store = Store(tmp_path)
    assert store.get("one") == {"attainment_offered": 0.5}
    assert store.get("two") is None
    store.put("three", "code", task, {})
    assert Store(tmp_path).get("three") == {}


def test_page_and_picture_hold_every_policy() -> None:
    scores = [judge.score("plimsoll", [a_run(0.9, 1.0), a_run(0.92, 1.1)]), a_score("static:<3>", 0.8, 1.5)]
    text = table.rendered(STEP, "step-60", scores, judge.checks(STEP, scores[0], scores, nominal=True))
    assert "| `plimsoll` | 2 | 91.00% ± 12.71 |" in text
    assert "| tokens | windows | GPU-hours |" in text
    assert "| offered | >= 95.0% | 91.00% | **no** |" in text
    assert "static:&lt;3&gt;" in picture.drawn("a & b", scores)
    json.dumps([one.offered for one in scores], allow_nan=False)


# ---------------------------------------------------------------- the short row


@pytest.mark.parametrize("policy", expect.POLICIES)
def test_the_short_row_is_no_worse_than_chance_allows(policy: str) -> None:
    for name, row in SHORT.items():
        runs = [play.play(Task(row, 1.0, policy, seed)) for seed in (1, 2)]
        assert not expect.worse(runs, expect.read()[name][policy])


def test_worse_is_told_and_better_is_not() -> None:
    expected = {"attainment_offered": (0.95, 0.005), "gpu_hours": (0.4, 0.01)}
    better, chance, worse = (
        [{"attainment_offered": offered, "gpu_hours": hours}]
        for offered, hours in ((0.99, 0.2), (0.936, 0.429), (0.934, 0.431))
    )
    assert not expect.worse(better, expected)
    assert not expect.worse(chance, expected)
    assert len(expect.worse(worse, expected)) == 2
    assert len(expect.worse(chance * 4, expected)) == 2, "four times the same is no chance"
