"""Screening of schedules: thousands are evaluated by the work of the arrivals alone, and few run on the plant.

Problem: a run of a 40-minute row takes seconds of CPU, and thousands of settings of a reactive baseline take hours.

Idea: the orders of a reactive baseline follow from the arrivals alone, by its own code and exactly. So does its cost,
except for the random start-ups and the drain. Settings with equal orders count once. Their misses are estimated by a
fluid queue: ready replicas, a mean start-up after their order, work for a share `rho` of their time. Work that can only
be done after the TTFT target is missed. The rho at which a replica meets the SLO is left open: at each of several, the
settings with the fewest misses are selected from every range of cost. A setting that no rho favours is not run,
although the plant might favour it. The more settings run, the less that matters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plimsoll.core.types import Role
from plimsoll.core.units import format_number
from plimsoll.sim.operator import TICK_S
from plimsoll.sim.policies import clairvoyant
from plimsoll.sim.policies.base import PolicyContext
from plimsoll.sim.policies.reactive import ReactiveSettings, ReplicaOrders, TrailingWindow, known_demand
from plimsoll.sim.request_cost import RequestCostModel

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

MARGINS: Final = tuple(round(0.40 + 0.05 * n, 2) for n in range(12))
STANDBYS: Final = (0, 1, 2, 3, 4)
HOLD_STARTUPS: Final = (0.0, 0.5, 1.0, 2.0)  # start-ups
WINDOWS_S: Final = (10.0, 30.0, 60.0, 120.0, 300.0)
TREND_WINDOWS_S: Final = (60.0, 120.0, 300.0)
SMOOTHING_WINDOWS_S: Final = (15.0, 60.0, 180.0)  # over which the oracle averages
GAP_STARTUPS: Final = (0.0, 1.0, 2.0)  # start-ups

_UTILISATIONS: Final = (0.5, 0.65, 0.8, 0.92)
_COST_RANGES: Final = 12  # of cost
_DEFAULT_PATIENCE_S: Final = 10.0  # without a TTFT target
_MAX_SCHEDULES_PER_TIER: Final = 14  # schedules of each of two tiers


class Schedule(NamedTuple):
    """Orders of one tier at each tick, and the option text that produces them."""

    options: str
    orders: Counts


@dataclass(frozen=True)
class SearchSpace:
    """What the schedules run on. initial: ready replicas at the start."""

    context: PolicyContext
    initial: Mapping[Role, int]
    length_s: float

    @property
    def ticks(self) -> int:
        return int(self.length_s / TICK_S) + 1


def follower_settings(startup_s: float) -> Iterator[ReactiveSettings]:
    """All settings of one tier's reactive baseline, for engines that start in startup_s."""
    windows = [(window_s, 0.0) for window_s in WINDOWS_S]
    if startup_s:
        windows += [(window_s, startup_s) for window_s in TREND_WINDOWS_S]
    holds_s = sorted({share * startup_s for share in HOLD_STARTUPS})
    for (window_s, trend_s), margin, standby, hold_s in product(windows, MARGINS, STANDBYS, holds_s):
        yield ReactiveSettings(margin, standby, hold_s, window_s, trend_s)


def screen_followers(space: SearchSpace, limit: int) -> list[str]:
    """Reactive baselines worth a run, at most `limit`, without an admission option."""
    startup_s = space.context.plant.startup.mean_s
    settings = list(follower_settings(startup_s))
    tiers = {role: _follower_schedules(space, role, settings) for role in space.context.bounds}
    return _select("follower", tiers, space, limit, join_tier_options)


def _follower_schedules(space: SearchSpace, role: Role, settings: Sequence[ReactiveSettings]) -> list[Schedule]:
    """The orders of all settings in one tier, by the follower's own code."""
    context, cost_model = space.context, RequestCostModel(space.context.plant, space.context.bounds)
    times = [n * TICK_S for n in range(space.ticks)]
    rates: dict[tuple[float, float], list[float]] = {}
    schedules = []
    for one in settings:
        key = one.window_s, one.trend_s
        if key not in rates:
            source = TrailingWindow(*key)
            for request in context.requests or ():
                source.add(*known_demand(cost_model, role, request, request.at_s))
            rates[key] = [source.rate(now_s) for now_s in times]
        orders = ReplicaOrders(one.margin, one.standby, one.hold_s, context.bounds[role])
        orders_by_tick = [orders.replicas_for(rate, now_s) for rate, now_s in zip(rates[key], times, strict=True)]
        options = f"margin={format_number(one.margin)},spare={one.standby},hold={format_number(one.hold_s)},"
        options += f"window={format_number(one.window_s)}"
        schedules.append(Schedule(options + (",trend=1" if one.trend_s else ",trend=0"), np.array(orders_by_tick)))
    return schedules


