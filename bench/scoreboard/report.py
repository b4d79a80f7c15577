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

from bench.scoreboard import bound, judge, reach
from bench.scoreboard.judge import Mean, Score, Tickets
from bench.scoreboard.play import Task, place
from bench.scoreboard.program import Program, key_of
from bench.scoreboard.reach import Check
from bench.scoreboard.rows import PLANTS, RAISED, ROWS, Row
from bench.scoreboard.store import Run
from plimsoll.sim import frontier

OWN: Final = "plimsoll"
FILE: Final = Path(__file__).parent / "board.json"
_DIGITS: Final = 5
_HEAD: Final = ("row", "plant", "followers", "boundary", "least")
_MEANS: Final = frozenset({"offered", "admitted", "tokens", "gpu_hours", "replicas", "shed"})


@dataclass(frozen=True)
class Judged:
    """A row on a plant. followers: how many were played. boundary: whether the least constant fleet is just below its
    limit. least: GPU-hours that nobody is below who attains what Plimsoll does; None where that is not known."""

    row: str
    plant: float
    followers: int
    boundary: bool
    scores: Sequence[Score]
    checks: Sequence[Check]
    least: float | None = None

    @property
    def place(self) -> str:
        return place(self.row, self.plant)

    @property
    def own(self) -> Score | None:
        return next((one for one in self.scores if one.policy == OWN), None)


@dataclass(frozen=True)
class Board:
    """program: hash of what was played. plays, cpu_s: made for it. left: of the plan, not played."""

    program: str
    plays: int
    cpu_s: float
    left: Sequence[str]
    places: Sequence[Judged]


def board(runs: Iterable[Run], program: Program, left: Sequence[str]) -> Board:
    """Of all kept runs of this program."""
    mine = of_program(runs, program)
    by_place: dict[tuple[str, float], list[Run]] = {}
    for run in mine:
        by_place.setdefault((run.row, run.plant), []).append(run)
    scores = {key: scored([run.figures for run in some]) for key, some in by_place.items()}
    places = [
        _bounded(row, judged(row, plant, scores[name, plant], _at_boundary(row, plant, scores)))
        for plant in PLANTS
        for name, row in ROWS.items()
        if (name, plant) in scores
    ]
    return Board(program.whole, len(mine), round(sum(run.figures["wall_s"] for run in mine)), left, places)


def _bounded(row: Row, found: Judged) -> Judged:
    """With the bound, where the page shows it."""
    if found.own is None or found.plant != 1.0:
        return found
    hours = bound.least(row, found.plant, found.own.offered.value)
    return replace(found, least=round(hours, _DIGITS) if math.isfinite(hours) else None)


def of_program(runs: Iterable[Run], program: Program) -> list[Run]:
    """Those that this program made, of rows as they are now."""
    known = {**ROWS, **{row.name: row for row in RAISED.values()}}
    return [run for run in runs if run.row in known and run.key == key_of(_task(run, known), program)]


def _task(run: Run, known: Mapping[str, Row]) -> Task:
    return Task(known[run.row], run.plant, run.figures["policy"], run.figures["seed"])


def scored(runs: Iterable[Mapping[str, Any]]) -> list[Score]:
    """One row's policies, Plimsoll first, then in order of their names."""
    each: dict[str, dict[int, Mapping[str, Any]]] = {}
    for run in runs:
        each.setdefault(run["policy"], {})[run["seed"]] = run
    ordered = sorted(each, key=lambda word: (word != OWN, word))
    return [judge.score(word, [each[word][seed] for seed in sorted(each[word])]) for word in ordered]


def judged(row: Row, plant: float, scores: Sequence[Score], boundary: bool) -> Judged:
    """One row's scores and whether Plimsoll reaches what is asked."""
    own = next((one for one in scores if one.policy == OWN), None)
    checks = [] if own is None else reach.checks(row, own, scores, plant == 1.0, boundary)
    followers = [one for one in scores if one.family == "follower"]
    points = [one.point for one in followers]
    told = {one.word for one in frontier.front(points)}
    if row.by_windows:
        told |= {one.word for one in frontier.front(replace(one, attainment=one.windows or 0.0) for one in points)}
    told |= {one.policy for one in followers if any(f"({one.policy})" in check.found for check in checks)}
    kept = [one for one in scores if one.family != "follower" or one.policy in told]
    return Judged(row.name, plant, len(followers), boundary, kept, checks)


def _at_boundary(row: Row, plant: float, scores: Mapping[tuple[str, float], Sequence[Score]]) -> bool:
    """Whether the row's least constant fleet was played at a rate of 5 % more, and does not carry it."""
    raised = RAISED.get(row.name)
    if raised is None:
        return False
    least = reach.least_fleet(scores[row.name, plant])
    there = [one for one in scores.get((raised.name, plant), ()) if one.policy == f"static:{least}"]
    return bool(there) and not reach.keeps(there[0])


# -------------------------------------------------------------------- as JSON


def write(found: Board, path: Path) -> None:
    """A line a policy, so that a change can be read."""
    lines = [f'"{name}": {json.dumps(getattr(found, name))}' for name in ("program", "plays", "cpu_s", "left")]
    places = ",\n".join(_place(one) for one in found.places)
    path.write_text("{" + ",\n".join(lines) + f',\n"places": [\n{places}\n]}}\n')


def _place(one: Judged) -> str:
    head = {name: getattr(one, name) for name in _HEAD}
    scores = ",\n  ".join(json.dumps(_as_dict(score), separators=(",", ":")) for score in one.scores)
    checks = ",\n  ".join(json.dumps(list(check), separators=(",", ":")) for check in one.checks)
    return f' {json.dumps(head)[:-1]}, "scores": [\n  {scores}],\n "checks": [\n  {checks}]}}'


def _as_dict(score: Score) -> dict[str, Any]:
    """Without what is of single seeds, and without what is not there."""
    told = {name: _rounded(value) for name, value in asdict(score).items() if name != "each"}
    told["tickets"] = list(score.tickets) if score.tickets.refused else None
    return {name: value for name, value in told.items() if value is not None}


def _rounded(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_rounded(one) for one in value]
    return round(value, _DIGITS) if isinstance(value, float) else value


def read(path: Path = FILE) -> Board:
    """What `write` wrote, with scores that hold means alone."""
    told = json.loads(path.read_text())
    places = [
        Judged(
            **{name: one[name] for name in _HEAD},
            scores=[_score(each) for each in one["scores"]],
            checks=[Check(*each) for each in one["checks"]],
        )
        for one in told["places"]
    ]
    return Board(**{**told, "places": places})


def _score(told: Mapping[str, Any]) -> Score:
    values = {one.name: told.get(one.name) for one in fields(Score) if one.name != "each"}
    values |= {name: Mean(*told[name]) for name in _MEANS}
    values["tickets"] = Tickets(*told.get("tickets", (0,) * len(Tickets._fields)))
    return Score(**values)
