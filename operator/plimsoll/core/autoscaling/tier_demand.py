"""Phase 3 of a tick: samples of demand, and the forecast of each tier."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple, NewType

from plimsoll.core.autoscaling.capacity_state import NO_TARGET
from plimsoll.core.autoscaling.decision_cache import CachedTier
from plimsoll.core.autoscaling.ingest import IngestedService
from plimsoll.core.autoscaling.observations import TierDemand
from plimsoll.core.autoscaling.service_state import ServiceTick
from plimsoll.core.autoscaling.sizing_requests import has_retry_backlog
from plimsoll.core.autoscaling.snapshot_signals import plausible_rate
from plimsoll.core.autoscaling.tier_state import TierState
from plimsoll.core.demand.batched_observe import observe_all
from plimsoll.core.demand.forecasting import forecast
from plimsoll.core.demand.service_metrics import ServiceMetrics
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role, Unavailable
from plimsoll.core.workload import Workload

MIN_OBSERVATION_S: Final = (
    10.0  # of arrivals before anything is made of them: the first two of a service may come together
)
ObservedService = NewType("ObservedService", ServiceTick)  # its demand has the sample of this tick


class ServiceDemand(NamedTuple):
    """Forecasts of one service. has_retry_backlog: as `sizing_requests.has_retry_backlog`."""

    tiers: Mapping[str, TierDemand | Unavailable]
    has_retry_backlog: bool


def observe(services: Iterable[IngestedService], now_s: float) -> list[ObservedService]:
    """Update the demand of every tier with its sample."""
    observed = list(services)
    samples = [sample for service in observed for sample in _samples(service)]
    tiers = [tier for tier, _, _ in samples]
    states = observe_all(
        [tier.forecast_state for tier in tiers], now_s, [work for _, work, _ in samples], [rate for *_, rate in samples]
    )
    for tier, state in zip(tiers, states, strict=True):
        tier.forecast_state = state
    return [ObservedService(service) for service in observed]


def _samples(service: IngestedService) -> Iterator[tuple[TierState, float, float]]:
    """Yield tiers with a new sample: work (GPU-seconds per second) and rate (1/s), NaN if unknown."""
    metrics, now_s = service.snapshot.metrics, service.now_s
    if service.spec.slo is None:
        return
    rate = plausible_rate(metrics)
    for tier in service.state.tiers.values():
        capacity = tier.capacity
        if isinstance(capacity, Unavailable):
            continue
        if tier.forecast_state.last_sample_s is None or now_s < tier.first_arrival_s:  # or the clock was set back
            tier.first_arrival_s = now_s
        if isinstance(rate, Unavailable):
            yield tier, math.nan, math.nan
        elif metrics.has_new_rate:
            skipped_per_s, prefill_gpu_s = _skipped_prefill(tier, service.state.workload, metrics)
            yield tier, (rate + skipped_per_s) * capacity.request_gpu_s + prefill_gpu_s, rate + skipped_per_s


def _skipped_prefill(tier: TierState, workload: Workload | Unavailable, metrics: ServiceMetrics) -> tuple[float, float]:
    """Return the requests (1/s) that a decode tier has in addition to the counted ones, and its prefill work for them.

    The work is in GPU-seconds per second. Their prompts are at most as long as a mean one: decode engines that compute
    the prompts of other requests again would make them too long.
    """
    skipped, model = metrics.skipped_prefill, tier.engines.model
    if tier.role is not Role.DECODE or skipped is None or model is None or isinstance(workload, Unavailable):
        return 0.0, 0.0
    prompt_tokens = min(skipped.prompt_tokens, workload.mean(workload.prompt_tokens))
    return skipped.per_s, skipped.per_s * float(model.prefill_work_s(prompt_tokens, 0.0))


def service_demand(service: ObservedService) -> ServiceDemand:
    """Return the forecast of each tier for its start-up time, including the last sample."""
    state, snapshot, spec, now_s = service
    retries_due = has_retry_backlog(state.tiers, snapshot)
    tiers = {
        name: _tier_demand(
            tier, spec.slo, state.workload, state.horizon_s(name, spec), retries_due, state.cache.of(name), now_s
        )
        for name, tier in state.tiers.items()
    }
    return ServiceDemand(tiers, retries_due)


def _tier_demand(
    tier: TierState,
    slo: Slo | None,
    workload: Workload | Unavailable,
    horizon_s: float,
    retries_due: bool,
    cache: CachedTier,
    now_s: float,
) -> TierDemand | Unavailable:
    if slo is None:
        return Unavailable("spec.slo is not set, so nothing is sized")
    if not slo.has_target_for(tier.role):
        return NO_TARGET
    if isinstance(tier.capacity, Unavailable):
        return tier.capacity if not isinstance(workload, Unavailable) else workload
    if now_s - tier.first_arrival_s < MIN_OBSERVATION_S:
        return Unavailable(
            f"arrivals observed for {now_s - tier.first_arrival_s:.0f} s, {MIN_OBSERVATION_S:.0f} s required"
        )
    tier_forecast = forecast(tier.forecast_state, now_s, horizon_s, slo.share, retries_due)
    if isinstance(tier_forecast, Unavailable):
        return tier_forecast
    return TierDemand(tier_forecast, cache.growth_distribution(tier.forecast_state, horizon_s))
