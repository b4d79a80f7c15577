"""Which of thousands of schedules are worth a run: all of them over the arrivals' work alone, few on the plant.

Problem: a run of a 40-minute row takes seconds of CPU, thousands of settings of a follower take hours.

Idea: what a follower orders follows from the arrivals alone, by its own code and exactly, and so does its cost, but
for the draw of start-ups and the drain. Settings that order alike are one. What they miss is estimated by a queue of
work: ready replicas, a mean start-up after their order, do `rho` of their time; what could only be done later than the
promised first token is missed. Which rho a replica keeps its promise at is left open: at each of several, the settings
that miss least are taken from every range of cost. So a setting that none of these rates favours is not run, although
the plant might have favoured it; the more are run, the less that matters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plimsoll.core.picking.endpoint import Role
from plimsoll.sim.operator import TICK_S
from plimsoll.sim.policies import clairvoyant
from plimsoll.sim.policies.base import Scene
from plimsoll.sim.policies.follower import Following, Orders, Window, known
from plimsoll.sim.work import Work, ttft_target_s

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

MARGINS: Final = tuple(round(0.40 + 0.05 * n, 2) for n in range(12))
SPARES: Final = (0, 1, 2, 3, 4)
HOLDS: Final = (0.0, 0.5, 1.0, 2.0)  # start-ups
WINDOWS_S: Final = (10.0, 30.0, 60.0, 120.0, 300.0)
TREND_WINDOWS_S: Final = (60.0, 120.0, 300.0)
SMOOTHS_S: Final = (15.0, 60.0, 180.0)  # over which who knows the future takes the mean
GAPS: Final = (0.0, 1.0, 2.0)  # start-ups

_RHOS: Final = (0.5, 0.65, 0.8, 0.92)
_RANGES: Final = 12  # of cost
_PATIENCE_S: Final = 10.0  # where no first token is promised
_OF_TIER: Final = 14  # schedules of each of two tiers


class Course(NamedTuple):
    """What one tier is ordered at each tick, and the words for it."""

    word: str
    orders: Counts


@dataclass(frozen=True)
class Ground:
    """What schedules run over. initial: ready replicas at the start."""

    scene: Scene
    initial: Mapping[Role, int]
    length_s: float

    @property
    def ticks(self) -> int:
        return int(self.length_s / TICK_S) + 1


class Found(NamedTuple):
    """words: of the policies worth a run. settings: how many were looked at. schedules: how many of them differ."""

    words: list[str]
    settings: int
    schedules: int


def followings(start_s: float) -> Iterator[Following]:
    """All settings of one tier's follower, for engines that start in `start_s`."""
    sources = [(window_s, 0.0) for window_s in WINDOWS_S]
    if start_s:
        sources += [(window_s, start_s) for window_s in TREND_WINDOWS_S]
    holds_s = sorted({share * start_s for share in HOLDS})
    for (window_s, trend_s), margin, spare, hold_s in product(sources, MARGINS, SPARES, holds_s):
        yield Following(margin, spare, hold_s, window_s, trend_s)


def followers(ground: Ground, limit: int) -> Found:
    """Followers worth a run, at most so many, without a word about admission."""
    start_s = ground.scene.plant.start.mean_s
    settings = list(followings(start_s))
    tiers = {role: _followed(ground, role, settings) for role in ground.scene.bounds}
    return _found("follower", tiers, ground, limit, len(settings), together)


def _followed(ground: Ground, role: Role, settings: Sequence[Following]) -> list[Course]:
    """The orders of all settings in one tier, by the follower's own code."""
    scene, work = ground.scene, Work(ground.scene.plant, ground.scene.bounds)
    times = [n * TICK_S for n in range(ground.ticks)]
    rates: dict[tuple[float, float], list[float]] = {}
    found = []
    for one in settings:
        key = one.window_s, one.trend_s
        if key not in rates:
            source = Window(*key)
            for asked in scene.asked or ():
                source.arrived(*known(work, role, asked, asked.at_s))
            rates[key] = [source.rate(now_s) for now_s in times]
        orders = Orders(one.margin, one.spare, one.hold_s, scene.bounds[role])
        wanted = [orders.wanted(rate, now_s) for rate, now_s in zip(rates[key], times, strict=True)]
        words = f"margin={one.margin:g},spare={one.spare},hold={one.hold_s:g},window={one.window_s:g}"
        found.append(Course(words + (",trend=1" if one.trend_s else ",trend=0"), np.array(wanted)))
    return found


