"""Whether Plimsoll reaches what a row asks: offered and admitted and GPU-hours together, by the means of all seeds.

Others are held against Plimsoll's runs of the very seeds that they were played with: a follower that was tried once has
met one draw of the load and of the machines, and Plimsoll's mean over ten others says nothing about it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from bench.scoreboard.judge import Score, Tickets
from bench.scoreboard.rows import Reach, Row
from plimsoll.sim.frontier import Point

KEEPS: Final = 0.99  # of windows: what has to pass for a promise to be kept
KNOWING: Final = frozenset({"clairvoyant"})  # who knows the future
ELSEWHERE: Final = (0.02, 1 / 1.05)  # on other plants: how far behind followers at which share of our cost
_ENOUGH: Final = 20  # followers on a frontier
_TOLD: Final = 0.9
_WAVES: Final = 1  # of refusals, where clients come back
_BOUNDARY: Final = 1.0  # replicas more, where the rate is just below what the least fleet carries


class Check(NamedTuple):
    """One figure of a row's reach."""

    name: str
    asked: str
    found: str
    passed: bool


class Rival(NamedTuple):
    """Another policy, and Plimsoll over the same seeds."""

    own: Point
    its: Point

    @property
    def better(self) -> float:
        return self.its.attainment - self.own.attainment


def checks(row: Row, own: Score, others: Sequence[Score], nominal: bool, boundary: bool = False) -> list[Check]:
    """Each figure that the row asks for. nominal: whether absolute figures bind on this plant; on others followers
    are what attainment and cost are judged by. boundary: whether the least fleet would not carry 5 % more."""
    reach, found = row.reach, []
    if nominal:
        found += _least("offered", reach.offered, own.offered.value)
        found += _least("admitted", reach.admitted, own.admitted.value)
        found += _most("GPU-hours", reach.gpu_hours, own.gpu_hours.value)
        found += _most("mean replicas", reach.mean_replicas, own.replicas.value)
    followed = allowance(row, nominal)
    if followed is not None:
        found += _behind(*followed, own, others)
    if nominal and reach.times_best is not None:
        found += _times_best(reach.times_best, row, own, others)
    if nominal and reach.windows is not None and own.windows is not None:
        found += _least("windows", reach.windows, own.windows)
    found += _course(reach, own, others, boundary)
    if row.clients != "none":
        found.append(Check("waves of refusals", f"<= {_WAVES}", str(own.waves), own.waves <= _WAVES))
    if own.shed_work is not None:
        found += _most("work of what was shed", 1.1, own.shed_work)
    return found


def allowance(row: Row, nominal: bool) -> tuple[float, float] | None:
    """By how much the best follower may be better, at which share of our cost; None where that is not asked."""
    reach = row.reach
    if nominal:
        return None if reach.behind is None else (reach.behind, reach.at_cost)
    return None if reach.behind is None and reach.times_best is None else ELSEWHERE


def rivals(own: Score, others: Sequence[Score]) -> Iterator[Rival]:
    """All but Plimsoll that were played with a seed that it was played with."""
    for one in others:
        seeds = own.each.keys() & one.each.keys()
        if one.family != own.family and seeds:
            yield Rival(own.over(seeds), one.over(seeds))


def followers(own: Score, others: Sequence[Score]) -> list[Rival]:
    return list(rivals(own, [one for one in others if one.family == "follower"]))


def best_rival(own: Score, others: Sequence[Score], at_cost: float) -> Rival | None:
    """The follower that is better by most at no more than a share of our GPU-hours."""
    affordable = [one for one in followers(own, others) if one.its.gpu_hours <= one.own.gpu_hours * at_cost]
    return max(affordable, key=lambda one: (one.better, -one.its.gpu_hours), default=None)


def cheapest_rival(row: Row, own: Score, others: Sequence[Score]) -> Rival | None:
    """The cheapest, relative to ours, of those that attain as much, whoever they are but for those that know the
    future."""
    good = [
        one
        for one in rivals(own, [each for each in others if each.family not in KNOWING])
        if as_good(row, one.own, one.its)
    ]
    return min(good, key=lambda one: one.its.gpu_hours / one.own.gpu_hours, default=None)


