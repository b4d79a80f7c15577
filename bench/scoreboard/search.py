"""The best setting of each policy on each row, found by trying: what a peer's most patient user could have known.

Problem: a peer at its defaults is easy to beat, and a setting picked by hand proves nothing.

Idea: the policy's family says which words are worth trying. Of those that differ in more than their ladder (the option
with the most values: a target, a threshold) the first is played with one seed; around the leading ones all others of
the same step of the ladder, with that seed too; and those that lead then with all seeds. Leading are the few that
attain most and the few that do so at no more GPU-hours than the row allows Plimsoll. One of each is kept, for any cost
the cheapest of those within a tenth of a point. They lie in `found.json`, and the board plays them, with what
`plimsoll.sim.frontier` finds among followers and schedules: `follower-frontier`, `hindsight` and `clairvoyant`.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from bench.scoreboard import judge
from bench.scoreboard.play import Task, ground
from bench.scoreboard.rows import ROWS, Row
from plimsoll.sim import frontier, screen
from plimsoll.sim.errors import BadInput
from plimsoll.sim.policies import registry
from plimsoll.sim.policies.base import Scene

_FOUND: Final = Path(__file__).parent / "found.json"
_ALIKE: Final = 1e-3
_PEERS: Final = tuple(
    name for name in registry.names() if name not in ("plimsoll", "static", "follower", "clairvoyant")
)
_FOLLOWERS: Final = 20  # so many make a frontier
_LEADING: Final = 2  # settings that go on to the next round, at any cost and within the row's

Played = Callable[[Sequence[Task]], Sequence[dict[str, Any]]]


def words(name: str, row: Row) -> Sequence[str]:
    """What is worth trying."""
    if name != "static":
        return registry.search(name)
    counts = itertools.product(*(range(max(1, least), most + 1) for _, least, most in row.tiers))
    return [f"static:{','.join(map(str, each))}" for each in counts]


def search(name: str, row: Row, seeds: int, played: Played) -> None:
    """Tries settings on the nominal plant, prints them, and keeps the best in the file. seeds: of the last round."""
    family = name.partition(":")[0]
    if family in frontier.COMPARISONS:
        _keep(row, family, _compared(name, row, seeds, played))
        return

    def scored(settings: Sequence[str], seeds: int) -> list[judge.Score]:
        tasks = [Task(row, 1.0, word, seed) for word in settings for seed in range(1, seeds + 1)]
        runs = iter(played(tasks))
        return [judge.score(word, [next(runs) for _ in range(seeds)]) for word in settings]

    steps = ladder(words(name, row))
    tried = scored([step[0] for step in steps], 1)
    led = set(leading(row, tried))
    tried += scored([word for step in steps if step[0] in led for word in step[1:]], 1)
    if seeds > 1:
        tried = scored(leading(row, tried), seeds)
    for one in sorted(tried, key=lambda one: -one.offered.value):
        print(f"{row.name} {one.policy}: {one.offered.value:.2%} at {one.gpu_hours.value:.3f} GPU-hours")
    _keep(row, name, best(row, tried))


def ladder(settings: Sequence[str]) -> list[list[str]]:
    """The words by their value of the option that has the most values; each for itself where it has no such option."""
    options = {word: _options(word) for word in settings}
    names = list(dict.fromkeys(name for each in options.values() for name in each))
    if not names:
        return [[word] for word in settings]
    rung = max(names, key=lambda name: len({each[name] for each in options.values() if name in each}))
    steps: dict[str, list[str]] = {}
    for word in settings:
        steps.setdefault(options[word].get(rung, word), []).append(word)
    return list(steps.values())


def _options(word: str) -> dict[str, str]:
    return dict(one.split("=") for one in word.partition(":")[2].split(",") if "=" in one)


def leading(row: Row, scores: Sequence[judge.Score]) -> list[str]:
    """Words of the few that attain most, of all and within the cost; alike is what rounds to one tenth of a point."""

    def first(some: Sequence[judge.Score]) -> list[str]:
        ordered = sorted(some, key=lambda one: (-round(one.offered.value / _ALIKE), one.gpu_hours.value))
        return [one.policy for one in ordered[:_LEADING]]

    return list(dict.fromkeys([*first(scores), *first([one for one in scores if _within(row, one)])]))


def _compared(name: str, row: Row, seeds: int, played: Played) -> list[str]:
    """Words of the followers' frontier, of the best in hindsight, of a schedule that knows the future. name: with its
    options, such as `hindsight:runs=20`."""

    def play(runs: Sequence[tuple[str, int]]) -> Sequence[dict[str, Any]]:
        return played([Task(row, 1.0, word, seed) for word, seed in runs])

    return frontier.words(name, ground(row, 1.0, row.load.make(1)), play, range(1, seeds + 1))


def _keep(row: Row, name: str, kept: Sequence[str]) -> None:
    found = _found()
    found.setdefault(row.name, {})[name] = list(kept)
    ordered = {place: dict(sorted(found[place].items())) for place in sorted(found)}
    _FOUND.write_text(json.dumps(ordered, indent=1) + "\n")


def best(row: Row, scores: Sequence[judge.Score]) -> list[str]:
    """Words of the one that attains most, and of the one that does so within the row's cost."""
    most = max(one.offered.value for one in scores)
    whatever = min((one for one in scores if one.offered.value >= most - _ALIKE), key=lambda one: one.gpu_hours.value)
    within = [one for one in scores if _within(row, one)]
    kept = {whatever.policy}
    if within:
        kept.add(max(within, key=lambda one: one.offered.value).policy)
    return sorted(kept)


