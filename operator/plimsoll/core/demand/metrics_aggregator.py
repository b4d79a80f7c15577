"""Aggregation of raw readings of one service into the metrics for a scaling decision. It has no clock of its own.

Problem: readings arrive from many sources at their own times. A decision needs one consistent moment, with missing data
marked as such.

Idea: `observe_gateway` and `observe_engine` take readings in any order of sources. `collect` combines demand, request
lengths and tiers for a decision. All times are seconds since the epoch by one clock. Memory use does not grow with
time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from plimsoll.core.demand.counter_delta import ServiceInterval, is_valid_time, sanitize
from plimsoll.core.demand.engine_aggregator import EngineAggregator
from plimsoll.core.demand.engine_arrivals import EngineArrivals
from plimsoll.core.demand.gateway_aggregator import ArrivalSample, GatewayAggregator
from plimsoll.core.demand.histogram_percentile import percentile
from plimsoll.core.demand.request_lengths import RequestLengthEstimator
from plimsoll.core.demand.service_metrics import ServiceMetrics
from plimsoll.core.demand.skipped_prefill import SkippedPrefillEstimator
from plimsoll.core.engine_model.kv_transfer import TransferMeter, TransferStats
from plimsoll.core.ports import BucketCounts, EngineReading, ServiceReading, SloCounts
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role, Unavailable


class MetricsAggregator:
    """Aggregates one service. roles: its tiers; readings of engines in other roles are ignored.

    demand_from_engines: whether engines report the demand in place of gateways, which then have no part in it. Those
    that a request reaches first report it: prefill engines, where there are any.
    """

    def __init__(self, roles: Iterable[Role], *, demand_from_engines: bool = False) -> None:
        self.demand_from_engines = demand_from_engines
        self._arrivals = EngineArrivals() if demand_from_engines else None
        self._engines = {role: EngineAggregator(role) for role in roles}
        self._prefill_roles = {Role.PREFILL} if Role.PREFILL in self._engines else {Role.SERVE, Role.DECODE}
        self._lengths = RequestLengthEstimator()
        self._gateways = GatewayAggregator(self._lengths.on_arrivals)
        self._transfers = TransferMeter()
        is_pair = demand_from_engines and Role.PREFILL in self._engines
        self._skipped_prefill = SkippedPrefillEstimator() if is_pair else None

    def observe_gateway(self, gateway: str, instance_id: str, at_s: float, reading: ServiceReading) -> None:
        """Add the service's counters at one gateway replica, read at at_s. instance_id identifies its process start."""
        if self._arrivals is None:
            self._gateways.observe(gateway, instance_id, at_s, reading)

    def set_slos(self, slos: tuple[Slo, ...], now_s: float) -> None:
        """Set the SLO of the service and those of its classes."""
        self._gateways.set_slos(slos, now_s)

    def observe_engine(self, role: Role, reading: EngineReading) -> None:
        """Add a reading of one engine of a tier; invalid figures in it count as missing."""
        engines = self._engines.get(role)
        if engines is None or not is_valid_time(reading.at_s):
            return
        reading = sanitize(reading)
        if self._arrivals is not None and role in self._prefill_roles:
            as_gateway = self._arrivals.observe(reading)
            if as_gateway is not None:
                self._gateways.observe(reading.pod, reading.instance_id, reading.at_s, as_gateway)
        transfer_counters = reading.transferred_prompt_tokens, reading.transfer_s, reading.post_s
        if role is Role.DECODE and None not in transfer_counters:
            self._transfers.record(
                reading.pod,
                reading.instance_id,
                reading.at_s,
                TransferStats(*(value or 0.0 for value in transfer_counters)),
            )
        interval = engines.observe(reading)
        if self._skipped_prefill is not None:
            self._skipped_prefill.observe(role, reading, interval)
        if interval is None:
            return
        if role is not Role.PREFILL:
            self._lengths.on_output(reading.at_s, interval, engines.completions(reading.pod))
        if role in self._prefill_roles:
            self._lengths.on_prefill(reading.at_s, interval)

    def collect(
        self, now_s: float, pods: Mapping[Role, Collection[str]], gateways: Collection[str], share: float
    ) -> ServiceMetrics:
        """Return the metrics of the service at now_s.

        pods: the ready pods, by tier. Other pods get no requests, and their silence would look like load. gateways: the
        existing gateways. share: the SLO percentile, 0 to 1.
        """
        gateway_count = max(1, len(gateways))
        if self._arrivals is not None:
            gateways = [pod for role, names in pods.items() if role in self._prefill_roles for pod in names]
            self._arrivals.retain({*gateways})
            gateway_count = 1
        has_new_rate = self._gateways.take_sample(now_s, gateways)
        self._transfers.retain(pods.get(Role.DECODE, ()))
        metrics = self._gateway_metrics(now_s, gateways, share)
        tiers = {
            role: tier.collect(now_s, pods.get(role, ()), share, metrics.ttft_s, metrics.e2e_s)
            for role, tier in self._engines.items()
        }
        skipped_prefill = None
        if self._skipped_prefill is not None:
            ages = [tier.age_s for tier in tiers.values() if tier.coverage == 1.0 and tier.age_s is not None]
            age_s = max(ages) if len(ages) == len(tiers) else None
            skipped_prefill = self._skipped_prefill.collect(now_s, {*pods.get(Role.DECODE, ())}, age_s)
        return replace(
            metrics,
            has_new_rate=has_new_rate,
            transfer_stats=self._transfers.stats,
            gateway_count=gateway_count,
            workload=self._lengths.workload(now_s, metrics.mean_prompt_tokens, metrics.arrivals),
            tiers=tiers,
            skipped_prefill=skipped_prefill,
        )

    def _gateway_metrics(self, now_s: float, gateways: Collection[str], share: float) -> ServiceMetrics:
        """Metrics from the gateways; all `Unavailable` while no gateway reports."""
        coverage = self._gateways.coverage(now_s, gateways)
        if coverage <= 0.0:
            unavailable = Unavailable(self._no_coverage(gateways))
            return ServiceMetrics(
                unavailable,
                succeeded_per_s=unavailable,
                failed_per_s=unavailable,
                mean_prompt_tokens=unavailable,
                ttft_s=unavailable,
                e2e_s=unavailable,
                rejected_share=unavailable,
                queued=unavailable,
                queued_work_s=unavailable,
                reserved_work_s=unavailable,
                in_flight=unavailable,
                is_measured_at_engines=self._arrivals is not None,
            )
        sample, last_minute = self._gateways.latest_sample(now_s), self._gateways.last_minute.total(now_s)
        gauges = self._gateways.gauges(now_s, gateways)
        return ServiceMetrics(
            rate_per_s=sample.rate_per_s if isinstance(sample, ArrivalSample) else sample,
            coverage=coverage,
            silent=() if self._arrivals is not None else self._gateways.silent(now_s, gateways),
            age_s=self._gateways.age_s(now_s, gateways),
            succeeded_per_s=sample.succeeded_per_s if isinstance(sample, ArrivalSample) else sample,
            failed_per_s=sample.failed_per_s if isinstance(sample, ArrivalSample) else sample,
            mean_prompt_tokens=self._lengths.mean_prompt_tokens(last_minute),
            token_ratios=self._lengths.token_ratios(),
            ttft_s=_latency_percentile(last_minute, None if last_minute is None else last_minute.ttft_s, share),
            ttft_histogram=None if last_minute is None else last_minute.ttft_s,
            is_measured_at_engines=self._arrivals is not None,
            e2e_s=_latency_percentile(last_minute, None if last_minute is None else last_minute.e2e_s, share),
            slo_counts=_slo_counts(last_minute),
            by_tpot_target=None if last_minute is None else last_minute.by_tpot_target,
            arrivals=0.0 if last_minute is None else last_minute.arrivals,
            arrivals_by_class=(None if last_minute is None else last_minute.arrivals_by_class) or {},
            rejected_share=_rejected_share(last_minute),
            queued=gauges.queued,
            queued_work_s=gauges.queued_work_s,
            reserved_work_s=gauges.reserved_work_s,
            in_flight=gauges.in_flight,
            quiet_s=self._gateways.quiet_s(now_s, gateways),
        )

    def _no_coverage(self, gateways: Collection[str]) -> str:
        if self._arrivals is not None:
            return "no ready engine reports its requests" if gateways else "no engine is ready"
        if not gateways:
            return "there is no gateway"
        if not self._gateways.knows_any(gateways):
            return "no gateway has reported a request of the service yet"
        return f"none of {len(gateways)} gateways answers"


def _latency_percentile(
    last_minute: ServiceInterval | None, histogram: BucketCounts | None, share: float
) -> float | Unavailable:
    """A percentile of the latencies of the last minute."""
    if last_minute is not None and histogram is None:
        return Unavailable("the gateways do not report it")
    value = None if histogram is None else percentile(histogram, share)
    return Unavailable("no response in the last minute") if value is None else value


def _slo_counts(last_minute: ServiceInterval | None) -> SloCounts | None:
    if last_minute is None or last_minute.assessed is None:
        return None
    missed = (last_minute.missed, last_minute.ttft_missed, last_minute.e2e_missed)
    return SloCounts(last_minute.assessed, *(0.0 if part is None else part for part in missed))


def _rejected_share(last_minute: ServiceInterval | None) -> float | Unavailable:
    """Rejected share of the arrivals, at most 1. A retry can be rejected again, but it arrives only once."""
    if last_minute is None or last_minute.arrivals <= 0.0:
        return Unavailable("nothing arrived in the last minute")
    return min(1.0, last_minute.rejected / last_minute.arrivals)
