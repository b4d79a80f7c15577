"""The middleware's counters; they show on vLLM's own /metrics because both use the default registry.

All label values are known from the contract and start at zero, so that a dashboard sees them before the first fault.
"""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from launcher.contract import Contract

REMOTE_PREFILL_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class MiddlewareMetrics:
    """Counters of one engine."""

    def __init__(self, contract: Contract, registry: CollectorRegistry = REGISTRY) -> None:
        names = contract.metrics
        self._remote_prefills = Counter(
            names["remote_prefills"], "Requests with a prefill endpoint, by outcome of the remote prefill.",
            ["outcome"], registry=registry,
        )  # fmt: skip
        self._remote_prefill_seconds = Histogram(
            names["remote_prefill_seconds"], "Seconds that a remote prefill took, by outcome.", ["outcome"],
            registry=registry, buckets=REMOTE_PREFILL_BUCKETS_S,
        )  # fmt: skip
        self._stream_errors = Counter(
            names["stream_errors"], "Streams and answers that did not end well, by reason.", ["reason"],
            registry=registry,
        )  # fmt: skip
        self._salted_requests = Counter(
            names["salted_requests"], "Requests that use the KV blocks of their own tenant only.", registry=registry
        )
        self._prioritized_requests = Counter(
            names["prioritized_requests"], "Requests that the engine schedules by their class.", registry=registry
        )
        for outcome in contract.remote_prefill_outcomes:
            self._remote_prefills.labels(outcome)
        for reason in contract.stream_error_reasons:
            self._stream_errors.labels(reason)

    def count_remote_prefill(self, outcome: str, seconds: float | None = None) -> None:
        """Count a remote prefill; `seconds` if one was tried."""
        self._remote_prefills.labels(outcome).inc()
        if seconds is not None:
            self._remote_prefill_seconds.labels(outcome).observe(seconds)

    def count_stream_error(self, reason: str) -> None:
        """Count a stream or response that failed."""
        self._stream_errors.labels(reason).inc()

    def count_salted_request(self) -> None:
        """Count a request that the engine gets with its tenant's salt."""
        self._salted_requests.inc()

    def count_prioritized_request(self) -> None:
        """Count a request that the engine gets with the priority of its class."""
        self._prioritized_requests.inc()
