"""What the kept runs of one program come to: every row with its scores and checks, small enough to be committed.

Only runs whose key is that of a row as it is now are taken, so that nothing of an older program or row is among them.
Of the followers those are kept that nobody beats at their cost (in windows, too, where the row is judged by them), and
those that are named by a check; how many were played is told.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from bench.scoreboard import cost_bound, scoring, target_checks
from bench.scoreboard.code_hash import CodeHash, run_key
from bench.scoreboard.rows import BOARD_ROWS, PLANTS, RAISED_ROWS, BoardRow
from bench.scoreboard.run_store import StoredRun
from bench.scoreboard.scoring import MeanWithError, RetryAfterCounts, Score
from bench.scoreboard.simulate_run import RunTask, place_of
from bench.scoreboard.target_checks import TargetCheck
from plimsoll.sim import frontier

OWN_POLICY: Final = "plimsoll"
BOARD_FILE: Final = Path(__file__).parent / "board.json"
_DIGITS: Final = 5
_ENTRY_FIELDS: Final = ("row", "plant", "followers", "boundary", "least")
_MEAN_FIELDS: Final = frozenset({"offered", "admitted", "tokens", "gpu_hours", "replicas", "shed"})


@dataclass(frozen=True)
class BoardEntry:
    """A row on a plant. followers: how many were played. boundary: whether the least constant fleet is just below its
    limit. least: GPU-hours that nobody is below who attains what Plimsoll does; None where that is not known."""

    row: str
    plant: float
    followers: int
    boundary: bool
    scores: Sequence[Score]
    checks: Sequence[TargetCheck]
    least: float | None = None

    @property
    def row_and_plant(self) -> str:
        return place_of(self.row, self.plant)

    @property
    def own_score(self) -> Score | None:
        return next((one for one in self.scores if one.policy == OWN_POLICY), None)


@dataclass(frozen=True)
class ScoreBoard:
    """program: hash of what was played. plays, cpu_s: made for it. left: of the plan, not played."""

    program: str
    plays: int
    cpu_s: float
    left: Sequence[str]
    places: Sequence[BoardEntry]


def make_board(runs: Iterable[StoredRun], program: CodeHash, not_played: Sequence[str]) -> ScoreBoard:
    """Of all kept runs of this program."""
    current_runs = runs_of_program(runs, program)
    runs_by_entry: dict[tuple[str, float], list[StoredRun]] = {}
    for run in current_runs:
        runs_by_entry.setdefault((run.row, run.plant), []).append(run)
    scores = {key: score_runs([run.figures for run in entry_runs]) for key, entry_runs in runs_by_entry.items()}
    entries = [
        _with_cost_bound(row, make_entry(row, plant, scores[name, plant], _at_boundary(row, plant, scores)))
        for plant in PLANTS
        for name, row in BOARD_ROWS.items()
        if (name, plant) in scores
    ]
    return ScoreBoard(
        program.with_operator,
        len(current_runs),
        round(sum(run.figures["wall_s"] for run in current_runs)),
        not_played,
        entries,
    )


def _with_cost_bound(row: BoardRow, entry: BoardEntry) -> BoardEntry:
    """With the bound, where the page shows it."""
    if entry.own_score is None or entry.plant != 1.0:
        return entry
    hours = cost_bound.min_gpu_hours(row, entry.plant, entry.own_score.offered.value)
    return replace(entry, least=round(hours, _DIGITS) if math.isfinite(hours) else None)


def runs_of_program(runs: Iterable[StoredRun], program: CodeHash) -> list[StoredRun]:
    """Those that this program made, of rows as they are now."""
    rows = {**BOARD_ROWS, **{row.name: row for row in RAISED_ROWS.values()}}
    return [run for run in runs if run.row in rows and run.key == run_key(_task(run, rows), program)]


def _task(run: StoredRun, known: Mapping[str, BoardRow]) -> RunTask:
    return RunTask(known[run.row], run.plant, run.figures["policy"], run.figures["seed"])


def score_runs(runs: Iterable[Mapping[str, Any]]) -> list[Score]:
    """One row's policies, Plimsoll first, then in order of their names."""
    runs_by_policy: dict[str, dict[int, Mapping[str, Any]]] = {}
    for run in runs:
        runs_by_policy.setdefault(run["policy"], {})[run["seed"]] = run
    ordered = sorted(runs_by_policy, key=lambda policy: (policy != OWN_POLICY, policy))
    return [
        scoring.score_policy(policy, [runs_by_policy[policy][seed] for seed in sorted(runs_by_policy[policy])])
        for policy in ordered
    ]


