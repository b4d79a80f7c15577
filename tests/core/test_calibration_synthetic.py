"""What is learned of made windows whose truth is known: how far, how fast, in what order, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from plimsoll.core.engine_model.calibration.counter_window import (
    ContextLengths,
    WindowSums,
    context_lengths,
    fill_missing,
)
from plimsoll.core.engine_model.calibration.estimates import MODEL_MISFIT_SD, assess_quality, quantile_model
from plimsoll.core.engine_model.calibration.posterior_model import coefficients, initial_posterior, step_counts
from plimsoll.core.engine_model.calibration.posterior_update import rejection_reason, update, update_all
from plimsoll.core.engine_model.calibration.serialization import from_dict, to_dict
from plimsoll.core.engine_model.step_time import StepModel
from plimsoll.core.workload import from_samples
from tests.core.calibration_prediction import count_identified_directions, mean_model, predict_window
from tests.core.test_calibration import EVERY_S, FLOOR, KEY, SECONDS, bare, doubtful, fitted, prior_of, summed

# Made windows, whose truth is known.

TRUTH = StepModel(4.9e-3, -1.0e-3, 2.1e-5, 1.4e-9, 1.5e-5, 3.2e-8)
HOT_MODEL = replace(TRUTH, prefill_token_s=1.18 * TRUTH.prefill_token_s, prefill_pair_s=1.18 * TRUTH.prefill_pair_s)


def synthetic_windows(truth: StepModel, rng: np.random.Generator, count: int, start_s: float = 0.0) -> list[WindowSums]:
    """Windows of 15 s at random rates and mixes, each with 2 % of noise."""
    windows = []
    for number in range(count):
        batch, prompt, context = rng.uniform(5, 120), rng.uniform(200, 4000), rng.uniform(300, 4000)
        prefill_share = rng.uniform(0.02, 0.3)
        sums = np.array([1 - prefill_share, prefill_share, 0, 0, batch, batch * context])
        sums[2] = prefill_share * prompt
        sums[3] = sums[2] * prompt / 2
        steps = 15.0 / float(sums @ coefficients(truth))
        total = steps * sums
        noise = float(np.exp(rng.normal(0, 0.02)))
        windows.append(
            WindowSums(
                end_s=start_s + EVERY_S * number,
                busy_s=15.0 * noise,
                steps=steps,
                computed_tokens=total[2] + total[4],
                output_tokens=total[4],
                prompt_tokens=total[2],
                mean_running=batch,
                prefill_steps=total[1],
                prefill_pairs=total[3],
                cached_tokens_read=total[5],
            )
        )
    return windows


def test_posterior_many_mixes_identifies_all_but_pairs() -> None:
    posterior = fitted(synthetic_windows(TRUTH, np.random.default_rng(0), 400))
    found, true = coefficients(mean_model(posterior)), coefficients(TRUTH)
    assert assess_quality(posterior).sufficient
    assert count_identified_directions(posterior) == 5
    assert found[[0, 1, 2, 5]] == pytest.approx(true[[0, 1, 2, 5]], rel=0.06)
    assert found[4] == pytest.approx(true[4], rel=0.1)
    pairs_of_prior = posterior.prior.prefill_pair_s  # 4 % of the time: left where the common factor puts it
    assert found[3] == pytest.approx(pairs_of_prior, rel=0.3)


@pytest.mark.parametrize("count", [0, 3, 40])
def test_quantile_model_has_stated_quantile(count: int) -> None:
    rng = np.random.default_rng(2)
    prior = prior_of(FLOOR, 0.6)
    too_fast = 0
    for _ in range(100):
        factors = np.exp(rng.normal(0, 0.18) + rng.normal(0, 0.15, 6))
        values = np.maximum(factors * coefficients(prior), coefficients(FLOOR))
        truth = StepModel(values[0], values[1] - values[0], *values[2:])
        *observed, unseen = synthetic_windows(truth, rng, count + 1)
        sized = quantile_model(update_all(initial_posterior(prior, FLOOR), observed), 0.9, window=unseen)
        work = step_counts(unseen)
        too_fast += bool(work @ coefficients(sized) < work @ coefficients(truth))
    assert too_fast <= 15  # of 100 where 10 are meant; `MISFIT` makes it fewer


def test_quantile_model_converges_to_mean() -> None:
    windows = synthetic_windows(TRUTH, np.random.default_rng(3), 60)
    at = windows[0]
    work, margins = step_counts(at), []
    for count in (0, 5, 60):
        posterior = fitted(windows[:count])
        high, mean = quantile_model(posterior, 0.9, at), mean_model(posterior)
        margins.append(float(work @ coefficients(high) / (work @ coefficients(mean))) - 1)
        each = coefficients(quantile_model(posterior, 0.9))
        assert work @ each >= work @ coefficients(high) * (1 - 1e-9)  # each at its quantile is the dearer one
    assert margins[0] > 0.3
    assert margins[0] > margins[1] > margins[2] > NORMAL_90 * MODEL_MISFIT_SD


NORMAL_90 = 1.2815  # standard deviations


FOLLOWED_WITHIN = 16


@pytest.mark.parametrize(("before", "after"), [(TRUTH, HOT_MODEL), (HOT_MODEL, TRUTH)], ids=["heats up", "cools down"])
@pytest.mark.parametrize("seed", range(3))
def test_update_lasting_change_is_followed_in_16_windows(before: StepModel, after: StepModel, seed: int) -> None:
    rng = np.random.default_rng(seed)
    posterior = fitted(synthetic_windows(before, rng, 120))
    changed = synthetic_windows(after, rng, FOLLOWED_WITHIN, start_s=120 * EVERY_S)
    for window in changed:
        posterior = update(posterior, window)
    off = [
        float(step_counts(w) @ coefficients(mean_model(posterior))) / (15.0) - 1
        for w in synthetic_windows(after, rng, 50)
    ]
    assert abs(np.mean(off)) <= 0.03


@pytest.mark.parametrize("wild", [0.8, 1.3, 10.0])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("seed", [5, 6])
def test_update_outlier_window_keeps_estimate(wild: float, times: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    windows = synthetic_windows(TRUTH, rng, 60)
    before = fitted(windows)
    after = before
    for window in synthetic_windows(TRUTH, rng, times, start_s=windows[-1].end_s):
        assert rejection_reason(after, window) is None
        after = update(after, replace(window, busy_s=wild * window.busy_s))
    moved = [
        predict_window(after, w).busy_s / predict_window(before, w).busy_s for w in synthetic_windows(TRUTH, rng, 50)
    ]
    assert moved == pytest.approx([1.0] * 50, abs=0.005)
    assert assess_quality(after).noise_sd > assess_quality(before).noise_sd  # seen, and counted as doubt


def test_update_steady_speed_raises_no_change_alarm() -> None:
    posterior, weight = initial_posterior(prior_of(FLOOR, 0.75), FLOOR), 0.0
    for window in synthetic_windows(TRUTH, np.random.default_rng(11), 400):
        posterior = update(posterior, window)
        assert posterior.weight > 0.98 * weight
        weight = posterior.weight


def test_update_old_windows_decay_by_half_life() -> None:
    posterior = fitted(synthetic_windows(TRUTH, np.random.default_rng(6), 100))
    (window,) = synthetic_windows(TRUTH, np.random.default_rng(7), 1)
    later = update(posterior, replace(window, end_s=100 * EVERY_S + 1800))
    added = 1 - 50 / (window.steps + 50)
    assert later.weight == pytest.approx(posterior.weight / 2, abs=1 + added)
    much_later = update(posterior, replace(window, end_s=1e9))
    assert much_later.weight == pytest.approx(added)
    assert not assess_quality(much_later).sufficient


def test_update_all_replicas_of_different_speed_learns_mean() -> None:
    rng, posterior = np.random.default_rng(12), initial_posterior(prior_of(FLOOR, 0.75), FLOOR)
    for tick in range(60):
        four = zip(synthetic_windows(TRUTH, rng, 4), (0.9, 0.9, 1.1, 1.1), strict=True)
        posterior = update_all(posterior, [replace(w, end_s=EVERY_S * tick, busy_s=f * w.busy_s) for w, f in four])
    assert posterior.weight > 150  # no alarm
    off = [predict_window(posterior, window).busy_s / 15.0 - 1 for window in synthetic_windows(TRUTH, rng, 50)]
    assert abs(np.mean(off)) <= 0.02
    assert 0.08 < assess_quality(posterior).noise_sd < 0.12


def test_update_all_reversed_batch_is_equal() -> None:
    windows = synthetic_windows(TRUTH, np.random.default_rng(8), 30)
    start = initial_posterior(prior_of(FLOOR, 0.75), FLOOR)
    one, other = update_all(start, windows), update_all(start, windows[::-1])
    assert other.information == pytest.approx(one.information, rel=1e-12, abs=1e-12)
    assert coefficients(mean_model(other)) == pytest.approx(coefficients(mean_model(one)), rel=1e-9)


def test_update_reversed_windows_gives_same_estimate() -> None:
    windows = [replace(window, end_s=0.0) for window in synthetic_windows(TRUTH, np.random.default_rng(9), 60)]
    one, other = fitted(windows), fitted(windows[::-1])
    assert coefficients(mean_model(other))[[0, 2, 5]] == pytest.approx(
        coefficients(mean_model(one))[[0, 2, 5]], rel=0.01
    )


def test_initial_posterior_equals_prior() -> None:
    prior = prior_of(FLOOR, 0.75)
    posterior = initial_posterior(prior, FLOOR)
    assert coefficients(mean_model(posterior)) == pytest.approx(coefficients(prior))
    assert coefficients(quantile_model(posterior, 0.5)) == pytest.approx(coefficients(prior))
    doubtful(posterior, "0 measured windows")
    assert count_identified_directions(posterior) == 0


def test_fill_missing_lengths_complete_missing_counters_only() -> None:
    whole = summed("8b_chat@15", SECONDS["8b_chat@15"])
    lengths = ContextLengths(1188.0, 820.0, 1337.0)
    assert fill_missing(whole, lengths) == whole
    some = fill_missing(replace(whole, prefill_pairs=None), lengths)
    assert some.prefill_pairs == pytest.approx(820.0 * whole.prompt_tokens)
    assert (some.prefill_steps, some.is_exact) == (whole.prefill_steps, True)
    steps = fill_missing(bare(whole), lengths).prefill_steps
    assert steps == pytest.approx(whole.prefill_steps, rel=0.1)
    with pytest.raises(ValueError, match="positive"):
        fill_missing(whole, ContextLengths(0.0, 820.0, 1337.0))


def test_context_lengths_of_workload_are_token_weighted() -> None:
    workload = from_samples([1000.0, 10_000.0], [0.0, 96.0], [100.0, 300.0])
    lengths = context_lengths(workload, 8192)
    assert lengths.chunk_tokens == pytest.approx(11_000 / 3)
    assert lengths.prefill_context_tokens == pytest.approx((1000 * 500 + 10_000 * 5096) / 11_000)
    assert lengths.decode_context_tokens == pytest.approx((100 * 1050 + 300 * 10_246) / 400)
    with pytest.raises(ValueError, match="above 0"):
        context_lengths(workload, 0)


def test_predict_window_speculative_decoding_counts_sequences() -> None:
    posterior = initial_posterior(prior_of(FLOOR, 0.75), FLOOR)
    plain = summed("8b_short@30", SECONDS["8b_short@30"])
    output = 2.5 * plain.mean_running * plain.steps
    drafted = replace(plain, output_tokens=output, computed_tokens=plain.prompt_tokens + output)
    assert predict_window(posterior, drafted).busy_s == pytest.approx(predict_window(posterior, plain).busy_s, rel=0.02)


@pytest.mark.parametrize("quantile", [0.49, 1.0, math.nan])
def test_quantile_model_quantile_below_half_raises(quantile: float) -> None:
    with pytest.raises(ValueError, match="pessimistic quantile"):
        quantile_model(initial_posterior(prior_of(FLOOR, 0.75), FLOOR), quantile)


def test_quantile_model_at_window_without_context_sums_raises() -> None:
    (window,) = synthetic_windows(TRUTH, np.random.default_rng(0), 1)
    posterior = initial_posterior(prior_of(FLOOR, 0.75), FLOOR)
    with pytest.raises(ValueError, match="absent"):
        quantile_model(posterior, 0.9, window=bare(window))
    with pytest.raises(ValueError, match="too few"):
        quantile_model(posterior, 0.9, window=replace(window, steps=0.0, prefill_steps=0.0))


@pytest.mark.parametrize(
    ("prior", "half_life_s", "why"),
    [
        (replace(FLOOR, base_s=0.9 * FLOOR.base_s, any_prefill_s=0.0), 1800.0, "faster than its floor"),
        (replace(FLOOR, sequence_s=0.0), 1800.0, "faster than its floor"),
        (FLOOR, 1800.0, "takes time"),
        (prior_of(FLOOR, 0.75), 0.0, "half-life"),
        (prior_of(FLOOR, 0.75), math.nan, "half-life"),
    ],
)
def test_initial_posterior_with_invalid_prior_raises(prior: StepModel, half_life_s: float, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        initial_posterior(prior, FLOOR, half_life_s)


def test_posterior_round_trip_keeps_state() -> None:
    posterior = fitted(synthetic_windows(TRUTH, np.random.default_rng(0), 150))
    text = json.dumps(to_dict(posterior, KEY), separators=(",", ":"))
    assert len(text) <= 1024
    read = from_dict(json.loads(text), KEY, posterior.prior, FLOOR)
    assert coefficients(mean_model(read)) == pytest.approx(coefficients(mean_model(posterior)), rel=1e-4)
    assert assess_quality(read).message == assess_quality(posterior).message
    (window,) = synthetic_windows(TRUTH, np.random.default_rng(1), 1, start_s=150 * EVERY_S)
    assert update(read, window).weight == pytest.approx(update(posterior, window).weight)
    fresh = initial_posterior(posterior.prior, FLOOR)
    assert from_dict(to_dict(fresh, KEY), KEY, fresh.prior, FLOOR) == fresh
