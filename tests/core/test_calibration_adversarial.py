"""Counters that lie, clocks that jump, states that somebody edited: the posterior holds, never below the floor."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.core.engine_model.calibration.counter_window import WindowSums
from plimsoll.core.engine_model.calibration.estimates import assess_quality, quantile_model
from plimsoll.core.engine_model.calibration.posterior_model import (
    Posterior,
    coefficients,
    initial_posterior,
    step_counts,
)
from plimsoll.core.engine_model.calibration.posterior_update import rejection_reason, update, update_all
from plimsoll.core.engine_model.calibration.serialization import EngineKey, from_dict, to_dict
from plimsoll.core.engine_model.step_time import StepModel
from tests.core.calibration_prediction import mean_model, predict_window

FLOOR = StepModel(3.3e-3, -3.3e-3, 1.4e-5, 5e-10, 2e-6, 2.7e-8)
PRIOR = StepModel(4.5e-3, 0.0, 1.9e-5, 7e-10, 1.4e-5, 3.6e-8)
TRUTH = StepModel(4.9e-3, -1.0e-3, 2.1e-5, 1.0e-9, 1.5e-5, 3.2e-8)
KEY = EngineKey("model", "gpu", "tp1", "vllm 0.26.0")
INITIAL = initial_posterior(PRIOR, FLOOR)


def window(batch: float, end_s: float = 0.0, truth: StepModel = TRUTH, slowness: float = 1.0) -> WindowSums:
    """15 s at a steady batch; prompts of 1,000 tokens, contexts of 1,300."""
    prompt = 6 * batch
    sums = np.array([1 - prompt / 1000, prompt / 1000, prompt, 500 * prompt, batch, 1300 * batch])
    steps = 15.0 / float(sums @ coefficients(truth))
    _, prefill_steps, prompt, pairs, output, read = (float(value) for value in steps * sums)
    return WindowSums(
        end_s, 15.0 * slowness, steps, prompt + output, output, prompt, batch, 1.0, prefill_steps, pairs, read
    )


def learn(count: int = 60) -> Posterior:
    """After `count` windows at batches from 4 to 60."""
    rng = np.random.default_rng(4)
    posterior = INITIAL
    for number in range(count):
        batch, noise = float(rng.uniform(4, 60)), float(rng.normal(1, 0.02))
        posterior = update(posterior, window(batch, 15.0 * number, slowness=noise))
    return posterior


FITTED = learn()
GOOD = window(20.0, 15.0 * 60)


def assert_sound(posterior: Posterior) -> None:
    """Finite, nowhere faster than the floor, pessimism above the mean, and storable."""
    floor = coefficients(FLOOR)
    for model in (mean_model(posterior), quantile_model(posterior, 0.95), quantile_model(posterior, 0.95, window=GOOD)):
        assert np.isfinite(coefficients(model)).all()
        assert (coefficients(model) >= floor * (1 - 1e-12)).all()
    assert (coefficients(quantile_model(posterior, 0.95)) >= coefficients(mean_model(posterior)) * (1 - 1e-12)).all()
    text = json.dumps(to_dict(posterior, KEY), separators=(",", ":"), allow_nan=False)
    assert len(text) <= 1024
    from_dict(json.loads(text), KEY, PRIOR, FLOOR)


def test_update_valid_windows_become_known() -> None:
    assert assess_quality(FITTED).sufficient
    assert predict_window(FITTED, GOOD).busy_s == pytest.approx(15.0, rel=0.01)
    assert_sound(FITTED)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, 1e300])
@pytest.mark.parametrize("field", [field.name for field in fields(WindowSums) if field.name != "replica"])
def test_update_window_with_invalid_value_is_ignored(field: str, bad: float) -> None:
    if (field, bad) == ("end_s", -1.0):
        return  # a time has any sign
    assert update(FITTED, replace(GOOD, **{field: bad})) is FITTED


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"steps": 0.0, "prefill_steps": 0.0}, "too few"),
        ({"steps": 19.0, "prefill_steps": 0.0}, "too few"),
        ({"busy_s": 0.0}, "too few"),
        ({"coverage": 0.8}, "saw 80%"),
        ({"coverage": 1.2}, "saw 120%"),
        ({"mean_running": 0.6}, "idle"),
        ({"output_tokens": -50.0}, "reset"),
        ({"steps": -3000.0}, "reset"),
        ({"prompt_tokens": 0.0}, "not of the same moments"),
        ({"computed_tokens": 0.0, "output_tokens": 5e5}, "not of the same moments"),
        ({"prefill_steps": 1e5}, "more steps"),
        ({"busy_s": 1e7}, "for work of"),
        ({"steps": 1e7}, "faster than the hardware"),
        ({"cached_tokens_read": 1e12}, "faster than the hardware"),
        ({"busy_s": 1e-7}, "faster than the hardware"),
    ],
)
def test_rejection_reason_names_reason_of_invalid_window(changes: dict[str, float], why: str) -> None:
    bad = replace(GOOD, **changes)
    assert why in str(rejection_reason(FITTED, bad))
    assert update(FITTED, bad) is FITTED
    with pytest.raises(ValueError, match="nothing can be expected"):
        predict_window(FITTED, bad)


def test_update_engine_reset_in_window_keeps_estimate() -> None:
    half = replace(GOOD, steps=GOOD.steps / 2, computed_tokens=GOOD.computed_tokens / 2)
    half = replace(half, output_tokens=GOOD.output_tokens / 2, prompt_tokens=GOOD.prompt_tokens / 2)
    half = replace(half, prefill_steps=None, prefill_pairs=None, cached_tokens_read=None)  # busy seconds go on
    after = update(FITTED, half)
    assert coefficients(mean_model(after)) == pytest.approx(coefficients(mean_model(FITTED)), rel=0.01)


def test_update_all_without_valid_windows_is_identity() -> None:
    assert update_all(FITTED, ()) is FITTED
    assert update_all(FITTED, [replace(GOOD, steps=math.nan)] * 3) is FITTED


def test_update_all_skips_invalid_windows_of_batch() -> None:
    bad = [replace(GOOD, busy_s=math.nan), replace(GOOD, steps=1e7), replace(GOOD, coverage=0.1)]
    assert update_all(FITTED, [bad[0], GOOD, *bad[1:]]) == update_all(FITTED, [GOOD])


def test_predict_window_missing_counter_is_not_zero() -> None:
    absent = replace(GOOD, prefill_steps=None, prefill_pairs=None, cached_tokens_read=None)
    zero = replace(GOOD, prefill_steps=0.0, prefill_pairs=0.0, cached_tokens_read=0.0)
    assert predict_window(FITTED, absent).busy_s == pytest.approx(predict_window(FITTED, GOOD).busy_s, rel=0.05)
    assert predict_window(FITTED, absent).sd_s > 2 * predict_window(FITTED, GOOD).sd_s
    assert predict_window(FITTED, zero).busy_s < 0.95 * predict_window(FITTED, GOOD).busy_s


def test_update_huge_consistent_window_counts_once() -> None:
    names = ["busy_s", "steps", "computed_tokens", "output_tokens", "prompt_tokens"]
    names += ["prefill_steps", "prefill_pairs", "cached_tokens_read"]
    huge = replace(GOOD, **{name: 1e4 * getattr(GOOD, name) for name in names})
    after = update(FITTED, huge)
    assert after.weight <= FITTED.weight + 1
    assert_sound(after)


def test_update_clock_going_backwards_keeps_knowledge() -> None:
    back = update(FITTED, replace(GOOD, end_s=-1e6))
    assert back.weight > FITTED.weight
    assert back.updated_s == -1e6
    again = update(back, replace(GOOD, end_s=-1e6 + 15))
    assert again.weight > back.weight
    assert_sound(again)


def test_update_clock_jump_ahead_reduces_knowledge() -> None:
    shifted = update(FITTED, replace(GOOD, end_s=1e14))
    assert not assess_quality(shifted).sufficient
    assert assess_quality(shifted).base_sd > assess_quality(FITTED).base_sd
    assert_sound(shifted)


def test_update_persistent_garbage_becomes_unknown() -> None:
    rng = np.random.default_rng(0)
    posterior = FITTED
    for number in range(60):
        slowness = float(rng.uniform(1.0, 10.0))
        posterior = update(posterior, window(float(rng.uniform(4, 60)), 900.0 + 15 * number, slowness=slowness))
        assert_sound(posterior)
    assert not assess_quality(posterior).sufficient


def test_estimate_of_data_at_floor_stays_above_floor() -> None:
    posterior = INITIAL
    for number in range(100):
        posterior = update(posterior, window(4.0 + number % 50, 15.0 * number, FLOOR, slowness=0.95))
    assert_sound(posterior)
    assert predict_window(posterior, window(20.0, truth=FLOOR)).busy_s == pytest.approx(15.0, rel=0.02)


def test_update_overload_does_not_distort_estimate() -> None:
    posterior = FITTED
    for number in range(50):  # batches far beyond what was learned, 40 % slower than the line
        posterior = update(posterior, window(400.0, 900.0 + 15 * number, replace(TRUTH, sequence_s=1e-4), slowness=1.4))
        assert_sound(posterior)
    work = step_counts(GOOD)
    assert work @ coefficients(mean_model(posterior)) == pytest.approx(15.0, rel=0.6)


ANY = st.floats(allow_nan=True, allow_infinity=True)
ANY_WINDOW = st.builds(
    WindowSums, *[ANY] * 8, prefill_steps=st.none() | ANY, prefill_pairs=st.none() | ANY, cached_tokens_read=st.none()
)
NEAR_WINDOW = st.builds(
    lambda batch, slowness, end_s, exact: (
        window(batch, end_s, slowness=slowness)
        if exact
        else replace(
            window(batch, end_s, slowness=slowness), prefill_steps=None, prefill_pairs=None, cached_tokens_read=None
        )
    ),
    st.floats(1, 150),
    st.floats(0.5, 15),
    st.floats(-1e6, 1e6),
    st.booleans(),
)


@given(ANY_WINDOW)
@settings(max_examples=200)
def test_update_arbitrary_floats_never_raises(anything: WindowSums) -> None:
    after = update(FITTED, anything)
    if after is not FITTED:
        assert_sound(after)


@given(st.lists(NEAR_WINDOW, min_size=1, max_size=8))
@settings(max_examples=60)
def test_estimate_of_plausible_windows_stays_above_floor(windows: list[WindowSums]) -> None:
    posterior = INITIAL
    for one in windows:
        posterior = update(posterior, one)
        assert_sound(posterior)
    assert_sound(update_all(INITIAL, windows))


@given(st.lists(NEAR_WINDOW, min_size=2, max_size=8), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_update_all_is_independent_of_order(windows: list[WindowSums], rng: Any) -> None:
    mixed = list(windows)
    rng.shuffle(mixed)
    one, other = update_all(FITTED, windows), update_all(FITTED, mixed)
    assert other.moment == pytest.approx(one.moment, rel=1e-9, abs=1e-9)
    assert (other.weight, other.noise_sum) == pytest.approx((one.weight, one.noise_sum), rel=1e-9)


STORED = to_dict(FITTED, KEY)


@pytest.mark.parametrize("data", [None, "", 1, [], {}, {"version": 1}])
def test_from_dict_invalid_object_raises(data: object) -> None:
    with pytest.raises(ValueError, match="not a calibration"):
        from_dict(data, KEY, PRIOR, FLOOR)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"version": 2}, "not a calibration: version 2"),
        ({"engine": ["other", "gpu", "tp1", "vllm 0.26.0"]}, "is of"),
        ({"engine": None}, "engine: None is not a list"),
        ({"prior": [1.0] * 6}, "another prior"),
        ({"prior": [1.0] * 5}, "prior: .* 5 parts, not 6"),
        ({"prior": "abcdef"}, "prior: .* not a list"),
        ({"weight": -1.0}, "weight: -1.0 is not a number of at least 0"),
        ({"weight": "12"}, "not a number"),
        ({"weight": True}, "not a number"),
        ({"weight": 1e5}, "add up"),
        ({"noise": [1.0]}, "noise: .* 1 parts, not 2"),
        ({"noise": [1.0, -1.0]}, "noise: -1.0 is not a number of at least 0"),
        ({"shift": [math.nan, 0.0]}, "not a number"),
        ({"updatedSeconds": "now"}, "not a number"),
        ({"updatedSeconds": math.nan}, "not a number"),
        ({"moment": [1e300] * 7}, "not a number"),
        ({"information": [0.0] * 28}, "add up"),
        ({"information": [-value for value in STORED["information"]]}, "add up"),
    ],
)
def test_from_dict_single_invalid_field_raises(changes: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        from_dict({**STORED, **changes}, KEY, PRIOR, FLOOR)


def test_from_dict_indefinite_information_raises() -> None:
    edited = list(STORED["information"])
    edited[0] -= 1000.0  # the sum is kept by its neighbour
    edited[1] += 500.0
    with pytest.raises(ValueError, match="sum of squares"):
        from_dict({**STORED, "information": edited}, KEY, PRIOR, FLOOR)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=3) | st.integers(),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@given(st.sampled_from(sorted(STORED)), JSON)
@settings(max_examples=150)
def test_from_dict_any_value_is_read_or_raises_value_error(field: str, value: object) -> None:
    try:
        read = from_dict({**STORED, field: value}, KEY, PRIOR, FLOOR)
    except ValueError:
        return
    assert np.isfinite(coefficients(mean_model(read))).all()
    assert (coefficients(mean_model(read)) >= coefficients(FLOOR) * (1 - 1e-12)).all()