def as_good(row: Row, own: Point, its: Point) -> bool:
    """Whether it attains as much: by windows as many as Plimsoll, or as have to pass."""
    if row.by_windows:
        return (its.windows or 0.0) >= min(KEEPS, own.windows or 0.0)
    return its.attainment >= own.attainment


def keeps(one: Score) -> bool:
    """Whether it keeps the promise in 99 % of windows."""
    return (one.windows or 0.0) >= KEEPS


def least_fleet(others: Sequence[Score]) -> int | None:
    """Replicas of the smallest constant fleet that keeps the promise; None where the one below it was not played, and
    so where nobody knows."""
    fleets = {int(k): keeps(one) for one in others if (k := one.policy.removeprefix("static:")).isdecimal()}
    least = min((count for count, kept in fleets.items() if kept), default=None)
    return least if least == 1 or (least is not None and least - 1 in fleets) else None


def _course(reach: Reach, own: Score, others: Sequence[Score], boundary: bool) -> list[Check]:
    """Of how the fleet went: what binds on every plant."""
    found: list[Check] = []
    if reach.reversals is not None:
        found.append(Check("reversals", f"<= {reach.reversals}", str(own.reversals), own.reversals <= reach.reversals))
    if reach.above_least is not None:
        found += _above_least(_BOUNDARY if boundary else reach.above_least, own, others)
    if reach.tickets is not None:
        found += _honoured(reach.tickets, own.tickets)
    return found


def _honoured(least: float, told: Tickets) -> list[Check]:
    """What tickets were worth, to those who honour them."""
    if not told.refused:
        return [Check("refusals that carry a ticket", f">= {_TOLD:.0%}", "nobody was refused", False)]
    found = _least("refusals that carry a ticket", _TOLD, told.given / told.refused)
    found += _least("in at the first retry, to 60 s", least, told.soon_in / told.soon) if told.soon else []
    return found + (_least("in by the second, 60 to 120 s", least, told.later_in / told.later) if told.later else [])


def _above_least(most: float, own: Score, others: Sequence[Score]) -> list[Check]:
    """Mean replicas over the smallest constant fleet that keeps the promise in 99 % of windows: after the first hour
    with all that was in reserve, and after the second, when no reserve of the prior may be left."""
    least = least_fleet(others)
    if least is None or own.later is None or own.settled is None:
        return [Check("mean replicas over the least fleet", f"<= {most:.2f}", "no constant fleet keeps it", False)]
    return [
        *_most(f"mean replicas over {least} after an hour", most, own.later - least),
        *_most(f"mean replicas over {least} after two", most, own.settled - least),
    ]


def _too_few(name: str, asked: str, played: int) -> list[Check]:
    """A frontier of a few settings proves nothing."""
    return [Check(name, asked, f"{played} were played, {_ENOUGH} are wanted", False)] if played < _ENOUGH else []


def _least(name: str, asked: float | None, found: float) -> list[Check]:
    return [] if asked is None else [Check(name, f">= {asked:.1%}", f"{found:.2%}", found >= asked)]


def _most(name: str, asked: float | None, found: float) -> list[Check]:
    return [] if asked is None else [Check(name, f"<= {asked:.2f}", f"{found:.3f}", found <= asked)]


def _behind(most: float, at_cost: float, own: Score, others: Sequence[Score]) -> list[Check]:
    """How much better the best follower is that costs no more."""
    asked = f"<= {most:.0%} behind followers" + ("" if at_cost == 1.0 else " at 5 % less")
    if few := _too_few("followers", asked, len(followers(own, others))):
        return few
    best = best_rival(own, others, at_cost)
    if best is None:
        return [Check("followers", asked, "none costs so little", True)]
    return [Check("followers", asked, f"{best.better:+.2%} ({best.its.word})", best.better <= most)]


def _times_best(most: float, row: Row, own: Score, others: Sequence[Score]) -> list[Check]:
    """GPU-hours over those of the cheapest that attains as much."""
    asked = f"<= {most:.2f} times the cheapest as good"
    if few := _too_few("cost", asked, len(followers(own, others))):
        return few
    best = cheapest_rival(row, own, others)
    if best is None:
        return [Check("cost", asked, "none is as good", True)]
    times = best.own.gpu_hours / best.its.gpu_hours
    return [Check("cost", asked, f"{times:.3f} ({best.its.word})", times <= most)]
