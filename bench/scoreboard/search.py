"""Search for the best setting of each policy on each row: as tuned by a peer's most patient user.

Problem: a peer at its defaults is easy to beat, and a setting picked by hand proves nothing.

Idea: the policy's family lists the options to try. Of those that differ in more than their ladder (the option with the
most values: a target, a threshold) the first runs with one seed; around the leading ones all others of the same step of
the ladder, with that seed too; and the leaders then with all seeds. Leading are the few with the highest attainment and
the few with the highest attainment at no more GPU-hours than the row allows Plimsoll. One of each is stored, for any
cost the cheapest of those within a tenth of a point. They are in `found.json`, and the board runs them, with the
results of `plimsoll.sim.frontier` among followers and schedules: `follower-frontier`, `hindsight` and `clairvoyant`.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from bench.scoreboard import scoring
from bench.scoreboard.rows import BOARD_ROWS, BoardRow
from bench.scoreboard.simulate_run import RunTask, search_space
from plimsoll.sim import frontier, screening
from plimsoll.sim.errors import BadInput
from plimsoll.sim.policies import registry
from plimsoll.sim.policies.base import PolicyContext

_FOUND: Final = Path(__file__).parent / "found.json"
_ROUNDING: Final = 1e-3
_PEERS: Final = tuple(
    name for name in registry.names() if name not in ("plimsoll", "static", "follower", "clairvoyant")
)
_MAX_FOLLOWERS: Final = 20  # so many make a frontier
_LEADER_COUNT: Final = 2  # settings that go on to the next round, at any cost and within the row's

RunTasks = Callable[[Sequence[RunTask]], Sequence[dict[str, Any]]]


def candidate_settings(name: str, row: BoardRow) -> Sequence[str]:
    """What is worth trying."""
    if name != "static":
        return registry.search_space(name)
    counts = itertools.product(
        *(range(max(1, min_replicas), max_replicas + 1) for _, min_replicas, max_replicas in row.tiers)
    )
    return [f"static:{','.join(map(str, each))}" for each in counts]


def search_settings(name: str, row: BoardRow, seeds: int, played: RunTasks) -> None:
    """Tries settings on the nominal plant, prints them, and keeps the best in the file. seeds: of the last round."""
    family = name.partition(":")[0]
    if family in frontier.COMPARISONS:
        _save(row, family, _search_baseline(name, row, seeds, played))
        return

    def scored(settings: Sequence[str], seeds: int) -> list[scoring.Score]:
        tasks = [RunTask(row, 1.0, setting, seed) for setting in settings for seed in range(1, seeds + 1)]
        runs = iter(played(tasks))
        return [scoring.score_policy(setting, [next(runs) for _ in range(seeds)]) for setting in settings]

    steps = settings_by_option(candidate_settings(name, row))
    scores = scored([step[0] for step in steps], 1)
    leading_rungs = set(leading_settings(row, scores))
    scores += scored([setting for step in steps if step[0] in leading_rungs for setting in step[1:]], 1)
    if seeds > 1:
        scores = scored(leading_settings(row, scores), seeds)
    for score in sorted(scores, key=lambda score: -score.offered.value):
        print(f"{row.name} {score.policy}: {score.offered.value:.2%} at {score.gpu_hours.value:.3f} GPU-hours")
    _save(row, name, best_settings(row, scores))


def settings_by_option(settings: Sequence[str]) -> list[list[str]]:
    """The words by their value of the option that has the most values; each for itself where it has no such option."""
    options = {setting: _options(setting) for setting in settings}
    names = list(dict.fromkeys(name for each in options.values() for name in each))
    if not names:
        return [[setting] for setting in settings]
    rung = max(names, key=lambda name: len({each[name] for each in options.values() if name in each}))
    steps: dict[str, list[str]] = {}
    for setting in settings:
        steps.setdefault(options[setting].get(rung, setting), []).append(setting)
    return list(steps.values())


def _options(word: str) -> dict[str, str]:
    return dict(one.split("=") for one in word.partition(":")[2].split(",") if "=" in one)


def leading_settings(row: BoardRow, scores: Sequence[scoring.Score]) -> list[str]:
    """Words of the few that attain most, of all and within the cost; alike is what rounds to one tenth of a point."""

    def first(subset: Sequence[scoring.Score]) -> list[str]:
        ordered = sorted(subset, key=lambda score: (-round(score.offered.value / _ROUNDING), score.gpu_hours.value))
        return [score.policy for score in ordered[:_LEADER_COUNT]]

    return list(dict.fromkeys([*first(scores), *first([score for score in scores if _is_within_cost(row, score)])]))


def _search_baseline(name: str, row: BoardRow, seeds: int, played: RunTasks) -> list[str]:
    """Words of the followers' frontier, of the best in hindsight, of a schedule that knows the future. name: with its
    options, such as `hindsight:runs=20`."""

    def play(runs: Sequence[tuple[str, int]]) -> Sequence[dict[str, Any]]:
        return played([RunTask(row, 1.0, word, seed) for word, seed in runs])

    return frontier.expand(name, search_space(row, 1.0, row.load.make(1)), play, range(1, seeds + 1))


def _save(row: BoardRow, name: str, settings: Sequence[str]) -> None:
    saved = _load_saved()
    saved.setdefault(row.name, {})[name] = list(settings)
    ordered = {row_entry: dict(sorted(saved[row_entry].items())) for row_entry in sorted(saved)}
    _FOUND.write_text(json.dumps(ordered, indent=1) + "\n")


def best_settings(row: BoardRow, scores: Sequence[scoring.Score]) -> list[str]:
    """Words of the one that attains most, and of the one that does so within the row's cost."""
    highest = max(score.offered.value for score in scores)
    best_overall = min(
        (score for score in scores if score.offered.value >= highest - _ROUNDING),
        key=lambda score: score.gpu_hours.value,
    )
    candidates = [score for score in scores if _is_within_cost(row, score)]
    best_within_cost = {best_overall.policy}
    if candidates:
        best_within_cost.add(max(candidates, key=lambda score: score.offered.value).policy)
    return sorted(best_within_cost)


