"""Demand against all that lies: gateways that restart, fall silent, leave, count what is no count, or refuse."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from plimsoll.core import histogram
from plimsoll.core.demand.metrics_aggregator import MetricsAggregator
from plimsoll.core.ports import BucketCounts, SloCounts
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role, Unavailable
from tests.core.signal_readings import NOW_S, SHARE, TTFT_EDGES_S, gateway, sample_histogram
from tests.core.test_signals import LENGTH_EDGES, engine, require_known
from tests.core.test_signals_adversarial import BAD, Fleet


def test_arrival_rate_first_reading_is_unavailable() -> None:
    listener = MetricsAggregator([Role.SERVE])
    listener.observe_gateway("g", "1", NOW_S, gateway(1e6))
    assert isinstance(listener.collect(NOW_S, {}, ["g"], SHARE).rate_per_s, Unavailable)
    listener.observe_gateway("g", "1", NOW_S + 1, gateway(1e6 + 3))
    assert listener.collect(NOW_S + 1, {}, ["g"], SHARE).rate_per_s == 3.0


def test_arrival_rate_gateway_restart_keeps_its_share() -> None:
    fleet = Fleet("g", "h")
    for t in range(60):
        if t == 30:
            fleet.restart("h")
        fleet.second({"g": 5.0, "h": 5.0})
    assert fleet.rates == pytest.approx([10.0] * len(fleet.rates))


@pytest.mark.parametrize("first", ["owner", "other"])
@pytest.mark.parametrize("gap", [0, 1, 4])
def test_arrival_rate_both_gateways_restart_is_kept(first: str, gap: int) -> None:
    """All requests count at their owner. After a restart Envoy asks the picker again, a part of them at first."""
    fleet, second = Fleet("owner", "other"), {"owner": "other", "other": "owner"}[first]
    for _ in range(30):
        fleet.second({"owner": 11.0})
    for _ in range(8):
        fleet.second({}, silent=("owner", "other"))
    fleet.restart("owner")
    fleet.restart("other")
    for t in range(gap):  # the first one decides alone about a part of its clients' requests
        fleet.second({first: 3.0 if t else 0.0}, silent=(second,))
    for t in range(4):
        fleet.second({"owner": 2.0 * t})
    for _ in range(20):
        fleet.second({"owner": 11.0})
    assert fleet.rates == pytest.approx([11.0] * len(fleet.rates))


def test_arrival_rate_silent_owner_is_assumed_to_go_on() -> None:
    """Its clients and peers still reach it, so that the other gateway decides about nothing."""
    fleet = Fleet("owner", "other")
    for _ in range(30):
        fleet.second({"owner": 11.0})
    for _ in range(30):
        fleet.second({"owner": 11.0}, silent=("owner",))
    assert fleet.rates == pytest.approx([11.0] * len(fleet.rates))


def test_arrival_rate_after_restart_follows_a_lower_load() -> None:
    fleet = Fleet("g")
    for _ in range(30):
        fleet.second({"g": 10.0})
    fleet.restart("g")
    rates = [fleet.second({"g": 4.0}).rate_per_s for _ in range(14)]
    assert rates[5] == pytest.approx(10.0), "Envoy may not ask it about all requests yet"
    assert rates[-1] == 4.0


def test_arrival_rate_after_restart_follows_higher_load_at_once() -> None:
    fleet = Fleet("g", "h")
    for _ in range(30):
        fleet.second({"g": 5.0, "h": 5.0})
    fleet.restart("h")
    fleet.second({"g": 5.0, "h": 5.0})
    assert fleet.second({"g": 12.0, "h": 9.0}).rate_per_s == 21.0


def test_arrival_rate_counter_decrease_is_a_reset() -> None:
    fleet = Fleet("g")
    for t in range(10):
        if t == 5:
            fleet.counts["g"] = 1.0
        fleet.second({"g": 4.0})
    assert fleet.rates == [4.0] * 8


def test_arrival_rate_alternating_workers_is_unavailable() -> None:
    listener, rates = MetricsAggregator([Role.SERVE]), []
    for t in range(20):
        listener.observe_gateway("g", str(t % 2), NOW_S + t, gateway(1000.0 * (t % 2) + t))
        metrics = listener.collect(NOW_S + t, {}, ["g"], SHARE)
        rates.append(metrics.rate_per_s)
    assert all(isinstance(rate, Unavailable) for rate in rates)


def test_arrival_rate_scale_down_keeps_past_counts() -> None:
    fleet = Fleet("g", "h")
    for _ in range(10):
        fleet.second({"g": 5.0, "h": 5.0})
    del fleet.counts["h"]
    for _ in range(10):
        fleet.second({"g": 10.0})
    assert fleet.rates == pytest.approx([10.0] * len(fleet.rates))
    assert fleet.received.coverage == 1.0
    assert fleet.received.ttft_histogram is not None
    assert (
        histogram.total_count(fleet.received.ttft_histogram) == 9 * 10.0 + 10 * 10.0
    )  # what it answered is still in the minute


def test_arrival_rate_includes_last_reading_of_left_gateway() -> None:
    fleet = Fleet("g", "h")
    for _ in range(5):
        fleet.second({"g": 5.0, "h": 5.0})
    metrics = fleet.second({"g": 5.0, "h": 5.0}, listed=("g",))
    assert metrics.rate_per_s == 10.0


def test_arrival_rate_half_coverage_is_scaled_up() -> None:
    fleet = Fleet("g", "h")
    for _ in range(10):
        fleet.second({"g": 5.0, "h": 5.0})
    for _ in range(20):
        fleet.second({"g": 5.0, "h": 5.0}, silent=("h",))
    assert fleet.received.coverage == 0.5
    assert fleet.received.rate_per_s == 10.0
    assert fleet.rates == pytest.approx([10.0] * len(fleet.rates))


def test_arrival_rate_crashed_gateway_does_not_double() -> None:
    fleet = Fleet("g", "h")
    for _ in range(10):
        fleet.second({"g": 5.0, "h": 5.0})
    for _ in range(60):  # still listed, as after a crash, and its clients are at the other
        fleet.second({"g": 10.0}, silent=("h",))
    assert fleet.received.coverage == 0.5
    assert max(fleet.rates) == 10.0
    fleet.second({"g": 25.0}, silent=("h",))
    assert fleet.received.rate_per_s == 25.0  # what is known for sure is never cut


def test_arrival_rate_silent_gateway_does_not_hide_decrease() -> None:
    """What the silent one carried is all that is assumed."""
    fleet = Fleet("g", "h")
    for _ in range(10):
        fleet.second({"g": 5.0, "h": 1.0})
    for _ in range(10):
        fleet.second({"g": 1.0}, silent=("h",))
    assert fleet.received.rate_per_s == pytest.approx(2.0)


def test_arrival_rate_starting_gateway_counts_as_zero() -> None:
    fleet = Fleet("g")
    for _ in range(30):  # the second one is listed as soon as it has an address, long before it answers
        fleet.second({"g": 5.0}, listed=("g", "h"))
    assert fleet.rates == [5.0] * len(fleet.rates)
    assert len(fleet.rates) == 29
    assert fleet.received.coverage == 0.5


def test_arrival_rate_short_silence_only_delays_sample() -> None:
    fleet = Fleet("g", "h")
    for t in range(30):
        fleet.second({"g": 5.0, "h": 3.0}, silent=("h",) if t % 10 in (4, 5, 6) else ())
    assert fleet.rates == pytest.approx([8.0] * len(fleet.rates))


def test_arrival_rate_all_gateways_silent_is_unavailable() -> None:
    fleet = Fleet("g")
    for t in range(20):
        fleet.second({"g": 5.0 * t})
    for _ in range(10):
        metrics = fleet.second({"g": 500.0}, silent=("g",))
    assert isinstance(metrics.rate_per_s, Unavailable)
    assert isinstance(metrics.ttft_s, Unavailable)
    assert metrics.coverage == 0.0
    assert not metrics.has_new_rate


def test_arrival_rate_after_15_s_gap_starts_over() -> None:
    fleet = Fleet("g")
    fleet.second({"g": 5.0})
    fleet.second({"g": 5.0})
    for _ in range(16):
        fleet.second({"g": 5.0}, silent=("g",))
    assert not fleet.second({"g": 5.0}).has_new_rate
    assert isinstance(fleet.received.rate_per_s, Unavailable)
    assert fleet.second({"g": 7.0}).rate_per_s == 7.0


def test_aggregator_late_and_repeated_readings_are_ignored() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in (0.0, 1.0, 1.0, 0.5, -30.0):
        listener.observe_gateway("g", "1", NOW_S + t, gateway(10.0 + 5.0 * t if t >= 0 else 0.0))
        listener.observe_engine(Role.SERVE, engine(max(t, 0.0), at_s=NOW_S + t))
    metrics = listener.collect(NOW_S + 1, {Role.SERVE: ["a"]}, ["g"], SHARE)
    assert metrics.rate_per_s == 5.0
    assert not listener.collect(NOW_S + 1, {Role.SERVE: ["a"]}, ["g"], SHARE).has_new_rate


def test_aggregator_clock_set_back_over_a_minute_is_accepted() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for base_s in (NOW_S, NOW_S - 3600.0):
        for t in range(12):
            listener.observe_gateway("g", "1", base_s + t, gateway(5.0 * t))
            if t % 5 == 0:
                listener.observe_engine(Role.SERVE, engine(t + 0.1, at_s=base_s + t))
            metrics = listener.collect(base_s + t, {Role.SERVE: ["a"]}, ["g"], SHARE)
        assert metrics.rate_per_s == 5.0
        assert metrics.coverage == metrics.tiers[Role.SERVE].coverage == 1.0
        assert metrics.ttft_histogram is not None
        assert histogram.total_count(metrics.ttft_histogram) == 55.0  # nothing of the other hour


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    "name",
    [
        *("arrived", "arrived_tokens", "succeeded", "failed", "rejected", "ttft_s"),
        *("queued", "queued_work_s", "reserved_work_s", "inflight"),
    ],
)
def test_aggregator_invalid_gateway_counter_is_ignored(name: str, bad: float) -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in (0, 1):
        listener.observe_gateway("g", "1", NOW_S + t, gateway(5.0 * t))
    value: object = bad
    if name in ("rejected", "inflight"):
        value = {"busy": bad}
    elif name == "ttft_s":
        value = BucketCounts(TTFT_EDGES_S, (bad,) * len(TTFT_EDGES_S), 1.0)
    listener.observe_gateway("g", "1", NOW_S + 2, replace(gateway(10.0), **{name: value}))  # type: ignore[arg-type]
    metrics = listener.collect(NOW_S + 2, {}, ["g"], SHARE)
    assert metrics.rate_per_s == 5.0
    listener.observe_gateway("g", "1", NOW_S + 3, gateway(15.0))
    assert listener.collect(NOW_S + 3, {}, ["g"], SHARE).rate_per_s == 5.0  # the mean over both seconds


@pytest.mark.parametrize("at_s", [math.nan, math.inf, -math.inf])
def test_aggregator_reading_with_invalid_time_is_ignored(at_s: float) -> None:
    listener = MetricsAggregator([Role.SERVE])
    listener.observe_gateway("g", "1", at_s, gateway(5.0))
    listener.observe_engine(Role.SERVE, engine(0.0, at_s=at_s))
    assert listener.collect(NOW_S, {Role.SERVE: ["a"]}, ["g"], SHARE).tiers[Role.SERVE].coverage == 0.0


def test_arrival_rate_includes_rejected_requests() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in range(3):
        refused = {"busy": 6.0 * t, "starting": 1.0 * t}
        listener.observe_gateway("g", "1", NOW_S + t, gateway(10.0 * t, rejected=refused, succeeded=3.0 * t))
    metrics = listener.collect(NOW_S + 2, {}, ["g"], SHARE)
    assert metrics.rate_per_s == 10.0
    assert metrics.succeeded_per_s == 3.0
    assert metrics.rejected_share == 0.7


def test_gateway_gauges_are_summed_and_scaled_to_coverage() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for name, held in (("a", 1.0), ("b", 3.0)):
        reading = gateway(0.0, queued=held, queued_work_s=0.5 * held, reserved_work_s=0.1, inflight={"x": 2, "y": 1})
        listener.observe_gateway(name, "1", NOW_S, reading)
    both = listener.collect(NOW_S, {}, ["a", "b"], SHARE)
    assert (both.queued, both.queued_work_s, both.reserved_work_s, both.in_flight) == (4.0, 2.0, 0.2, 6.0)
    more = listener.collect(NOW_S, {}, ["a", "b", "silent", "too"], SHARE)
    assert (more.queued, more.queued_work_s, more.reserved_work_s, more.in_flight) == (8.0, 4.0, 0.4, 12.0)
    gone = listener.collect(NOW_S + 60.0, {}, ["a", "b"], SHARE)
    for amount in (gone.queued, gone.queued_work_s, gone.reserved_work_s, gone.in_flight):
        assert isinstance(amount, Unavailable)


def test_arrival_rate_excludes_retries() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in range(10):
        reading = gateway(5.0 * t, retried=50.0 * t, reserved_work_s=2.0)
        listener.observe_gateway("g", "1", NOW_S + t, reading)
        metrics = listener.collect(NOW_S + t, {}, ["g"], SHARE)
    assert (metrics.rate_per_s, metrics.reserved_work_s) == (5.0, 2.0)


def test_rejected_share_excludes_client_errors() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in range(60):
        refused = {"quota_exceeded": 5.0 * t, "request_too_large": 1.0 * t, "overloaded": 1.0 * t}
        listener.observe_gateway("g", "1", NOW_S + t, gateway(10.0 * t, rejected=refused, succeeded=3.0 * t))
    assert listener.collect(NOW_S + 60, {}, ["g"], 0.95).rejected_share == pytest.approx(0.1)


def test_rejected_share_of_retries_is_at_most_one() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in range(3):
        listener.observe_gateway("g", "1", NOW_S + t, gateway(2.0 * t, retried=30.0 * t, rejected={"busy": 32.0 * t}))
    metrics = listener.collect(NOW_S + 2, {}, ["g"], SHARE)
    assert metrics.rejected_share == 1.0
    assert metrics.rate_per_s == 2.0


def test_mean_prompt_tokens_is_unbiased_by_rejections() -> None:
    """Nine of ten are refused: engines count a tenth of the tokens that gateways estimate."""
    listener = MetricsAggregator([Role.SERVE])
    for t in range(0, 61, 5):
        listener.observe_gateway("g", "1", NOW_S + t, gateway(50.0 * t, rejected={"busy": 45.0 * t}))
        listener.observe_engine(Role.SERVE, engine(float(t)))
    metrics = listener.collect(NOW_S + 60, {Role.SERVE: ["a"]}, ["g"], SHARE)
    assert require_known(metrics.mean_prompt_tokens) == pytest.approx(300.0, rel=0.03)


def test_mean_prompt_tokens_without_estimates_does_not_fail() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t, (arrived, tokens) in enumerate([(0.0, 0.0), (1.0, 0.0), (2.0, 0.0), (2.0, 5.0)]):
        listener.observe_gateway("g", "1", NOW_S + t, gateway(arrived, arrived_tokens=tokens))
        listener.observe_engine(Role.SERVE, engine(float(t)))
        assert isinstance(
            listener.collect(NOW_S + t, {Role.SERVE: ["a"]}, ["g"], SHARE).mean_prompt_tokens, float | Unavailable
        )


def test_mean_prompt_tokens_is_unbiased_by_silent_pods() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in range(0, 61, 5):
        listener.observe_gateway("g", "1", NOW_S + t, gateway(20.0 * t))
        listener.observe_engine(Role.SERVE, engine(float(t)))  # one of four
    metrics = listener.collect(NOW_S + 60, {Role.SERVE: ["a", "b", "c", "d"]}, ["g"], SHARE)
    assert require_known(metrics.mean_prompt_tokens) == pytest.approx(300.0, rel=0.03)


def test_mean_prompt_tokens_includes_disconnected_clients() -> None:
    """Only short requests end; the histogram over ended requests alone would say 100 tokens."""
    listener = MetricsAggregator([Role.SERVE])
    for t in range(0, 61, 5):
        listener.observe_gateway("g", "1", NOW_S + t, gateway(5.0 * t))
        listener.observe_engine(
            Role.SERVE, engine(float(t), prompt_tokens=sample_histogram(LENGTH_EDGES, 100.0, 2.0 * t))
        )
    metrics = listener.collect(NOW_S + 60, {Role.SERVE: ["a"]}, ["g"], SHARE)
    assert require_known(metrics.mean_prompt_tokens) == pytest.approx(300.0, rel=0.03)
    assert not isinstance(metrics.workload, Unavailable)
    assert metrics.workload.mean(metrics.workload.prompt_tokens) == pytest.approx(300.0, rel=0.03)


def test_slo_counts_of_other_targets_are_dropped() -> None:
    """All were late by the old target. Gateways count against the new one a moment after it is set."""
    tight, relaxed = (Slo(ttft_s=ttft_s, tpot_s=0.05, share=SHARE) for ttft_s in (0.001, 0.5))
    listener, responses, missed, shares = MetricsAggregator([Role.SERVE]), 0.0, 0.0, []
    for second in range(40):
        listener.set_slos((tight if second < 20 else relaxed,), NOW_S + second)
        responses += 10.0
        missed += 10.0 if second <= 21 else 0.0
        counted = replace(gateway(responses), slo_counts=SloCounts(responses, missed, missed, 0.0))
        listener.observe_gateway("g", "1", NOW_S + second, counted)
        counts = listener.collect(NOW_S + second, {}, ["g"], SHARE).slo_counts
        shares.append(counts.ttft_missed / counts.responses if counts and counts.responses else None)
    assert shares[1:20] == [1.0] * 19
    assert shares[20:23] == [None] * 3
    assert set(shares[23:]) == {0.0}
