"""One run with all rows and all baselines: `python -m bench scoreboard --whole`.

Problem: rows times policies times machines times seeds are days of computing, and a board put together from runs of
many versions of the program proves nothing about any.

Idea: the plan (`plan.py`) says who plays where, in order, and each kind of rival spends its plays where they tell most.
Followers: the row's own load is screened for settings worth a run (`plimsoll.sim.screen`), those are played with a
plain cap, cheapest first, until they cost more than Plimsoll; the best that do not cost more are played behind
Plimsoll's gate too; and who leads with one seed is played with the others. Constant fleets: from Plimsoll's mean down
to the first that does less well, or up to the first that does as well. All of it follows from kept runs and seeds: a
plan that was stopped goes on where it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench.scoreboard import judge, play, reach, search
from bench.scoreboard.judge import Score
from bench.scoreboard.loads import Phases
from bench.scoreboard.plan import Part
from bench.scoreboard.play import Task, ground
from bench.scoreboard.player import Spent
from bench.scoreboard.rows import RAISED, ROWS, Row
from bench.scoreboard.search import Played
from plimsoll.sim import frontier

OWN: Final = "plimsoll"
_SCREENED: Final = 40
_FOLLOWERS: Final = 20  # at least, with those that a search had left
_GATED: Final = 4
_LEADERS: Final = 4
_SCHEDULES: Final = 20
_TOLD_MARGINS: Final = (0.65, 0.85)


@dataclass(frozen=True)
class Place:
    """A row on a plant."""

    row: Row
    plant: float
    seeds: int
    played: Played

    def score(self, word: str, seeds: int = 1) -> Score:
        tasks = [Task(self.row, self.plant, word, seed) for seed in range(1, seeds + 1)]
        return judge.score(word, self.played(tasks))

    @property
    def name(self) -> str:
        return play.place(self.row.name, self.plant)


def follow(plan: Sequence[Part], played: Played) -> list[str]:
    """Plays the plan, and says what of it is not played yet, as `part: place, who`."""
    left: list[str] = []
    for part in plan:
        for plant, name, who in itertools.product(part.plants, part.rows, part.who):
            place = Place(ROWS[name], plant, part.seeds, played)
            try:
                KINDS.get(who, _word)(place, who)
            except Spent:
                left.append(f"{part.says}: {place.name}, {who}")
    return left


def _word(place: Place, word: str) -> None:
    place.score(word, place.seeds)


# -------------------------------------------------------------------- followers


def _followers(place: Place, _: str) -> None:
    nominal = place.plant == 1.0
    _, at_cost = reach.allowance(place.row, nominal) or (0.0, 1.0)
    most_hours = place.score(OWN).gpu_hours.value * at_cost
    scores = [place.score(word) for word in search.frontier_of(place.row)] if nominal else []
    known = {one.policy for one in scores}
    scores += (capped := list(_up_to(place, most_hours, _FOLLOWERS - _GATED - len(scores))))
    ordered = sorted(capped, key=lambda one: _too_dear_last(one, most_hours))
    gated = [word for one in ordered if (word := f"{one.policy.rpartition(',')[0]},gated=1") not in known]
    scores += [place.score(word) for word in (*gated[:_GATED], *_told(place.row))]
    if place.seeds > 1:
        _leading(place, at_cost, scores)


def _told(row: Row) -> Iterator[str]:
    """Some that are told the rate of each moment, where a request of one moment is like that of any other."""
    phases = row.load.phases if isinstance(row.load, Phases) else ()
    if len(row.tiers) > 1 or len({phase.lengths for phase in phases}) != 1:
        return
    begins = itertools.accumulate((phase.seconds for phase in phases[:-1]), initial=0.0)
    rates = ";".join(f"{at_s:g}@{phase.rate:g}" for at_s, phase in zip(begins, phases, strict=True))
    for margin, spare in itertools.product(_TOLD_MARGINS, (0, 1)):
        yield f"follower:margin={margin},spare={spare},hold=0,rates={rates},gated=1"


def _too_dear_last(one: Score, most_hours: float) -> tuple[float, float]:
    """To sort by attainment, and those that cost more by what they cost more."""
    return max(0.0, one.gpu_hours.value - most_hours), -one.offered.value


def _up_to(place: Place, most_hours: float, least: int) -> Iterator[Score]:
    """Screened ones with a cap, cheapest first, until there are enough and the last one costs more."""
    for count, word in enumerate(search.screened(place.row, place.plant, _SCREENED), 1):
        yield (one := place.score(word))
        if count >= least and one.gpu_hours.value > most_hours:
            return


def _leading(place: Place, at_cost: float, scores: Sequence[Score]) -> None:
    """Whom Plimsoll is judged by, again and again, with all seeds: who is better by most, or the cheapest as good."""
    own, by_word = place.score(OWN, place.seeds), {one.policy: one for one in scores}
    by_cost = place.plant == 1.0 and place.row.reach.times_best is not None
    for _ in range(_LEADERS):
        played = list(by_word.values())
        lead = reach.cheapest_rival(place.row, own, played) if by_cost else reach.best_rival(own, played, at_cost)
        if lead is None or by_word[lead.its.word].seeds == place.seeds:
            return
        by_word[lead.its.word] = place.score(lead.its.word, place.seeds)


# -------------------------------------------------------------------- constant fleets


def _fleets(place: Place, _: str) -> None:
    """From Plimsoll's mean down while the smaller one does as well, else up until one does."""
    own = place.score(OWN, place.seeds)
    mean = own.replicas.value if own.later is None else own.later
    least, most = len(place.row.tiers), sum(most for _, _, most in place.row.tiers)
    count = min(most, max(least, round(mean)))
    if _any_good(place, own, count):
        while count > least and _any_good(place, own, count - 1):
            count -= 1
    else:
        while count < most and not _any_good(place, own, count := count + 1):
            pass
    if place.row.reach.above_least is not None:
        _beside(place, own, count)


