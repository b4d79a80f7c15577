"""The ablation: what is replaced is what the law looks up, what is run, what is kept, and what the page says."""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench.ablation import command, page, runs
from bench.ablation.demand_series import SERIES, measure
from bench.ablation.length_rows import LENGTH_ROWS
from bench.ablation.mechanisms import MECHANISMS
from bench.ablation.page import CORE, Difference, count_lines, difference, mean_difference
from bench.ablation.runs import PLACES, AblationRunner, AblationTask, simulate, task_key
from bench.ablation.switches import Mechanism, Switch, constant, returning, switched_off, watched
from bench.ablation.verdicts import DELETIONS, NAMED_CASES, UNDECIDED
from bench.mismatch.cases import CASES
from bench.scoreboard.code_hash import CodeHash
from bench.scoreboard.loads import LengthDistribution, PhasedLoad, RatePhase
from bench.scoreboard.rows import BOARD_ROWS, SHORT_ROWS
from bench.scoreboard.run_store import RunStore, StoredRun
from plimsoll.core.admission import ttft_margin
from plimsoll.core.admission.retry_detection import RecentRejections

SWITCHES = [(name, switch) for name, one in MECHANISMS.items() for switch in one.switches]
CODE = CodeHash("whole", "bare")
TINY = replace(
    SHORT_ROWS["short"],
    name="tiny",
    load=PhasedLoad((RatePhase(30.0, 6.0, LengthDistribution(512.0, 32.0)),)),
    startup="10",
)


# ---------------------------------------------------------------- switches


@pytest.mark.parametrize(("name", "switch"), SWITCHES, ids=lambda one: one if isinstance(one, str) else one.label)
def test_replaced_name_exists_and_is_restored(name: str, switch: Switch) -> None:
    owner, attribute = switch.place
    before = vars(owner)[attribute]
    with switched_off(MECHANISMS[name]):
        assert vars(owner)[attribute] is not before
    assert vars(owner)[attribute] is before


@cache
def _imports(path: Path) -> list[tuple[str, str, str]]:
    """Module of which a name is imported, the name, and what it is called here."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    return [(node.module or "", one.name, one.asname or one.name) for node in nodes for one in node.names]


@cache
def _names_in_functions(path: Path) -> set[str]:
    """Names that functions look up when they run: `name`, or `module.name`."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    found: set[str] = set()
    for node in (node for function in functions for part in function.body for node in ast.walk(part)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(f"{node.value.id}.{node.attr}")
    return found


@pytest.mark.parametrize(
    ("name", "switch"),
    [(name, switch) for name, switch in SWITCHES if "." not in switch.name],
    ids=lambda one: one if isinstance(one, str) else one.label,
)
def test_no_other_module_holds_replaced_name_by_value(name: str, switch: Switch) -> None:
    """A module that imports the name from where it is replaced would go on with the original.

    A name that is replaced where it was imported to is replaced in all modules that import it.
    """
    path = CORE / f"{switch.module.replace('.', '/')}.py"
    imported = {called: (module, original) for module, original, called in _imports(path)}
    source = imported.get(switch.name, (f"plimsoll.core.{switch.module}", switch.name))
    replaced = {(one.module, one.name) for one in MECHANISMS[name].switches}
    for other in (*CORE.rglob("*.py"), *(CORE.parent / "sim").rglob("*.py")):  # what a run is made of
        for module, original, called in _imports(other):
            if (module, original) == source and other != path:
                where = ".".join(other.relative_to(CORE.parent).with_suffix("").parts).removeprefix("core.")
                assert (where, called) in replaced, f"{where} holds {switch.label} by value"


@pytest.mark.parametrize(
    "switch",
    [switch for _, switch in SWITCHES if "." not in switch.name],
    ids=lambda one: one.label,
)
def test_replaced_name_is_looked_up_in_a_function(switch: Switch) -> None:
    """Not in a default, a decorator or another constant, which are made once."""
    own = CORE / f"{switch.module.replace('.', '/')}.py"
    looked_up = switch.name in _names_in_functions(own)
    assert looked_up or any(switch.label in _names_in_functions(path) for path in CORE.rglob("*.py"))


def test_property_stays_a_property() -> None:
    switch = Switch("admission.arrival_estimator", "ArrivalEstimator.work_rate", returning(7.0))
    owner, attribute = switch.place
    with switched_off(Mechanism("m", "", (switch,), ())):
        assert getattr(owner(0.0), attribute) == 7.0


def test_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"ttft_margin has no nonesuch"):
        Switch("admission.ttft_margin", "nonesuch", constant(0)).place  # noqa: B018


