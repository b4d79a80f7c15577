"""The whole board: what its plan names, how rivals are chosen, how it stops and goes on, and what is made of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.scoreboard import board_file, cost_bound, docs_pages, full_run, search
from bench.scoreboard.code_hash import CodeHash
from bench.scoreboard.rows import BOARD_ROWS, OTHER_PLANTS, RAISED_ROWS
from bench.scoreboard.run_plan import RUN_PLAN, PlanPart
from bench.scoreboard.run_store import RunStore, write_committed
from bench.scoreboard.runner import BudgetExhausted, Runner
from bench.scoreboard.simulate_run import RunTask, search_space
from plimsoll.sim.policies import registry
from tests.bench.score_builders import make_board_figures, make_run

Made = Callable[[RunTask], dict[str, Any]]
CODE = CodeHash("whole", "bare")
STEP, CONSTANT = BOARD_ROWS["step-60"], "constant-1.4-poisson"
BASELINES = [f"follower:spare={n},cap=9" for n in range(30)]  # GPU-hours 0.5, 0.6 and so on


def a_made(task: RunTask) -> dict[str, Any]:
    return make_run(0.9, 1.0, policy=task.policy, seed=task.seed)


class Field:
    """Plays by a function, and remembers what was asked for."""

    def __init__(self, run_task: Made) -> None:
        self.made, self.tasks = run_task, list[RunTask]()

    def __call__(self, tasks: Sequence[RunTask]) -> list[dict[str, Any]]:
        self.tasks += tasks
        return [{**self.made(one), "policy": one.policy, "seed": one.seed} for one in tasks]

    def words(self, prefix: str) -> list[str]:
        return list(dict.fromkeys(one.policy for one in self.tasks if one.policy.startswith(prefix)))

    def without_stated_rates(self) -> list[str]:
        """Followers that measure the rate."""
        return [word for word in self.words("follower") if "rates=" not in word]


# ---------------------------------------------------------------- the plan


def test_plan_covers_every_row_and_known_kinds() -> None:
    assert {name for part in RUN_PLAN for name in part.rows} == set(BOARD_ROWS)
    own = {
        name for part in RUN_PLAN for name in part.rows if "plimsoll" in part.policy_groups and part.plants == (1.0,)
    }
    assert own == set(BOARD_ROWS), "Plimsoll on every row"
    kinds = {who for part in RUN_PLAN for who in part.policy_groups}
    words = {who for who in kinds if who.startswith(("plimsoll", "static:"))}
    assert kinds - words == set(full_run.POLICY_GROUPS)


def test_plan_has_baselines_for_rows_that_require_them() -> None:
    body = {
        name
        for name, row in BOARD_ROWS.items()
        if row.targets.max_attainment_gap is not None or row.targets.max_cost_ratio is not None
    }
    run_baseline = {
        (name, plant)
        for part in RUN_PLAN
        if "followers" in part.policy_groups
        for name in part.rows
        for plant in part.plants
    }
    assert {(name, plant) for name in body for plant in (1.0, *OTHER_PLANTS)} <= run_baseline


def test_plan_dependent_parts_follow_plimsoll() -> None:
    played: set[tuple[str, float]] = set()
    for part in RUN_PLAN:
        here = {(name, plant) for name in part.rows for plant in part.plants}
        if part.policy_groups[0] in ("followers", "fleets"):
            assert here <= played, part.description
        played |= here if "plimsoll" in part.policy_groups else set()


# ---------------------------------------------------------------- followers


@pytest.fixture
def screened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty followers, each a little dearer than the last, and nothing found by a search."""
    monkeypatch.setattr(search, "_FOUND", tmp_path / "found.json")
    (tmp_path / "found.json").write_text("{}")
    monkeypatch.setattr(search, "screened", lambda row, plant, limit: BASELINES[:limit])


def run_baseline(task: RunTask) -> dict[str, Any]:
    """Plimsoll costs 0.9; attainment rises with cost, and behind the gate by two points."""
    if task.policy == "plimsoll":
        return make_run(0.90, 0.9)
    spare = int(task.policy.partition("spare=")[2].partition(",")[0])
    return make_run(0.85 + 0.01 * spare + 0.02 * ("gated=1" in task.policy), 0.5 + 0.1 * spare)


