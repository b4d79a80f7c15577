"""Lengths that change: another mix is believed soon and whole, and more requests are no longer ones."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from plimsoll.core import histogram
from plimsoll.core.demand.metrics_aggregator import MetricsAggregator
from plimsoll.core.ports import BucketCounts, EngineReading
from plimsoll.core.types import Role, Unavailable
from plimsoll.core.workload import FloatArray, Workload
from tests.core.signal_readings import NOW_S, SHARE, TTFT_EDGES_S, gateway, sample_histogram
from tests.core.test_signals import LENGTH_EDGES, engine, require_known, serving


def arriving(factor: float) -> tuple[float, float]:
    """After a minute of prompts so many times as long: their mean, and that of the lengths that are believed."""
    listener, _ = serving()
    for t in range(61, 122):
        tokens = 60_000.0 + 1000.0 * factor * (t - 60)
        listener.observe_gateway("g", "1", NOW_S + t, gateway(4.0 * t, arrived_tokens=tokens))
    metrics = listener.collect(NOW_S + 121, {Role.SERVE: ["a"]}, ["g"], SHARE)
    assert not isinstance(metrics.workload, Unavailable)
    assert metrics.workload.mean(metrics.workload.output_tokens) == pytest.approx(150.0, rel=0.02)
    return require_known(metrics.mean_prompt_tokens), metrics.workload.mean(metrics.workload.prompt_tokens)


def test_prompt_lengths_are_scaled_to_current_arrivals() -> None:
    for factor in (0.25, 4.0):
        arrive, believed = arriving(factor)
        assert believed == pytest.approx(arrive, rel=0.05)


def test_prompt_lengths_small_mean_changes_are_damped() -> None:
    """Where all of it counted at once from a tenth on, replicas came and went with it."""
    means = [arriving(1.0 + 0.03 * n)[1] for n in range(27)]
    assert means == sorted(means)
    assert max(after / before for before, after in pairwise(means)) < 1.05
    assert means[-1] > 1.15 * means[0]


def known_scv(of: Workload, lengths: FloatArray) -> float:
    found = of.scv(lengths)
    assert found is not None
    return found


Series = Callable[[int], float]


def level_shift(shift_s: int, before: float, after: float) -> Series:
    return lambda t: after if t >= shift_s else before


def replay(rate_per_s: Series, output: Series) -> list[tuple[int, float]]:
    """Mean outputs as they are known, by the second; each token takes 50 ms, so that 300 of them end 15 s later."""
    listener = MetricsAggregator([Role.SERVE])
    lengths = {name: BucketCounts(LENGTH_EDGES, (0.0,) * len(LENGTH_EDGES), 0.0) for name in ("output", "prompt")}
    begun, tokens, running, observed = 0.0, 0.0, [], []
    for t in range(600):
        begun += rate_per_s(t)
        running.append((t + 0.05 * output(t), rate_per_s(t), output(t)))
        tokens += sum(rate * min(1.0, max(0.0, end - t)) / 0.05 for end, rate, _ in running)
        for _, rate, length in (one for one in running if one[0] <= t):
            for name, mean in (("output", length), ("prompt", 300.0)):
                lengths[name] = histogram.merge([lengths[name], sample_histogram(LENGTH_EDGES, mean, rate)])
        running = [one for one in running if one[0] > t]
        reading = engine(
            float(t), output_tokens=lengths["output"], prompt_tokens=lengths["prompt"], generated_tokens=tokens,
            ttft_s=sample_histogram(TTFT_EDGES_S, 0.2, begun), steps=20.0 * t,
            running=sum(rate for _, rate, _ in running),
        )  # fmt: skip
        listener.observe_engine(Role.SERVE, reading)
        found = listener.collect(NOW_S + t, {Role.SERVE: ["a"]}, [], SHARE).workload
        if not isinstance(found, Unavailable):
            observed.append((t, found.mean(found.output_tokens)))
    return observed


def test_length_mix_shift_is_followed_within_a_minute() -> None:
    after = dict(replay(level_shift(300, 8.0, 8.0), level_shift(300, 60.0, 300.0)))
    assert after[295] == pytest.approx(after[200], rel=0.05)
    assert after[330] > 2.0 * after[295], "while few of the long ones have ended"
    assert after[375] == pytest.approx(after[590], rel=0.15)


def test_length_mix_shift_to_shorter_discards_old_outputs() -> None:
    """Those that ended before are forgotten as another mix, not within minutes of as many: the long ones end at 315."""
    after = dict(replay(level_shift(300, 8.0, 8.0), level_shift(300, 300.0, 60.0)))
    assert after[375] == pytest.approx(60.0, rel=0.05)


def test_length_mix_shift_discards_previous_mix() -> None:
    """Both means may be right while two kinds of requests are remembered, which are no lengths of any load."""
    listener, _ = serving()
    counts = {"prompt": (300.0, 1000.0), "output": (150.0, 600.0)}
    for t in range(61, 181):
        since = 5.0 * (t - 60)
        lengths = {
            f"{name}_tokens": histogram.merge(
                [sample_histogram(LENGTH_EDGES, before, 300.0), sample_histogram(LENGTH_EDGES, after, since)]
            )
            for name, (before, after) in counts.items()
        }
        listener.observe_gateway(
            "g", "1", NOW_S + t, gateway(4.0 * t, arrived_tokens=60_000.0 + 1000.0 * 4.0 * (t - 60))
        )
        reading = engine(
            float(t), generated_tokens=750.0 * 60 + 3000.0 * (t - 60), steps=6000.0 + 400.0 * (t - 60),
            local_prompt_tokens=1125.0 * 60 + 3750.0 * (t - 60), cached_prompt_tokens=375.0 * 60 + 1250.0 * (t - 60),
            **lengths,
        )  # fmt: skip
        listener.observe_engine(Role.SERVE, reading)
        found = listener.collect(NOW_S + t, {Role.SERVE: ["a"]}, ["g"], SHARE).workload
    assert not isinstance(found, Unavailable)
    assert found.mean(found.prompt_tokens) == pytest.approx(1000.0, rel=0.05)
    assert found.mean(found.output_tokens) == pytest.approx(600.0, rel=0.05)
    assert known_scv(found, found.prompt_tokens) < 0.1
    assert known_scv(found, found.output_tokens) < 0.1


def test_length_mix_shift_of_three_errors_counts_fully() -> None:
    """240 requests in half a minute tell 200 tokens from 270 well: nothing is taken off for chance."""
    after = dict(replay(level_shift(300, 8.0, 8.0), level_shift(300, 200.0, 270.0)))
    assert after[345] == pytest.approx(270.0, rel=0.02)


@pytest.mark.parametrize("rates_per_s", [(4.0, 12.0), (12.0, 4.0)])
@pytest.mark.parametrize("output", [200.0, 800.0])
def test_output_lengths_are_independent_of_rate_changes(output: float, rates_per_s: tuple[float, float]) -> None:
    """With answers of 40 s, tokens follow the requests that begin by more than the time that they are counted in."""
    after = [mean for t, mean in replay(level_shift(300, *rates_per_s), lambda _: output) if t >= 120]
    assert max(after) < 1.15 * min(after)


def test_output_lengths_low_rate_clusters_are_no_mix_shift() -> None:
    """Two a second with answers of 40 s: 60 in half a minute, now some more, now some fewer."""
    after = [mean for t, mean in replay(level_shift(300, 2.0, 1.7), level_shift(300, 800.0, 800.0)) if t >= 120]
    assert max(after) < 1.15 * min(after)


@pytest.mark.parametrize("output", [400.0, 800.0, 1600.0])
def test_output_lengths_burst_does_not_lengthen_outputs(output: float) -> None:
    """Ten seconds of many and fifty of few: in half a minute after the many, tokens are theirs and few begin or end."""
    after = [mean for t, mean in replay(lambda t: 8.0 if t % 60 < 10 else 0.4, lambda _: output) if t >= 180]
    assert max(after) < 1.15 * min(after)


def test_output_lengths_growth_is_seen_before_completion() -> None:
    """When both lengths and the rate rise, the tokens of the new ones lag behind their number."""
    after = dict(replay(level_shift(300, 6.0, 12.0), level_shift(300, 60.0, 300.0)))
    assert after[312] > 1.8 * after[295], "12 s after the first of them none has ended"


def test_output_lengths_of_a_full_engine_follow_those_that_run() -> None:
    """It begins no further requests, and the short ones end first. The longest has 1,400 tokens."""
    lengths = replay(lambda t: 8.0 if t < 10 else 0.0, lambda t: 500.0 + 100.0 * t)
    assert max(mean for _, mean in lengths) < 1.1 * 1400.0


def test_output_lengths_of_already_busy_engine_are_unbiased() -> None:
    """As an operator that starts anew sees it: most of what it makes is of requests that began before."""
    listener, found = MetricsAggregator([Role.SERVE]), []
    for t in range(120):
        reading = engine(
            float(t), output_tokens=sample_histogram(LENGTH_EDGES, 800.0, 500.0 + 3.0 * t), generated_tokens=2400.0 * t,
            prompt_tokens=sample_histogram(LENGTH_EDGES, 300.0, 500.0 + 3.0 * t), steps=20.0 * t, running=120.0,
            ttft_s=sample_histogram(TTFT_EDGES_S, 0.2, 3.0 * t),
        )  # fmt: skip
        listener.observe_engine(Role.SERVE, reading)
        workload = listener.collect(NOW_S + t, {Role.SERVE: ["a"]}, [], SHARE).workload
        found += [] if isinstance(workload, Unavailable) else [workload.mean(workload.output_tokens)]
    assert found
    assert found == pytest.approx([800.0] * len(found), rel=0.05)


def test_requests_without_output_count_one_token() -> None:
    """As those of an embedding model: vLLM counts 0 generated tokens, and the prefill is all of the work."""
    listener = MetricsAggregator([Role.SERVE])
    prompts = BucketCounts(LENGTH_EDGES, (0.0,) * len(LENGTH_EDGES), 0.0)
    for t in range(120):
        prompts = histogram.merge([prompts, sample_histogram(LENGTH_EDGES, 300.0, 8.0)])
        none = BucketCounts(LENGTH_EDGES, (8.0 * (t + 1), *(0.0,) * (len(LENGTH_EDGES) - 1)), 0.0)
        reading = engine(
            float(t), output_tokens=none, prompt_tokens=prompts, generated_tokens=0.0,
            ttft_s=sample_histogram(TTFT_EDGES_S, 0.1, 8.0 * (t + 1)), steps=20.0 * t, running=1.0,
        )  # fmt: skip
        listener.observe_engine(Role.SERVE, reading)
    found = listener.collect(NOW_S + 119, {Role.SERVE: ["a"]}, [], SHARE).workload
    assert not isinstance(found, Unavailable), found
    assert found.mean(found.output_tokens) == pytest.approx(1.0)
    assert found.mean(found.prompt_tokens) == pytest.approx(300.0, rel=0.05)


def two_prompts(busy_s: float) -> EngineReading:
    """Five prompts a second: four of 100 tokens, and one of 4,000."""
    buckets = {histogram.bucket_index(LENGTH_EDGES, 100.0): 4.0, histogram.bucket_index(LENGTH_EDGES, 4000.0): 1.0}
    counts = {bucket: share * busy_s for bucket, share in buckets.items()}
    tokens = 4400.0 * busy_s
    prompts = histogram.from_sparse(LENGTH_EDGES, counts, tokens)
    return engine(busy_s, prompt_tokens=prompts, local_prompt_tokens=tokens, cached_prompt_tokens=0.0)


def test_prompt_lengths_random_variation_is_no_new_mix() -> None:
    """A fifth of the prompts is 40 times as long, so that the mean of a minute often moves by a sixth."""
    listener = MetricsAggregator([Role.SERVE])
    for t in range(122):
        tokens = 4.0 * 880.0 * (t + 0.45 * max(0, t - 60))
        listener.observe_gateway("g", "1", NOW_S + t, gateway(4.0 * t, arrived_tokens=tokens))
        if t % 5 == 0:
            listener.observe_engine(Role.SERVE, two_prompts(float(t)))
    metrics = listener.collect(NOW_S + 121, {Role.SERVE: ["a"]}, ["g"], SHARE)
    assert not isinstance(metrics.workload, Unavailable)
    assert require_known(metrics.mean_prompt_tokens) > 1.15 * 880.0
    assert metrics.workload.mean(metrics.workload.prompt_tokens) == pytest.approx(880.0, rel=0.02)