def test_watch_counts_calls_and_constants() -> None:
    called = MECHANISMS["ttft-margin-learning"]
    not_called, fixed = MECHANISMS["retry-detection"], MECHANISMS["prefill-pacing"]
    original = ttft_margin.TtftMargin.observe
    with watched([called, not_called, fixed]) as calls:
        margin = ttft_margin.TtftMargin(1.0)
        margin.observe(5.0)
    assert calls == {"ttft-margin-learning": 1, "prefill-pacing": 1}
    assert margin.margin_s > 0.3
    assert ttft_margin.TtftMargin.observe is original


def test_watch_ignores_calls_that_the_switch_would_not_change() -> None:
    rejections = RecentRejections()
    rejections.record("same", 0.0, 5.0)
    with watched([MECHANISMS["retry-detection"]]) as calls:
        assert not rejections.is_retry(False, "other", 1.0)
        assert not calls
        assert rejections.is_retry(False, "same", 1.0)
    assert calls == {"retry-detection": 1}


# ---------------------------------------------------------------- runs


def test_places_are_rows_and_mismatches() -> None:
    assert len(set(PLACES)) == len(PLACES) == len(SHORT_ROWS) + len(LENGTH_ROWS) + len(BOARD_ROWS) + len(CASES)
    assert set(command.SCREEN_PLACES) | set(command.FULL_ROWS) <= set(PLACES)
    assert len(command.FULL_ROWS) >= 8


def test_run_without_mechanism_is_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(runs.ROWS, "tiny", TINY)
    whole, again = simulate(AblationTask("tiny", 1)), simulate(AblationTask("tiny", 1))
    assert whole["digest"] == again["digest"]
    assert "step-time-ratio" in whole["reached"]
    assert "prefill-lateness" not in whole["reached"]
    off = simulate(AblationTask("tiny", 1, "prefill-lateness"))
    assert off["digest"] == whole["digest"]
    assert (off["mechanism"], off["seed"]) == ("prefill-lateness", 1)
    assert 0.0 <= whole["attainment"] <= 1.0 < whole["gpu_hours"] * 3600.0


def test_key_depends_on_program_place_seed_and_mechanism() -> None:
    task = AblationTask("short", 1, "standby")
    others = [
        replace(task, seed=2),
        replace(task, place="step-0"),
        replace(task, place="none"),
        replace(task, mechanism="trend"),
        replace(task, mechanism=None),
    ]
    keys = {task_key(task, CODE), task_key(task, CodeHash("other", "bare")), *(task_key(one, CODE) for one in others)}
    assert len(keys) == 7


@pytest.fixture
def executed_tasks(monkeypatch: pytest.MonkeyPatch) -> list[AblationTask]:
    """Runs that were made, by a simulation in which only `standby` and `trend` are called, and `trend` changes."""
    tasks: list[AblationTask] = []

    def run(task: AblationTask) -> dict[str, Any]:
        tasks.append(task)
        differs = task.mechanism == "trend"
        figures = {"attainment": 0.9 - 0.1 * differs, "gpu_hours": 2.0 + differs, "changes": 4 - differs}
        return {**figures, "digest": str(differs), "wall_s": 0.0, "reached": ["standby", "trend"]}

    monkeypatch.setattr(runs, "simulate", run)
    return tasks


def test_runner_resumes_and_skips_what_is_never_called(executed_tasks: list[AblationTask], tmp_path: Path) -> None:
    names = ["standby", "trend", "season"]
    assert AblationRunner(RunStore(tmp_path, tmp_path / "none"), CODE).run(["short"], 2, names)
    assert [(task.seed, task.mechanism) for task in executed_tasks] == [
        (1, None), (2, None), (1, "standby"), (1, "trend"), (2, "standby"), (2, "trend"),
    ]  # fmt: skip
    again = AblationRunner(RunStore(tmp_path, tmp_path / "none"), CODE)
    assert again.run(["short"], 2, names)
    assert len(executed_tasks) == 6
    never = again.figures(AblationTask("short", 1, "season"))
    assert never == again.figures(AblationTask("short", 1))


def test_screen_drops_what_has_differed(executed_tasks: list[AblationTask], tmp_path: Path) -> None:
    runner = AblationRunner(RunStore(tmp_path, tmp_path / "none"), CODE)
    assert runner.run(["short", "step-0"], 1, ["standby", "trend"], screen=True)
    assert [task.mechanism for task in executed_tasks if task.place == "step-0"] == [None, "standby"]


def test_no_run_begins_after_the_budget(executed_tasks: list[AblationTask], tmp_path: Path) -> None:
    runner = AblationRunner(RunStore(tmp_path, tmp_path / "none"), CODE, until_s=-math.inf)
    assert not runner.run(["short"], 1, ["standby"])
    assert not executed_tasks


