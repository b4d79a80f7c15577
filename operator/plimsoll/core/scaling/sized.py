"""From forecasts to replicas, for the tiers of all services in one call.

Problem: a thousand services are sized within a tick, and profile and load line of a tier are dear (milliseconds), while
a decision needs some figures beyond the count: what the present fleet would give, what one fewer would.

Idea: what is dear is kept in a `Line` for as long as model and mix stay the same; the rest is a few vectorised calls
over all tiers at once. A promise that no fleet keeps is replaced by the nearest that can be kept, and named.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np

from plimsoll.core.forecast import Forecast, Unknown
from plimsoll.core.forecast.fleet import Flags
from plimsoll.core.knee import HIGHEST_RATE, Constraint, Profile, Tier, attainment, profile, stack
from plimsoll.core.load_line import constraint, slo_rate
from plimsoll.core.queueing import Floats
from plimsoll.core.scaling.observation import Need
from plimsoll.core.sizing import Infeasible, infeasible, keepable, size_many

_PROBES: Final = (0.88, 0.96, 0.99, 1.01, 1.04, 1.12)  # of a rate: what lies near will be asked for soon
RELEASE_MARGIN: Final = 0.025  # of the forecast: what a line moves by within the level's memory, at an even mix
MOVES: Final = 1.96  # standard errors that a level moves up by, at some time, in one case of twenty
RELEASE_ERRORS: Final = 3.0  # standard errors by which a load that stands for hours may wander beyond the margin
RUNGS_KEPT: Final = 64  # counts of a line: more than a load sweeps before its mix has moved; they can be found anew


class Rungs:
    """Counts of replicas, each with the rates of which it is known that they need just so many.

    Requests/s with the headroom in them. More load never needs fewer, so what two rates need, those between them do.
    RUNGS_KEPT of them; the one farthest from the newest goes first.
    """

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._least: list[float] = []
        self._most: list[float] = []

    def at(self, rate_per_s: float) -> int | None:
        """The fewest replicas for a rate; None if that is not known yet."""
        place = bisect_right(self._least, rate_per_s) - 1
        return self._counts[place] if place >= 0 and rate_per_s <= self._most[place] else None

    def learn(self, rate_per_s: float, replicas: int) -> None:
        """A rate has been found to need so many."""
        place = bisect_left(self._counts, replicas)
        if place < len(self._counts) and self._counts[place] == replicas:
            self._least[place] = min(self._least[place], rate_per_s)
            self._most[place] = max(self._most[place], rate_per_s)
            return
        self._counts.insert(place, replicas)
        self._least.insert(place, rate_per_s)
        self._most.insert(place, rate_per_s)
        if len(self._counts) > RUNGS_KEPT:
            farthest = 0 if place > RUNGS_KEPT // 2 else -1
            for kept in (self._counts, self._least, self._most):
                del kept[farthest]


@dataclass(frozen=True, eq=False)
class Line:
    """One tier reduced to what sizing needs. Make it anew when model, mix, limits or promise have changed.

    request_gpu_s: work of a request of the mix, the unit between rates and forecasts. replica_work: load line of one
    replica among about as many as are needed, GPU-seconds per second. infeasible: as in Need.
    """

    profile: Profile
    request_gpu_s: float
    replica_work: float
    constraint: Constraint
    infeasible: Infeasible | None = None
    rungs: Rungs = field(default_factory=Rungs, repr=False)

    def tpot_s(self, level: float, ready: int) -> float | None:
        """Promised percentile of TPOT at so much work on so many replicas, s; None where it is not known."""
        work_s, base_s, promised, tail = self._law
        if not ready or not math.isfinite(promised):
            return None
        rho = min(level / self.request_gpu_s, HIGHEST_RATE) * work_s / ready
        if not rho < 1.0:
            return None
        at = rho * (len(tail) - 1)
        left = min(int(at), len(tail) - 2)
        return (tail[left] + (at - left) * (tail[left + 1] - tail[left])) * base_s / max(1.0 - rho, 1e-12)

    @cached_property
    def _law(self) -> tuple[float, float, float, list[float]]:
        of = self.profile
        return float(of.work_s[0]), float(of.base_s[0]), float(of.tpot_s[0]), of.tail[0].tolist()


@dataclass(frozen=True, slots=True)
class Ask:
    """One tier to be sized. replicas, ready: as in TierObservation. headroom: share of the load line kept free.

    backlog_gpu_s: work that waits, where nothing is ready yet. returning_gpu_s: of requests that were refused and told
    when to come back; arrivals are first attempts, so that these are in no forecast. Both are to be cleared within one
    horizon, beside the load: sooner is no new replica there. relied_gpu_s: more of the latter, which replicas on their
    way will serve: no reason to order others, but one to keep these.
    """

    line: Line
    forecast: Forecast
    replicas: int
    ready: int
    headroom: float = 0.0
    backlog_gpu_s: float = 0.0
    returning_gpu_s: float = 0.0
    relied_gpu_s: float = 0.0


def lines(tiers: Sequence[Tier], replicas: Sequence[int]) -> list[Line | Infeasible]:
    """The line of each tier that has or needs about so many replicas; Infeasible where no looser target helps either.

    Each is the same to the last bit in any company, and in company it takes a third of the time.
    """
    if not tiers:
        return []
    reduced = [profile(tier) for tier in tiers]
    kept = keepable(stack(reduced)).tolist()
    broken = [None if keeps else infeasible(tier) for tier, keeps in zip(tiers, kept, strict=True)]
    for n, none in enumerate(broken):
        if none is not None and none.feasible is not None:
            reduced[n] = profile(replace(tiers[n], slo=none.feasible))
    every, counts = stack(reduced), np.maximum(np.array(replicas, dtype=np.float64), 1.0)
    at, request_gpu_s = slo_rate(every, counts), every.rho(1.0, 1.0)
    figures = request_gpu_s.tolist(), (at * request_gpu_s / counts).tolist(), constraint(every, at, counts)
    found: list[Line | Infeasible] = []
    for own, none, request, work, stops in zip(reduced, broken, *figures, strict=True):
        if none is not None and none.feasible is None:
            found.append(none)
        else:
            found.append(Line(own, request, work, stops, none))
    return found


def needs(asks: Sequence[Ask]) -> list[Need | Unknown]:
    """The need of each tier, in order. Unknown where a rate is beyond belief, or no fleet carries it."""
    if not asks:
        return []
    tiers = stack([ask.line.profile for ask in asks])
    request = np.array([ask.line.request_gpu_s for ask in asks])
    asked = np.array([_work(ask) for ask in asks]) / request
    rate = np.where(asked <= HIGHEST_RATE / 2, asked, 0.0)
    headroom = np.array([ask.headroom for ask in asks])
    ordered = np.array([float(max(ask.replicas, 1)) for ask in asks])
    ready = np.array([float(max(ask.ready, 1)) for ask in asks])
    level = np.array([ask.forecast.level for ask in asks]) / request
    before = _remembered(asks, rate / (1.0 - headroom))
    sizes = size_many(tiers, rate, headroom, start=np.where(np.isnan(before), ordered, before))
    kept, lower = sizes.attained.copy(), np.array([_kept_for(ask, one) for ask, one in zip(asks, rate, strict=True)])
    down = (ordered > sizes.replicas) & (rate > 0)
    release = np.where(down, _remembered(asks, lower / (1.0 - headroom)), sizes.replicas)
    new = np.flatnonzero(np.isnan(release))
    release[new] = size_many(tiers.take(new), lower[new], headroom[new], start=sizes.replicas[new]).replicas
    other = np.flatnonzero(ordered != sizes.replicas)
    kept[other] = _attained(tiers.take(other), rate[other], ordered[other])
    ahead, by_law = _tpot_s(tiers, rate, ordered), _tpot_s(tiers, np.minimum(level, HIGHEST_RATE), ready)
    found: list[Need | Unknown] = []
    for i, ask in enumerate(asks):
        if rate[i] != asked[i] or not math.isfinite(release[i]):
            found.append(Unknown(f"{asked[i]:.3g} req/s is no load that a fleet carries but a wrong estimate"))
            continue
        found.append(
            Need(
                replicas=int(sizes.replicas[i]),
                release=int(release[i]),
                rate_per_s=float(rate[i]),
                request_gpu_s=ask.line.request_gpu_s,
                replica_work=ask.line.replica_work,
                constraint=ask.line.constraint,
                attained=float(kept[i]) if ask.replicas else 0.0,
                one_fewer=float(sizes.one_fewer[i]),
                tpot_s=_known(ahead[i]) if ask.replicas else None,
                law_tpot_s=_known(by_law[i]) if ask.ready and math.isfinite(by_law[i]) else None,
                headroom=ask.headroom,
                infeasible=ask.line.infeasible,
            )
        )
    return found


def remember(asks: Sequence[Ask], found: Sequence[Need | Unknown]) -> None:
    """Tell the lines what the rates asked for need, and, where that is new to a line, what those around them do."""
    known = []
    for ask, need in zip(asks, found, strict=True):
        if isinstance(need, Need) and need.rate_per_s > 0.0:
            rate = need.rate_per_s / (1.0 - ask.headroom)
            known.append((ask.line, rate, need.replicas))
            if ask.replicas > need.replicas:
                kept_for = _kept_for(ask, need.rate_per_s) / (1.0 - ask.headroom)
                known.append((ask.line, kept_for, need.release))
    new = [(line, rate, replicas) for line, rate, replicas in known if line.rungs.at(rate) != replicas]
    if not new:
        return
    every = np.repeat(np.arange(len(new)), len(_PROBES))
    near = np.array([rate for _, rate, _ in new])[every] * np.tile(_PROBES, len(new))
    near = np.minimum(near, HIGHEST_RATE)
    start = np.array([float(replicas) for _, _, replicas in new])[every]
    sizes = size_many(stack([line.profile for line, _, _ in new]).take(every), near, start=start).replicas
    for line, rate, replicas in new:
        line.rungs.learn(rate, replicas)
    for place, rate, count in zip(every.tolist(), near.tolist(), sizes.tolist(), strict=True):
        if math.isfinite(count):
            new[place][0].rungs.learn(rate, int(count))


def remembered(lines: Sequence[Line], work: Floats, headroom: Floats, some: Flags) -> Floats:
    """Replicas for so much work (GPU-seconds per second) of each line, as `needs` has found them before; NaN where it
    has not, or where not `some`. headroom: broadcast to work, whose elements are those of the lines in order."""
    rate = work / np.array([line.request_gpu_s for line in lines]).reshape(work.shape)
    known = some & (rate <= HIGHEST_RATE / 2)
    found = np.where(known, 0.0, np.nan)
    asked = np.flatnonzero(known & (rate > 0.0))
    with_room = (rate / (1.0 - headroom)).ravel()[asked].tolist()
    counts = [lines[n].rungs.at(one) for n, one in zip(asked.tolist(), with_room, strict=True)]
    found.flat[asked] = [math.nan if count is None else count for count in counts]
    return found


def _remembered(asks: Sequence[Ask], rate: Floats) -> Floats:
    """The fewest replicas for each rate, with the headroom in it, as far as the lines know; else NaN."""
    known = [ask.line.rungs.at(one) for ask, one in zip(asks, rate.tolist(), strict=True)]
    return np.array([math.nan if count is None else count for count in known])


def _work(ask: Ask) -> float:
    waiting = ask.returning_gpu_s if ask.ready else ask.returning_gpu_s + ask.backlog_gpu_s
    return ask.forecast.work + waiting / max(ask.forecast.horizon_s, 1.0)


def _kept_for(ask: Ask, rate_per_s: float) -> float:
    """Requests/s for which replicas that are ordered already are kept."""
    relied = ask.relied_gpu_s / max(ask.forecast.horizon_s, 1.0) / ask.line.request_gpu_s
    return (rate_per_s + relied) * _margin(ask.forecast)


def _margin(of: Forecast) -> float:
    return float(margin_of(*(np.array(part) for part in (of.work, of.error, of.memory))))


def margin_of(work: Floats, error: Floats, memory: Floats) -> Floats:
    """What forecasts are multiplied with before a step down, so that chance does not take it back; 1 without work.

    error: of the level. memory: how full that of the level is, m. A level that is the mean of all that came since a
    leap moves by its own error at most; once it forgets, by what it learns anew as well: by sqrt(1 + m) errors in the
    end. On its way there it has been MOVES of them up in one case of twenty: twice as often as it ends there, by the
    reflection principle. A load that stands for hours goes on wandering: to no more than RELEASE_ERRORS of the
    difference between two memories, which is the error itself, since that is reckoned from a memory and a mean that
    forgets is worth two. The line moves, too, by RELEASE_MARGIN while a memory fills, and a load that has stood for a
    time stands about as long again (Gott 1993).
    """
    wanders = np.maximum(MOVES * np.sqrt(1.0 + memory), RELEASE_ERRORS * memory) * error
    with np.errstate(all="ignore"):  # where there is no work
        return np.where(work > 0.0, 1.0 + np.maximum(RELEASE_MARGIN * memory, wanders / work), 1.0)


def _attained(tiers: Profile, rate: Floats, replicas: Floats) -> Floats:
    """Share in promise; what exceeds the full rate is refused at random."""
    served = np.minimum(rate, tiers.full_rate_per_s(replicas))
    return np.asarray(attainment(tiers, served, replicas).attained * served / np.maximum(rate, 1e-300))


def _tpot_s(tiers: Profile, rate: Floats, replicas: Floats) -> Floats:
    """Promised percentile of TPOT by the law: tail * base / (1 - rho), s; NaN where nothing is promised of it."""
    rho = rate * tiers.work_s / replicas
    at = np.minimum(rho, 1.0) * (tiers.tail.shape[1] - 1)
    left = np.minimum(at.astype(np.intp), tiers.tail.shape[1] - 2)
    rows = np.arange(len(tiers))
    tail = tiers.tail[rows, left] + (at - left) * (tiers.tail[rows, left + 1] - tiers.tail[rows, left])
    law = np.where(rho < 1.0, tail * tiers.base_s / np.maximum(1.0 - rho, 1e-12), np.inf)
    return np.where(np.isfinite(tiers.tpot_s), law, np.nan)


def _known(seconds: float) -> float | None:
    return None if math.isnan(seconds) else float(seconds)
