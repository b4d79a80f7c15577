"""Noise of an engine's steps, from the standard library."""

from __future__ import annotations

import random

from plimsoll.sim.engine.step_timing import NOISE_STEPS, limit_noise


def draw_step_noise(deviation: float, seed: int) -> list[float]:
    """Return relative errors of steps, for `StepTiming`. deviation: relative standard deviation of a
    step, 0 for none.
    """
    if not deviation:
        return []
    draw = random.Random(seed)
    return limit_noise(deviation * draw.gauss(0.0, 1.0) for _ in range(NOISE_STEPS))