def screen_plans(space: SearchSpace, limit: int) -> list[str]:
    """Oracle schedules worth a run, at most `limit`, without an admission option."""
    startup_s = space.context.plant.startup.max_s
    gaps_s = sorted({share * startup_s for share in GAP_STARTUPS})
    settings = list(product(MARGINS, SMOOTHING_WINDOWS_S, gaps_s, STANDBYS[:2]))
    tiers: dict[Role, list[Schedule]] = {}
    for role, bounds in space.context.bounds.items():
        demand = _arriving_work(role, space)
        orders_by_setting = [
            _clairvoyant_orders(demand, margin, smooth_s, gap_s, standby, startup_s, bounds)
            for margin, smooth_s, gap_s, standby in settings
        ]
        tiers[role] = [
            Schedule(f"plan={clairvoyant.format_plan(_to_plan(orders))}", orders) for orders in orders_by_setting
        ]
    return _select("clairvoyant", tiers, space, limit, clairvoyant.join_plans)


def _clairvoyant_orders(
    demand: Floats,
    margin: float,
    smooth_s: float,
    gap_s: float,
    standby: int,
    startup_s: float,
    bounds: tuple[int, int],
) -> Counts:
    """Return orders a start-up ahead of the need of the mean work around each moment, with gaps of up to `gap_s`
    filled.
    """
    half_ticks, gap_ticks, ahead_ticks = (math.ceil(span_s / TICK_S) for span_s in (smooth_s / 2, gap_s, startup_s))
    sums = np.concatenate([[0.0], np.cumsum(demand)])
    at = np.arange(len(demand))
    first, last = np.maximum(at - half_ticks, 0), np.minimum(at + half_ticks + 1, len(demand))
    rate = (sums[last] - sums[first]) / ((last - first) * TICK_S)
    need = np.clip(np.ceil(rate / margin - 1e-9).astype(np.int64) + standby, *bounds)
    filled = -_forward_max(-_forward_max(need, gap_ticks)[::-1], gap_ticks)[::-1]
    return _forward_max(np.maximum(need, filled), ahead_ticks)


def _forward_max(values: Counts, ticks: int) -> Counts:
    """Return the largest value of each index and the `ticks` after it."""
    reach, maxima = 0, values
    while reach < ticks:
        step = min(reach + 1, ticks - reach)
        later = np.concatenate([maxima[step:], np.full(min(step, len(maxima)), maxima.min())])
        maxima, reach = np.maximum(maxima, later), reach + step
    return maxima


def _to_plan(orders: Counts) -> clairvoyant.ReplicaPlan:
    changes = np.flatnonzero(np.diff(orders, prepend=orders[0] - 1))
    return tuple((tick * TICK_S, (int(orders[tick]),)) for tick in changes.tolist())


# -------------------------------------------------------------------- choosing


def _select(
    name: str,
    tiers: Mapping[Role, list[Schedule]],
    space: SearchSpace,
    limit: int,
    join: Callable[[Sequence[str]], str],
) -> list[str]:
    different = {role: list({one.orders.tobytes(): one for one in each}.values()) for role, each in tiers.items()}
    fluids = {role: FluidEstimate.estimate(role, each, space) for role, each in different.items()}
    if len(fluids) == 1:
        [(role, fluid)] = fluids.items()
        policies = [different[role][place].options for place in _best_per_cost_range(fluid, limit)]
    else:
        selected = {role: _best_per_cost_range(fluid, _MAX_SCHEDULES_PER_TIER) for role, fluid in fluids.items()}
        pairs = list(product(*selected.values()))
        cost = sum(fluids[role].cost_s[[pair[n] for pair in pairs]] for n, role in enumerate(selected))
        met_share = math.prod(
            1.0 - fluids[role].missed[:, [pair[n] for pair in pairs]] for n, role in enumerate(selected)
        )
        combined = FluidEstimate(np.asarray(cost), 1.0 - np.asarray(met_share))
        policies = [
            join([different[role][at].options for role, at in zip(selected, pairs[place], strict=True)])
            for place in _best_per_cost_range(combined, limit)
        ]
    return [f"{name}:{word}" for word in policies]


def join_tier_options(words: Sequence[str]) -> str:
    """Options of each tier, joined as `key=A/B`."""
    options = [dict(option.split("=", 1) for option in word.split(",")) for word in words]
    return ",".join(f"{key}={'/'.join(each[key] for each in options)}" for key in options[0])


