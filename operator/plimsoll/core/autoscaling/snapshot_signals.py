"""What one snapshot of a service shows: arrival rate, idleness, missed SLO, and the share of processes that report."""

from __future__ import annotations

from typing import Final

from plimsoll.core import histogram, units
from plimsoll.core.autoscaling.inputs import ServiceSnapshot, TierSnapshot
from plimsoll.core.autoscaling.observations import LATENCY_WINDOW_S, LaggingSignals, NoDemand
from plimsoll.core.capacity.tier_model import MAX_RATE_PER_S
from plimsoll.core.demand.idle_periods import IdlePeriod
from plimsoll.core.demand.service_metrics import ServiceMetrics, TierMetrics
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role, Unavailable

NO_TIER_METRICS: Final = TierMetrics(LaggingSignals(), 0.0, None, ())


def is_fully_ready(tier_snapshot: TierSnapshot) -> bool:
    """Whether all ordered replicas are ready."""
    return tier_snapshot.ready == tier_snapshot.replicas > 0 and not tier_snapshot.starting


def in_flight(metrics: ServiceMetrics) -> float:
    """Return the number of running requests; 0 if unknown."""
    return 0.0 if isinstance(metrics.in_flight, Unavailable) else metrics.in_flight


def idle_status(snapshot: ServiceSnapshot) -> bool | Unavailable:
    """Whether no request arrives, waits, runs or has a retry reservation.

    One request proves the contrary. That there is none is known only if all gateways and engines report.
    """
    metrics, rate, unavailable = snapshot.metrics, plausible_rate(snapshot.metrics), None
    for amount in (rate if metrics.has_new_rate else 0.0, metrics.queued, metrics.reserved_work_s, metrics.in_flight):
        if isinstance(amount, Unavailable):
            unavailable = amount
        elif amount > 0.0:
            return False
    for name, tier_snapshot in snapshot.tiers.items():
        tier_metrics = metrics.tiers.get(Role(name), NO_TIER_METRICS)
        if not isinstance(tier_metrics.in_flight, Unavailable) and tier_metrics.in_flight > 0.0:
            return False
        if metrics_coverage(metrics, tier_metrics, tier_snapshot.ready) < 1.0:
            unavailable = unavailable or Unavailable(
                f"only {tier_metrics.coverage:.0%} of the {name} engines report metrics"
            )
    if isinstance(rate, Unavailable):
        return rate
    if metrics.coverage < 1.0:
        return Unavailable(f"only {metrics.coverage:.0%} of the gateways report metrics")
    return unavailable or True


def known_no_demand(snapshot: ServiceSnapshot, idle_period: IdlePeriod | Unavailable) -> NoDemand | None:
    """Return the demand of a service that has had no request for LATENCY_WINDOW_S; None if that is not certain.

    All gateways must have reported this over the whole window, and all ready engines must report no request. Engines
    that work without a request at a gateway have traffic that bypasses it.
    """
    if isinstance(idle_period, Unavailable) or idle_period.active:
        return None
    metrics = snapshot.metrics
    if min(idle_period.idle_s, metrics.quiet_s) < LATENCY_WINDOW_S or metrics.arrivals > 0.0:
        return None
    for name, tier_snapshot in snapshot.tiers.items():
        tier_metrics = metrics.tiers.get(Role(name), NO_TIER_METRICS)
        if tier_metrics.completed > 0.0 or (tier_snapshot.ready and tier_metrics.in_flight != 0.0):
            return None
    return NoDemand(idle_period.idle_s)


def plausible_rate(metrics: ServiceMetrics) -> float | Unavailable:
    """Return the arrival rate of first attempts, 1/s; Unavailable if it is implausibly high."""
    rate = metrics.rate_per_s
    if isinstance(rate, Unavailable) or rate <= MAX_RATE_PER_S:
        return rate
    return Unavailable(f"arrival rate {units.format_rate(rate)} is implausible")


def metrics_coverage(metrics: ServiceMetrics, tier_metrics: TierMetrics, ready: int) -> float:
    """Return the share of gateways and engines that report, above 0. Below 1, no tier scales down."""
    engines = tier_metrics.coverage or 0.5 / ready if ready else 1.0
    return min(metrics.coverage or 0.5, engines)


def late_first_tokens(metrics: ServiceMetrics, slo: Slo) -> tuple[float, float] | None:
    """Return how many of the last minute's responses were late with their first token, and their number.

    Gateways count each by its own class and prompt. Without their count, all have the target of a mean prompt. None
    without responses or without a TTFT target.
    """
    if metrics.ttft_histogram is None or slo.ttft_s is None:
        return None
    if metrics.slo_counts is not None and metrics.slo_counts.responses > 0.0:
        return metrics.slo_counts.ttft_missed, metrics.slo_counts.responses
    tokens = 0.0 if isinstance(metrics.mean_prompt_tokens, Unavailable) else metrics.mean_prompt_tokens
    in_time = histogram.share_below(metrics.ttft_histogram, slo.deadlines(tokens).ttft_s)
    responses = histogram.total_count(metrics.ttft_histogram)
    return None if in_time is None or responses <= 0.0 else ((1.0 - in_time) * responses, responses)