def policies(row: Row) -> list[str]:
    """Plimsoll, all constant fleets, peers, followers that a search has left and those that the row's load names, and
    who knows the future."""
    followers = [*frontier_of(row), *screened(row, 1.0, _FOLLOWERS)]
    return list(dict.fromkeys(["plimsoll", *words("static", row), *peers(row), *followers, *references(row)]))


def peers(row: Row) -> list[str]:
    """Each at its defaults and at the settings that were found on the row, or, where it was not searched for there, on
    another one, of the same engines if there is one."""
    found = _found()
    alike = sorted(found, key=lambda name: ROWS[name].hardware != row.hardware)
    wanted: dict[str, None] = {}
    for name in _PEERS:
        elsewhere = next((found[other][name] for other in alike if name in found[other]), [])
        wanted |= dict.fromkeys([*(found.get(row.name, {}).get(name) or elsewhere), name])
    scene = ground(row, 1.0, row.load.make(1)).scene
    return [word for word in wanted if _possible(word, scene)]


def frontier_of(row: Row) -> list[str]:
    """Followers that a search on this row has left; none where there was no search."""
    return list(_found().get(row.name, {}).get("follower-frontier", ()))


def screened(row: Row, plant: float, limit: int) -> list[str]:
    """Followers worth a run on this load and plant, by its work alone, the cheapest first; with a plain cap on what is
    in flight."""
    known = ground(row, plant, row.load.make(1))
    cap = max(1, round(frontier.CAPS[0] * frontier.most_resident(known.scene)))
    return [f"{word},cap={cap}" for word in screen.followers(known, limit).words]


def references(row: Row) -> list[str]:
    """Who knows the future, as far as it was found on this row."""
    found = _found().get(row.name, {})
    return [word for name in ("hindsight", "clairvoyant") for word in found.get(name, ())]


def _possible(word: str, scene: Scene) -> bool:
    """Whether it can be made here; some need packages that a checkout does not bring. What cannot be is told."""
    try:
        registry.parse(word, scene)
    except BadInput as error:
        print(f"left out: {word}: {error}", file=sys.stderr)
        return False
    return True


def _within(row: Row, one: judge.Score) -> bool:
    reach = row.reach
    most_hours, most_replicas = reach.gpu_hours or math.inf, reach.mean_replicas or math.inf
    return one.gpu_hours.value <= most_hours and one.replicas.value <= most_replicas


def _found() -> dict[str, dict[str, list[str]]]:
    return dict(json.loads(_FOUND.read_text()))
