"""Sizing requests: the forecast of each tier, with its queued work and its reserved retries."""

from __future__ import annotations

from collections.abc import Mapping

from plimsoll.core.autoscaling import retry_backlog
from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot, TierSnapshot
from plimsoll.core.autoscaling.observations import SizingResult, TierDemand
from plimsoll.core.autoscaling.retry_backlog import RetryBacklog
from plimsoll.core.autoscaling.sizing_batch import SizingRequest, TierCapacity
from plimsoll.core.autoscaling.snapshot_signals import in_flight, is_fully_ready
from plimsoll.core.autoscaling.tier_state import TierState
from plimsoll.core.demand.forecasting import Forecast
from plimsoll.core.demand.service_metrics import ServiceMetrics
from plimsoll.core.types import Role, Unavailable


def client_tier(tiers: Mapping[str, TierState]) -> str:
    """Tier that serves client requests: decode or serve."""
    return next(name for name, tier in tiers.items() if tier.role is not Role.PREFILL)


def first_tier(tiers: Mapping[str, TierState]) -> str:
    """Tier that computes prompts, which a request reaches first: prefill or serve."""
    return next(name for name, tier in tiers.items() if tier.role is not Role.DECODE)


def sizing_requests(
    tiers: Mapping[str, TierState],
    sizings: Mapping[str, SizingResult | Unavailable],
    snapshot: ServiceSnapshot,
    spec: ScalingSpec,
    demand: Mapping[str, TierDemand | Unavailable],
    now_s: float,
) -> dict[str, SizingRequest]:
    """Return sizing requests for the tiers with known demand and SLO capacity."""
    requests = {}
    for name, tier_demand in demand.items():
        capacity, tier_snapshot = tiers[name].capacity, snapshot.tiers.get(name)
        if isinstance(tier_demand, TierDemand) and isinstance(capacity, TierCapacity) and tier_snapshot is not None:
            counts = tier_snapshot.replicas, tier_snapshot.ready
            backlog = backlog_gpu_s(tiers, name, snapshot.metrics)
            retries = _retry_backlog(
                tiers, sizings.get(name), name, tier_snapshot, capacity, tier_demand.forecast, snapshot, spec, now_s
            )
            requests[name] = SizingRequest(capacity, tier_demand.forecast, *counts, spec.headroom, backlog, *retries)
    return requests


def _retry_backlog(
    tiers: Mapping[str, TierState],
    sizing: SizingResult | Unavailable | None,
    name: str,
    tier_snapshot: TierSnapshot,
    capacity: TierCapacity,
    tier_forecast: Forecast,
    snapshot: ServiceSnapshot,
    spec: ScalingSpec,
    now_s: float,
) -> RetryBacklog:
    """Return the retry backlog of the tier."""
    work_gpu_s, tier = retry_gpu_s(tiers, name, snapshot.metrics), tiers[name]
    if work_gpu_s <= 0.0:
        return retry_backlog.NO_BACKLOG
    if is_fully_ready(tier_snapshot) and spec.slo is not None:
        error_budget, running = 1.0 - spec.slo.share, in_flight(snapshot.metrics)
        return retry_backlog.significant_backlog(
            work_gpu_s, tier_forecast, capacity.request_gpu_s, error_budget, running, tier.capacity_state.arrival_cv2
        )
    replica_work = sizing.replica_work if isinstance(sizing, SizingResult) else 0.0
    return retry_backlog.backlog_during_startup(work_gpu_s, tier, tier_snapshot, tier_forecast, replica_work, now_s)


def backlog_gpu_s(tiers: Mapping[str, TierState], name: str, metrics: ServiceMetrics) -> float:
    """Return the work of queued requests for a tier, GPU-seconds."""
    return (
        0.0 if isinstance(metrics.queued_work_s, Unavailable) else metrics.queued_work_s * _relative_work(tiers, name)
    )


def retry_gpu_s(tiers: Mapping[str, TierState], name: str, metrics: ServiceMetrics) -> float:
    """Return the work for a tier that arrived before and is not being served, GPU-seconds.

    That is the reserved retries; at engines without a gateway, which rejects nothing, the requests that wait there, and
    those that wait for a prefill before they reach the tier.
    """
    if metrics.is_measured_at_engines:
        roles = {tiers[name].role, tiers[first_tier(tiers)].role}
        return sum(waiting_at_engines(metrics, role) for role in roles) * _request_gpu_s(tiers[name])
    return (
        0.0
        if isinstance(metrics.reserved_work_s, Unavailable)
        else metrics.reserved_work_s * _relative_work(tiers, name)
    )


def has_retry_backlog(tiers: Mapping[str, TierState], snapshot: ServiceSnapshot) -> bool:
    """Whether clients come back on top of the level: retries are reserved. Without a gateway, whether more than one
    request waits at each ready engine of the first tier, since one may wait for the next step. A decode engine counts
    requests whose KV cache is on its way as waiting.
    """
    metrics = snapshot.metrics
    if metrics.is_measured_at_engines:
        name = first_tier(tiers)
        tier = snapshot.tiers.get(name)
        return waiting_at_engines(metrics, tiers[name].role) > (0 if tier is None else tier.ready)
    return not isinstance(metrics.reserved_work_s, Unavailable) and metrics.reserved_work_s > 0.0


def waiting_at_engines(metrics: ServiceMetrics, role: Role) -> float:
    """Return the requests that wait at the engines of a tier; 0 while that is not known."""
    tier = metrics.tiers.get(role)
    return 0.0 if tier is None or isinstance(tier.lagging.waiting, Unavailable) else tier.lagging.waiting


def _request_gpu_s(tier: TierState) -> float:
    return 0.0 if isinstance(tier.capacity, Unavailable) else tier.capacity.request_gpu_s


def _relative_work(tiers: Mapping[str, TierState], name: str) -> float:
    """Return the work of a request in this tier over its work in the client tier, the unit of the gateways."""
    capacity, client_capacity = tiers[name].capacity, tiers[client_tier(tiers)].capacity
    if isinstance(capacity, Unavailable) or isinstance(client_capacity, Unavailable):
        return 1.0
    return capacity.request_gpu_s / client_capacity.request_gpu_s
