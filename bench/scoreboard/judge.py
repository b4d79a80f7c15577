"""What several seeds of a policy on a row came to, and whether the row's figures are reached.

Means over seeds, with the half width of their 95 % confidence interval (Student's t). A row passes where every figure
that it asks for is reached by the means: offered and admitted and GPU-hours together.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from bench.scoreboard.rows import Reach, Row
from plimsoll.sim import frontier
from plimsoll.sim.frontier import Point

# Student's t, two-sided 95 %, by degrees of freedom 1 to 30; beyond them that of the normal law.
_T: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_NORMAL: Final = 1.960
_ENOUGH: Final = 20  # followers on a frontier
_KEEPS: Final = 0.99  # of windows
_TOLD: Final = 0.9
_WAVES: Final = 1  # of refusals, where clients come back


class Mean(NamedTuple):
    """half: of the confidence interval; None for a single seed."""

    value: float
    half: float | None


class Tickets(NamedTuple):
    """Of those who were refused: how many, how many were told a time, and of those that honour a time of up to 60 s how
    many there were and how many got in at their first retry; of those that honour one of 60 to 120 s, how many there
    were and how many got in by their second."""

    refused: int
    given: int
    soon: int
    soon_in: int
    later: int
    later_in: int


@dataclass(frozen=True)
class Score:
    """A policy on a row. seeds: how many."""

    policy: str
    seeds: int
    offered: Mean
    admitted: Mean
    tokens: Mean
    gpu_hours: Mean
    replicas: Mean  # of all tiers
    shed: Mean
    shed_work: float | None  # mean work of what was shed over that of what was offered
    reversals: int  # the most in a phase of any seed
    windows: float | None  # share that passed
    first_s: float | None  # TTFT p95
    later: float | None  # mean replicas after the first hour
    tickets: Tickets
    waves: int  # the most in any seed: stretches of minutes in each of which somebody new was refused

    @property
    def family(self) -> str:
        return self.policy.partition(":")[0]

    @property
    def point(self) -> Point:
        return Point(self.policy, self.offered.value, self.gpu_hours.value, self.windows)


class Check(NamedTuple):
    """One figure of a row's reach."""

    name: str
    asked: str
    found: str
    passed: bool


def mean(values: Iterable[float]) -> Mean:
    """Of at least one value."""
    known = list(values)
    if len(known) == 1:
        return Mean(known[0], None)
    t = _T[len(known) - 2] if len(known) - 2 < len(_T) else _NORMAL
    return Mean(statistics.fmean(known), t * statistics.stdev(known) / math.sqrt(len(known)))


def score(policy: str, runs: Sequence[Mapping[str, Any]]) -> Score:
    """Of all seeds of one policy on one row."""

    def of(key: str) -> Mean:
        return mean(run[key] or 0.0 for run in runs)

    windows = sum(run["windows"]["n"] for run in runs)
    ratios = [run["shed_work_ratio"] for run in runs if run["shed_work_ratio"] is not None]
    firsts = [run["p95_ttft_s"] for run in runs if run["p95_ttft_s"] is not None]
    return Score(
        policy,
        len(runs),
        of("attainment_offered"),
        of("attainment_admitted"),
        of("attainment_tokens"),
        of("gpu_hours"),
        mean(sum(run["mean_replicas"].values()) for run in runs),
        of("shed_share"),
        statistics.fmean(ratios) if ratios else None,
        max(count for run in runs for tier in run["reversals"].values() for count in tier),
        sum(run["windows"]["passed"] for run in runs) / windows if windows else None,
        statistics.fmean(firsts) if firsts else None,
        _later(runs),
        _tickets(runs),
        max(waves(run["board"]["minutes"]["shed"]) for run in runs),
    )


def _later(runs: Sequence[Mapping[str, Any]]) -> float | None:
    """Of all tiers; None where a run was over by then."""
    tiers = [run["board"]["mean_replicas_later"].values() for run in runs]
    if any(one is None for each in tiers for one in each):
        return None
    return statistics.fmean(sum(each) for each in tiers)


def _tickets(runs: Sequence[Mapping[str, Any]]) -> Tickets:
    told = [run["tickets"] for run in runs]
    soon, later = ([one["honoured"][until] for one in told] for until in ("to_60_s", "to_120_s"))
    return Tickets(
        sum(one["refused"] for one in told),
        sum(one["given"] for one in told),
        sum(one["given"] for one in soon),
        sum(one["first_ok"] for one in soon),
        sum(one["given"] for one in later),
        sum(one["first_ok"] + one["second_ok"] for one in later),
    )


