"""The middleware's counters; they show on vLLM's own /metrics because both use the default registry.

All label values are known from the contract and start at zero, so that a dashboard sees them before the first fault.
"""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from launcher.contract import Contract

LEG_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Meters:
    """Counters of one engine."""

    def __init__(self, contract: Contract, registry: CollectorRegistry = REGISTRY) -> None:
        names = contract.metrics
        self._legs = Counter(
            names["legs"], "Requests with a prefill endpoint, by what came of their prefill leg.", ["outcome"],
            registry=registry,
        )  # fmt: skip
        self._leg_seconds = Histogram(
            names["leg_seconds"], "Seconds that a prefill leg took, by outcome.", ["outcome"],
            registry=registry, buckets=LEG_BUCKETS,
        )  # fmt: skip
        self._stream_errors = Counter(
            names["stream_errors"], "Streams and answers that did not end well, by reason.", ["reason"],
            registry=registry,
        )  # fmt: skip
        for outcome in contract.leg_outcomes:
            self._legs.labels(outcome)
        for reason in contract.stream_error_reasons:
            self._stream_errors.labels(reason)

    def leg(self, outcome: str, seconds: float | None = None) -> None:
        """Counts a leg; `seconds` where one was tried."""
        self._legs.labels(outcome).inc()
        if seconds is not None:
            self._leg_seconds.labels(outcome).observe(seconds)

    def stream_error(self, reason: str) -> None:
        """Counts a stream or answer that did not end well."""
        self._stream_errors.labels(reason).inc()
