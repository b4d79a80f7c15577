"""Request counters of one service since this picker started, for `/signals` and `/metrics`.

A Prometheus counter costs more than the event that it counts, so `/metrics` is updated only when it is read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import prometheus_client

from plimsoll.core import histogram
from plimsoll.core.admission.request import AdmissionOutcome
from plimsoll.core.slo import Deadlines
from plimsoll.gateway.demand_counter import DemandCounter, DemandTokens
from plimsoll.gateway.envoy.access_log import AccessRecord, RequestOutcome
from plimsoll.gateway.errors import Rejection, RejectionReason
from plimsoll.gateway.recent_counter import RecentCounter
from plimsoll.gateway.served_stats import ServedStats
from plimsoll.gateway.tenant_labels import TenantLabels
from plimsoll.telemetry import gateway_metrics
from plimsoll.telemetry.pending_histogram import PendingHistogram

SENT: Final = "sent"  # the decision about a request that is not rejected


class RequestStats:
    """Counters of one service. Service "" counts rejections of requests that name no known service."""

    def __init__(self, service: str) -> None:
        self._service = service
        self.arrivals = 0  # first attempts
        self.retries = 0
        self.demand = DemandCounter()
        self.demand_retries = 0
        self.completed: Counter[RequestOutcome] = Counter()
        self.rejections: Counter[RejectionReason] = Counter()
        self.admission_outcomes: Counter[AdmissionOutcome] = Counter()
        self.ttft: Counter[int] = Counter()  # by bucket index of LATENCY_EDGES_S
        self.ttft_sum_s = 0.0
        self.e2e: Counter[int] = Counter()
        self.e2e_sum_s = 0.0
        self.assessed = self.missed = self.missed_ttft = self.missed_e2e = 0  # responses with an SLO
        self.by_tpot_target: RecentCounter[float] = (
            RecentCounter()
        )  # responses with a TPOT target, by target in seconds
        self.early_first_tokens = 0  # known while their responses ran
        self.served = ServedStats(service)
        self._tenants = TenantLabels()
        self._tenant_decisions: Counter[tuple[str, str]] = Counter()  # by label and decision
        self.remote_prefills = 0
        self.local_prefills = 0
        self._first_counter = gateway_metrics.GATEWAY_ARRIVED.labels(service, "first")
        self._retry_counter = gateway_metrics.GATEWAY_ARRIVED.labels(service, "retry")
        self._demand_counter = gateway_metrics.GATEWAY_DEMAND.labels(service)
        self._remote_counter = gateway_metrics.GATEWAY_PREFILLS.labels(service, "remote")
        self._local_counter = gateway_metrics.GATEWAY_PREFILLS.labels(service, "local")
        self._early_counter = gateway_metrics.GATEWAY_EARLY_FIRST_TOKENS.labels(service)
        self._exported: dict[prometheus_client.Counter, int] = {}
        self._completed_counters = {
            outcome: gateway_metrics.GATEWAY_COMPLETED.labels(service, outcome.value) for outcome in RequestOutcome
        }
        self._ttft_histogram = PendingHistogram(gateway_metrics.GATEWAY_TTFT.labels(service))
        self._duration_histogram = PendingHistogram(gateway_metrics.GATEWAY_DURATION.labels(service))

    def record_arrival(self, tokens: DemandTokens, *, retry: bool, demand: bool) -> None:
        """Count a request for this service, whatever its outcome.

        `tokens` are its prompt tokens. `demand` says whether capacity serves it or would serve it. A retry is no new
        demand.
        """
        if retry:
            self.retries += 1
            self.demand_retries += demand
        else:
            self.arrivals += 1
            if demand:
                self.demand.add(tokens)

    def record_prefill(self, *, remote: bool) -> None:
        if remote:
            self.remote_prefills += 1
        else:
            self.local_prefills += 1

    def record_sent(self, tenant: str) -> None:
        """Count a request of a tenant that is sent to an engine."""
        self._tenant_decisions[self._tenants.of(tenant), SENT] += 1

    def record_rejection(self, rejection: Rejection, tenant: str | None = None) -> None:
        """Count a rejection. `tenant` is None if the request has no identity, or takes no capacity."""
        self.rejections[rejection.reason] += 1
        if tenant is not None:
            self._tenant_decisions[self._tenants.of(tenant), rejection.reason.value] += 1
        if rejection.limit is not None:
            rejection.limit.count_reached()

    def record_outcome(self, outcome: AdmissionOutcome) -> None:
        """Count an admission outcome. A queued request has another outcome later."""
        self.admission_outcomes[outcome] += 1

    def record_completion(self, record: AccessRecord, deadlines: Deadlines | None = None) -> None:
        """Count the end of a forwarded request. `deadlines` are those of its SLO, None without one."""
        outcome = record.outcome
        self.completed[outcome] += 1
        ttft_s = record.ttft_s
        if ttft_s is not None:
            self._record_ttft(ttft_s)
        e2e_s = record.e2e_s
        if e2e_s is not None:
            self.e2e[histogram.bucket_index(histogram.LATENCY_EDGES_S, e2e_s)] += 1
            self.e2e_sum_s += e2e_s
        if deadlines is not None and ttft_s is not None and e2e_s is not None:
            self._record_slo(ttft_s > deadlines.ttft_s, e2e_s > deadlines.e2e_s)
            if deadlines.tpot_s < math.inf:
                self.by_tpot_target.add(deadlines.tpot_s)
        if record.duration_us is not None:
            self._duration_histogram.observe(record.duration_us / 1e6)

    def _record_slo(self, missed_ttft: bool, missed_e2e: bool) -> None:
        self.assessed += 1
        self.missed += missed_ttft or missed_e2e
        self.missed_ttft += missed_ttft
        self.missed_e2e += missed_e2e

    def _record_ttft(self, ttft_s: float) -> None:
        self._ttft_histogram.observe(ttft_s)
        self.ttft[histogram.bucket_index(histogram.LATENCY_EDGES_S, ttft_s)] += 1
        self.ttft_sum_s += ttft_s

    def update_metrics(self) -> None:
        """Update the counters of `/metrics` just before they are read."""
        self.served.update_metrics()
        self._ttft_histogram.flush()
        self._duration_histogram.flush()
        for counter, count in self._counts():
            counter.inc(count - self._exported.get(counter, 0))
            self._exported[counter] = count

    def _counts(self) -> Iterator[tuple[prometheus_client.Counter, int]]:
        yield self._first_counter, self.arrivals
        yield self._retry_counter, self.retries
        yield self._demand_counter, self.demand.report().requests
        yield self._remote_counter, self.remote_prefills
        yield self._local_counter, self.local_prefills
        yield self._early_counter, self.early_first_tokens
        for outcome, counter in self._completed_counters.items():
            yield counter, self.completed[outcome]
        for admission_outcome, count in self.admission_outcomes.items():
            yield gateway_metrics.GATEWAY_ADMISSION_DECISIONS.labels(self._service, admission_outcome.value), count
        for (tenant, decision), count in self._tenant_decisions.items():
            yield gateway_metrics.GATEWAY_TENANT_DECISIONS.labels(self._service, tenant, decision), count
        for reason, count in self.rejections.items():
            yield gateway_metrics.GATEWAY_REJECTED.labels(self._service, reason.value), count

    def signals(self) -> dict[str, Any]:
        """Returns the `requests`, `ttft`, `e2e`, `slo` and `prefill` parts of this service in `/signals`."""
        demand = self.demand.report()
        return {
            "requests": {
                "arrived": demand.requests,
                "arrived_tokens": demand.tokens,
                "arrived_media_tokens": {kind.value: count for kind, count in demand.media_tokens.items()},
                "arrived_by_class": dict(demand.by_class),
                "retried": self.demand_retries,
                "succeeded": self.completed[RequestOutcome.SUCCEEDED],
                "rejected_by_engine": self.completed[RequestOutcome.REJECTED],
                "failed": self.completed[RequestOutcome.FAILED] + self.completed[RequestOutcome.IDLE_TIMEOUT],
                "cancelled": self.completed[RequestOutcome.CANCELLED]
                + self.completed[RequestOutcome.DEADLINE_EXCEEDED],
                "rejected": {reason.value: count for reason, count in self.rejections.items()},
            },
            "ttft": {
                "sum_s": round(self.ttft_sum_s, 6),
                "buckets": list(self.ttft),
                "counts": list(self.ttft.values()),
            },
            "e2e": {"sum_s": round(self.e2e_sum_s, 6), "buckets": list(self.e2e), "counts": list(self.e2e.values())},
            "slo": {
                "assessed": self.assessed,
                "missed": self.missed,
                "missed_ttft": self.missed_ttft,
                "missed_e2e": self.missed_e2e,
                "tpot": {"targets_s": list(self.by_tpot_target), "counts": list(self.by_tpot_target.values())},
            },
            "prefill": {"remote": self.remote_prefills, "local": self.local_prefills},
        }
