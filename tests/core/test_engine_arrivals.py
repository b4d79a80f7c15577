"""Demand from engines' counters: the rate, queues, restarts, and what is missing."""

from __future__ import annotations

import math
from dataclasses import replace

from plimsoll.core.demand.engine_arrivals import EngineArrivals
from plimsoll.core.demand.metrics_aggregator import MetricsAggregator
from plimsoll.core.ports import BucketCounts, EngineReading, ServiceReading
from plimsoll.core.types import Role, Unavailable

NOW_S = 1.8e9


def reading(second: float, first_tokens: float, waiting: float = 0.0, pod: str = "a", run: str = "1") -> EngineReading:
    ttft = BucketCounts((0.5, math.inf), (first_tokens, 0.0), 0.2 * first_tokens)
    return EngineReading(pod, NOW_S + second, run, running=1.0, waiting=waiting, ttft_s=ttft)


def arrived(*readings: EngineReading) -> list[float]:
    arrivals, found = EngineArrivals(), []
    for one in readings:
        made = arrivals.observe(one)
        assert made is not None
        found.append(made.arrived)
    return found


def test_arrivals_are_first_tokens_and_growth_of_the_queue() -> None:
    assert arrived(reading(0, 100), reading(2, 120), reading(4, 130, waiting=30)) == [0.0, 20.0, 60.0]


def test_arrivals_do_not_fall_when_clients_leave_the_queue() -> None:
    counts = arrived(reading(0, 100, waiting=50), reading(2, 110, waiting=0), reading(4, 130))
    assert counts == [0.0, 0.0, 20.0]


def test_arrivals_begin_anew_with_the_process() -> None:
    assert arrived(reading(0, 100), reading(2, 150), reading(4, 7, run="2"), reading(6, 9, run="2"))[2:] == [0.0, 2.0]


def test_engine_without_first_tokens_or_queue_gives_no_demand() -> None:
    for gap in ({"ttft_s": None}, {"waiting": None}, {"running": None}):
        assert EngineArrivals().observe(replace(reading(0, 1), **gap)) is None


def collected(rates: dict[str, float], ready: list[str], seconds: int = 30) -> MetricsAggregator:
    aggregator = MetricsAggregator([Role.SERVE], demand_from_engines=True)
    for second in range(0, seconds, 2):
        for pod, rate in rates.items():
            aggregator.observe_engine(Role.SERVE, reading(second, rate * second, pod=pod))
        aggregator.collect(NOW_S + second, {Role.SERVE: ready}, ("gw-1", "gw-2"), 0.95)
    return aggregator


def test_rate_of_engines_is_the_sum_over_ready_pods() -> None:
    metrics = collected({"a": 3.0, "b": 5.0}, ["a", "b"]).collect(NOW_S + 29, {Role.SERVE: ["a", "b"]}, ("gw-1",), 0.95)
    assert metrics.rate_per_s == 8.0
    assert metrics.coverage == 1.0
    assert metrics.gateway_count == 1
    assert not isinstance(metrics.ttft_s, Unavailable)
    assert metrics.in_flight == 2.0


def test_gateways_have_no_part_in_demand_from_engines() -> None:
    aggregator = collected({"a": 3.0}, ["a"])
    for second in range(20, 30):
        counters = ServiceReading(1000.0 * second, None, 0.0, 0.0, 0.0, 0.0, {}, None)
        aggregator.observe_gateway("gw-1", "1", NOW_S + second, counters)
    assert aggregator.collect(NOW_S + 30, {Role.SERVE: ["a"]}, ("gw-1",), 0.95).rate_per_s == 3.0


def test_no_ready_engine_is_unknown_demand() -> None:
    rate = collected({}, []).collect(NOW_S + 30, {Role.SERVE: []}, ("gw-1",), 0.95).rate_per_s
    assert rate == Unavailable("no engine is ready")


def test_silent_engine_is_an_engine_and_no_gateway() -> None:
    found = collected({"a": 3.0}, ["a", "b"]).collect(NOW_S + 29, {Role.SERVE: ["a", "b"]}, ("gw-1",), 0.95)
    assert (found.silent, found.tiers[Role.SERVE].silent) == ((), ("b",))
