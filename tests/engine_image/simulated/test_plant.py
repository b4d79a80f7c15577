"""The time of a step: exactly the law, and the deviations one at a time."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core.latency import StepModel
from simulated.plant import Plant
from simulated.profiles import Coefficients, load
from tests.engine_image.simulated.lab import HOT, profile

LOADS = ((0, 0.0, 0, 0), (0, 0.0, 1, 700), (512, 512 * 256.0, 0, 0), (8192, 3e7, 120, 90_000), (100, 5e4, 255, 700_000))


@pytest.mark.parametrize("load_", LOADS)
@pytest.mark.parametrize("name", ["h200-8b-hot", "h200-8b-cool", "h200-70b", "h100x2-32b"])
def test_the_law_is_the_controllers_to_the_last_digit(name: str, load_: tuple[int, float, int, int]) -> None:
    made = load(name)
    law = StepModel(*astuple(made.coefficients))
    assert Plant(made).seconds(0.0, *load_) == pytest.approx(float(law.step_s(*load_)), rel=1e-12)


@given(st.floats(0.5, 2), st.integers(0, 9000), st.integers(0, 300), st.integers(0, 700_000))
def test_a_factor_multiplies_every_step(factor: float, tokens: int, sequences: int, cached: int) -> None:
    one = Plant(profile(HOT)).seconds(0.0, tokens, tokens * tokens / 2, sequences, cached)
    other = Plant(profile(HOT), factor).seconds(0.0, tokens, tokens * tokens / 2, sequences, cached)
    assert other == pytest.approx(one * factor)


def test_sequences_beyond_the_hinge_cost_more() -> None:
    made = replace(profile(HOT), hinge_sequences=128, hinge_dec=1e-5)
    plant = Plant(made)
    step = [plant.seconds(0.0, 0, 0.0, sequences, 0) for sequences in (127, 128, 129, 130)]
    assert step[1] - step[0] == pytest.approx(HOT.dec)
    assert step[3] - step[2] == pytest.approx(HOT.dec + 1e-5)


def test_noise_has_the_mean_and_the_spread_that_were_asked_for() -> None:
    plant = Plant(profile(), noise=0.05, seed=1)
    steps = [plant.seconds(0.0, 0, 0.0, 1, 0) for _ in range(4000)]
    mean = sum(steps) / len(steps)
    assert mean == pytest.approx(1.0, abs=0.003)  # three standard errors
    assert (sum((step - mean) ** 2 for step in steps) / len(steps)) ** 0.5 == pytest.approx(0.05, rel=0.05)


def test_the_same_seed_gives_the_same_steps() -> None:
    first, second = (Plant(profile(), noise=0.1, seed=7) for _ in range(2))
    assert [first.seconds(0.0, 0, 0.0, 1, 0) for _ in range(9)] == [second.seconds(0.0, 0, 0.0, 1, 0) for _ in range(9)]


def _heated(share: float, seconds: float, idle_after: float = 0.0) -> Coefficients:
    """Coefficients after steps of which products take a share, and then nothing for a while."""
    cool = Coefficients(0.05, 0.0, 1e-4, 0.0, 0.0, 0.0)
    hot = replace(cool, base=0.04, pretok=2e-4)
    plant, now = Plant(replace(profile(cool), hot=hot)), 0.0
    while now < seconds:
        tokens = 500
        took = plant.coefficients.pretok * tokens / share
        plant.seconds(now + took - 0.05 - plant.coefficients.pretok * tokens, tokens, 0.0, 0, 0)
        now += took
    if idle_after:
        plant.seconds(now + idle_after, 0, 0.0, 1, 0)
    return plant.coefficients


def test_a_busy_card_gets_hot_a_light_load_leaves_it_cool_and_rest_cools_it() -> None:
    assert _heated(0.2, 60.0).pretok == pytest.approx(1e-4)
    assert 1.2e-4 < _heated(0.5, 60.0).pretok < 1.9e-4
    assert _heated(0.68, 200.0).pretok == pytest.approx(2e-4, rel=0.06)
    assert _heated(0.68, 200.0, idle_after=60.0).pretok == pytest.approx(1e-4)
