"""A histogram that gets its values later has the samples of one that gets them at once."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

from plimsoll.telemetry.pending_histogram import PendingHistogram

BUCKETS = (0.1, 1.0, 10.0)
VALUES = (0.0, 0.1, 0.5, 1.0, 9.9, 10.0, 11.0)


def samples(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    found = (sample for metric in registry.collect() for sample in metric.samples)
    return {(s.name, s.labels.get("le", "")): s.value for s in found if not s.name.endswith("_created")}


def test_pending_histogram_has_samples_of_direct_one() -> None:
    direct, later = CollectorRegistry(), CollectorRegistry()
    observed = Histogram("t", "t", ("service",), buckets=BUCKETS, registry=direct).labels("a")
    pending = PendingHistogram(Histogram("t", "t", ("service",), buckets=BUCKETS, registry=later).labels("a"))
    for value in VALUES:
        observed.observe(value)
        pending.observe(value)
        if value == 1.0:
            pending.flush()
    assert samples(later) != samples(direct)
    pending.flush()
    pending.flush()
    assert samples(later) == samples(direct)