def _any_good(place: Place, own: Score, replicas: int) -> bool:
    """Whether one of the fleets with so many replicas does as well; all of them are played."""
    scores = [place.score(word, place.seeds) for word in _constant(place.row, replicas)]
    if place.row.by_windows:
        return any(reach.keeps(one) for one in scores)
    return any(one.offered.value >= own.offered.value for one in scores)


def _constant(row: Row, replicas: int) -> list[str]:
    each = itertools.product(*(range(1, most + 1) for _, _, most in row.tiers))
    return [f"static:{','.join(map(str, counts))}" for counts in each if sum(counts) == replicas]


def _beside(place: Place, own: Score, least: int) -> None:
    """Where Plimsoll has more than the least fleet: whether that one is just below its limit."""
    assert own.later is not None
    if own.later > least + (place.row.reach.above_least or 0.0):
        raised = Place(RAISED[place.row.name], place.plant, place.seeds, place.played)
        raised.score(f"static:{least}", place.seeds)


# -------------------------------------------------------------------- the others


def _peers(place: Place, _: str) -> None:
    for word in search.peers(place.row):
        place.score(word, place.seeds)


def _found(place: Place, _: str) -> None:
    for word in search.references(place.row):
        place.score(word, place.seeds)


def _schedules(place: Place, _: str) -> None:
    """Looks for the cheapest schedule that knows the future and attains 99 % of what is offered."""

    def made(runs: Sequence[tuple[str, int]]) -> Sequence[Mapping[str, Any]]:
        return place.played([Task(place.row, place.plant, word, seed) for word, seed in runs])

    known = ground(place.row, place.plant, place.row.load.make(1))
    frontier.words(f"clairvoyant:runs={_SCHEDULES}", known, made, (1,))


KINDS: Final[Mapping[str, Callable[[Place, str], None]]] = {
    "followers": _followers,
    "fleets": _fleets,
    "peers": _peers,
    "found": _found,
    "schedules": _schedules,
}
