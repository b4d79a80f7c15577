"""Vectorised sizing: replica counts for the forecasts of all tiers of all services.

Problem: 1,000 services are sized within a tick. The profile and the SLO capacity of a tier take milliseconds. A
decision also needs the attainment of the current count, and of one replica fewer.

Idea: a `TierCapacity` stores the expensive results while model and mix stay the same. The rest is a few vectorised
calls over all tiers. An infeasible SLO is replaced by the nearest feasible one, which the result names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from plimsoll.core import units
from plimsoll.core.autoscaling.observations import SizingResult
from plimsoll.core.capacity.attainment import attainment
from plimsoll.core.capacity.queueing import Floats
from plimsoll.core.capacity.sizing import Infeasible, find_infeasibility, is_feasible, size_tiers
from plimsoll.core.capacity.slo_capacity import binding_constraint, slo_capacity_per_s
from plimsoll.core.capacity.tier_model import (
    MAX_RATE_PER_S,
    Constraint,
    TierProfile,
    TierSpec,
    build_profile,
    stack_profiles,
)
from plimsoll.core.demand.forecasting import Forecast
from plimsoll.core.types import Unavailable

RELEASE_MARGIN: Final = 0.025  # relative change of the SLO capacity within the level's memory, at a constant mix
LEVEL_RISE_ERRORS: Final = 1.96  # standard errors by which a level rises at some time in 5 % of cases
RELEASE_ERRORS: Final = 3.0  # standard errors by which a load that is constant for hours may vary beyond it


@dataclass(frozen=True, eq=False)
class TierCapacity:
    """SLO capacity of one tier, with what sizing needs. Compute it again when model, mix, limits or SLO change.

    request_gpu_s: work of a mean request of the mix; converts between work and requests. replica_work: SLO capacity of
    one replica in a tier of about the needed size, GPU-seconds per second. infeasible: the SLO is infeasible, and the
    capacity is that of its nearest feasible SLO.
    """

    profile: TierProfile
    request_gpu_s: float
    replica_work: float
    constraint: Constraint
    infeasible: Infeasible | None = None


@dataclass(frozen=True, slots=True)
class SizingRequest:
    """One tier to be sized. replicas, ready: as in TierObservation. headroom: share of the SLO capacity to keep free.

    backlog_gpu_s: queued work; it counts only while no replica is ready. retry_gpu_s: work of rejected requests with a
    retry reservation. Arrivals count first attempts only, so no forecast includes it. Both are to be served within one
    horizon in addition to the load, because no new replica is ready sooner. scheduled_gpu_s: retry work that the
    ordered replicas will serve. It orders no further replicas, but keeps these from being removed.
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
    """Return the SLO capacity of each tier at about this many replicas; Infeasible if no looser target is feasible.

    A tier's result does not depend on the other tiers. A batch takes a third of the time of single calls.
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
    sizes = size_tiers(tiers, rate, headroom, start=ordered)
    attainment_now, retained_rate = (
        sizes.attainment.copy(),
        np.array([_retained_rate(request, one) for request, one in zip(requests, rate, strict=True)]),
    )
    scale_down_counts = sizes.replicas.copy()
    scaling_down = np.flatnonzero((ordered > sizes.replicas) & (rate > 0))
    scale_down_counts[scaling_down] = size_tiers(
        tiers.select(scaling_down),
        retained_rate[scaling_down],
        headroom[scaling_down],
        start=sizes.replicas[scaling_down],
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
                retained_rate_per_s=float(retained_rate[i]),
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


def _requested_work(request: SizingRequest) -> float:
    waiting_gpu_s = request.retry_gpu_s if request.ready else request.retry_gpu_s + request.backlog_gpu_s
    return request.forecast.work + waiting_gpu_s / max(request.forecast.horizon_s, 1.0)


def _retained_rate(request: SizingRequest, rate_per_s: float) -> float:
    """Return the rate, requests/s, that decides which ordered replicas stay."""
    scheduled_rate = request.scheduled_gpu_s / max(request.forecast.horizon_s, 1.0) / request.capacity.request_gpu_s
    forecast = request.forecast
    return (rate_per_s + scheduled_rate) * scale_down_margin(forecast.work, forecast.level_error, forecast.memory_fill)


def scale_down_margin(work: float, error: float, memory: float) -> float:
    """Return the factor on the forecast for scaling down, so that random variation does not reverse it; 1 without work.

    error: standard error of the level. memory: fill m of the level's memory, 0 to 1. While the level is the mean of all
    samples since a level shift, it moves by its own error at most. Once it discounts old samples, its final deviation
    has sqrt(1 + m) standard errors. By the reflection principle, it exceeds LEVEL_RISE_ERRORS of them at some time in 5
    % of cases, twice as often as at the end. A load that is constant for hours keeps varying by up to RELEASE_ERRORS of
    the difference between two memories, which equals the error. The SLO capacity moves by RELEASE_MARGIN while a memory
    fills, and a load that has been constant for a time stays so for about as long again (Gott 1993).
    """
    deviation = max(LEVEL_RISE_ERRORS * math.sqrt(1.0 + memory), RELEASE_ERRORS * memory) * error
    return 1.0 + max(RELEASE_MARGIN * memory, deviation / work) if work > 0.0 else 1.0


def _attainment(tiers: TierProfile, rate: Floats, replicas: Floats) -> Floats:
    """Return the attainment; requests beyond saturation are rejected at random."""
    served = np.minimum(rate, tiers.saturation_rate_per_s(replicas))
    return np.asarray(attainment(tiers, served, replicas).within_slo * served / np.maximum(rate, 1e-300))


def _model_tpot_s(tiers: TierProfile, rate: Floats, replicas: Floats) -> Floats:
    """Return the modelled TPOT at the SLO's percentile: tail * base / (1 - rho), s; NaN without a TPOT target."""
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
