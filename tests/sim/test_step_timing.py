"""The time of a step: exactly the model, and the deviations one at a time."""

from __future__ import annotations

from dataclasses import astuple, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core.engine_model.step_time import StepModel
from plimsoll.sim.engine.step_timing import NOISE_STEPS, StepTiming
from plimsoll.sim.profiles import HardwareProfile, StepCoefficients, load
from plimsoll.sim.step_noise import draw_step_noise
from simulated.step_noise import draw_step_noise as draw_served_noise

LOADS = ((0, 0.0, 0, 0), (0, 0.0, 1, 700), (512, 512 * 256.0, 0, 0), (8192, 3e7, 120, 90_000), (100, 5e4, 255, 700_000))
PLAIN = load("h200-8b-hot")


def step_s(profile: HardwareProfile, *work: float) -> float:
    """The first step's time."""
    return StepTiming(profile).series(0, *work).first_s  # type: ignore[arg-type]


@pytest.mark.parametrize("load_", LOADS)
@pytest.mark.parametrize("name", ["h200-8b-hot", "h200-8b-cool", "h200-70b", "h100x2-32b"])
def test_step_time_equals_step_model(name: str, load_: tuple[int, float, int, int]) -> None:
    law = StepModel(*astuple(load(name).coefficients))
    assert step_s(load(name), *load_) == pytest.approx(float(law.step_s(*load_)), rel=1e-12)


@given(st.floats(0.5, 2), st.integers(0, 9000), st.integers(0, 300), st.integers(0, 700_000))
def test_profile_factor_multiplies_every_step(factor: float, tokens: int, sequences: int, cached: int) -> None:
    work = (tokens, tokens * tokens / 2, sequences, cached)
    assert step_s(PLAIN.scaled(factor), *work) == pytest.approx(factor * step_s(PLAIN, *work))


@pytest.mark.parametrize("draw", [lambda: draw_step_noise(0.05, Random(1)), lambda: draw_served_noise(0.05, 1)])
def test_noise_has_requested_mean_and_deviation(draw: object) -> None:
    noise = draw()  # type: ignore[operator]
    assert noise == draw()  # type: ignore[operator]
    timing = StepTiming(PLAIN, noise)
    mean_s = step_s(PLAIN, 0, 0.0, 1, 0)
    steps = [timing.duration_s(timing.series(n, 0, 0.0, 1, 0), 1) / mean_s for n in range(NOISE_STEPS)]
    mean = sum(steps) / len(steps)
    assert mean == pytest.approx(1.0, abs=0.005)  # three standard errors
    assert (sum((step - mean) ** 2 for step in steps) / len(steps)) ** 0.5 == pytest.approx(0.05, rel=0.1)


def heated(share: float, idle_after_s: float = 0.0) -> float:
    """Seconds of a prompt token after a minute of steps whose products take a share of the time, and then a pause."""
    cool = StepCoefficients(0.01, 0.0, 1e-4, 0.0, 0.0, 0.0)
    timing = StepTiming(replace(PLAIN, coefficients=cool, hot=replace(cool, pretok=2e-4)))

    def token_s() -> float:
        return timing.series(0, 1000, 0.0, 0, 0).first_s / 1000 - 1e-5

    now_s = 0.0
    while now_s < 60.0:
        if now_s >= timing.next_heat_update_s:
            timing.update_heat(now_s)
        now_s += token_s() * 500 / share
        timing.add_compute(500, 0.0, 0)
    for _ in range(2):  # what was computed up to now counts for the time before the first of them
        timing.update_heat(now_s)
        now_s += idle_after_s
    return token_s()


@pytest.mark.parametrize(("share", "pretok"), [(0.1, 1e-4), (0.25, 1e-4), (0.375, 1.5e-4), (0.5, 2e-4), (0.7, 2.2e-4)])
def test_busier_gpu_is_slower(share: float, pretok: float) -> None:
    assert heated(share) == pytest.approx(pretok, rel=0.07)  # the mean of two seconds wavers with each step


def test_idle_gpu_cools_down() -> None:
    assert heated(0.7, idle_after_s=10.0) == pytest.approx(1e-4)