@pytest.mark.usefixtures("screened")
def test_baselines_cheapest_first_then_best_with_admission() -> None:
    field = Field(run_baseline)
    full_run.run_plan([PlanPart("p", ("step-60",), ("followers",))], field)
    assert [word for word in field.without_stated_rates() if "cap" in word] == BASELINES[:16]
    assert field.without_stated_rates()[16:] == [f"follower:spare={n},gated=1" for n in (4, 3, 2, 1)]
    assert len(field.without_stated_rates()) == 20


@pytest.mark.usefixtures("screened")
def test_baselines_suffice_when_few_cost_at_most_plimsoll(tmp_path: Path) -> None:
    """Of those that a search had left one is what would be played behind the gate."""
    (tmp_path / "found.json").write_text('{"step-60": {"follower-frontier": ["follower:spare=0,gated=1"]}}')
    field = Field(lambda task: {**run_baseline(task), **({"gpu_hours": 0.6} if task.policy == "plimsoll" else {})})
    full_run.run_plan([PlanPart("p", ("step-60",), ("followers",))], field)
    assert len(field.without_stated_rates()) == 20
    assert field.without_stated_rates()[16:] == [f"follower:spare={n},gated=1" for n in (1, 2, 3, 4)]


@pytest.mark.usefixtures("screened")
def test_baselines_all_at_most_plimsoll_cost_are_played() -> None:
    field = Field(lambda task: {**run_baseline(task), **({"gpu_hours": 2.95} if task.policy == "plimsoll" else {})})
    full_run.run_plan([PlanPart("p", ("step-60",), ("followers",))], field)
    assert len([word for word in field.without_stated_rates() if "cap" in word]) == 26, "25 of them cost no more"


@pytest.mark.usefixtures("screened")
def test_baselines_other_plant_count_at_five_percent_less_cost() -> None:
    field = Field(run_baseline)
    full_run.run_plan([PlanPart("p", ("step-60",), ("followers",), plants=(1.4,))], field)
    assert next(word for word in field.without_stated_rates() if "gated" in word) == "follower:spare=3,gated=1"
    assert {one.plant for one in field.tasks} == {1.4}


@pytest.mark.usefixtures("screened")
def test_leader_is_played_with_all_seeds_then_the_next() -> None:
    attained = {f"follower:spare={n},gated=1": 0.90 + 0.001 * n for n in range(4)}

    def fake_run(task: RunTask) -> dict[str, Any]:
        if "gated" not in task.policy:
            return run_baseline(task)
        lucky = 0.91 if task.seed == 1 else 0.8
        return {
            **run_baseline(task),
            "attainment_offered": attained.get(task.policy, 0.5 if "rates" in task.policy else lucky),
        }

    field = Field(fake_run)
    full_run.run_plan([PlanPart("p", ("step-60",), ("followers",), seeds=3)], field)
    more = {one.policy for one in field.tasks if one.seed == 3}
    assert "plimsoll" in more
    assert "follower:spare=4,gated=1" in more
    assert len(more) == 3, "it was luck, so that another one leads"


@pytest.mark.usefixtures("screened")
def test_leader_by_cost_is_cheapest_with_equal_attainment() -> None:
    """The better ones cost more; and with more seeds the cheapest is less good."""

    def fake_run(task: RunTask) -> dict[str, Any]:
        unlucky = task.policy == "follower:spare=3,gated=1" and task.seed > 1
        return {**run_baseline(task), **({"attainment_offered": 0.8} if unlucky else {})}

    field = Field(fake_run)
    full_run.run_plan([PlanPart("p", ("step-60-pd",), ("followers",), seeds=2)], field)
    assert [one.policy for one in field.tasks if one.seed == 2 and one.policy != "plimsoll"] == [
        "follower:spare=3,gated=1", "follower:spare=4,gated=1",
    ]  # fmt: skip


@pytest.mark.usefixtures("screened")
def test_baselines_get_stated_rates_for_identical_requests() -> None:
    field = Field(run_baseline)
    full_run.run_plan([PlanPart("p", ("step-60", "ramp-120", "shift-60-pd", "azure-code"), ("followers",))], field)
    reported = [one for one in field.tasks if "rates=" in one.policy]
    assert {one.row.name for one in reported} == {"step-60"}
    assert {one.policy.partition("rates=")[2] for one in reported} == {"0@6;300@36;1200@6,gated=1"}
    assert len(reported) == 4
    scene = search_space(STEP, 1.0, STEP.load.make(1)).context
    assert all(registry.parse(one.policy, scene).runs_operator for one in reported)


