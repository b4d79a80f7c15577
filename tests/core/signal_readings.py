"""Readings of gateways and engines that behave."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from plimsoll.core import histogram
from plimsoll.core.ports import BucketCounts, ServiceReading

NOW_S = 1.8e9
SHARE = 0.95
TTFT_EDGES_S = histogram.LATENCY_EDGES_S


def sample_histogram(edges: tuple[float, ...], value: float, n: float) -> BucketCounts:
    """n values, all the same."""
    return histogram.from_sparse(edges, {histogram.bucket_index(edges, value): n}, value * n)


def gateway(arrived: float, **other: Any) -> ServiceReading:
    """Counts since the start: requests of 250 estimated tokens, all answered after 0.2 s."""
    reading = ServiceReading(
        arrived=arrived,
        arrived_tokens=250.0 * arrived,
        retried=0.0,
        succeeded=arrived,
        failed=0.0,
        cancelled=0.0,
        rejected={},
        ttft_s=sample_histogram(TTFT_EDGES_S, 0.2, arrived),
        e2e_s=sample_histogram(TTFT_EDGES_S, 3.0, arrived),
    )
    return replace(reading, **other)
