"""Distributions of requests: from samples, from histograms, merged, censored."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.core.workload import (
    HISTOGRAM_ROWS,
    MAX_ROWS,
    FloatArray,
    LengthHistogram,
    Workload,
    censored_weights,
    from_histograms,
    from_samples,
    merge,
)

# The bucket edges of vLLM's prompt and output histograms.
EDGES = np.array([1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, math.inf])
SHARES = np.array([0.05, 0.5, 0.9, 0.95, 0.99])

samples = st.lists(
    st.tuples(st.integers(0, 40_000), st.integers(0, 40_000), st.integers(0, 4_000), st.floats(0.01, 100)),
    min_size=1,
    max_size=30,
)


def make_workload(rows: list[tuple[int, int, int, float]]) -> Workload:
    uncached, cached, output, weights = zip(*rows, strict=True)
    return from_samples(uncached, cached, output, weights)


def lognormal(n: int, prompt: float = 1000.0, output: float = 195.0, seed: int = 1) -> tuple[FloatArray, FloatArray]:
    rng = np.random.default_rng(seed)
    return prompt * np.exp(0.6 * rng.standard_normal(n)), output * np.exp(0.5 * rng.standard_normal(n))


def histogram(values: FloatArray, mean: bool) -> LengthHistogram:
    counts = np.histogram(values, np.concatenate(([0.0], EDGES)))[0].astype(float)
    return LengthHistogram(EDGES, counts, float(values.mean()) if mean else None, maximum_tokens=40_960)


# Rows


def test_from_samples_sorts_and_joins_equal_rows() -> None:
    workload = from_samples([5, 3, 5], [0, 1, 0], [7, 2, 7], [1, 2, 1])
    assert workload.uncached_tokens.tolist() == [3, 5]
    assert workload.cached_tokens.tolist() == [1, 0]
    assert workload.prompt_tokens.tolist() == [4, 5]
    assert workload.output_tokens.tolist() == [2, 7]
    assert workload.weights.tolist() == [0.5, 0.5]


def test_moments_match_manual_calculation() -> None:
    workload = from_samples([0, 0], [0, 0], [10, 40], [3, 1])
    output = workload.output_tokens
    assert workload.mean(output) == pytest.approx(17.5)
    assert workload.moment(output, 2) == pytest.approx((3 * 100 + 1600) / 4)
    assert workload.scv(output) == pytest.approx(((3 * 100 + 1600) / 4 - 17.5**2) / 17.5**2)
    assert workload.scv(workload.uncached_tokens) is None  # of zeros there is none
    assert workload.quantile(output, [0.0, 0.75, 0.7501, 1.0]).tolist() == [10, 10, 40, 40]
    assert workload.quantile(output, 0.5).shape == ()


def test_scv_of_large_numbers_is_exact() -> None:
    workload = from_samples([1e9, 1e9 + 1], [0, 0], [1, 1])
    assert workload.scv(workload.uncached_tokens) == pytest.approx(0.25e-18, rel=1e-3)


@given(samples, st.sampled_from([0.01, 0.5, 0.95]))
@settings(max_examples=25)
def test_quantile_matches_sorted_samples(rows: list[tuple[int, int, int, float]], share: float) -> None:
    workload = make_workload(rows)
    total, reached = sum(row[3] for row in rows), 0.0
    desired = float(workload.quantile(workload.output_tokens, share))
    for _, _, output, weight in sorted(rows, key=lambda row: row[2]):
        reached += weight / total
        if reached >= share - 1e-9:
            assert desired == output
            break


def test_from_samples_reduction_keeps_moments_and_quantiles() -> None:
    prompts, outputs = lognormal(20_000)
    workload = from_samples(prompts, np.zeros(20_000), outputs)
    assert workload.weights.size == MAX_ROWS
    of_rows: dict[str, Callable[[FloatArray, FloatArray], FloatArray]] = {
        "prompt": lambda prompt, output: prompt,
        "output": lambda prompt, output: output,
        "product": lambda prompt, output: prompt * output,
        "square": lambda prompt, output: prompt**2,
    }
    for quantity in of_rows.values():
        true, rows = quantity(prompts, outputs), quantity(workload.uncached_tokens, workload.output_tokens)
        assert workload.mean(rows) == pytest.approx(true.mean(), rel=2e-3)
        assert workload.scv(rows) == pytest.approx(true.var() / true.mean() ** 2, rel=0.01)
        assert workload.quantile(rows, SHARES) == pytest.approx(np.quantile(true, SHARES), rel=0.08)


def test_from_samples_reduction_keeps_far_tail() -> None:
    prompts, outputs = lognormal(5_000)
    workload = from_samples(np.append(prompts, 100_000.0), np.zeros(5_001), np.append(outputs, 10.0))
    assert workload.uncached_tokens.max() == pytest.approx(100_000)


# Merging


def equal(one: Workload | None, other: Workload | None) -> bool:
    assert one is not None
    assert other is not None
    names = ("uncached_tokens", "cached_tokens", "output_tokens", "weights")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


@given(st.lists(samples, min_size=1, max_size=4), st.randoms(use_true_random=False))
@settings(max_examples=25)
def test_merge_is_order_independent_and_adds_means(
    parts: list[list[tuple[int, int, int, float]]], random: object
) -> None:
    weighted = [(make_workload(rows), 1.0 + index) for index, rows in enumerate(parts)]
    shuffled = list(weighted)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    merged = merge(weighted)
    assert equal(merged, merge(shuffled))
    assert merged is not None
    for name in ("uncached_tokens", "cached_tokens", "output_tokens"):
        total = sum(weight * part.mean(getattr(part, name)) for part, weight in weighted)
        assert merged.mean(getattr(merged, name)) == pytest.approx(total / sum(weight for _, weight in weighted))


def test_merge_large_parts_stays_bounded() -> None:
    parts = [(from_samples(p, np.zeros(p.size), o), 1.0) for p, o in (lognormal(2000, seed=n) for n in range(4))]
    merged = merge(parts)
    assert merged is not None
    assert merged.weights.size == MAX_ROWS
    assert equal(merged, merge(parts[::-1]))
    staged = merge([(merge(parts[:2]) or parts[0][0], 2.0), (merge(parts[2:]) or parts[0][0], 2.0)])
    assert staged is not None
    for quantity in (lambda w: w.uncached_tokens, lambda w: w.output_tokens * w.prompt_tokens):
        assert staged.mean(quantity(staged)) == pytest.approx(merged.mean(quantity(merged)), rel=1e-3)
        assert staged.scv(quantity(staged)) == pytest.approx(merged.scv(quantity(merged)), rel=0.01)


def test_merge_of_nothing_is_none() -> None:
    workload = from_samples([1], [1], [1])
    assert merge([]) is None
    assert merge([(workload, 0.0)]) is None
    assert equal(merge([(workload, 3.0)]), workload)


# Histograms


@pytest.mark.parametrize("mean", [True, False])
def test_from_histograms_recovers_distribution(mean: bool) -> None:
    prompts, outputs = lognormal(20_000)
    workload = from_histograms(histogram(prompts, mean), histogram(outputs, mean))
    for true, rows in ((prompts, workload.uncached_tokens), (outputs, workload.output_tokens)):
        assert workload.mean(rows) == pytest.approx(true.mean(), rel=1e-3 if mean else 0.01)
        assert workload.scv(rows) == pytest.approx(true.var() / true.mean() ** 2, rel=0.08)
        assert workload.quantile(rows, SHARES) == pytest.approx(np.quantile(true, SHARES), rel=0.04)


def test_from_histograms_columns_are_independent() -> None:
    prompts, outputs = lognormal(20_000)
    workload = from_histograms(histogram(prompts, True), histogram(outputs, True), histogram(prompts, True))
    columns = np.stack((workload.uncached_tokens, workload.cached_tokens, workload.output_tokens))
    assert columns.shape[1] == HISTOGRAM_ROWS
    assert np.abs(np.corrcoef(columns) - np.eye(3)).max() < 0.06
    product = workload.mean(workload.uncached_tokens * workload.output_tokens)
    assert product == pytest.approx(prompts.mean() * outputs.mean(), rel=0.01)
    again = from_histograms(histogram(prompts, True), histogram(outputs, True), histogram(prompts, True))
    assert equal(workload, again)


@given(st.lists(st.integers(0, 1000), min_size=15, max_size=15).filter(any))
@settings(max_examples=25)
def test_histogram_lengths_keep_bucket_shares(counts: list[int]) -> None:
    found = LengthHistogram(EDGES[:15], np.array(counts, dtype=float)).lengths((np.arange(2000) + 0.5) / 2000)
    assert np.all(np.diff(found) >= 0)
    within = np.searchsorted(found, EDGES[:15], side="right") / 2000
    assert within == pytest.approx(np.cumsum(counts) / sum(counts), abs=2e-3)


def test_histogram_lengths_match_known_mean() -> None:
    shares = (np.arange(HISTOGRAM_ROWS) + 0.5) / HISTOGRAM_ROWS
    for mean in (120.0, 300.0, 450.0):
        one = LengthHistogram(np.array([100.0, 500.0]), np.array([0.0, 10.0]), mean_tokens=mean)
        assert one.lengths(shares).mean() == pytest.approx(mean, rel=0.01 if mean > 125 else 0.1)
        assert np.all((one.lengths(shares) >= 100) & (one.lengths(shares) <= 500))
    # A mean that the buckets cannot have moves them as far as they go.
    assert LengthHistogram(np.array([100.0, 500.0]), np.array([0.0, 1.0]), 9000.0).lengths(shares).mean() > 450


def test_histogram_infinite_bucket_ends_at_maximum() -> None:
    shares = (np.arange(100) + 0.5) / 100
    open_end = LengthHistogram(np.array([10.0, 100.0, math.inf]), np.array([1.0, 1.0, 8.0]), maximum_tokens=1000)
    assert 100 < open_end.lengths(shares).max() <= 1000
    low = LengthHistogram(np.array([10.0, 100.0, math.inf]), np.array([1.0, 1.0, 8.0]), maximum_tokens=50)
    assert low.lengths(shares).max() <= 100
    with pytest.raises(ValueError, match="maximum_tokens"):
        LengthHistogram(np.array([10.0, math.inf]), np.array([1.0, 1.0]))
    assert np.isfinite(LengthHistogram(np.array([10.0, math.inf]), np.array([1.0, 0.0])).lengths(shares)).all()


def test_from_histograms_lengths_are_at_least_one_token() -> None:
    ones = LengthHistogram(np.array([1.0, 2.0]), np.array([5.0, 0.0]))
    workload = from_histograms(ones, ones)
    assert workload.uncached_tokens.tolist() == [1.0]
    assert workload.output_tokens.tolist() == [1.0]
    assert workload.cached_tokens.tolist() == [0.0]


# Censoring


def product_limit(output: FloatArray, finished: np.ndarray, weights: FloatArray) -> dict[float, float]:
    """Survival after each finished length, by Kaplan and Meier's product."""
    survival, found = 1.0, {}
    for length in sorted({float(o) for o, done in zip(output, finished, strict=True) if done}):
        at_risk = weights[output >= length].sum()
        survival *= 1 - weights[(output == length) & finished].sum() / at_risk
        found[length] = survival
    return found


