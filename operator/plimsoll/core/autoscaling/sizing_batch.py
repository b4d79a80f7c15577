"""Vectorised sizing: replica counts for the forecasts of all tiers of all services.

Problem: 1,000 services are sized within a tick. The profile and the SLO capacity of a tier take milliseconds. A
decision also needs the attainment of the current count, and of one replica fewer.

Idea: a `TierCapacity` stores the expensive results while model and mix stay the same. The rest is a few vectorised
calls over all tiers. An infeasible SLO is replaced by the nearest feasible one, which the result names.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np

from plimsoll.core import units
from plimsoll.core.autoscaling.observations import SizingResult
from plimsoll.core.capacity.queueing import Floats
from plimsoll.core.capacity.sizing import Infeasible, find_infeasibility, is_feasible, size_tiers
from plimsoll.core.capacity.slo_capacity import binding_constraint, slo_capacity_per_s
from plimsoll.core.capacity.tier_model import (
    MAX_RATE_PER_S,
    Constraint,
    TierProfile,
    TierSpec,
    attainment,
    build_profile,
    stack_profiles,
)
from plimsoll.core.demand.batched_observe import Flags
from plimsoll.core.demand.forecasting import Forecast
from plimsoll.core.types import Unavailable

_PROBES: Final = (0.88, 0.96, 0.99, 1.01, 1.04, 1.12)  # of a rate: what lies near will be asked for soon
RELEASE_MARGIN: Final = 0.025  # of the forecast: what a line moves by within the level's memory, at an even mix
LEVEL_RISE_ERRORS: Final = 1.96  # standard errors that a level moves up by, at some time, in one case of twenty
RELEASE_ERRORS: Final = 3.0  # standard errors by which a load that stands for hours may wander beyond the margin
MAX_CACHED_COUNTS: Final = (
    64  # counts of a line: more than a load sweeps before its mix has moved; they can be found anew
)


class ReplicaCache:
    """Counts of replicas, each with the rates of which it is known that they need just so many.

    Requests/s with the headroom in them. More load never needs fewer, so what two rates need, those between them do.
    RUNGS_KEPT of them; the one farthest from the newest goes first.
    """

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._lowest_rates: list[float] = []
        self._highest_rates: list[float] = []

    def lookup(self, rate_per_s: float) -> int | None:
        """Return the fewest replicas for a rate; None if it is not cached."""
        index = bisect_right(self._lowest_rates, rate_per_s) - 1
        return self._counts[index] if index >= 0 and rate_per_s <= self._highest_rates[index] else None

    def record(self, rate_per_s: float, replicas: int) -> None:
        """Record that `rate_per_s` requires `replicas`."""
        index = bisect_left(self._counts, replicas)
        if index < len(self._counts) and self._counts[index] == replicas:
            self._lowest_rates[index] = min(self._lowest_rates[index], rate_per_s)
            self._highest_rates[index] = max(self._highest_rates[index], rate_per_s)
            return
        self._counts.insert(index, replicas)
        self._lowest_rates.insert(index, rate_per_s)
        self._highest_rates.insert(index, rate_per_s)
        if len(self._counts) > MAX_CACHED_COUNTS:
            farthest = 0 if index > MAX_CACHED_COUNTS // 2 else -1
            for column in (self._counts, self._lowest_rates, self._highest_rates):
                del column[farthest]


@dataclass(frozen=True, eq=False)
class TierCapacity:
    """One tier reduced to what sizing needs. Make it anew when model, mix, limits or promise have changed.

    request_gpu_s: work of a request of the mix, the unit between rates and forecasts. replica_work: load line of one
    replica among about as many as are needed, GPU-seconds per second. infeasible: as in Need.
    """

    profile: TierProfile
    request_gpu_s: float
    replica_work: float
    constraint: Constraint
    infeasible: Infeasible | None = None
    replica_cache: ReplicaCache = field(default_factory=ReplicaCache, repr=False)

    def tpot_s(self, level: float, ready: int) -> float | None:
        """Promised percentile of TPOT at so much work on so many replicas, s; None where it is not known."""
        work_s, base_s, target_s, tail = self._tpot_law
        if not ready or not math.isfinite(target_s):
            return None
        rho = min(level / self.request_gpu_s, MAX_RATE_PER_S) * work_s / ready
        if not rho < 1.0:
            return None
        position = rho * (len(tail) - 1)
        index = min(int(position), len(tail) - 2)
        return (tail[index] + (position - index) * (tail[index + 1] - tail[index])) * base_s / max(1.0 - rho, 1e-12)

    @cached_property
    def _tpot_law(self) -> tuple[float, float, float, list[float]]:
        profile = self.profile
        return (
            float(profile.work_s[0]),
            float(profile.base_s[0]),
            float(profile.tpot_s[0]),
            profile.tpot_tail[0].tolist(),
        )


@dataclass(frozen=True, slots=True)
class SizingRequest:
    """One tier to be sized. replicas, ready: as in TierObservation. headroom: share of the load line kept free.

    backlog_gpu_s: work that waits, where nothing is ready yet. returning_gpu_s: of requests that were refused and told
    when to come back; arrivals are first attempts, so that these are in no forecast. Both are to be cleared within one
    horizon, beside the load: sooner is no new replica there. relied_gpu_s: more of the latter, which replicas on their
    way will serve: no reason to order others, but one to keep these.
    """

    capacity: TierCapacity
    forecast: Forecast
    replicas: int
    ready: int
    headroom: float = 0.0
    backlog_gpu_s: float = 0.0
    retry_gpu_s: float = 0.0
    scheduled_gpu_s: float = 0.0


def tier_capacities(tiers: Sequence[TierSpec], replicas: Sequence[int]) -> list[TierCapacity | Infeasible]:
    """The line of each tier that has or needs about so many replicas; Infeasible where no looser target helps either.

    Each is the same to the last bit in any company, and in company it takes a third of the time.
    """
    if not tiers:
        return []
    profiles = [build_profile(tier) for tier in tiers]
    feasible = is_feasible(stack_profiles(profiles)).tolist()
    infeasibilities = [
        None if meets_slo else find_infeasibility(tier) for tier, meets_slo in zip(tiers, feasible, strict=True)
    ]
    for n, infeasibility in enumerate(infeasibilities):
        if infeasibility is not None and infeasibility.nearest_slo is not None:
            profiles[n] = build_profile(replace(tiers[n], slo=infeasibility.nearest_slo))
    stacked, counts = stack_profiles(profiles), np.maximum(np.array(replicas, dtype=np.float64), 1.0)
    rate_per_s, request_gpu_s = slo_capacity_per_s(stacked, counts), stacked.rho(1.0, 1.0)
    columns = (
        request_gpu_s.tolist(),
        (rate_per_s * request_gpu_s / counts).tolist(),
        binding_constraint(stacked, rate_per_s, counts),
    )
    capacities: list[TierCapacity | Infeasible] = []
    for tier_profile, infeasibility, request_work, replica_work, binding in zip(
        profiles, infeasibilities, *columns, strict=True
    ):
        if infeasibility is not None and infeasibility.nearest_slo is None:
            capacities.append(infeasibility)
        else:
            capacities.append(TierCapacity(tier_profile, request_work, replica_work, binding, infeasibility))
    return capacities


def size_batch(requests: Sequence[SizingRequest]) -> list[SizingResult | Unavailable]:
    """Return the sizing of each tier, in order. Unavailable for an implausible rate, or if no count carries it."""
    if not requests:
        return []
    tiers = stack_profiles([request.capacity.profile for request in requests])
    request_gpu_s = np.array([request.capacity.request_gpu_s for request in requests])
    requested_rate = np.array([_requested_work(request) for request in requests]) / request_gpu_s
    rate = np.where(requested_rate <= MAX_RATE_PER_S / 2, requested_rate, 0.0)
    headroom = np.array([request.headroom for request in requests])
    ordered = np.array([float(max(request.replicas, 1)) for request in requests])
    ready = np.array([float(max(request.ready, 1)) for request in requests])
    level = np.array([request.forecast.level for request in requests]) / request_gpu_s
    cached = _cached_counts(requests, rate / (1.0 - headroom))
    sizes = size_tiers(tiers, rate, headroom, start=np.where(np.isnan(cached), ordered, cached))
    attainment_now, retained_rate = (
        sizes.attainment.copy(),
        np.array([_retained_rate(request, one) for request, one in zip(requests, rate, strict=True)]),
    )
    scales_down = (ordered > sizes.replicas) & (rate > 0)
    scale_down_counts = np.where(
        scales_down, _cached_counts(requests, retained_rate / (1.0 - headroom)), sizes.replicas
    )
    uncached = np.flatnonzero(np.isnan(scale_down_counts))
    scale_down_counts[uncached] = size_tiers(
        tiers.select(uncached), retained_rate[uncached], headroom[uncached], start=sizes.replicas[uncached]
    ).replicas
    differing = np.flatnonzero(ordered != sizes.replicas)
    attainment_now[differing] = _attainment(tiers.select(differing), rate[differing], ordered[differing])
    forecast_tpot_s, model_tpot_s = (
        _model_tpot_s(tiers, rate, ordered),
        _model_tpot_s(tiers, np.minimum(level, MAX_RATE_PER_S), ready),
    )
    results: list[SizingResult | Unavailable] = []
    for i, request in enumerate(requests):
        if rate[i] != requested_rate[i] or not math.isfinite(scale_down_counts[i]):
            results.append(Unavailable(f"forecast rate {units.format_rate(requested_rate[i])} is implausible"))
            continue
        results.append(
            SizingResult(
                replicas=int(sizes.replicas[i]),
                scale_down_replicas=int(scale_down_counts[i]),
                rate_per_s=float(rate[i]),
                request_gpu_s=request.capacity.request_gpu_s,
                replica_work=request.capacity.replica_work,
                constraint=request.capacity.constraint,
                attainment=float(attainment_now[i]) if request.replicas else 0.0,
                attainment_one_fewer=float(sizes.attainment_one_fewer[i]),
                tpot_s=_none_if_nan(forecast_tpot_s[i]) if request.replicas else None,
                model_tpot_s=_none_if_nan(model_tpot_s[i])
                if request.ready and math.isfinite(model_tpot_s[i])
                else None,
                headroom=request.headroom,
                infeasible=request.capacity.infeasible,
            )
        )
    return results


def record_sizes(requests: Sequence[SizingRequest], results: Sequence[SizingResult | Unavailable]) -> None:
    """Tell the lines what the rates asked for need, and, where that is new to a line, what those around them do."""
    points = []
    for request, sizing in zip(requests, results, strict=True):
        if isinstance(sizing, SizingResult) and sizing.rate_per_s > 0.0:
            rate = sizing.rate_per_s / (1.0 - request.headroom)
            points.append((request.capacity, rate, sizing.replicas))
            if request.replicas > sizing.replicas:
                retained_rate = _retained_rate(request, sizing.rate_per_s) / (1.0 - request.headroom)
                points.append((request.capacity, retained_rate, sizing.scale_down_replicas))
    new_points = [
        (capacity, rate, replicas)
        for capacity, rate, replicas in points
        if capacity.replica_cache.lookup(rate) != replicas
    ]
    if not new_points:
        return
    rows = np.repeat(np.arange(len(new_points)), len(_PROBES))
    nearby_rates = np.array([rate for _, rate, _ in new_points])[rows] * np.tile(_PROBES, len(new_points))
    nearby_rates = np.minimum(nearby_rates, MAX_RATE_PER_S)
    start = np.array([float(replicas) for _, _, replicas in new_points])[rows]
    sizes = size_tiers(
        stack_profiles([capacity.profile for capacity, _, _ in new_points]).select(rows), nearby_rates, start=start
    ).replicas
    for capacity, rate, replicas in new_points:
        capacity.replica_cache.record(rate, replicas)
    for row, rate, count in zip(rows.tolist(), nearby_rates.tolist(), sizes.tolist(), strict=True):
        if math.isfinite(count):
            new_points[row][0].replica_cache.record(rate, int(count))


def cached_replicas(capacities: Sequence[TierCapacity], work: Floats, headroom: Floats, mask: Flags) -> Floats:
    """Replicas for so much work (GPU-seconds per second) of each line, as `needs` has found them before; NaN where it
    has not, or where not `some`. headroom: broadcast to work, whose elements are those of the lines in order."""
    rate = work / np.array([capacity.request_gpu_s for capacity in capacities]).reshape(work.shape)
    known = mask & (rate <= MAX_RATE_PER_S / 2)
    replicas = np.where(known, 0.0, np.nan)
    indices = np.flatnonzero(known & (rate > 0.0))
    rates_with_headroom = (rate / (1.0 - headroom)).ravel()[indices].tolist()
    counts = [
        capacities[n].replica_cache.lookup(one) for n, one in zip(indices.tolist(), rates_with_headroom, strict=True)
    ]
    replicas.flat[indices] = [math.nan if count is None else count for count in counts]
    return replicas


def _cached_counts(requests: Sequence[SizingRequest], rate: Floats) -> Floats:
    """The fewest replicas for each rate, with the headroom in it, as far as the lines know; else NaN."""
    counts = [request.capacity.replica_cache.lookup(one) for request, one in zip(requests, rate.tolist(), strict=True)]
    return np.array([math.nan if count is None else count for count in counts])


def _requested_work(request: SizingRequest) -> float:
    waiting_gpu_s = request.retry_gpu_s if request.ready else request.retry_gpu_s + request.backlog_gpu_s
    return request.forecast.work + waiting_gpu_s / max(request.forecast.horizon_s, 1.0)


def _retained_rate(request: SizingRequest, rate_per_s: float) -> float:
    """Return the rate, requests/s, for which ordered replicas are kept."""
    scheduled_rate = request.scheduled_gpu_s / max(request.forecast.horizon_s, 1.0) / request.capacity.request_gpu_s
    return (rate_per_s + scheduled_rate) * _scale_down_margin(request.forecast)


def _scale_down_margin(forecast: Forecast) -> float:
    return float(
        scale_down_margin(*(np.array(part) for part in (forecast.work, forecast.level_error, forecast.memory_fill)))
    )


def scale_down_margin(work: Floats, error: Floats, memory: Floats) -> Floats:
    """What forecasts are multiplied with before a step down, so that chance does not take it back; 1 without work.

    error: of the level. memory: how full that of the level is, m. A level that is the mean of all that came since a
    leap moves by its own error at most; once it forgets, by what it learns anew as well: by sqrt(1 + m) errors in the
    end. On its way there it has been MOVES of them up in one case of twenty: twice as often as it ends there, by the
    reflection principle. A load that stands for hours goes on wandering: to no more than RELEASE_ERRORS of the
    difference between two memories, which is the error itself, since that is reckoned from a memory and a mean that
    forgets is worth two. The line moves, too, by RELEASE_MARGIN while a memory fills, and a load that has stood for a
    time stands about as long again (Gott 1993).
    """
    deviation = np.maximum(LEVEL_RISE_ERRORS * np.sqrt(1.0 + memory), RELEASE_ERRORS * memory) * error
    with np.errstate(all="ignore"):  # where there is no work
        return np.where(work > 0.0, 1.0 + np.maximum(RELEASE_MARGIN * memory, deviation / work), 1.0)


def _attainment(tiers: TierProfile, rate: Floats, replicas: Floats) -> Floats:
    """Return the attainment; requests beyond saturation are rejected at random."""
    served = np.minimum(rate, tiers.saturation_rate_per_s(replicas))
    return np.asarray(attainment(tiers, served, replicas).within_slo * served / np.maximum(rate, 1e-300))


def _model_tpot_s(tiers: TierProfile, rate: Floats, replicas: Floats) -> Floats:
    """Promised percentile of TPOT by the law: tail * base / (1 - rho), s; NaN where nothing is promised of it."""
    rho = rate * tiers.work_s / replicas
    position = np.minimum(rho, 1.0) * (tiers.tpot_tail.shape[1] - 1)
    index = np.minimum(position.astype(np.intp), tiers.tpot_tail.shape[1] - 2)
    rows = np.arange(len(tiers))
    tail = tiers.tpot_tail[rows, index] + (position - index) * (
        tiers.tpot_tail[rows, index + 1] - tiers.tpot_tail[rows, index]
    )
    law = np.where(rho < 1.0, tail * tiers.base_s / np.maximum(1.0 - rho, 1e-12), np.inf)
    return np.where(np.isfinite(tiers.tpot_s), law, np.nan)


def _none_if_nan(seconds: float) -> float | None:
    return None if math.isnan(seconds) else float(seconds)