def row_policies(row: BoardRow) -> list[str]:
    """Plimsoll, all constant fleets, peers, followers that a search has left and those that the row's load names, and
    who knows the future."""
    followers = [*saved_frontier(row), *screened(row, 1.0, _MAX_FOLLOWERS)]
    return list(
        dict.fromkeys(
            ["plimsoll", *candidate_settings("static", row), *peer_policies(row), *followers, *oracle_policies(row)]
        )
    )


def peer_policies(row: BoardRow) -> list[str]:
    """Each at its defaults and at the settings that were found on the row, or, where it was not searched for there, on
    another one, of the same engines if there is one."""
    saved = _load_saved()
    similar_rows = sorted(saved, key=lambda name: BOARD_ROWS[name].hardware != row.hardware)
    wanted: dict[str, None] = {}
    for name in _PEERS:
        other_settings = next(
            (saved[similar_row][name] for similar_row in similar_rows if name in saved[similar_row]), []
        )
        wanted |= dict.fromkeys([*(saved.get(row.name, {}).get(name) or other_settings), name])
    scene = search_space(row, 1.0, row.load.make(1)).context
    return [word for word in wanted if _is_available(word, scene)]


def saved_frontier(row: BoardRow) -> list[str]:
    """Followers that a search on this row has left; none where there was no search."""
    return list(_load_saved().get(row.name, {}).get("follower-frontier", ()))


def screened(row: BoardRow, plant: float, limit: int) -> list[str]:
    """Followers worth a run on this load and plant, by its work alone, the cheapest first; with a plain cap on what is
    in flight."""
    space = search_space(row, plant, row.load.make(1))
    cap = max(1, round(frontier.CAP_SHARES[0] * frontier.max_resident_sequences(space.context)))
    return [f"{word},cap={cap}" for word in screening.screen_followers(space, limit)]


def oracle_policies(row: BoardRow) -> list[str]:
    """Who knows the future, as far as it was found on this row."""
    saved = _load_saved().get(row.name, {})
    return [word for name in ("hindsight", "clairvoyant") for word in saved.get(name, ())]


def _is_available(word: str, scene: PolicyContext) -> bool:
    """Whether it can be made here; some need packages that a checkout does not bring. What cannot be is told."""
    try:
        registry.parse(word, scene)
    except BadInput as error:
        print(f"left out: {word}: {error}", file=sys.stderr)
        return False
    return True


def _is_within_cost(row: BoardRow, score: scoring.Score) -> bool:
    reach = row.targets
    most_hours, most_replicas = reach.gpu_hours or math.inf, reach.mean_replicas or math.inf
    return score.gpu_hours.value <= most_hours and score.replicas.value <= most_replicas


def _load_saved() -> dict[str, dict[str, list[str]]]:
    return dict(json.loads(_FOUND.read_text()))