@given(st.lists(st.tuples(st.integers(1, 12), st.booleans(), st.floats(0.1, 5)), min_size=1, max_size=25))
@settings(max_examples=60)
def test_censored_weights_match_kaplan_meier(rows: list[tuple[int, bool, float]]) -> None:
    output, weights = np.array([r[0] for r in rows], dtype=float), np.array([r[2] for r in rows])
    finished = np.array([r[1] for r in rows])
    moved = censored_weights(output, finished, weights)
    assert np.all(moved >= 0)
    assert moved.sum() == pytest.approx(weights.sum())
    for length, survival in product_limit(output, finished, weights).items():
        assert moved[output > length].sum() / weights.sum() + sum(
            moved[(output == length) & ~finished] / weights.sum()
        ) == pytest.approx(survival, abs=1e-9)


def test_censored_weights_of_ramp_are_unbiased() -> None:
    rng = np.random.default_rng(5)
    true = np.round(200 * np.exp(0.5 * rng.standard_normal(5000)))
    so_far = rng.uniform(0, 900, 5000)  # tokens there was time for: the last arrivals have made few
    finished = true <= so_far
    observed = np.minimum(true, so_far)
    naive = true[finished].mean()
    found = from_samples(np.full(5000, 10.0), np.zeros(5000), observed, finished=finished)
    assert naive < 0.92 * true.mean()
    assert found.mean(found.output_tokens) == pytest.approx(true.mean(), rel=0.04)
    assert found.quantile(found.output_tokens, 0.5) == pytest.approx(np.median(true), rel=0.04)