# ---------------------------------------------------------------- page


@pytest.mark.parametrize("name", MECHANISMS)
def test_code_of_mechanism_exists(name: str) -> None:
    assert MECHANISMS[name].does.endswith(".")
    assert count_lines(MECHANISMS[name].code) >= len(MECHANISMS[name].code)


def test_lines_of_a_module_count_its_parts_once() -> None:
    whole = len((CORE / "admission/ttft_margin.py").read_text().splitlines())
    assert count_lines(["admission/ttft_margin.py"]) == whole
    assert count_lines(["admission/ttft_margin.py", "admission/ttft_margin.py:TtftMargin.observe"]) == whole
    assert 0 < count_lines(["admission/ttft_margin.py:TtftMargin.observe"]) < 10
    with pytest.raises(KeyError):
        count_lines(["admission/ttft_margin.py:nonesuch"])


def test_difference_is_without_less_whole() -> None:
    whole = {"attainment": 0.9, "gpu_hours": 2.0, "changes": 4, "digest": "a", "reached": ["standby"]}
    found = difference("standby", whole, {"attainment": 0.8, "gpu_hours": 3.0, "changes": 3, "digest": "b"})
    assert (found.attainment, found.gpu_hours) == pytest.approx((-10.0, 50.0))
    assert (found.changes, found.differs, found.reached) == (-1, True, True)


def test_interval_is_over_seeds_of_means_over_places() -> None:
    def make_difference(points: float) -> Difference:
        return Difference(points, 0.0, 0.0, True, True)

    found = {
        "a": {1: make_difference(1.0), 2: make_difference(3.0)},
        "b": {1: make_difference(3.0), 2: make_difference(5.0), 3: make_difference(99.0)},
    }
    mean = mean_difference(found, lambda one: one.attainment)
    assert mean is not None
    assert mean.value == pytest.approx(3.0)  # of 2 and 4
    assert mean.half_width == pytest.approx(12.706)  # t of one degree of freedom, times sqrt(2) over sqrt(2)
    single = mean_difference({"a": {1: make_difference(1.0)}}, lambda one: one.attainment)
    assert single is not None
    assert single.half_width is None
    assert mean_difference({}, lambda one: one.attainment) is None


def test_page_separates_unchanged_from_never_called(executed_tasks: list[AblationTask], tmp_path: Path) -> None:
    runner, names = AblationRunner(RunStore(tmp_path, tmp_path / "none"), CODE), ["standby", "trend", "season"]
    runner.run(["short"], 2, names)
    text = page.render(runner, ["short", "sigma"], 2, names)
    called, never = text.split("Called, and no run differs:")[1].split("Never called in any of these runs")
    assert "`standby`" in called
    assert "`season`" in never.split("## Places")[0]
    assert "| `trend` | 2 of 2 | -10.00 ± 0.00 | +50.00 % ± 0.00 | -1.0 ± 0.00 |" in text
    assert "6 of 12 comparisons" in text


# ---------------------------------------------------------------- command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--places", "nonesuch"], "no place nonesuch; there are short"),
        (["--mechanisms", "nonesuch"], "no mechanism nonesuch; there are standby"),
    ],
)
def test_unknown_name_is_a_usage_error(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(words) == 2
    assert message in capsys.readouterr().err


def test_command_writes_page_of_stored_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "code_hash", lambda: CODE)
    figures = {"attainment": 0.9, "gpu_hours": 2.0, "changes": 4, "digest": "a", "reached": []}
    store = RunStore(tmp_path / "runs", tmp_path / "none")
    store.put(StoredRun(task_key(AblationTask("short", 1), CODE), "short", 1.0, figures))
    out = tmp_path / "page.md"
    words = ["--page", "--places", "short", "--mechanisms", "standby", "--screen"]
    assert command.main([*words, "--store", str(tmp_path / "runs"), "--out", str(out)]) == 0
    assert "| `standby` | 231 | 1 |" in out.read_text().replace(str(count_lines(MECHANISMS["standby"].code)), "231")


def test_verdicts_name_mechanisms_and_deletions_are_gone() -> None:
    assert {one.name for one in (*NAMED_CASES, *UNDECIDED)} <= set(MECHANISMS)
    assert not {one.name for one in DELETIONS} & set(MECHANISMS)
    assert {name for series in SERIES for name in series.mechanisms} <= set(MECHANISMS)


def test_demand_series_without_own_growth_loses_bursts() -> None:
    series = replace(SERIES[1], horizons_s=(240.0,), every=24)
    whole, without = (measure(series, 1, one) for one in (None, MECHANISMS["own-growth-burst"]))
    assert without[0, 0] > whole[0, 0] + 5.0
    assert without[0, 1] < whole[0, 1]
