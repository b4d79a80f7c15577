"""For how long no request has come, as the aggregator knows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plimsoll.core.demand.metrics_aggregator import MetricsAggregator
from plimsoll.core.ports import ServiceReading
from plimsoll.core.types import Role
from tests.core.signal_readings import NOW_S, SHARE, gateway


def quiet_after(
    readings: list[tuple[float, str, str, ServiceReading]], gateways: tuple[str, ...], now_s: float
) -> float:
    """The metric `quiet_s` after readings of (seconds, gateway, instance, counters)."""
    aggregator = MetricsAggregator([Role.SERVE])
    for at_s, name, instance, reading in readings:
        aggregator.observe_gateway(name, instance, NOW_S + at_s, reading)
    return aggregator.collect(NOW_S + now_s, {}, gateways, SHARE).quiet_s


def each_second(
    seconds: range, name: str = "gw", instance: str = "a", **reading: Any
) -> list[tuple[float, str, str, ServiceReading]]:
    return [(float(second), name, instance, gateway(7.0, **reading)) for second in seconds]


def test_quiet_s_grows_while_nothing_arrives_or_ends() -> None:
    assert quiet_after(each_second(range(91)), ("gw",), 90.0) == 90.0


@pytest.mark.parametrize(
    "change",
    [
        {"arrived": 8.0},
        {"retried": 1.0},
        {"succeeded": 8.0},
        {"failed": 1.0},
        {"cancelled": 1.0},
        {"rejected": {"overloaded": 1.0}},
        {"queued": 1.0},
        {"reserved_work_s": 0.1},
        {"inflight": {"pod": 1}},
    ],
)
def test_quiet_s_restarts_with_any_request(change: dict[str, Any]) -> None:
    readings = each_second(range(80)) + [(float(s), "gw", "a", replace(gateway(7.0), **change)) for s in range(80, 91)]
    is_gauge = next(iter(change)) in ("queued", "reserved_work_s", "inflight")
    assert quiet_after(readings, ("gw",), 90.0) == (0.0 if is_gauge else 10.0)


@pytest.mark.parametrize("reason", ["quota_exceeded", "request_too_large"])
def test_quiet_s_ignores_rejections_no_capacity_cures(reason: str) -> None:
    readings = [(float(s), "gw", "a", gateway(7.0, rejected={reason: float(s)})) for s in range(91)]
    assert quiet_after(readings, ("gw",), 90.0) == 90.0


def test_quiet_s_of_restarted_gateway_starts_again() -> None:
    assert quiet_after(each_second(range(80)) + each_second(range(80, 91), instance="b"), ("gw",), 90.0) == 10.0


def test_quiet_s_starts_again_after_gap_in_readings() -> None:
    assert quiet_after([*each_second(range(40)), *each_second(range(80, 91))], ("gw",), 90.0) == 10.0


def test_quiet_s_is_that_of_youngest_gateway() -> None:
    readings = sorted(each_second(range(91)) + each_second(range(70, 91), name="new"), key=lambda one: one[0])
    assert quiet_after(readings, ("gw", "new"), 90.0) == 20.0


@pytest.mark.parametrize("gateways", [(), ("other",), ("gw", "other")], ids=["none", "unknown", "partial"])
def test_quiet_s_is_zero_unless_all_gateways_report(gateways: tuple[str, ...]) -> None:
    assert quiet_after(each_second(range(91)), gateways, 90.0) == 0.0


def test_quiet_s_is_zero_after_gateways_fall_silent() -> None:
    assert quiet_after(each_second(range(91)), ("gw",), 120.0) == 0.0