def plans(ground: Ground, limit: int) -> Found:
    """Schedules that know the future, worth a run, at most so many, without a word about admission."""
    start_s = ground.scene.plant.start.longest_s
    gaps_s = sorted({share * start_s for share in GAPS})
    settings = list(product(MARGINS, SMOOTHS_S, gaps_s, SPARES[:2]))
    tiers: dict[Role, list[Course]] = {}
    for role, bounds in ground.scene.bounds.items():
        demand = _demand(role, ground)
        each = [
            _foreseen(demand, margin, smooth_s, gap_s, spare, start_s, bounds)
            for margin, smooth_s, gap_s, spare in settings
        ]
        tiers[role] = [Course(f"plan={clairvoyant.written(_steps(orders))}", orders) for orders in each]
    return _found("clairvoyant", tiers, ground, limit, len(settings), clairvoyant.together)


def _foreseen(
    demand: Floats, margin: float, smooth_s: float, gap_s: float, spare: int, start_s: float, bounds: tuple[int, int]
) -> Counts:
    """Orders a start-up ahead of what the mean work around each moment needs, valleys of up to `gap_s` filled."""
    half, gap, ahead = (math.ceil(span_s / TICK_S) for span_s in (smooth_s / 2, gap_s, start_s))
    sums = np.concatenate([[0.0], np.cumsum(demand)])
    at = np.arange(len(demand))
    first, last = np.maximum(at - half, 0), np.minimum(at + half + 1, len(demand))
    rate = (sums[last] - sums[first]) / ((last - first) * TICK_S)
    need = np.clip(np.ceil(rate / margin - 1e-9).astype(np.int64) + spare, *bounds)
    filled = -_most_ahead(-_most_ahead(need, gap)[::-1], gap)[::-1]
    return _most_ahead(np.maximum(need, filled), ahead)


def _most_ahead(values: Counts, ticks: int) -> Counts:
    """The largest from each place to so many after it."""
    reach, found = 0, values
    while reach < ticks:
        step = min(reach + 1, ticks - reach)
        later = np.concatenate([found[step:], np.full(min(step, len(found)), found.min())])
        found, reach = np.maximum(found, later), reach + step
    return found


def _steps(orders: Counts) -> clairvoyant.Plan:
    changes = np.flatnonzero(np.diff(orders, prepend=orders[0] - 1))
    return tuple((tick * TICK_S, (int(orders[tick]),)) for tick in changes.tolist())


# -------------------------------------------------------------------- choosing


def _found(
    name: str,
    tiers: Mapping[Role, list[Course]],
    ground: Ground,
    limit: int,
    settings: int,
    together: Callable[[Sequence[str]], str],
) -> Found:
    different = {role: list({one.orders.tobytes(): one for one in each}.values()) for role, each in tiers.items()}
    schedules = math.prod(len(each) for each in different.values())
    fluids = {role: Fluid.of(role, each, ground) for role, each in different.items()}
    if len(fluids) == 1:
        [(role, fluid)] = fluids.items()
        words = [different[role][place].word for place in _worth(fluid, limit)]
    else:
        kept = {role: _worth(fluid, _OF_TIER) for role, fluid in fluids.items()}
        pairs = list(product(*kept.values()))
        cost = sum(fluids[role].cost_s[[pair[n] for pair in pairs]] for n, role in enumerate(kept))
        met = math.prod(1.0 - fluids[role].missed[:, [pair[n] for pair in pairs]] for n, role in enumerate(kept))
        both = Fluid(np.asarray(cost), 1.0 - np.asarray(met))
        words = [
            together([different[role][at].word for role, at in zip(kept, pairs[place], strict=True)])
            for place in _worth(both, limit)
        ]
    return Found([f"{name}:{word}" for word in words], settings ** len(tiers), schedules)


def together(words: Sequence[str]) -> str:
    """Options of each tier as those of all: `key=A/B`."""
    options = [dict(option.split("=", 1) for option in word.split(",")) for word in words]
    return ",".join(f"{key}={'/'.join(each[key] for each in options)}" for key in options[0])