# ---------------------------------------------------------------- constant fleets


def make_static_fleets(least: int, own: float = 2.0, limit: float = 1.0) -> Made:
    """Constant fleets from `least` on keep the promise, up to `limit` times the row's rate; Plimsoll has `own`."""

    def fake_run(task: RunTask) -> dict[str, Any]:
        if task.policy == "plimsoll":
            return make_run(0.97, 12.0, board=make_board_figures(own))
        count = int(task.policy.removeprefix("static:"))
        raised = task.row.name in {row.name for row in RAISED_ROWS.values()}
        good = count >= least and (not raised or limit >= 1.05)
        return make_run(
            0.97, 6.0 * count, windows={"n": 100, "passed": 100 if good else 50}, board=make_board_figures(float(count))
        )

    return fake_run


@pytest.mark.parametrize(
    ("least", "own", "fleets"),
    [(2, 2.0, [2, 1]), (1, 3.1, [3, 2, 1]), (4, 2.0, [2, 3, 4]), (99, 9.0, [9, 10]), (1, 1.0, [1])],
    ids=["below fails", "down to one", "up", "none keeps it", "there is none below one"],
)
def test_static_fleets_from_plimsoll_mean_down_to_least_passing(least: int, own: float, fleets: list[int]) -> None:
    field = Field(make_static_fleets(least, own, limit=1.1))
    full_run.run_plan([PlanPart("p", (CONSTANT,), ("fleets",))], field)
    played = [one.policy for one in field.tasks if one.row.name == CONSTANT and one.policy != "plimsoll"]
    assert list(dict.fromkeys(played)) == [f"static:{count}" for count in fleets]


@pytest.mark.parametrize(("own", "limit", "boundary", "passed"), [
    (2.0, 1.0, False, True), (2.9, 1.0, True, True), (2.9, 1.1, False, False),
], ids=["it has no more", "just below the limit", "far below it"])  # fmt: skip
def test_boundary_run_is_played_only_where_it_matters(
    own: float, limit: float, boundary: bool, passed: bool, tmp_path: Path
) -> None:
    player = a_player(tmp_path, make_static_fleets(2, own, limit))
    full_run.run_plan([PlanPart("p", (CONSTANT,), ("plimsoll", "fleets"))], player)
    [found] = board_file.make_board(player.store, player.program, []).places
    assert found.boundary is boundary
    assert {check.name: check.passed for check in found.checks}["mean replicas over 2 after an hour"] is passed


def test_static_fleets_of_two_tiers_try_all_pairs() -> None:
    field = Field(lambda task: make_run(0.9 if task.policy in ("plimsoll", "static:2,1") else 0.5, 1.0))
    full_run.run_plan([PlanPart("p", ("step-60-pd",), ("fleets",))], field)
    assert field.words("static") == ["static:1,1", "static:1,2", "static:2,1"]


# ---------------------------------------------------------------- budget


def a_store(folder: Path) -> RunStore:
    """Beside which nothing is committed."""
    return RunStore(folder, folder / "nothing")


def a_player(folder: Path, fake_run: Made, **more: Any) -> Runner:
    """Names policy and seed in what is made, as a run does."""
    return Runner(
        a_store(folder),
        CODE,
        run_task=lambda task: {**fake_run(task), "policy": task.policy, "seed": task.seed},
        **more,
    )


