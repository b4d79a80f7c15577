"""The time of a step: exactly the law, and the deviations one at a time."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core.engine_model.step_time import StepModel
from plimsoll.sim.profiles import StepCoefficients, load
from simulated.plant import StepTimePlant
from tests.engine_image.simulated.core_harness import FITTED_STEPS, make_profile

LOADS = ((0, 0.0, 0, 0), (0, 0.0, 1, 700), (512, 512 * 256.0, 0, 0), (8192, 3e7, 120, 90_000), (100, 5e4, 255, 700_000))


@pytest.mark.parametrize("load_", LOADS)
@pytest.mark.parametrize("name", ["h200-8b-hot", "h200-8b-cool", "h200-70b", "h100x2-32b"])
def test_plant_step_time_equals_step_model(name: str, load_: tuple[int, float, int, int]) -> None:
    made = load(name)
    law = StepModel(*astuple(made.coefficients))
    assert StepTimePlant(made).step_s(0.0, *load_) == pytest.approx(float(law.step_s(*load_)), rel=1e-12)


@given(st.floats(0.5, 2), st.integers(0, 9000), st.integers(0, 300), st.integers(0, 700_000))
def test_plant_factor_multiplies_every_step(factor: float, tokens: int, sequences: int, cached: int) -> None:
    one = StepTimePlant(make_profile(FITTED_STEPS)).step_s(0.0, tokens, tokens * tokens / 2, sequences, cached)
    other = StepTimePlant(make_profile(FITTED_STEPS), factor).step_s(
        0.0, tokens, tokens * tokens / 2, sequences, cached
    )
    assert other == pytest.approx(one * factor)


def test_plant_sequences_beyond_hinge_cost_more() -> None:
    made = replace(make_profile(FITTED_STEPS), hinge_sequences=128, hinge_dec=1e-5)
    plant = StepTimePlant(made)
    step = [plant.step_s(0.0, 0, 0.0, sequences, 0) for sequences in (127, 128, 129, 130)]
    assert step[1] - step[0] == pytest.approx(FITTED_STEPS.dec)
    assert step[3] - step[2] == pytest.approx(FITTED_STEPS.dec + 1e-5)


def test_plant_hinge_counts_prefill_tokens_of_a_step() -> None:
    level, bent = make_profile(FITTED_STEPS), replace(make_profile(FITTED_STEPS), hinge_sequences=128, hinge_dec=1e-5)
    for tokens, beyond in ((200, 100), (38, 10), (28, 0)):
        more = StepTimePlant(bent).step_s(0.0, tokens, 0.0, 100, 0) - StepTimePlant(level).step_s(
            0.0, tokens, 0.0, 100, 0
        )
        assert more == pytest.approx(beyond * 1e-5)


def test_plant_noise_has_requested_mean_and_deviation() -> None:
    plant = StepTimePlant(make_profile(), noise=0.05, seed=1)
    steps = [plant.step_s(0.0, 0, 0.0, 1, 0) for _ in range(4000)]
    mean = sum(steps) / len(steps)
    assert mean == pytest.approx(1.0, abs=0.003)  # three standard errors
    assert (sum((step - mean) ** 2 for step in steps) / len(steps)) ** 0.5 == pytest.approx(0.05, rel=0.05)


def test_plant_same_seed_gives_same_steps() -> None:
    first, second = (StepTimePlant(make_profile(), noise=0.1, seed=7) for _ in range(2))
    assert [first.step_s(0.0, 0, 0.0, 1, 0) for _ in range(9)] == [second.step_s(0.0, 0, 0.0, 1, 0) for _ in range(9)]


def heated(share: float, idle_after_s: float = 0.0) -> StepCoefficients:
    """Coefficients after a minute of steps whose products take a share of the time, and then nothing for a while."""
    cool = StepCoefficients(0.01, 0.0, 1e-4, 0.0, 0.0, 0.0)
    plant = StepTimePlant(replace(make_profile(cool), hot=replace(cool, pretok=2e-4)))
    now = 0.0
    while now < 60.0:
        products = plant.coefficients.pretok * 500
        plant.step_s(now, 500, 0.0, 0, 0)
        now += products / share
    plant.step_s(now + idle_after_s, 0, 0.0, 1, 0)
    return plant.coefficients


@pytest.mark.parametrize(("share", "pretok"), [(0.1, 1e-4), (0.25, 1e-4), (0.375, 1.5e-4), (0.5, 2e-4), (0.7, 2.2e-4)])
def test_plant_busier_gpu_is_slower(share: float, pretok: float) -> None:
    assert heated(share).pretok == pytest.approx(pretok, rel=0.07)  # the mean of two seconds wavers with each step


def test_plant_idle_gpu_cools_down() -> None:
    assert heated(0.7, idle_after_s=10.0).pretok == 1e-4