@dataclass(frozen=True)
class Fluid:
    """Schedules over the work alone: GPU-seconds of each, and by rho the share of work that it misses."""

    cost_s: Floats
    missed: Floats

    @classmethod
    def of(cls, role: Role, courses: Sequence[Course], ground: Ground) -> Fluid:
        plant, initial = ground.scene.plant, ground.initial[role]
        played = [_played(one.orders, initial, plant.start.mean_s, ground) for one in courses]
        ready = np.array([one for one, _ in played], dtype=float)
        gpus = plant.gpus.get(role, 1)
        return cls(
            np.array([gpus * paid_s for _, paid_s in played]),
            np.array([_missed(_demand(role, ground), ready * rho, _patience_s(ground.scene)) for rho in _RHOS]),
        )


def _played(orders: Counts, initial: int, start_s: float, ground: Ground) -> tuple[Counts, float]:
    """Ready replicas at each tick, and replica-seconds: who became ready last goes first."""
    change = np.zeros(ground.ticks + 1, dtype=np.int64)
    there: list[tuple[float, float]] = [(0.0, 0.0)] * initial  # ordered, ready
    paid_s = 0.0

    def gone(ordered_s: float, ready_s: float, now_s: float) -> float:
        if ready_s < now_s:
            change[min(ground.ticks, math.ceil(ready_s / TICK_S))] += 1
            change[min(ground.ticks, math.ceil(now_s / TICK_S))] -= 1
        return now_s - ordered_s

    moments = np.flatnonzero(np.diff(orders, prepend=initial))
    for tick in moments.tolist():
        now_s, wanted = tick * TICK_S, int(orders[tick])
        while len(there) > wanted:
            paid_s += gone(*there.pop(), now_s)
        there += [(now_s, now_s + start_s)] * (wanted - len(there))
    for ordered_s, ready_s in there:
        gone(ordered_s, ready_s, ground.ticks * TICK_S)
        paid_s += max(0.0, ground.length_s - ordered_s)
    return np.cumsum(change[:-1]), paid_s


def _demand(role: Role, ground: Ground) -> Floats:
    """Work that arrives in each tick."""
    work, found = Work(ground.scene.plant, ground.scene.bounds), np.zeros(ground.ticks)
    for one in ground.scene.asked or ():
        found[min(ground.ticks - 1, int(one.at_s / TICK_S))] += work.seconds(role, one)
    return found


def _patience_s(scene: Scene) -> float:
    prompts = sorted(one.prompt_tokens for one in scene.asked or ())
    target_s = ttft_target_s(scene.slo, prompts[len(prompts) // 2]) if scene.slo and prompts else None
    return _PATIENCE_S if target_s is None else target_s


def _missed(demand: Floats, capacity: Floats, patience_s: float) -> Floats:
    """Share of the work that each fleet could only do too late. capacity: of fleet and tick, seconds a second."""
    queue, missed = np.zeros(len(capacity)), np.zeros(len(capacity))
    for tick, comes in enumerate(demand.tolist()):
        queue = np.maximum(0.0, queue + comes - capacity[:, tick] * TICK_S)
        late = np.maximum(0.0, queue - capacity[:, tick] * patience_s)
        missed += late
        queue -= late
    return missed / max(float(demand.sum()), 1e-12)


def _worth(fluid: Fluid, limit: int) -> list[int]:
    """Places of those that miss least in their range of cost, at one rho or another."""
    cost = fluid.cost_s
    enough = [cost[missed <= missed.min() + 1e-3].min() for missed in fluid.missed]
    most = max(enough) * (1.0 + 1.0 / _RANGES) or 1.0  # a load of one moment costs nobody anything
    edges = np.linspace(cost.min(), most, _RANGES + 1)
    ranges = np.searchsorted(edges, cost, side="right")
    lists = []
    for missed in fluid.missed:
        for one in range(1, _RANGES + 1):
            inside = np.flatnonzero(ranges == one)
            lists.append(inside[np.lexsort((cost[inside], missed[inside]))].tolist())
    kept: dict[int, None] = {}
    for depth in range(max(map(len, lists), default=0)):
        for ranked in lists:
            if depth < len(ranked) and len(kept) < limit:
                kept[ranked[depth]] = None
    return sorted(kept, key=lambda place: (cost[place], place))