@dataclass(frozen=True)
class FluidEstimate:
    """Schedules evaluated by work alone: GPU-seconds of each, and by rho the share of work that it misses."""

    cost_s: Floats
    missed: Floats

    @classmethod
    def estimate(cls, role: Role, schedules: Sequence[Schedule], space: SearchSpace) -> FluidEstimate:
        plant, initial = space.context.plant, space.initial[role]
        simulated = [_simulate_orders(one.orders, initial, plant.startup.mean_s, space) for one in schedules]
        ready = np.array([one for one, _ in simulated], dtype=float)
        gpus = plant.gpus.get(role, 1)
        return cls(
            np.array([gpus * paid_s for _, paid_s in simulated]),
            np.array(
                [
                    _missed_share(_arriving_work(role, space), ready * rho, _patience_for(space.context))
                    for rho in _UTILISATIONS
                ]
            ),
        )


def _simulate_orders(orders: Counts, initial: int, startup_s: float, space: SearchSpace) -> tuple[Counts, float]:
    """Return the ready replicas at each tick, and replica-seconds; the last one ready is removed first."""
    change = np.zeros(space.ticks + 1, dtype=np.int64)
    replicas: list[tuple[float, float]] = [(0.0, 0.0)] * initial  # ordered, ready
    replica_s = 0.0

    def record_end(ordered_s: float, ready_s: float, end_s: float) -> float:
        if ready_s < end_s:
            change[min(space.ticks, math.ceil(ready_s / TICK_S))] += 1
            change[min(space.ticks, math.ceil(end_s / TICK_S))] -= 1
        return end_s - ordered_s

    change_ticks = np.flatnonzero(np.diff(orders, prepend=initial))
    for tick in change_ticks.tolist():
        now_s, desired = tick * TICK_S, int(orders[tick])
        while len(replicas) > desired:
            replica_s += record_end(*replicas.pop(), now_s)
        replicas += [(now_s, now_s + startup_s)] * (desired - len(replicas))
    for ordered_s, ready_s in replicas:
        record_end(ordered_s, ready_s, space.ticks * TICK_S)
        replica_s += max(0.0, space.length_s - ordered_s)
    return np.cumsum(change[:-1]), replica_s


def _arriving_work(role: Role, space: SearchSpace) -> Floats:
    """Return the work that arrives in each tick."""
    cost_model, work_by_tick = RequestCostModel(space.context.plant, space.context.bounds), np.zeros(space.ticks)
    for one in space.context.requests or ():
        work_by_tick[min(space.ticks - 1, int(one.at_s / TICK_S))] += cost_model.cost_s(role, one)
    return work_by_tick


def _patience_for(context: PolicyContext) -> float:
    prompts = sorted(one.prompt_tokens for one in context.requests or ())
    if context.slo is None or context.slo.ttft_s is None or not prompts:
        return _DEFAULT_PATIENCE_S
    return context.slo.ttft_target_s(prompts[len(prompts) // 2])


def _missed_share(demand: Floats, capacity: Floats, patience_s: float) -> Floats:
    """Return the share of the work that each fleet completes too late. capacity: of fleet and tick,
    seconds per second.
    """
    queue, missed = np.zeros(len(capacity)), np.zeros(len(capacity))
    for tick, arriving_s in enumerate(demand.tolist()):
        queue = np.maximum(0.0, queue + arriving_s - capacity[:, tick] * TICK_S)
        late = np.maximum(0.0, queue - capacity[:, tick] * patience_s)
        missed += late
        queue -= late
    return missed / max(float(demand.sum()), 1e-12)


def _best_per_cost_range(fluid: FluidEstimate, limit: int) -> list[int]:
    """Return the indices of those that miss least in their range of cost, for any rho."""
    cost = fluid.cost_s
    sufficient_cost = [cost[missed <= missed.min() + 1e-3].min() for missed in fluid.missed]
    max_cost = max(sufficient_cost) * (1.0 + 1.0 / _COST_RANGES) or 1.0  # a load of one moment costs nothing
    edges = np.linspace(cost.min(), max_cost, _COST_RANGES + 1)
    ranges = np.searchsorted(edges, cost, side="right")
    rankings = []
    for missed in fluid.missed:
        for one in range(1, _COST_RANGES + 1):
            inside = np.flatnonzero(ranges == one)
            rankings.append(inside[np.lexsort((cost[inside], missed[inside]))].tolist())
    selected: dict[int, None] = {}
    for depth in range(max(map(len, rankings), default=0)):
        for ranked in rankings:
            if depth < len(ranked) and len(selected) < limit:
                selected[ranked[depth]] = None
    return sorted(selected, key=lambda place: (cost[place], place))