def test_censored_weights_beyond_all_finished_are_kept() -> None:
    assert censored_weights([1, 5, 9], [True, False, False], [1, 1, 1]).tolist() == [1, 1, 1]
    assert censored_weights([3, 1], [False, False], [2, 1]).tolist() == [2, 1]
    # At one length the finished end first; the unfinished one goes on to the longer.
    assert censored_weights([5, 5, 9], [False, True, True], [1, 1, 1]).tolist() == [0, 1, 2]


# What is refused


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("place", ["uncached_tokens", "cached_tokens", "output_tokens", "weights"])
def test_from_samples_invalid_values_raise_naming_argument(bad: float, place: str) -> None:
    arguments = {name: [1.0, 2.0] for name in ("uncached_tokens", "cached_tokens", "output_tokens", "weights")}
    with pytest.raises(ValueError, match=place):
        from_samples(**{**arguments, place: [1.0, bad]})
    with pytest.raises(ValueError, match=place):
        from_samples(
            **{**arguments, place: [1.0, 2.0, 3.0]} if place != "uncached_tokens" else {**arguments, place: []}
        )


def test_workload_empty_input_raises() -> None:
    with pytest.raises(ValueError, match="uncached_tokens"):
        from_samples([], [], [])
    with pytest.raises(ValueError, match="weights"):
        from_samples([1], [1], [1], [0])
    with pytest.raises(ValueError, match="counts"):
        LengthHistogram(np.array([1.0, 2.0]), np.array([0.0, 0.0]))
    with pytest.raises(ValueError, match="counts"):
        LengthHistogram(np.array([]), np.array([]))


