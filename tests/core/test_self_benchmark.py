"""Priors from ladders: what a known engine's ladder gives back, what it cannot tell, and what nonsense does to it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plimsoll.core.capacity.tier_model import HTTP_OVERHEAD_PER_TOKEN_S, HTTP_OVERHEAD_S
from plimsoll.core.engine_model import roofline
from plimsoll.core.engine_model.calibration.posterior_model import coefficients, initial_posterior
from plimsoll.core.engine_model.self_benchmark import (
    FLOOR_SHARE,
    choose_prior,
    find_accelerator,
    fit_step_model,
    floor_model,
    nonnegative_least_squares,
)
from plimsoll.core.engine_model.step_time import StepModel
from plimsoll.core.ports import EngineInfo, SelfBenchmark
from plimsoll.core.types import Unavailable
from tests.core.test_roofline import LLAMA_8B, LLAMA_70B, QWEN_32B

LENGTHS, BATCHES, CONTEXT = (16, 128, 1024), (1, 4, 8), 24
# Fits to vLLM on one H200, and to a tiny model on one CPU core.
H200_8B = StepModel(4.889e-3, -1.39e-3, 2.111e-5, 1.373e-9, 1.529e-5, 3.165e-8)
H200_70B = StepModel(2.067e-2, 2.32e-2, 1.022e-4, 1.407e-8, 7.65e-5, 8.57e-8)
CPU = StepModel(2.25e-3, 0.0, 2.44e-5, 5.8e-8, 8.26e-5, 2.87e-7)


def plain(base: float, token: float, sequence: float) -> StepModel:
    """A model of nothing but what a ladder can tell."""
    return StepModel(base, 0.0, token, 0.0, sequence, 0.0)


def run_benchmark(
    model: StepModel,
    lengths: Sequence[int] = LENGTHS,
    batches: Sequence[int] = BATCHES,
    budget: int = 8192,
    http_s: float = HTTP_OVERHEAD_S,
    long: int | None = None,
) -> SelfBenchmark:
    """The ladder that an engine of this model has. long: context of one more batch, of the largest size."""
    sizes = [(b, CONTEXT) for b in batches] + ([(max(batches), long)] if long else [])
    return SelfBenchmark(
        tuple((n, float(model.prefill_s(n, 0, budget)) + http_s + HTTP_OVERHEAD_PER_TOKEN_S * n) for n in lengths),
        tuple((b, c, float(model.step_s(0, 0, b, b * c))) for b, c in sizes),
    )


def make_engine_info(**known: Any) -> EngineInfo:
    return EngineInfo(**{"engine": "vllm", "engine_version": "0.32.0", "accelerator": "cpu", "gpus": 0, **known})


def assert_near(found: StepModel, truth: StepModel, share: float) -> None:
    for name in ("base_s", "prefill_token_s", "sequence_s"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=share), name


seconds = st.floats(1e-4, 0.2)
models = st.builds(plain, seconds, st.floats(2e-6, 1e-3), st.floats(1e-6, 1e-3))


@given(models, st.floats(0.0, 0.02), st.sampled_from((256, 512, 8192)))
def test_prior_exact_benchmark_recovers_model(model: StepModel, http_s: float, budget: int) -> None:
    assert_near(fit_step_model(run_benchmark(model, budget=budget, http_s=http_s), budget), model, 1e-3)


@given(models, st.integers(0, 2**32 - 1))
def test_prior_noise_of_1_percent_gives_few_percent_error(model: StepModel, seed: int) -> None:
    noise = np.random.default_rng(seed).normal(1.0, 0.01, 6).clip(0.97, 1.03).tolist()
    exact = run_benchmark(model)
    noisy = SelfBenchmark(
        tuple((n, t * e) for (n, t), e in zip(exact.prefill, noise[:3], strict=True)),
        tuple((b, c, t * e) for (b, c, t), e in zip(exact.decode, noise[3:], strict=True)),
    )
    found = fit_step_model(noisy)
    for size in BATCHES:
        step, true = float(found.step_s(0, 0, size, 0)), float(model.step_s(0, 0, size, 0))
        # A sequence that noise hides costs what a prompt token does.
        assert 0.95 * true <= step <= 1.05 * true + size * max(0.0, found.prefill_token_s - model.sequence_s)


@pytest.mark.parametrize(("model", "share"), [(H200_8B, 0.06), (H200_70B, 0.08)])
def test_prior_measured_engines_is_within_tolerance(model: StepModel, share: float) -> None:
    assert_near(fit_step_model(run_benchmark(model)), model, share)


@given(models, st.floats(1e-8, 1e-5))
def test_prior_long_context_batch_identifies_cached_token(model: StepModel, cached_token_s: float) -> None:
    truth = replace(model, cached_token_s=cached_token_s)
    found = fit_step_model(run_benchmark(truth, long=1032))
    assert_near(found, truth, 1e-3)
    assert found.cached_token_s == pytest.approx(cached_token_s, rel=1e-3)


@pytest.mark.parametrize(("model", "share"), [(H200_8B, 0.06), (H200_70B, 0.08)])
def test_prior_measured_long_contexts_is_within_tolerance(model: StepModel, share: float) -> None:
    found = fit_step_model(run_benchmark(model, long=1032))
    assert_near(found, model, share)
    assert found.cached_token_s == pytest.approx(model.cached_token_s, rel=0.01)
    chat = (0, 0, 60, 60 * 1100)
    assert float(found.step_s(*chat)) == pytest.approx(float(model.step_s(*chat)), rel=0.02)


def test_prior_similar_contexts_have_no_cached_token_cost() -> None:
    assert fit_step_model(run_benchmark(CPU, long=7 * CONTEXT)).cached_token_s == 0
    assert fit_step_model(run_benchmark(CPU, long=8 * CONTEXT)).cached_token_s > 0


def test_prior_faster_long_context_has_no_cached_token_cost() -> None:
    ladder = run_benchmark(plain(5e-3, 2e-5, 1e-4), long=1032)
    *short, (size, context, took) = ladder.decode
    found = fit_step_model(ladder._replace(decode=(*short, (size, context, 0.99 * took))))
    assert found.cached_token_s == 0
    assert found.base_s == pytest.approx(5e-3, rel=0.02)


def test_prior_short_prompts_have_no_pair_cost() -> None:
    found = fit_step_model(run_benchmark(CPU))
    assert found.prefill_pair_s == 0
    at_1024 = float(found.prefill_s(1024, 0, 8192))
    assert at_1024 == pytest.approx(float(CPU.prefill_s(1024, 0, 8192)), rel=0.15)


def test_prior_unidentified_coefficients_are_zero() -> None:
    found = fit_step_model(run_benchmark(H200_8B))
    assert (found.any_prefill_s, found.prefill_pair_s, found.cached_token_s) == (0.0, 0.0, 0.0)


def test_prior_prefill_only_recovers_base_and_token_cost() -> None:
    model = plain(5e-3, 2e-5, 1e-5)
    found = fit_step_model(run_benchmark(model, batches=()))
    assert found.base_s == pytest.approx(model.base_s, rel=1e-3)
    assert found.prefill_token_s == pytest.approx(model.prefill_token_s, rel=1e-3)
    assert found.sequence_s == found.prefill_token_s  # a decoding sequence sends one token


def test_prior_prefill_only_base_includes_extra_http_time() -> None:
    found = fit_step_model(run_benchmark(plain(5e-3, 2e-5, 1e-5), batches=(), http_s=2 * HTTP_OVERHEAD_S))
    assert found.base_s == pytest.approx(5e-3 + HTTP_OVERHEAD_S, rel=1e-3)


def test_prior_http_share_is_at_most_half_of_a_point() -> None:
    quick = SelfBenchmark(((16, 2e-3), (128, 2.5e-3)), ())
    found = fit_step_model(quick)
    assert found.base_s > 0.5e-3
    assert found.prefill_token_s > 0


def test_prior_single_batch_size_uses_token_cost_per_sequence() -> None:
    model = plain(5e-3, 2e-5, 2e-5)
    found = fit_step_model(run_benchmark(model, batches=(4,)))
    assert_near(found, model, 1e-3)


def test_prior_single_prompt_length_with_batches_is_enough() -> None:
    model = plain(5e-3, 2e-5, 1e-4)
    assert_near(fit_step_model(run_benchmark(model, lengths=(1024,))), model, 1e-3)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (((16, 0.05), (128, 0.04), (1024, 0.03)), ()),  # longer prompts take less
        (((16, 0.05), (128, 0.04), (1024, 0.03)), ((1, 24, 0.006), (8, 24, 0.005))),  # and so do larger batches
        (((16, 0.02), (1024, 0.02)), ((1, 24, 0.02), (8, 24, 0.02))),  # nothing costs anything
        (((16, 0.002), (1024, 0.03)), ((1, 24, 0.001), (8, 24, 0.008))),  # a step without a base
        (((16, 1e-7), (17, 3600.0)), ()),
        (((1, 1e-7), (10_000_000, 1e-7)), ((1, 1, 3600.0), (10_000_000, 1, 1e-7))),
    ],
)
def test_prior_inverted_measurements_give_slow_model(prefill: Any, decode: Any) -> None:
    found = fit_step_model(SelfBenchmark(prefill, decode))
    assert min(found.base_s, found.prefill_token_s, found.sequence_s) > 0
    longest, took = max(prefill)
    assert found.base_s + found.prefill_token_s * longest >= 0.4 * (
        took - HTTP_OVERHEAD_S - HTTP_OVERHEAD_PER_TOKEN_S * longest
    )
    size, _, step = max(decode, default=(1, 0, 0.0))
    assert found.base_s + found.sequence_s * size >= 0.4 * step


def test_prior_equal_prompt_times_charge_longest_prompt() -> None:
    found = fit_step_model(SelfBenchmark(((16, 0.014), (128, 0.014)), ()))
    assert found.prefill_token_s >= (0.014 - HTTP_OVERHEAD_S - HTTP_OVERHEAD_PER_TOKEN_S * 128) / 128 * 0.99


def test_prior_zero_base_uses_fastest_step() -> None:
    steps = tuple((size, 24, 1e-3 * size) for size in (1, 4, 8))
    assert fit_step_model(SelfBenchmark(((16, 0.01), (1024, 0.03)), steps)).base_s == pytest.approx(1e-3)


NONSENSE = [
    (), None, 7, "ab", b"ab", {}, {"a": 1}, ((),), (None,), ("ab",), ((16,),), ((16, 0.1, 2, 3),), ((0, 0.1),),
    ((-1, 0.1),), ((16, 0.0),), ((16, -1.0),), ((16, math.nan),), ((16, math.inf),), ((16, 1e300),), ((16, 10**400),),
    ((10**400, 0.1),), ((True, 0.1),), ((16, True),), (("16", 0.1),), ((16, "0.1"),), ((16.5, 0.1),), ((16, None),),
    (([16], 0.1),), ((16, [0.1]),),
]  # fmt: skip


@pytest.mark.parametrize("points", NONSENSE, ids=repr)
def test_prior_invalid_points_are_skipped(points: Any) -> None:
    with pytest.raises(ValueError, match="a self-benchmark needs"):
        fit_step_model(SelfBenchmark(points, ()))
    model = plain(5e-3, 2e-5, 1e-4)
    good = run_benchmark(model)
    if isinstance(points, tuple):
        assert_near(fit_step_model(SelfBenchmark((*points, *good.prefill), (*points, *good.decode))), model, 1e-3)
    assert fit_step_model(SelfBenchmark(good.prefill, points)).base_s > 0


def test_prior_without_prompts_raises() -> None:
    with pytest.raises(ValueError, match="a prompt of one length at least"):
        fit_step_model(run_benchmark(H200_8B, lengths=()))
    with pytest.raises(ValueError, match="one prompt length"):
        fit_step_model(run_benchmark(H200_8B, lengths=(16,), batches=()))


def test_prior_reads_bounded_number_of_points() -> None:
    model = plain(5e-3, 2e-5, 1e-4)
    good = run_benchmark(model)
    assert_near(fit_step_model(SelfBenchmark(good.prefill * 20 + ((16, 99.0),) * 10**5, good.decode * 20)), model, 1e-3)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from((16, 0.01)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
points = json_values | st.lists(
    st.lists(json_values | st.floats(1e-6, 10.0) | st.integers(1, 9), max_size=3), max_size=4
)


@given(points, points, json_values)
@example([[1, 1]], [], None)
def test_prior_invalid_input_raises_named_error_only(prefill: Any, decode: Any, budget: Any) -> None:
    try:
        found = fit_step_model(SelfBenchmark(prefill, decode), budget)
    except ValueError as error:
        if not str(error).startswith("a self-benchmark "):
            raise
    else:
        assert initial_posterior(found, floor_model(found)).prior == found


@given(models)
def test_calibration_accepts_prior_and_floor(model: StepModel) -> None:
    found = fit_step_model(run_benchmark(model))
    low = floor_model(found)
    assert (coefficients(low) <= coefficients(found)).all()
    assert initial_posterior(found, low).floor == low


def test_floor_is_share_of_every_coefficient() -> None:
    model = replace(H200_8B, cached_token_s=0.0)
    assert floor_model(model, 0.5) == StepModel(*(0.5 * part for part in astuple(model)))
    assert floor_model(H200_8B).base_s == FLOOR_SHARE * H200_8B.base_s


def test_floor_of_sequence_is_at_most_floor_of_token() -> None:
    assert floor_model(plain(1.0, 0.25, 0.5), 0.5) == plain(0.5, 0.125, 0.125)
    assert floor_model(plain(1.0, 0.5, 0.25), 0.5) == plain(0.5, 0.25, 0.125)


def test_floor_of_cached_token_is_zero() -> None:
    assert floor_model(H200_8B).cached_token_s == 0


@pytest.mark.parametrize("share", [0.0, -1.0, 1.1, math.nan, math.inf])
def test_floor_share_out_of_range_raises(share: float) -> None:
    with pytest.raises(ValueError, match="a floor is a share"):
        floor_model(H200_8B, share)


@pytest.mark.parametrize("truth", [H200_8B, plain(5e-3, 2e-5, 1e-4), CPU])
@pytest.mark.parametrize("rung", range(7))
@pytest.mark.parametrize("slower", [1.05, 1.2, 2.0, 5.0, 20.0])
def test_prior_single_outlier_keeps_floor_below_truth(truth: StepModel, rung: int, slower: float) -> None:
    exact = run_benchmark(truth, long=1032)
    disturbed = SelfBenchmark(
        tuple((n, t * (slower if k == rung else 1)) for k, (n, t) in enumerate(exact.prefill)),
        tuple((b, c, t * (slower if k + 3 == rung else 1)) for k, (b, c, t) in enumerate(exact.decode)),
    )
    found = fit_step_model(disturbed)
    assert 0.65 <= found.base_s / fit_step_model(exact).base_s <= 1.4
    assert 0.7 <= found.prefill_token_s / fit_step_model(exact).prefill_token_s <= 4
    assert floor_model(found).base_s <= truth.base_s
    assert floor_model(found).prefill_token_s <= truth.prefill_token_s
    assert floor_model(found).sequence_s <= truth.sequence_s


@pytest.mark.parametrize("slower", [2.0, 3.0])
def test_floor_of_slow_benchmark_stays_below_truth(slower: float) -> None:
    model = plain(5e-3, 2e-5, 1e-4)
    exact = run_benchmark(model)
    disturbed = SelfBenchmark(
        tuple((n, slower * t) for n, t in exact.prefill), tuple((b, c, slower * t) for b, c, t in exact.decode)
    )
    assert (coefficients(floor_model(fit_step_model(disturbed))) <= coefficients(model)).all()


def test_choose_prior_known_accelerator_uses_roofline() -> None:
    shape = roofline.model_shape(LLAMA_70B)
    gpu = roofline.ACCELERATORS["H100-SXM"]
    chosen = choose_prior(
        make_engine_info(
            accelerator="NVIDIA H100 80GB HBM3", gpus=2, config=LLAMA_70B, self_benchmark=run_benchmark(CPU)
        )
    )
    assert chosen == (roofline.prior(shape, gpu, 2), roofline.physical_floor(shape, gpu, 2))


def test_find_accelerator_simulated_name_is_accepted() -> None:
    assert find_accelerator("H200") is roofline.ACCELERATORS["H200"]
    assert choose_prior(make_engine_info(accelerator="H200", gpus=1, config=LLAMA_8B)) == choose_prior(
        make_engine_info(accelerator="NVIDIA-H200", gpus=1, config=LLAMA_8B)
    )


@pytest.mark.parametrize("name", roofline.ACCELERATORS)
def test_find_accelerator_table_covers_all_driver_names(name: str) -> None:
    drivers = ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB")
    drivers += ("NVIDIA L40S", "NVIDIA L4", "NVIDIA B200", "AMD Instinct MI300X")
    assert [find_accelerator(driver) for driver in drivers].count(roofline.ACCELERATORS[name]) == 1


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA A10G", "cpu", "", None, 7, [], {}])
def test_find_accelerator_similar_name_is_unknown(name: Any) -> None:
    assert find_accelerator(name) is None


def test_choose_prior_unknown_accelerator_uses_benchmark() -> None:
    model = plain(5e-3, 2e-5, 1e-4)
    ladder = run_benchmark(model, budget=512)
    chosen = choose_prior(make_engine_info(config=LLAMA_8B, token_budget=512, self_benchmark=ladder))
    assert isinstance(chosen, tuple)
    assert_near(chosen[0], model, 1e-3)
    assert chosen[1] == floor_model(chosen[0])


@pytest.mark.parametrize(
    ("known", "why"),
    [
        ({}, "'cpu' is in no table, and the engine reports no self-benchmark"),
        ({"accelerator": "H200"}, "config.json was not found, and the engine reports no self-benchmark"),
        ({"accelerator": "H200", "config": {}}, "tells no shape: model_type is None"),
        (
            {"accelerator": "H200", "config": {"model_type": []}},
            "tells no shape: .*, and the engine reports no self-benchmark",
        ),
        ({"accelerator": "H200", "config": LLAMA_8B, "gpus": 5}, "tensor must divide"),
        ({"accelerator": "H200", "config": {**LLAMA_8B, "vocab_size": 10**400}}, "tells no shape"),
        ({"self_benchmark": SelfBenchmark((), ())}, "'cpu' is in no table, and a self-benchmark needs"),
        ({"self_benchmark": {"prefill": []}}, "the engine reports no self-benchmark"),
        ({"accelerator": "x" * 9999}, "is in no table"),
    ],
)
def test_choose_prior_without_information_is_unavailable(known: dict[str, Any], why: str) -> None:
    found = choose_prior(make_engine_info(**known))
    assert isinstance(found, Unavailable)
    assert re.search(why, found.reason)
    assert len(found.reason) < 500


def test_choose_prior_unsupported_model_uses_benchmark() -> None:
    windows = {**QWEN_32B, "sliding_window": 4096, "use_sliding_window": True, "max_position_embeddings": 40960}
    chosen = choose_prior(
        make_engine_info(accelerator="H200", gpus=1, config=windows, self_benchmark=run_benchmark(H200_8B))
    )
    assert chosen == (fit_step_model(run_benchmark(H200_8B)), floor_model(fit_step_model(run_benchmark(H200_8B))))


def test_choose_prior_narrow_model_has_floor_below_prior() -> None:
    narrow = {**LLAMA_8B, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
              "intermediate_size": 64, "num_hidden_layers": 1}  # fmt: skip
    chosen = choose_prior(make_engine_info(accelerator="L4", gpus=1, config=narrow))
    assert isinstance(chosen, tuple)
    assert initial_posterior(*chosen).prior == chosen[0]


@given(
    st.sampled_from(tuple(roofline.ACCELERATORS)),
    st.integers(0, 9),
    st.dictionaries(st.sampled_from(tuple(LLAMA_8B)), json_values),
)
def test_choose_prior_any_config_returns_valid_prior(name: str, gpus: int, changes: dict[str, object]) -> None:
    known = make_engine_info(
        accelerator=name, gpus=gpus, config={**LLAMA_8B, **changes}, self_benchmark=run_benchmark(H200_8B)
    )
    chosen = choose_prior(known)
    assert isinstance(chosen, tuple)
    assert initial_posterior(*chosen).prior == chosen[0]


@given(json_values, json_values, json_values, json_values, json_values)
def test_choose_prior_any_engine_info_is_valid_or_unavailable(a: Any, b: Any, c: Any, d: Any, e: Any) -> None:
    found = choose_prior(replace(make_engine_info(), accelerator=a, gpus=b, config=c, self_benchmark=d, token_budget=e))
    if isinstance(found, Unavailable):
        assert 0 < len(found.reason) < 500
    else:
        assert initial_posterior(*found).prior == found[0]


# Columns alike but for 1e-16 have no optimum in doubles.
ENTRIES = st.floats(-10, 10).map(lambda entry: round(entry, 4))


@given(st.lists(st.lists(ENTRIES, min_size=3, max_size=3), min_size=1, max_size=6), st.randoms())
def test_nonnegative_least_squares_meets_optimality(rows: list[list[float]], random: Any) -> None:
    matrix = np.array(rows)
    desired = np.array([random.uniform(-5, 5) for _ in rows])
    found = np.array(nonnegative_least_squares(matrix, desired))
    gradient = matrix.T @ (matrix @ found - desired)
    scale = 1e-6 * (1 + np.abs(matrix).max() ** 2)
    assert (found >= 0).all()
    assert (gradient >= -scale * 100).all()
    assert np.abs(gradient[found > 0]).max(initial=0.0) <= scale * 100