class Clock:
    """A second more at every look."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def test_player_stops_at_budget_and_resumes(tmp_path: Path) -> None:
    seeds: list[int] = []

    def remembered(task: RunTask) -> dict[str, Any]:
        seeds.append(task.seed)
        return a_made(task)

    tasks = [RunTask(STEP, 1.0, "plimsoll", seed) for seed in range(1, 5)]
    with pytest.raises(BudgetExhausted):
        a_player(tmp_path, remembered, budget_s=3.0, clock=Clock())(tasks)
    assert seeds == [1, 2]
    assert len(a_player(tmp_path, remembered)(tasks)) == 4
    assert seeds == [1, 2, 3, 4]
    assert len(a_player(tmp_path, remembered, budget_s=0.0)(tasks)) == 4, "all of it is kept"


def test_player_resumes_from_committed_runs(tmp_path: Path) -> None:
    tasks = [RunTask(STEP, 1.0, "plimsoll", seed) for seed in (2, 1)]
    here = a_player(tmp_path / "here", a_made)
    runs = here(tasks)
    committed = tmp_path / "runs.jsonl.gz"
    write_committed(here.store, committed)
    there = RunStore(tmp_path / "there", committed)
    assert Runner(there, CODE, budget_s=0.0)(tasks) == runs
    before = committed.read_bytes()
    write_committed(reversed([*there]), committed)
    assert committed.read_bytes() == before, "the same runs, the same bytes"


def test_player_processes_make_all_runs(tmp_path: Path) -> None:
    tasks = [RunTask(STEP, 1.0, "plimsoll", seed) for seed in range(1, 4)]
    found = Runner(a_store(tmp_path), CODE, processes=2, run_task=a_made)(tasks)
    assert [run["seed"] for run in found] == [1, 2, 3]


def test_follow_reports_remaining_plan_items(tmp_path: Path) -> None:
    plan = [
        PlanPart("first", ("step-0", "step-60"), ("plimsoll",)),
        PlanPart("then", ("step-0",), ("static:3",), plants=(0.7,)),
    ]
    a_player(tmp_path, a_made)([RunTask(STEP, 1.0, "plimsoll", 1)])
    assert full_run.run_plan(plan, a_player(tmp_path, a_made, budget_s=0.0)) == [
        "first: step-0, plimsoll",
        "then: step-0@0.7, static:3",
    ]
    assert full_run.run_plan(plan, a_player(tmp_path, a_made)) == []


# ---------------------------------------------------------------- what is made of it


def test_board_ignores_runs_of_other_program_or_row(tmp_path: Path) -> None:
    a_player(tmp_path, a_made)(
        [RunTask(STEP, 1.0, "plimsoll", 1), RunTask(replace(STEP, ttft="2s"), 1.0, "plimsoll", 2)]
    )
    other = Runner(a_store(tmp_path), CodeHash("other", "other"), run_task=a_made)
    other([RunTask(STEP, 1.0, "plimsoll", 3)])
    found = board_file.make_board(a_store(tmp_path), CODE, [])
    assert (found.program, found.plays, found.cpu_s) == ("whole", 1, 10)
    assert [one.row_and_plant for one in found.places] == ["step-60"]


def a_whole_board(folder: Path, left: Sequence[str] = ()) -> board_file.ScoreBoard:
    """The step on two plants, with a dozen policies and twenty followers."""
    peers = {"kpa": (0.99, 2.0), "kpa:target=4": (0.95, 1.8), "apa": (0.5, 0.9), "static:3": (0.97, 1.5)}
    peers |= {"clairvoyant:plan=0@1": (0.991, 1.2), "static:2": (0.6, 1.0), "hpa-queue": (0.6, 2.2)}
    followers = {f"follower:spare={n}": (0.9 - 0.01 * n, 1.0 + 0.1 * n) for n in range(20)}
    figures = {"plimsoll": (0.94, 1.26), **peers, **followers}

    def fake_run(task: RunTask) -> dict[str, Any]:
        return make_run(*figures[task.policy])

    player = a_player(folder, fake_run)
    player([RunTask(STEP, plant, word, 1) for word in figures for plant in (1.0, 1.4)])
    return board_file.make_board(player.store, CODE, left)


def test_board_round_trips_without_single_seeds(tmp_path: Path) -> None:
    found = a_whole_board(tmp_path, ["first: step-0, plimsoll"])
    board_file.write(found, tmp_path / "board.json")
    json.loads((tmp_path / "board.json").read_text(), parse_constant=pytest.fail)
    bare = [replace(one, scores=[replace(score, each={}) for score in one.scores]) for one in found.places]
    assert board_file.read(tmp_path / "board.json") == replace(found, places=bare)


def test_board_counts_dominated_baselines_without_keeping_them(tmp_path: Path) -> None:
    nominal, other = a_whole_board(tmp_path).places
    assert nominal.followers == other.followers == 20
    assert [one.policy for one in nominal.scores if one.family == "follower"] == ["follower:spare=0"]


def test_page_states_misses_and_costs_of_equal_policies(tmp_path: Path) -> None:
    board = a_whole_board(tmp_path, ["first: step-0, plimsoll", "first: step-30, plimsoll"])
    text = docs_pages.summary(board)
    assert "2 items were left when its time was over" in text
    assert "- first: step-0, plimsoll; step-30, plimsoll" in docs_pages.tables(board)
    assert "| `step-60` | 1 | 94.00% | 100.00% | 1.260 | 3 of 4 | **offered** 94.00%, asked >= 95.0% |" in text
    assert "| `step-60@1.4` | 1 | 94.00% | 100.00% | 1.260 | 1 of 1 |  |" in text
    who = "| `step-60` | 94.0% at 1.26 | 97.0% at 1.50, `static:3` | 95.0% at 1.80, `kpa:target=4` |"
    who += " 50.0% at 0.90, `apa` | 90.0% at 1.00, `follower:spare=0` | 99.1% at 1.20, `clairvoyant` |"
    assert f"{who} {math.floor(100 * cost_bound.min_gpu_hours(STEP, 1.0, 0.94)) / 100} |" in text


def test_page_trace_compares_passed_windows(tmp_path: Path) -> None:
    """Attainment in all would name the dearer peer, and a schedule of which windows fail."""
    row, good, bad = BOARD_ROWS["azure-code"], {"n": 100, "passed": 99}, {"n": 100, "passed": 98}
    results = {
        "plimsoll": make_run(0.995, 9.0, windows={"n": 100, "passed": 100}),
        "kpa": make_run(0.996, 9.9, windows=good),
        "apa": make_run(0.990, 9.5, windows=good),
        "clairvoyant:plan=0@8": make_run(0.991, 7.0, windows=bad),
        "clairvoyant:plan=0@9": make_run(0.985, 8.0, windows=good),
        "follower:spare=1": make_run(0.980, 8.9, windows=good),
        "follower:spare=0": make_run(0.994, 8.8, windows=bad),
    }
    player = a_player(tmp_path, lambda task: results[task.policy])
    player([RunTask(row, 1.0, word, 1) for word in results])
    text = docs_pages.summary(board_file.make_board(player.store, CODE, []))
    assert "| `azure-code` | 100.0% of windows at 9.00 | - | 99.0% of windows at 9.50, `apa` | - |" in text
    assert " 99.0% of windows at 8.90, `follower:spare=1` | 99.0% of windows at 8.00, `clairvoyant` |" in text


def test_page_shows_other_miss_costs_side_by_side(tmp_path: Path) -> None:
    player = a_player(tmp_path, lambda task: make_run(0.9 + 0.001 * len(task.policy), 1.0))
    words = "plimsoll", "plimsoll:sloMissCost=0", "plimsoll:sloMissCost=80"
    player([RunTask(STEP, 1.0, word, 1) for word in words] + [RunTask(BOARD_ROWS["step-0"], 1.0, "plimsoll", 1)])
    text = docs_pages.summary(board_file.make_board(player.store, CODE, []))
    assert "| row | 0 | 25 | 80 |\n" in text
    assert "| `step-60` | 92.2% at 1.00 | 90.8% at 1.00 | 92.3% at 1.00 |\n" in text
    assert text.count("`step-0`") == 1


def test_pages_replace_marked_sections_and_remove_old_charts(tmp_path: Path) -> None:
    board, docs = a_whole_board(tmp_path), tmp_path / "docs"
    (docs / "evaluation" / "scoreboard").mkdir(parents=True)
    (docs / "evaluation" / "scoreboard" / "gone.svg").write_text("")
    page = f"before\n\n{docs_pages.BEGIN}\nold\n{docs_pages.END}\n\nafter\n"
    (docs / "evaluation" / "scoreboard.md").write_text(page)
    for _ in range(2):
        docs_pages.write(board, docs)
        text = (docs / "evaluation" / "scoreboard.md").read_text()
        assert text.startswith("before\n")
        assert text.endswith("\n\nafter\n")
        assert "old" not in text
    assert [path.name for path in (docs / "evaluation" / "scoreboard").iterdir()] == ["step-60.svg"]
    tables = (docs / "evaluation" / "scoreboard-tables.md").read_text()
    assert "19 more followers were played" in tables
    assert "![attainment over GPU-hours](scoreboard/step-60.svg)" in tables


def test_committed_pages_match_committed_board(tmp_path: Path) -> None:
    board = board_file.read()
    text = (docs_pages.DOCS / "evaluation" / "scoreboard.md").read_text()
    assert docs_pages.summary(board) in text, "run `make generate`"
    assert (docs_pages.DOCS / "evaluation" / "scoreboard-tables.md").read_text() == docs_pages.tables(board), (
        "run `make generate`"
    )
    assert board_file.BOARD_FILE.stat().st_size < 500_000
