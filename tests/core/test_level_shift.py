"""A leap of the load is found wherever it begins, and so is its end."""

from __future__ import annotations

import numpy as np
import pytest

from plimsoll.core.demand.demand_state import DemandState, observe
from tests.core.test_forecast import REQUEST_GPU_S, demand, demand_after, forecast_of


def test_level_shift_up_and_down_moves_level_in_seconds() -> None:
    rates = np.concatenate([np.full(600, 6.0), np.full(600, 36.0), np.full(600, 6.0)])
    works = demand(rates, 1.0, seed=3)
    before = demand_after(works[:600])
    top = demand_after(works[600:604], state=before, start_s=600.0)
    assert forecast_of(top).level == pytest.approx(36 * REQUEST_GPU_S, rel=0.25)
    assert forecast_of(top).level_shift_age_s == pytest.approx(0.0, abs=3.0)
    settled = demand_after(works[604:1200], state=top, start_s=604.0)
    assert forecast_of(settled).work == pytest.approx(36 * REQUEST_GPU_S, rel=0.05)
    down = demand_after(works[1200:1220], state=settled, start_s=1200.0)
    assert forecast_of(down).level == pytest.approx(6 * REQUEST_GPU_S, rel=0.4)


def constant_then(seed: int, low: float, high: float, first: int = 0) -> tuple[int, int]:
    """Seconds until the level is three quarters of a leap after half a minute, and a quarter after its end."""
    rates = np.concatenate([np.full(30, low), np.full(60, high), np.zeros(120)])
    works = demand(rates, 1.0, seed)
    works[30] += first * REQUEST_GPU_S
    state, levels = DemandState(), []
    for second, work in enumerate(works, start=1):
        state = observe(state, float(second), float(work))
        levels.append(forecast_of(state).level / REQUEST_GPU_S)
    up = next((s for s, level in enumerate(levels[30:90], 1) if level >= 0.75 * high), 60)
    return up, next((s for s, level in enumerate(levels[90:], 1) if level <= 0.25 * high), 120)


@pytest.mark.parametrize("first", [0, 8, 15, 30, 60])
def test_level_shift_initial_batch_does_not_delay_detection(first: int) -> None:
    """Requests that come at once at its beginning are not taken for what the noise is like."""
    found = [constant_then(seed, 0.5, 7.0, first) for seed in range(40)]
    print(f"{first} at once: up and down after {[np.quantile(of, (0.5, 0.9, 1.0)) for of in zip(*found, strict=True)]}")
    assert max(up for up, _ in found) <= 20
    assert max(down for _, down in found) <= 20


def test_level_shift_small_is_detected_within_20_s() -> None:
    found = [constant_then(seed, 2.0, 8.0)[0] for seed in range(40)]
    assert np.quantile(found, 0.9) <= 20


def test_level_shift_down_estimate_is_not_biased_low() -> None:
    """It is found sooner where little comes at first, and what is given back by that has to start again."""
    found = []
    for seed in range(100):
        works = demand(np.concatenate([np.full(300, 12.0), np.full(60, 4.0)]), 1.0, seed)
        state = demand_after(works[:300])
        before = state.level_shift_s
        for second, work in enumerate(works[300:], start=301):
            state = observe(state, float(second), float(work))
            if state.level_shift_s != before:
                found.append(forecast_of(state).level / REQUEST_GPU_S)
                break
    print(f"levels after a leap to 4: {np.quantile(found, (0.05, 0.25, 0.5, 0.75, 0.95))}")
    assert len(found) >= 95
    assert np.mean(np.array(found) < 0.75 * 4.0) <= 0.2, "more than one in three if it were to the mean since"


def test_level_shift_to_zero_is_detected_quickly() -> None:
    """From six requests a second: e^-6 a second."""
    found = [constant_then(seed, 2.0, 6.0)[1] for seed in range(40)]
    assert np.quantile(found, 0.9) <= 15