def make_entry(row: BoardRow, plant: float, scores: Sequence[Score], boundary: bool) -> BoardEntry:
    """One row's scores and whether Plimsoll reaches what is asked."""
    own = next((score for score in scores if score.policy == OWN_POLICY), None)
    checks = [] if own is None else target_checks.check_targets(row, own, scores, plant == 1.0, boundary)
    followers = [score for score in scores if score.family == "follower"]
    points = [score.point for score in followers]
    shown_policies = {score.policy for score in frontier.pareto_front(points)}
    if row.compares_windows:
        shown_policies |= {
            score.policy
            for score in frontier.pareto_front(
                replace(score, attainment=score.windows_passed or 0.0) for score in points
            )
        }
    shown_policies |= {
        score.policy for score in followers if any(f"({score.policy})" in check.found for check in checks)
    }
    shown_scores = [score for score in scores if score.family != "follower" or score.policy in shown_policies]
    return BoardEntry(row.name, plant, len(followers), boundary, shown_scores, checks)


def _at_boundary(row: BoardRow, plant: float, scores: Mapping[tuple[str, float], Sequence[Score]]) -> bool:
    """Whether the row's least constant fleet was played at a rate of 5 % more, and does not carry it."""
    raised = RAISED_ROWS.get(row.name)
    if raised is None:
        return False
    least = target_checks.min_constant_fleet(scores[row.name, plant])
    raised_scores = [one for one in scores.get((raised.name, plant), ()) if one.policy == f"static:{least}"]
    return bool(raised_scores) and not target_checks.meets_windows(raised_scores[0])


# -------------------------------------------------------------------- as JSON


def write(board: ScoreBoard, path: Path) -> None:
    """A line a policy, so that a change can be read."""
    lines = [f'"{name}": {json.dumps(getattr(board, name))}' for name in ("program", "plays", "cpu_s", "left")]
    entries = ",\n".join(_entry_json(entry) for entry in board.places)
    path.write_text("{" + ",\n".join(lines) + f',\n"places": [\n{entries}\n]}}\n')


def _entry_json(entry: BoardEntry) -> str:
    head = {name: getattr(entry, name) for name in _ENTRY_FIELDS}
    scores = ",\n  ".join(json.dumps(_score_dict(score), separators=(",", ":")) for score in entry.scores)
    checks = ",\n  ".join(json.dumps(list(check), separators=(",", ":")) for check in entry.checks)
    return f' {json.dumps(head)[:-1]}, "scores": [\n  {scores}],\n "checks": [\n  {checks}]}}'


def _score_dict(score: Score) -> dict[str, Any]:
    """Without what is of single seeds, and without what is not there."""
    document = {name: _round(value) for name, value in asdict(score).items() if name != "each"}
    document["retry_reservations"] = list(score.retry_reservations) if score.retry_reservations.refused else None
    return {name: value for name, value in document.items() if value is not None}


def _round(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_round(item) for item in value]
    return round(value, _DIGITS) if isinstance(value, float) else value


def read(path: Path = BOARD_FILE) -> ScoreBoard:
    """What `write` wrote, with scores that hold means alone."""
    document = json.loads(path.read_text())
    entries = [
        BoardEntry(
            **{name: entry_document[name] for name in _ENTRY_FIELDS},
            scores=[_read_score(item) for item in entry_document["scores"]],
            checks=[TargetCheck(*item) for item in entry_document["checks"]],
        )
        for entry_document in document["places"]
    ]
    return ScoreBoard(**{**document, "places": entries})


def _read_score(document: Mapping[str, Any]) -> Score:
    values = {
        field_info.name: document.get(field_info.name) for field_info in fields(Score) if field_info.name != "each"
    }
    values |= {name: MeanWithError(*document[name]) for name in _MEAN_FIELDS}
    reservations = document.get("retry_reservations", (0,) * len(RetryAfterCounts._fields))
    values["retry_reservations"] = RetryAfterCounts(*reservations)
    return Score(**values)
