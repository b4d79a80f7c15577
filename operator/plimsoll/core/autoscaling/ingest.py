"""Phase 1 of a tick: the metrics of engines and gateways update the state of a service."""

from __future__ import annotations

from typing import NewType

from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot, TierSnapshot
from plimsoll.core.autoscaling.itl_limit import MIN_COMPLETED
from plimsoll.core.autoscaling.observations import LATENCY_WINDOW_S
from plimsoll.core.autoscaling.service_state import TICK_S, ServiceState, ServiceTick
from plimsoll.core.autoscaling.sizing_requests import waiting_at_engines
from plimsoll.core.autoscaling.snapshot_signals import NO_TIER_METRICS, is_fully_ready
from plimsoll.core.autoscaling.startup_models import select_variant
from plimsoll.core.autoscaling.tier_engines import TierEngines, without_kv_posting
from plimsoll.core.autoscaling.tier_state import TierState
from plimsoll.core.demand.service_metrics import ServiceMetrics, TierMetrics
from plimsoll.core.types import Unavailable
from plimsoll.core.workload import Workload

IngestedService = NewType("IngestedService", ServiceTick)  # its state has the metrics of this tick


def ingest(service: ServiceState, snapshot: ServiceSnapshot, spec: ScalingSpec, now_s: float) -> IngestedService:
    """Ingest the metrics of one tick: engines, lengths, speeds, activity, late first tokens."""
    spec = service.class_targets.apply(spec, snapshot.metrics, now_s)
    if not isinstance(snapshot.metrics.workload, Unavailable) or isinstance(service.workload, Unavailable):
        service.workload = snapshot.metrics.workload
    for name, tier in service.tiers.items():
        tier_snapshot = snapshot.tiers.get(name)
        if tier_snapshot is not None:
            tier.startup_models = select_variant(tier.startup_models, tier_snapshot.variant)
            about = tier_snapshot.engine_info
            if about is not None and service.cache.is_unprocessed(name, about):
                tier.on_engine_info(about)
                service.cache.mark_processed(name, about)
        metrics = snapshot.metrics.tiers.get(tier.role, NO_TIER_METRICS)
        _update_engines(tier.engines, metrics, tier_snapshot, service.workload, now_s)
        if tier_snapshot is not None and tier_snapshot.is_uniform:
            _update_settled_minute(tier, tier_snapshot, snapshot.metrics, spec, now_s)
    startup_s = max([tier.startup_s for tier in service.tiers.values()])
    service.activity.update(snapshot, startup_s + TICK_S if spec.horizon_s is None else spec.horizon_s, now_s)
    service.ttft_feedback.update(snapshot, spec, service.tiers, service.workload, service.sizings, now_s)
    return IngestedService(ServiceTick(service, snapshot, spec, now_s))


def _update_settled_minute(
    tier: TierState, tier_snapshot: TierSnapshot, metrics: ServiceMetrics, spec: ScalingSpec, now_s: float
) -> None:
    """Process the ITL of the last minute, if it was settled."""
    ready, found = tier_snapshot.ready, metrics.tiers.get(tier.role, NO_TIER_METRICS)
    if not tier.ends_settled_minute(ready, is_fully_ready(tier_snapshot), now_s):
        return
    is_queued = waiting_at_engines(metrics, tier.role) > ready  # what completes is then less than the load
    if not is_queued and found.completed >= MIN_COMPLETED:
        rate_per_s = found.completed / LATENCY_WINDOW_S / ready
        tier.update_itl(found.lagging.itl_s, None if spec.slo is None else spec.slo.itl_s, rate_per_s, now_s)


def _update_engines(
    engines: TierEngines,
    metrics: TierMetrics,
    tier_snapshot: TierSnapshot | None,
    workload: Workload | Unavailable,
    now_s: float,
) -> None:
    if tier_snapshot is None or tier_snapshot.is_uniform:  # else former engines would limit the new ones
        engines.update_limits(metrics.batches, now_s)
    if metrics.windows:
        engines.update_model(without_kv_posting(metrics.windows, metrics.kv_post_share), workload)
