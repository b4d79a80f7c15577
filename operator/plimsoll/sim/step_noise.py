"""Noise of simulated steps."""

from __future__ import annotations

from random import Random

import numpy as np

from plimsoll.sim.engine.step_timing import NOISE_STEPS, limit_noise


def draw_step_noise(deviation: float, random: Random) -> list[float]:
    """Relative errors of one replica's steps, for `StepTiming`. deviation: relative standard deviation of a step."""
    if not deviation:
        return []
    normals = np.random.default_rng(random.getrandbits(64)).standard_normal(NOISE_STEPS)
    return limit_noise((deviation * normals).tolist())
