"""From raw readings to what a decision needs: what is heard of gateways and engines that behave."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plimsoll.core import histogram
from plimsoll.core.demand.metrics_aggregator import MetricsAggregator
from plimsoll.core.demand.service_metrics import ServiceMetrics
from plimsoll.core.engine_model.calibration.counter_window import MIN_STEPS, validity_error
from plimsoll.core.ports import BucketCounts, EngineReading
from plimsoll.core.types import Role, Unavailable
from tests.core.signal_readings import NOW_S, SHARE, TTFT_EDGES_S, gateway, sample_histogram

LENGTH_EDGES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, math.inf)
TPOT_EDGES_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, math.inf)


def gaps(n: float) -> BucketCounts:
    """Two in a hundred of 60 ms, the rest of 8."""
    edge = histogram.bucket_index(TPOT_EDGES_S, 0.06)
    return histogram.from_sparse(TPOT_EDGES_S, {0: 0.98 * n, edge: 0.02 * n}, (0.98 * 0.008 + 0.02 * 0.06) * n)


def engine(busy_s: float, pod: str = "a", at_s: float | None = None, **other: Any) -> EngineReading:
    """Counts after busy_s of work: 100 steps a second, 10 requests running, 5 ended a second of 300 and 150 tokens.

    A quarter of each prompt comes from the cache.
    """
    ended = 5.0 * busy_s
    reading = EngineReading(
        pod=pod,
        at_s=NOW_S + busy_s if at_s is None else at_s,
        instance_id="1",
        running=10.0,
        waiting=2.0,
        kv_used=0.3,
        steps=100.0 * busy_s,
        computed_tokens=5.0 * (225.0 + 150.0) * busy_s,
        generated_tokens=5.0 * 150.0 * busy_s,
        local_prompt_tokens=5.0 * 225.0 * busy_s,
        cached_prompt_tokens=5.0 * 75.0 * busy_s,
        transferred_prompt_tokens=0.0,
        preemptions=0.2 * busy_s,
        post_s=0.05 * busy_s,
        prompt_tokens=sample_histogram(LENGTH_EDGES, 300.0, ended),
        output_tokens=sample_histogram(LENGTH_EDGES, 150.0, ended),
        tpot_s=sample_histogram(TPOT_EDGES_S, 0.0102, ended),
        ttft_s=sample_histogram(TTFT_EDGES_S, 0.1, ended),
        itl_s=gaps(149.0 * ended),
    )
    return replace(reading, **other)


def serving(seconds: int = 60, rate_per_s: float = 4.0) -> tuple[MetricsAggregator, ServiceMetrics]:
    """A service with one gateway and one engine, heard every second and every five."""
    listener = MetricsAggregator([Role.SERVE])
    for t in range(seconds + 1):
        listener.observe_gateway("g", "1", NOW_S + t, gateway(rate_per_s * t))
        if t % 5 == 0:
            listener.observe_engine(Role.SERVE, engine(float(t)))
        metrics = listener.collect(NOW_S + t, {Role.SERVE: ["a"]}, ["g"], SHARE)
    return listener, metrics


def require_known(value: float | Unavailable) -> float:
    assert not isinstance(value, Unavailable), value
    return value


def test_metrics_full_coverage_has_all_values() -> None:
    _, metrics = serving()
    assert metrics.rate_per_s == pytest.approx(4.0)
    assert metrics.succeeded_per_s == pytest.approx(4.0)
    assert metrics.failed_per_s == metrics.rejected_share == metrics.queued == 0.0
    assert metrics.has_new_rate
    assert metrics.coverage == 1.0
    assert metrics.age_s == 0.0
    assert require_known(metrics.ttft_s) == pytest.approx(0.2, rel=0.05)  # buckets are 9 % apart
    assert metrics.ttft_histogram is not None
    assert histogram.total_count(metrics.ttft_histogram) == pytest.approx(
        240.0, abs=20.0
    )  # a minute, to a slot of five seconds
    tier = metrics.tiers[Role.SERVE]
    assert tier.coverage == 1.0
    assert tier.age_s == 0.0
    assert tier.lagging.ttft_s == metrics.ttft_s
    assert require_known(metrics.e2e_s) == pytest.approx(3.0, rel=0.05)
    assert tier.lagging.e2e_s == metrics.e2e_s
    assert require_known(tier.lagging.tpot_s) == pytest.approx(0.0102, rel=0.2)
    assert 0.05 <= require_known(tier.lagging.itl_s) <= 0.075  # their 99th percentile, whatever share is promised
    assert tier.lagging.waiting == 2.0
    assert tier.lagging.kv_used == 0.3
    assert tier.lagging.preemptions_per_s == pytest.approx(0.2)
    assert tier.kv_post_share == pytest.approx(0.05)


def test_metrics_before_first_reading_say_what_is_missing() -> None:
    listener = MetricsAggregator([Role.SERVE])
    found = [listener.collect(NOW_S, {}, gateways, SHARE).rate_per_s for gateways in ([], ["g", "h"])]
    listener.observe_gateway("g", "1", NOW_S, gateway(0.0))
    found.append(listener.collect(NOW_S + 60.0, {}, ["g", "h"], SHARE).rate_per_s)
    assert found == [
        Unavailable("there is no gateway"),
        Unavailable("no gateway has reported a request of the service yet"),
        Unavailable("none of 2 gateways answers"),
    ]


def test_arrival_rate_is_mean_since_last_sample() -> None:
    listener = MetricsAggregator([Role.SERVE])
    rates = []
    for t, arrived in enumerate((0, 3, 3, 3, 12)):
        if t != 2:  # one answer of the gateway is missing
            listener.observe_gateway("g", "1", NOW_S + t, gateway(float(arrived)))
        metrics = listener.collect(NOW_S + t, {}, ["g"], SHARE)
        rates.append((metrics.has_new_rate, metrics.rate_per_s))
    assert isinstance(rates[0][1], Unavailable)
    assert rates[1:] == [(True, 3.0), (False, 3.0), (True, 0.0), (True, 9.0)]


def test_arrival_rate_interleaved_gateways_is_their_sum() -> None:
    listener = MetricsAggregator([Role.SERVE])
    total = 0.0
    for t in range(31):
        listener.observe_gateway("g", "1", NOW_S + t, gateway(5.0 * t))
        listener.observe_gateway("h", "1", NOW_S + t + 0.4, gateway(2.0 * (t + 0.4)))
        metrics = listener.collect(NOW_S + t + 0.5, {}, ["g", "h"], SHARE)
        if metrics.has_new_rate and t:
            total += require_known(metrics.rate_per_s)
    assert total / 30 == pytest.approx(7.0)


def test_mean_prompt_tokens_is_corrected_by_engine_counts() -> None:
    _, metrics = serving()
    # Engines count 300 tokens where gateways estimate 250; belief in the estimate fades with some hundred requests.
    assert require_known(metrics.mean_prompt_tokens) == pytest.approx(300.0, rel=0.03)


def test_mean_prompt_tokens_before_engines_is_gateway_estimate() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in range(3):
        listener.observe_gateway("g", "1", NOW_S + t, gateway(5.0 * t))
    assert listener.collect(NOW_S + 2, {}, ["g"], SHARE).mean_prompt_tokens == 250.0


def test_e2e_latency_of_mixed_releases_uses_newer_gateway() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in range(20):
        listener.observe_gateway("new", "1", NOW_S + t, gateway(5.0 * t))
        listener.observe_gateway("old", "1", NOW_S + t, gateway(5.0 * t, e2e_s=None))
    metrics = listener.collect(NOW_S + 20.0, {}, ["new", "old"], 0.95)
    assert require_known(metrics.rate_per_s) == pytest.approx(10.0)
    assert require_known(metrics.e2e_s) == pytest.approx(3.0, rel=0.05)
    assert isinstance(listener.collect(NOW_S + 400.0, {}, ["new", "old"], 0.95).e2e_s, Unavailable)


def test_itl_without_engine_metric_or_tokens_is_unavailable() -> None:
    reported = {}
    for name, other in (("old", {"itl_s": None}), ("still", {"itl_s": gaps(7.0)})):
        listener = MetricsAggregator([Role.SERVE])
        for t in range(0, 21, 5):
            listener.observe_engine(Role.SERVE, engine(float(t), **other))
        reported[name] = listener.collect(NOW_S + 20.0, {Role.SERVE: ["a"]}, [], SHARE).tiers[Role.SERVE].lagging.itl_s
    assert reported == {
        "old": Unavailable("the engines do not tell"),
        "still": Unavailable("no answer had a second token in the last minute"),
    }


def test_tpot_of_first_reading_is_reported_without_requests() -> None:
    """An engine that has just started reports its histograms, and no request has ended in them."""
    listener = MetricsAggregator([Role.SERVE])
    listener.observe_engine(Role.SERVE, engine(0.0))
    lagging = listener.collect(NOW_S, {Role.SERVE: ["a"]}, [], SHARE).tiers[Role.SERVE].lagging
    assert lagging.tpot_s == Unavailable("no request ended in the last minute")


def test_mean_prompt_tokens_without_gateway_uses_engines() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in range(0, 21, 5):
        listener.observe_gateway("g", "1", NOW_S + t, gateway(5.0 * t, arrived_tokens=None, ttft_s=None))
        listener.observe_engine(Role.SERVE, engine(float(t)))
    metrics = listener.collect(NOW_S + 20, {Role.SERVE: ["a"]}, ["g"], SHARE)
    assert require_known(metrics.mean_prompt_tokens) == pytest.approx(300.0)
    assert isinstance(metrics.ttft_s, Unavailable)
    assert metrics.rate_per_s == pytest.approx(5.0)


def test_workload_has_engine_lengths_and_cached_share() -> None:
    _, metrics = serving()
    assert not isinstance(metrics.workload, Unavailable)
    work = metrics.workload
    assert work.mean(work.prompt_tokens) == pytest.approx(300.0, rel=0.02)
    assert work.mean(work.output_tokens) == pytest.approx(150.0, rel=0.02)
    assert work.mean(work.cached_tokens) / work.mean(work.prompt_tokens) == pytest.approx(0.25)
    assert np.all(work.uncached_tokens >= 1.0)


def test_workload_running_requests_count_current_length() -> None:
    """An engine with more than it can carry: four begin a second, ten tokens each a second, and none ends."""
    listener, nothing = MetricsAggregator([Role.SERVE]), sample_histogram(LENGTH_EDGES, 150.0, 0.0)
    found = []
    for seconds in (0.0, 1.0, 5.0, 10.0):
        begun, tokens = 4.0 * seconds, 20.0 * seconds**2
        reading = engine(
            seconds, generated_tokens=tokens, prompt_tokens=nothing, output_tokens=nothing, tpot_s=nothing,
            local_prompt_tokens=225.0 * begun, cached_prompt_tokens=75.0 * begun,
            ttft_s=sample_histogram(TTFT_EDGES_S, 0.1, begun),
        )  # fmt: skip
        listener.observe_engine(Role.SERVE, reading)
        found.append(listener.collect(NOW_S + seconds, {Role.SERVE: ["a"]}, ["g"], SHARE).workload)
    assert [isinstance(one, Unavailable) for one in found] == [True, True, False, False], "five must have begun"
    for one, tokens in zip(found[2:], (25.0, 50.0), strict=True):
        assert not isinstance(one, Unavailable)
        means = one.mean(one.uncached_tokens), one.mean(one.cached_tokens), one.mean(one.output_tokens)
        assert means == pytest.approx((225.0, 75.0, tokens))


def test_windows_are_returned_once_and_valid() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in range(0, 31, 5):
        listener.observe_engine(Role.SERVE, engine(float(t)))
    windows = listener.collect(NOW_S + 30, {Role.SERVE: ["a"]}, [], SHARE).tiers[Role.SERVE].windows
    assert len(windows) == 6
    assert all(validity_error(window) is None for window in windows)
    assert windows[0].busy_s == 5.0
    assert windows[0].steps == 500.0
    assert windows[0].output_tokens == 3750.0
    assert windows[0].prompt_tokens == 5625.0
    assert windows[0].mean_running == 10.0
    assert listener.collect(NOW_S + 31, {Role.SERVE: ["a"]}, [], SHARE).tiers[Role.SERVE].windows == ()


def test_windows_of_frequent_readings_last_two_seconds() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in range(11):
        listener.observe_engine(Role.SERVE, engine(t / 2))
    windows = listener.collect(NOW_S + 5, {Role.SERVE: ["a"]}, [], SHARE).tiers[Role.SERVE].windows
    assert [window.busy_s for window in windows] == [2.0, 2.0]


def test_windows_of_slow_engine_extend_to_enough_steps() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in range(41):
        slow = engine(float(t), steps=2.0 * t, computed_tokens=1145.0 * t, generated_tokens=20.0 * t, tpot_s=None)
        listener.observe_engine(Role.SERVE, slow)
    windows = listener.collect(NOW_S + 40, {Role.SERVE: ["a"]}, [], SHARE).tiers[Role.SERVE].windows
    assert windows
    assert all(window.steps >= MIN_STEPS and validity_error(window) is None for window in windows)


def test_waiting_is_sum_and_kv_used_is_maximum_over_pods() -> None:
    listener = MetricsAggregator([Role.SERVE])
    listener.observe_engine(Role.SERVE, engine(0.0, "a", waiting=3.0, kv_used=0.2))
    listener.observe_engine(Role.SERVE, engine(0.0, "b", waiting=5.0, kv_used=0.9))
    tier = listener.collect(NOW_S + 1, {Role.SERVE: ["a", "b"]}, [], SHARE).tiers[Role.SERVE]
    assert tier.lagging.waiting == 8.0
    assert tier.lagging.kv_used == 0.9
    assert tier.age_s == 1.0


def test_preemptions_are_summed_over_pods() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in (0.0, 5.0):
        for pod in ("a", "b", "c"):
            listener.observe_engine(Role.SERVE, engine(t, pod))
    tier = listener.collect(NOW_S + 5, {Role.SERVE: ["a", "b", "c"]}, [], SHARE).tiers[Role.SERVE]
    assert tier.lagging.preemptions_per_s == pytest.approx(0.6)


def test_draft_acceptance_is_accepted_over_drafted_tokens() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in (0.0, 5.0):
        listener.observe_engine(Role.SERVE, engine(t, "a", draft_tokens=30.0 * t, accepted_draft_tokens=24.0 * t))
        listener.observe_engine(Role.SERVE, engine(t, "b", draft_tokens=10.0 * t, accepted_draft_tokens=0.0))
        listener.observe_engine(Role.SERVE, engine(t, "c"))  # of a revision that does not speculate
    tier = listener.collect(NOW_S + 5, {Role.SERVE: ["a", "b", "c"]}, [], SHARE).tiers[Role.SERVE]
    assert tier.draft_acceptance == pytest.approx(0.6)
    idle = listener.collect(NOW_S + 70, {Role.SERVE: ["a", "b", "c"]}, [], SHARE).tiers[Role.SERVE]
    assert isinstance(idle.draft_acceptance, Unavailable)


@pytest.mark.parametrize(("offloaded", "share"), [(0.0, 0.25), (0.5, 0.625)])
def test_prompt_tokens_from_cpu_memory_count_as_cached(offloaded: float, share: float) -> None:
    """vLLM counts hits of an offloaded cache as those of a KV transfer, also in an aggregated engine."""
    listener = MetricsAggregator([Role.SERVE])
    for t in range(0, 65, 5):
        computed = 5.0 * 225.0 * t
        reading = engine(
            t,
            local_prompt_tokens=computed * (1.0 - offloaded),
            cached_prompt_tokens=5.0 * 75.0 * t,
            transferred_prompt_tokens=computed * offloaded,
        )
        listener.observe_engine(Role.SERVE, reading)
    found = listener.collect(NOW_S + 60, {Role.SERVE: ["a"]}, [], SHARE)
    assert not isinstance(found.workload, Unavailable)
    cached = found.workload.mean(found.workload.cached_tokens)
    assert cached / (cached + found.workload.mean(found.workload.uncached_tokens)) == pytest.approx(share, rel=0.02)


def prefilling(busy_s: float) -> EngineReading:
    """A prefill engine of the same requests: one output token each, half of each prompt cached."""
    ended = 5.0 * busy_s
    return replace(
        engine(busy_s, "p"),
        generated_tokens=ended,
        computed_tokens=ended * 151.0,
        local_prompt_tokens=ended * 150.0,
        cached_prompt_tokens=ended * 150.0,
        output_tokens=sample_histogram(LENGTH_EDGES, 1.0, ended),
        tpot_s=BucketCounts(TPOT_EDGES_S, (0.0,) * len(TPOT_EDGES_S), 0.0),
        ttft_s=sample_histogram(TTFT_EDGES_S, 0.08, ended),
    )


def decoding(busy_s: float) -> EngineReading:
    """The decode engine that gets them: no prompt is computed here."""
    moved = 5.0 * 300.0 * busy_s
    return replace(
        engine(busy_s, "d"),
        computed_tokens=1000.0 * busy_s,
        local_prompt_tokens=0.0,
        cached_prompt_tokens=0.0,
        transferred_prompt_tokens=moved,
        ttft_s=sample_histogram(TTFT_EDGES_S, 0.03, 5.0 * busy_s),
    )


def disaggregated() -> ServiceMetrics:
    listener = MetricsAggregator([Role.PREFILL, Role.DECODE])
    for t in range(0, 61, 5):
        listener.observe_gateway("g", "1", NOW_S + t, gateway(5.0 * t))
        listener.observe_engine(Role.PREFILL, prefilling(float(t)))
        listener.observe_engine(Role.DECODE, decoding(float(t)))
    return listener.collect(NOW_S + 60, {Role.PREFILL: ["p"], Role.DECODE: ["d"]}, ["g"], SHARE)


def test_split_tiers_have_role_specific_metrics() -> None:
    metrics = disaggregated()
    prefill, decode = metrics.tiers[Role.PREFILL].lagging, metrics.tiers[Role.DECODE].lagging
    assert require_known(prefill.ttft_s) == pytest.approx(0.08, rel=0.05)
    assert isinstance(prefill.tpot_s, Unavailable)
    assert isinstance(decode.ttft_s, Unavailable)
    assert isinstance(prefill.e2e_s, Unavailable)
    assert isinstance(prefill.itl_s, Unavailable)
    assert 0.05 <= require_known(decode.itl_s) <= 0.075
    assert require_known(decode.tpot_s) == pytest.approx(0.0102, rel=0.2)


def test_split_tiers_give_one_workload_of_full_requests() -> None:
    work = disaggregated().workload
    assert not isinstance(work, Unavailable)
    assert work.mean(work.output_tokens) == pytest.approx(150.0, rel=0.02)  # not the one token of a prefill engine
    assert work.mean(work.prompt_tokens) == pytest.approx(300.0, rel=0.03)
    assert work.mean(work.cached_tokens) / work.mean(work.prompt_tokens) == pytest.approx(0.5)


def test_tier_without_pods_is_covered_and_unavailable() -> None:
    metrics = MetricsAggregator([Role.SERVE]).collect(NOW_S, {Role.SERVE: []}, [], SHARE)
    tier = metrics.tiers[Role.SERVE]
    assert tier.coverage == 1.0
    assert isinstance(tier.lagging.waiting, Unavailable)
    assert metrics.coverage == 0.0
    assert metrics.rate_per_s == Unavailable("there is no gateway")


def test_readings_of_unknown_tier_are_ignored() -> None:
    listener = MetricsAggregator([Role.SERVE])
    listener.observe_engine(Role.DECODE, engine(0.0))
    assert list(listener.collect(NOW_S, {}, [], SHARE).tiers) == [Role.SERVE]


def test_missing_counter_in_one_scrape_is_skipped() -> None:
    """Steady work of 150 tokens, 100 steps a second; one reading in the middle lacks its steps."""
    listener = MetricsAggregator([Role.SERVE])
    for t in range(121):
        reading = engine(float(t), running=7.5)  # as five a second of a second and a half are
        listener.observe_engine(Role.SERVE, replace(reading, steps=None) if t == 60 else reading)
        found = listener.collect(NOW_S + t, {Role.SERVE: ["a"]}, [], SHARE).workload
        if not isinstance(found, Unavailable):
            assert found.mean(found.output_tokens) == pytest.approx(150.0, rel=0.02)
    answers = listener._engines[Role.SERVE].completions("a")
    assert answers is not None, "it is followed again"
    assert answers._clock == pytest.approx(100.0 * (120 - 61))


def test_transfer_stats_include_present_decode_engines() -> None:
    listener = MetricsAggregator([Role.PREFILL, Role.DECODE])
    for t in range(61):
        for role, pod in ((Role.PREFILL, "p"), (Role.DECODE, "a"), (Role.DECODE, "b")):
            counted = engine(float(t), pod, transferred_prompt_tokens=1000.0 * t, transfer_s=0.2 * t, post_s=0.05 * t)
            listener.observe_engine(role, counted)
    listener.observe_engine(Role.DECODE, engine(61.0, "a", transferred_prompt_tokens=61e3, transfer_s=None))
    found = listener.collect(NOW_S + 60.0, {Role.DECODE: ["a", "b"]}, ["g"], SHARE).transfer_stats
    assert 0.95 * 120e3 < found.tokens < 120e3, "what was moved lately counts most"
    assert found.transfer_s / found.tokens == pytest.approx(2e-4)
    assert found.post_s / found.tokens == pytest.approx(5e-5)
    assert MetricsAggregator([Role.SERVE]).collect(NOW_S, {}, [], SHARE).transfer_stats.tokens == 0.0