def waves(shed: Sequence[int]) -> int:
    """Stretches without a pause in which somebody was refused. shed: first attempts refused in each minute."""
    return sum(bool(now) and not before for before, now in itertools.pairwise((0, *shed)))


def checks(row: Row, own: Score, others: Sequence[Score], nominal: bool) -> list[Check]:
    """Each figure that the row asks for. nominal: whether absolute figures bind on this plant."""
    reach, found = row.reach, []
    if nominal:
        found += _least("offered", reach.offered, own.offered.value)
        found += _least("admitted", reach.admitted, own.admitted.value)
        found += _most("GPU-hours", reach.gpu_hours, own.gpu_hours.value)
        found += _most("mean replicas", reach.mean_replicas, own.replicas.value)
    elif reach.offered is not None:
        found += _behind(0.02, 1 / 1.05, own, others)
    if nominal and reach.behind is not None:
        found += _behind(reach.behind, reach.at_cost, own, others)
    if reach.times_best is not None:
        found += _times_best(reach.times_best, own, others, by_windows=reach.windows is not None)
    found += _course(reach, own, others)
    if row.clients != "none":
        found.append(Check("waves of refusals", f"<= {_WAVES}", str(own.waves), own.waves <= _WAVES))
    if own.shed_work is not None:
        found += _most("work of what was shed", 1.1, own.shed_work)
    return found


def _course(reach: Reach, own: Score, others: Sequence[Score]) -> list[Check]:
    """Of how the fleet went: what binds on every plant."""
    found: list[Check] = []
    if reach.reversals is not None:
        found.append(Check("reversals", f"<= {reach.reversals}", str(own.reversals), own.reversals <= reach.reversals))
    if reach.windows is not None and own.windows is not None:
        found += _least("windows", reach.windows, own.windows)
    if reach.above_least is not None:
        found += _above_least(reach.above_least, own, others)
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
    """Mean replicas after the first hour over the smallest constant fleet that keeps the promise in 99 % of windows."""
    fleets = [one for one in others if one.family == "static" and (one.windows or 0.0) >= _KEEPS]
    if not fleets or own.later is None:
        return [Check("mean replicas over the least fleet", f"<= {most:.2f}", "no constant fleet keeps it", False)]
    least = min(one.replicas.value for one in fleets)
    return _most(f"mean replicas over {least:.0f}", most, own.later - least)


def _too_few(name: str, asked: str, played: Sequence[frontier.Point]) -> Check:
    """A frontier of a few settings proves nothing."""
    return Check(name, asked, f"{len(played)} were played, {_ENOUGH} are wanted", False)


def _least(name: str, asked: float | None, found: float) -> list[Check]:
    return [] if asked is None else [Check(name, f">= {asked:.1%}", f"{found:.2%}", found >= asked)]


def _most(name: str, asked: float | None, found: float) -> list[Check]:
    return [] if asked is None else [Check(name, f"<= {asked:.2f}", f"{found:.3f}", found <= asked)]


def _behind(most: float, at_cost: float, own: Score, others: Sequence[Score]) -> list[Check]:
    """How much better the best follower is that costs no more."""
    followers = [one.point for one in others if one.family == "follower"]
    if len(followers) < _ENOUGH:
        return [_too_few("followers", f"<= {most:.0%} behind followers", followers)]
    asked = f"<= {most:.0%} behind followers" + ("" if at_cost == 1.0 else " at 5 % less")
    best = frontier.best_at(followers, own.gpu_hours.value * at_cost)
    if best is None:
        return [Check("followers", asked, "none costs so little", True)]
    by = best.attainment - own.offered.value
    return [Check("followers", asked, f"{by:+.2%} ({best.word})", by <= most)]


def _times_best(most: float, own: Score, others: Sequence[Score], by_windows: bool) -> list[Check]:
    """GPU-hours over those of the cheapest reference that attains as much, in windows or in all."""
    points = [one.point for one in others if one.family == "follower"]
    if len(points) < _ENOUGH:
        return [_too_few("cost", f"<= {most:.2f} times the cheapest reference as good", points)]
    floor = {"windows": own.windows or 0.0} if by_windows else {"attainment": own.offered.value}
    best = frontier.cheapest(points, **floor)
    asked = f"<= {most:.2f} times the cheapest reference as good"
    if best is None:
        return [Check("cost", asked, "none is as good", True)]
    times = own.gpu_hours.value / best.gpu_hours
    return [Check("cost", asked, f"{times:.3f} ({best.word})", times <= most)]
