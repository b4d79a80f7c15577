"""How long a step takes on this machine: the law of its profile, and what real machines do besides.

Problem: a controller that is tried only on its own formula learns nothing about itself.
Idea: the deviations that were measured. Decoding bends where matrix products turn from memory- to arithmetic-bound, at
so many tokens of a step: beside a prompt each sequence costs the bend's price. A card that computes much is
power-capped and slower; no two replicas and no two steps are quite alike.

The heat follows the mean share of the last seconds that went into matrix products: cool up to the profile's
`cool_share`, the `hot` set at `hot_share`, a fifth of that way beyond it at the most. How near this comes to recorded
loads of an H200 is said in docs/evaluation/simulator-validation.md.
"""

from __future__ import annotations

import math
import random
from typing import Final

from plimsoll.sim.profiles import HardwareProfile, StepCoefficients

_MAX_HEAT: Final = 1.2
_HEAT_TIME_CONSTANT_S: Final = 2.0
_MIN_STEP_FACTOR: Final = 0.5  # of a step, whatever the noise says


class StepTimePlant:
    """The step time of one replica; `factor` multiplies every step, `noise` is a step's relative standard deviation."""

    def __init__(self, profile: HardwareProfile, factor: float = 1.0, noise: float = 0.0, seed: int = 0) -> None:
        self._profile = profile.scaled(factor)
        self._noise = noise
        self._random = random.Random(seed)
        self._compute_share = 0.0
        self._updated_s = -math.inf
        self._current = self._profile.coefficients

    @property
    def coefficients(self) -> StepCoefficients:
        """Those that hold at the present heat."""
        return self._current

    def step_s(self, start_s: float, tokens: int, pairs: float, sequences: int, cached: int) -> float:
        """A step that begins at `start` (seconds on any clock) and prefills, decodes and reads so much."""
        c = self._current
        compute_s = c.pretok * tokens + c.preattn * pairs + c.dec * sequences
        step_s = c.base + compute_s + c.ctx * cached + (c.anypre if tokens else 0.0)
        above_hinge = sequences - max(0, self._profile.hinge_sequences - tokens)
        if above_hinge > 0:
            step_s += self._profile.hinge_dec * above_hinge
        if self._noise:
            step_s *= max(_MIN_STEP_FACTOR, 1.0 + self._noise * self._random.gauss(0.0, 1.0))
        if self._profile.hot is not None:
            self._update_heat(start_s + step_s, compute_s)
        return step_s

    def _update_heat(self, end_s: float, compute_s: float) -> None:
        """Takes a step into the mean share of products, idle time before it included."""
        assert self._profile.hot is not None
        elapsed_s = max(end_s - self._updated_s, compute_s)
        self._updated_s = end_s
        decay = math.exp(-elapsed_s / _HEAT_TIME_CONSTANT_S)
        self._compute_share = (
            decay * self._compute_share + (1 - decay) * compute_s / elapsed_s if elapsed_s < math.inf else 0.0
        )
        cool, hot = self._profile.cool_share, self._profile.hot_share
        heat = min(_MAX_HEAT, max(0.0, (self._compute_share - cool) / (hot - cool)))
        self._current = self._profile.coefficients.interpolate(self._profile.hot, heat)
