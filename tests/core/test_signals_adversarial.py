"""Signals against all that lies: one test for each trap. What is not known must say so, and never pass for a number."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plimsoll.core.demand.gateway_aggregator import GatewayAggregator
from plimsoll.core.demand.metrics_aggregator import MetricsAggregator
from plimsoll.core.demand.service_metrics import ServiceMetrics, TierMetrics
from plimsoll.core.ports import BucketCounts, ServiceReading
from plimsoll.core.types import Role, Unavailable
from tests.core.signal_readings import NOW_S, SHARE, gateway, sample_histogram
from tests.core.test_signals import LENGTH_EDGES, TPOT_EDGES_S, engine, require_known, serving

BAD = (math.nan, math.inf, -math.inf, -1.0, 1e300)


class Fleet:
    """Gateways that count truly, and a listener that hears of them what the test lets through."""

    def __init__(self, *names: str) -> None:
        self.listener = MetricsAggregator([Role.SERVE])
        self.counts = dict.fromkeys(names, 0.0)
        self.instance_id = dict.fromkeys(names, 1)
        self.now_s = NOW_S
        self.rates: list[float] = []  # of every sample
        self.received = ServiceMetrics()

    def second(
        self, arrivals: dict[str, float], silent: tuple[str, ...] = (), listed: tuple[str, ...] = ()
    ) -> ServiceMetrics:
        """One second in which requests arrive at gateways, then one answer of each that is not silent."""
        self.now_s += 1.0
        for name, n in arrivals.items():
            self.counts[name] += n
        for name in self.counts:
            if name not in silent:
                reading = gateway(self.counts[name])
                self.listener.observe_gateway(name, str(self.instance_id[name]), self.now_s, reading)
        self.received = self.listener.collect(self.now_s, {}, listed or tuple(self.counts), SHARE)
        if self.received.has_new_rate:
            self.rates.append(require_known(self.received.rate_per_s))
        return self.received

    def restart(self, name: str) -> None:
        self.instance_id[name] += 1
        self.counts[name] = 0.0


def tier(listener: MetricsAggregator, now_s: float, *pods: str) -> TierMetrics:
    return listener.collect(now_s, {Role.SERVE: pods}, [], SHARE).tiers[Role.SERVE]


def test_metrics_without_readings_are_unavailable() -> None:
    metrics = MetricsAggregator([Role.PREFILL, Role.DECODE]).collect(NOW_S, {Role.DECODE: ["a"]}, ["g"], SHARE)
    for name in (
        "rate_per_s",
        "mean_prompt_tokens",
        "workload",
        "ttft_s",
        "rejected_share",
        "queued",
        "succeeded_per_s",
    ):
        assert isinstance(getattr(metrics, name), Unavailable), name
    assert not metrics.has_new_rate
    assert metrics.coverage == 0.0
    assert metrics.tiers[Role.DECODE].coverage == 0.0
    assert isinstance(metrics.tiers[Role.DECODE].lagging.waiting, Unavailable)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", ["running", "waiting", "kv_used", "steps", "preemptions", "post_s", "tpot_s"])
def test_invalid_engine_value_is_dropped_alone(name: str, bad: float) -> None:
    listener = MetricsAggregator([Role.SERVE])
    value: Any = BucketCounts(TPOT_EDGES_S, (bad,) * len(TPOT_EDGES_S), 1.0) if name == "tpot_s" else bad
    for t in (0.0, 5.0, 10.0):
        listener.observe_engine(Role.SERVE, engine(t, **{name: value}))
    found = tier(listener, NOW_S + 10, "a")
    assert found.coverage == 1.0
    reported = {
        "waiting": found.lagging.waiting,
        "kv_used": found.lagging.kv_used,
        "preemptions": found.lagging.preemptions_per_s,
        "post_s": found.kv_post_share,
        "tpot_s": found.lagging.tpot_s,
    }
    for other, figure in reported.items():
        assert isinstance(figure, Unavailable) == (other == name), other
    assert bool(found.windows) == (name != "running")  # without steps they follow from latencies


def test_share_above_one_is_unavailable() -> None:
    listener = MetricsAggregator([Role.SERVE])
    listener.observe_engine(Role.SERVE, engine(0.0, kv_used=37.0))
    assert isinstance(tier(listener, NOW_S, "a").lagging.kv_used, Unavailable)


def test_missing_metric_becomes_unavailable() -> None:
    listener, _ = serving()
    for t in range(65, 140, 5):
        listener.observe_engine(Role.SERVE, engine(float(t), waiting=None, tpot_s=None, preemptions=None))
    found = tier(listener, NOW_S + 135, "a")
    assert isinstance(found.lagging.waiting, Unavailable)
    assert isinstance(found.lagging.tpot_s, Unavailable)
    assert isinstance(found.lagging.preemptions_per_s, Unavailable)
    assert found.lagging.kv_used == 0.3


def test_reappearing_metric_counts_from_its_return() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t, preemptions in ((0.0, 0.0), (5.0, None), (10.0, 1000.0), (15.0, 1001.0)):
        listener.observe_engine(Role.SERVE, engine(t, preemptions=preemptions))
    assert tier(listener, NOW_S + 15, "a").lagging.preemptions_per_s == pytest.approx(0.2)


def test_engine_restart_adds_no_negative_or_full_count() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in (0.0, 5.0, 10.0):
        listener.observe_engine(Role.SERVE, engine(1000.0 + t, at_s=NOW_S + t))
    for t in (15.0, 20.0, 25.0):
        listener.observe_engine(Role.SERVE, engine(t - 14.0, at_s=NOW_S + t, instance_id="2"))
    found = tier(listener, NOW_S + 25, "a")
    assert found.lagging.preemptions_per_s == pytest.approx(0.2)
    assert [window.busy_s for window in found.windows] == [5.0] * 4
    assert all(window.steps == 500.0 for window in found.windows)


def test_single_counter_decrease_resets_all_counters() -> None:
    listener = MetricsAggregator([Role.SERVE])
    listener.observe_engine(Role.SERVE, engine(100.0, at_s=NOW_S))
    listener.observe_engine(Role.SERVE, engine(105.0, at_s=NOW_S + 5, generated_tokens=3.0))
    found = tier(listener, NOW_S + 5, "a")
    assert found.windows == ()
    assert isinstance(found.lagging.preemptions_per_s, Unavailable)


def test_changed_histogram_edges_reset_counters() -> None:
    listener = MetricsAggregator([Role.SERVE])
    listener.observe_engine(Role.SERVE, engine(100.0, at_s=NOW_S))
    other = sample_histogram((0.005, 0.5, math.inf), 0.2, 1000.0)
    listener.observe_engine(Role.SERVE, engine(105.0, at_s=NOW_S + 5, tpot_s=other))
    assert tier(listener, NOW_S + 5, "a").windows == ()


def test_histograms_of_mixed_releases_are_merged() -> None:
    listener = MetricsAggregator([Role.SERVE])
    fine = (0.005, 0.01, 0.015, 0.02, 0.025, math.inf)
    for t in (0.0, 5.0, 10.0):
        listener.observe_engine(Role.SERVE, engine(t, "a"))
        listener.observe_engine(Role.SERVE, engine(t, "b", tpot_s=sample_histogram(fine, 0.012, 5.0 * t)))
    assert 0.01 <= require_known(tier(listener, NOW_S + 10, "a", "b").lagging.tpot_s) <= 0.025


def test_partial_pod_coverage_is_scaled_up() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in (0.0, 5.0):
        listener.observe_engine(Role.SERVE, engine(t, "a", waiting=3.0))
    found = tier(listener, NOW_S + 5, "a", "b", "c", "d")
    assert found.coverage == 0.25
    assert found.lagging.waiting == 12.0
    assert found.lagging.preemptions_per_s == pytest.approx(0.8)
    assert found.lagging.kv_used == 0.3


def test_silent_pods_are_unavailable_after_15_s() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in (0.0, 5.0):
        listener.observe_engine(Role.SERVE, engine(t))
    assert tier(listener, NOW_S + 19, "a").coverage == 1.0
    found = tier(listener, NOW_S + 21, "a")
    assert found.coverage == 0.0
    assert found.age_s is None
    measured = found.lagging
    for figure in (measured.tpot_s, measured.waiting, measured.kv_used, measured.preemptions_per_s):
        assert isinstance(figure, Unavailable)


def test_deleted_pods_are_not_counted() -> None:
    listener = MetricsAggregator([Role.SERVE])
    listener.observe_engine(Role.SERVE, engine(0.0, "a", waiting=3.0))
    listener.observe_engine(Role.SERVE, engine(0.0, "b", waiting=100.0))
    found = tier(listener, NOW_S + 1, "a")
    assert found.coverage == 1.0
    assert found.lagging.waiting == 3.0


def test_percentile_of_idle_minute_is_unavailable() -> None:
    listener, _ = serving()
    for t in range(61, 140):
        listener.observe_gateway("g", "1", NOW_S + t, gateway(240.0))
        if t % 5 == 0:
            idle = engine(60.0, at_s=NOW_S + t, running=0.0, waiting=0.0)
            listener.observe_engine(Role.SERVE, idle)
    metrics = listener.collect(NOW_S + 139, {Role.SERVE: ["a"]}, ["g"], SHARE)
    assert metrics.rate_per_s == 0.0  # that is known
    for figure in (
        metrics.ttft_s,
        metrics.rejected_share,
        metrics.mean_prompt_tokens,
        metrics.tiers[Role.SERVE].lagging.tpot_s,
    ):
        assert isinstance(figure, Unavailable)
    assert metrics.tiers[Role.SERVE].lagging.waiting == 0.0
    assert not isinstance(metrics.workload, Unavailable)  # lengths outlast a quiet minute


def test_window_idle_at_either_end_is_dropped() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t, running in ((0.0, 10.0), (5.0, 0.0), (10.0, 10.0), (15.0, 10.0)):
        listener.observe_engine(Role.SERVE, engine(t, running=running))
    assert [window.end_s for window in tier(listener, NOW_S + 15, "a").windows] == [NOW_S + 15]


@pytest.mark.parametrize(("running", "busy_share", "windows"), [(2.0, 1.0, 4), (2.0, 0.75, 0), (20.0, 0.25, 0)])
def test_window_idle_in_between_is_detected_by_steps(running: float, busy_share: float, windows: int) -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in range(0, 21, 5):
        busy_s = t * busy_share
        tokens: dict[str, Any] = {
            "running": running,
            "generated_tokens": 100.0 * running * busy_s,
            "computed_tokens": 2125.0 * busy_s,
        }
        listener.observe_engine(Role.SERVE, engine(busy_s, at_s=NOW_S + t, **tokens))
    assert len(tier(listener, NOW_S + 20, "a").windows) == windows


@pytest.mark.parametrize(("waiting", "windows"), [(8.0, 4), (0.0, 0)])
def test_window_with_waiting_requests_is_not_idle(waiting: float, windows: int) -> None:
    """Long prompts fill a step by twos, and one that prefills for others gives no second token: nothing else tells how
    long its steps take."""
    listener = MetricsAggregator([Role.PREFILL, Role.DECODE])
    for t in range(0, 21, 5):
        reading = engine(
            float(t), running=2.0, waiting=waiting, steps=5.0 * t, computed_tokens=40_010.0 * t, tpot_s=None,
            generated_tokens=10.0 * t, local_prompt_tokens=40_000.0 * t,
        )  # fmt: skip
        listener.observe_engine(Role.PREFILL, reading)
    metrics = listener.collect(NOW_S + 20, {Role.PREFILL: ["a"]}, [], SHARE)
    assert len(metrics.tiers[Role.PREFILL].windows) == windows


def test_window_with_growing_batch_is_not_idle() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in range(0, 21, 5):
        # Requests that ended knew steps of 10 ms; by now they take 18.
        listener.observe_engine(
            Role.SERVE, engine(float(t), running=40.0 + t, steps=55.0 * t, generated_tokens=2000.0 * t)
        )
    assert len(tier(listener, NOW_S + 20, "a").windows) == 4


def test_window_with_speculative_decoding_is_not_idle() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in range(0, 61, 5):
        # 2.5 tokens a step: the time per output token is 4 ms, a step takes 10.
        tpot = sample_histogram(TPOT_EDGES_S, 0.004, 5.0 * t)
        busy = engine(float(t), running=4.0, generated_tokens=1000.0 * t, tpot_s=tpot)
        listener.observe_engine(Role.SERVE, busy)
    assert len(tier(listener, NOW_S + 60, "a").windows) >= 11


def test_window_without_token_sources_is_made() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in (0.0, 5.0):
        listener.observe_engine(Role.SERVE, engine(t, local_prompt_tokens=None, cached_prompt_tokens=None))
    (window,) = tier(listener, NOW_S + 5, "a").windows
    assert window.prompt_tokens == 5625.0  # what was computed and is no output


def test_workload_excludes_prefill_tier_outputs() -> None:
    listener = MetricsAggregator([Role.PREFILL, Role.DECODE])
    for t in (0.0, 5.0, 10.0):
        one_token = sample_histogram(LENGTH_EDGES, 1.0, 5.0 * t)
        listener.observe_engine(Role.PREFILL, engine(t, output_tokens=one_token))
    metrics = listener.collect(NOW_S + 10, {Role.PREFILL: ["a"]}, [], SHARE)
    assert isinstance(metrics.workload, Unavailable)


def test_workload_prompts_beyond_last_edge_are_kept() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in (0.0, 5.0, 10.0):
        listener.observe_engine(Role.SERVE, engine(t, prompt_tokens=sample_histogram(LENGTH_EDGES, 8000.0, 5.0 * t)))
    work = listener.collect(NOW_S + 10, {Role.SERVE: ["a"]}, [], SHARE).workload
    assert not isinstance(work, Unavailable)
    assert work.mean(work.prompt_tokens) == pytest.approx(8000.0, rel=0.05)


def test_workload_invalid_length_histogram_is_unavailable() -> None:
    listener = MetricsAggregator([Role.SERVE])
    upside_down = (5.0, 2.0, math.inf)
    for t in (0.0, 5.0, 10.0):
        listener.observe_engine(
            Role.SERVE, engine(t, prompt_tokens=BucketCounts(upside_down, (5.0 * t, 0.0, 0.0), 20.0 * t))
        )
    work = listener.collect(NOW_S + 10, {Role.SERVE: ["a"]}, [], SHARE).workload
    assert isinstance(work, Unavailable)
    assert "edges" in work.reason


def test_workload_fully_cached_prompts_compute_one_token() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in (0.0, 5.0, 10.0):
        cached = engine(t, local_prompt_tokens=0.0, cached_prompt_tokens=1500.0 * t)
        listener.observe_engine(Role.SERVE, cached)
    work = listener.collect(NOW_S + 10, {Role.SERVE: ["a"]}, [], SHARE).workload
    assert not isinstance(work, Unavailable)
    assert np.all(work.uncached_tokens >= 1.0)


def test_arrival_rate_below_minimum_interval_is_unavailable() -> None:
    demand = GatewayAggregator()
    for t in (0.0, 1e-3, 2e-3):
        demand.observe("g", "1", NOW_S + t, gateway(1.0 + (t > 0)))
        demand.take_sample(NOW_S + t, ["g"])
    assert isinstance(
        demand.latest_sample(NOW_S), Unavailable
    )  # one request in a millisecond is not a thousand a second


def size_of(thing: Any, visited: set[int] | None = None) -> int:
    """Bytes of an object with all that it holds."""
    visited = set() if visited is None else visited
    if id(thing) in visited or isinstance(thing, type):
        return 0
    visited.add(id(thing))
    size = sys.getsizeof(thing)
    if isinstance(thing, dict):
        return size + sum(size_of(k, visited) + size_of(v, visited) for k, v in thing.items())
    if isinstance(thing, list | tuple | set | frozenset) or type(thing).__name__ == "deque":
        return size + sum(size_of(part, visited) for part in thing)
    names = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    slots = sum(size_of(getattr(thing, name), visited) for name in names if hasattr(thing, name))
    return size + slots + (size_of(vars(thing), visited) if hasattr(thing, "__dict__") else 0)


def test_aggregator_memory_is_bounded_over_time() -> None:
    listener, sizes = MetricsAggregator([Role.SERVE]), []
    for t in range(0, 3600, 5):
        pod, name = f"pod-{t // 60}", f"gateway-{t // 60}"
        listener.observe_gateway(name, "1", NOW_S + t, gateway(5.0 * t))
        listener.observe_engine(Role.SERVE, engine(float(t), pod))
        if t >= 1800:  # for half an hour nobody asks
            listener.collect(NOW_S + t, {Role.SERVE: [pod]}, [name], SHARE)
        if t % 60 == 55:
            sizes.append(size_of(listener))
    assert max(sizes) < 1_000_000
    assert sizes[-1] < 1.05 * sizes[len(sizes) * 3 // 4]


ODD = (None, math.nan, math.inf, -3.0, 0.0, 1e300)
NUMBERS = (
    *("running", "waiting", "kv_used", "steps", "computed_tokens", "generated_tokens", "local_prompt_tokens"),
    *("cached_prompt_tokens", "transferred_prompt_tokens", "preemptions", "post_s", "transfer_s"),
)
HISTOGRAMS = ("prompt_tokens", "output_tokens", "tpot_s", "ttft_s")
COUNTS = ("arrived", "arrived_tokens", "succeeded", "failed", "queued", "queued_work_s", "reserved_work_s")


@pytest.mark.parametrize("place", [0, 3, -1])
@pytest.mark.parametrize("bad", [*BAD, 1e308])
def test_histogram_with_invalid_count_is_unavailable(bad: float, place: int) -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in (0.0, 5.0):
        counts = list(engine(t).tpot_s.counts)
        counts[place] = bad
        if bad == 1e308:
            counts[1] = bad
        listener.observe_engine(Role.SERVE, engine(t, tpot_s=BucketCounts(TPOT_EDGES_S, tuple(counts), 1.0 + t)))
    assert isinstance(tier(listener, NOW_S + 5, "a").lagging.tpot_s, Unavailable)


def invalid_histogram(rng: np.random.Generator, of: BucketCounts) -> BucketCounts:
    counts = list(of.counts)
    counts[rng.integers(0, len(counts))] = ODD[rng.integers(1, 6)] or 0.0
    return BucketCounts(of.edges, tuple(counts), ODD[rng.integers(1, 6)] or of.value_sum)


def test_aggregator_any_readings_give_valid_metrics() -> None:
    rng = np.random.default_rng(11)
    listener = MetricsAggregator([Role.PREFILL, Role.DECODE, Role.SERVE])
    roles = list(Role)
    for t in range(600):
        at_s = ODD[rng.integers(1, 6)] if rng.random() < 0.05 else NOW_S + t + float(rng.normal(0.0, 20.0))
        values: dict[str, Any] = {
            name: ODD[rng.integers(0, 6)] if rng.random() < 0.3 else float(rng.integers(0, 1000)) for name in NUMBERS
        }
        assert at_s is not None
        reading = engine(float(t), f"p{rng.integers(0, 3)}", at_s, instance_id=str(rng.integers(0, 2)), **values)
        shapes = {name: invalid_histogram(rng, getattr(reading, name)) for name in HISTOGRAMS if rng.random() < 0.2}
        listener.observe_engine(roles[rng.integers(0, 3)], replace(reading, **shapes))
        counts: dict[str, Any] = {name: ODD[rng.integers(1, 6)] for name in COUNTS if rng.random() < 0.1}
        counted: ServiceReading = replace(gateway(float(rng.integers(0, 50))), **counts)
        listener.observe_gateway(f"g{rng.integers(0, 3)}", str(rng.integers(0, 2)), at_s, counted)
        metrics = listener.collect(NOW_S + t, dict.fromkeys(roles, ("p0", "p1", "p2")), ("g0", "g1", "g2"), SHARE)
        figures = [
            metrics.rate_per_s,
            metrics.succeeded_per_s,
            metrics.mean_prompt_tokens,
            metrics.ttft_s,
            metrics.rejected_share,
        ]
        figures += [
            metrics.queued,
            metrics.queued_work_s,
            metrics.reserved_work_s,
            metrics.in_flight,
            *metrics.transfer_stats,
        ]
        for found in metrics.tiers.values():
            measured = found.lagging
            figures += [measured.tpot_s, measured.ttft_s, measured.waiting, measured.kv_used]
            assert 0.0 <= found.coverage <= 1.0
        assert all(isinstance(figure, Unavailable) or 0.0 <= figure < 1e20 for figure in figures)
        assert 0.0 <= metrics.coverage <= 1.0


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", ["transferred_prompt_tokens", "transfer_s", "post_s", "at_s"])
def test_transfer_stats_ignore_invalid_values(name: str, bad: float) -> None:
    """Such a sum would never be a number again, and no verdict on the fabric be made of it."""
    listener = MetricsAggregator([Role.PREFILL, Role.DECODE])
    for t in range(5):
        counted: dict[str, Any] = {"transferred_prompt_tokens": 100.0 * t, "transfer_s": 2.0 * t, "post_s": 1.0 * t}
        counted |= {"at_s": NOW_S + t} | ({name: bad} if t == 2 else {})
        listener.observe_engine(Role.DECODE, engine(float(t), **counted))
    moved = listener.collect(NOW_S + 5, {Role.DECODE: ["a"]}, [], SHARE).transfer_stats
    assert moved == pytest.approx((400.0, 8.0, 4.0), rel=0.02)