def test_workload_invalid_arguments_raise() -> None:
    workload = from_samples([1, 2], [0, 0], [1, 2])
    two = np.array([1.0, 2.0])
    with pytest.raises(ValueError, match="share"):
        workload.quantile(workload.output_tokens, 1.5)
    with pytest.raises(ValueError, match="share"):
        workload.quantile(workload.output_tokens, math.nan)
    with pytest.raises(ValueError, match="values"):
        workload.mean(np.array([1.0]))
    with pytest.raises(ValueError, match="values"):
        workload.mean(np.array([1.0, math.nan]))
    with pytest.raises(ValueError, match="weights"):
        Workload(two, two, two, two)
    with pytest.raises(ValueError, match="weight"):
        merge([(workload, math.nan)])
    with pytest.raises(ValueError, match="finished"):
        censored_weights([1.0, 2.0], [1, 0], [1.0, 1.0])
    with pytest.raises(ValueError, match="weights"):
        censored_weights([1.0], [True], [0.0])
    with pytest.raises(ValueError, match="rows"):
        from_histograms(LengthHistogram(two, two), LengthHistogram(two, two), rows=0)
    with pytest.raises(ValueError, match="shares"):
        LengthHistogram(two, two).lengths(np.array([1.0]))


@pytest.mark.parametrize(
    ("edges", "counts", "match"),
    [
        ([1.0], [1.0, 2.0], "edges"),
        ([2.0, 1.0], [1.0, 2.0], "edges"),
        ([0.0, 1.0], [1.0, 2.0], "edges"),
        ([math.inf, math.inf], [1.0, 2.0], "edges"),
        ([1.0, math.nan], [1.0, 2.0], "edges"),
        ([1.0, 2.0], [1.0, math.nan], "counts"),
        ([1.0, 2.0], [1.0, -2.0], "counts"),
    ],
)
def test_histogram_invalid_buckets_raise(edges: list[float], counts: list[float], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        LengthHistogram(np.array(edges), np.array(counts))


@pytest.mark.parametrize("bad", [math.nan, 0.0, -1.0, math.inf])
def test_histogram_invalid_mean_or_maximum_raises(bad: float) -> None:
    for name in ("mean_tokens", "maximum_tokens"):
        with pytest.raises(ValueError, match=name):
            LengthHistogram(np.array([1.0]), np.array([1.0]), **{name: bad})
