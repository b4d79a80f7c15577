"""Step times of one replica, for one step or for thousands at once.

Problem: a day of a million requests has half a billion steps. The plant must not use the controller's own formula:
decoding has a hinge at a batch size, a card under heavy compute is power-capped, and no two replicas or steps are
equal.

Idea: while the batch is constant, its context grows by one token per sequence and step, so many steps sum up in closed
form. Noise comes from a table of one replica's steps with prefix sums. Heat changes on a grid of time, not
with every step. Both therefore sum up as well, and fast-forwarding is exact.

The hinge is where matrix products turn from memory-bound to compute-bound, at a number of tokens of a step, not of
sequences. A prompt in the same step exceeds it, so each sequence in the step has the hinge's cost too (in recorded
steps of an H200: 2 ms more for 124 sequences with 200 prompt tokens).

Heat follows the mean share of the last seconds that went into matrix products: cool up to the profile's `cool_share`,
its `hot` set at `hot_share`, and at most a fifth of that way beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from plimsoll.sim.profiles import HardwareProfile

HEAT_UPDATE_S: Final = 0.5
_HEAT_TIME_CONSTANT_S: Final = 2.0
MAX_HEAT: Final = 1.2
NOISE_STEPS: Final = 1024  # steps after which the noise repeats
MIN_STEP_FACTOR: Final = 0.5  # of a step, with any noise


@dataclass(slots=True)
class StepSeries:
    """Steps of one batch: the first takes `first_s` without noise, and each further one `increment_s` more.

    noise_index: index of the first step in the noise table.
    """

    first_s: float
    increment_s: float
    noise_index: int


def limit_noise(errors: Iterable[float]) -> list[float]:
    """Return the relative errors of steps, limited so that no step is shorter than MIN_STEP_FACTOR of its time."""
    return [max(error, MIN_STEP_FACTOR - 1.0) for error in errors]


class StepTiming:
    """Step times of one replica. noise: relative errors of NOISE_STEPS steps, within `limit_noise`; empty without."""

    def __init__(self, profile: HardwareProfile, noise: Sequence[float] = ()) -> None:
        self._cool, self._hot = profile.coefficients, profile.hot
        self._hinge, self._hinge_s = profile.hinge_sequences, profile.hinge_dec
        self._cool_share, self._hot_share = profile.cool_share, profile.hot_share
        self._current = profile.coefficients
        self._compute_share = self._compute_s = 0.0
        self._updated_s = -math.inf
        self.throttles = profile.hot is not None
        self.next_heat_update_s = -math.inf if self.throttles else math.inf
        self._noise_sums: list[float] = [0.0, *accumulate(noise)]
        self._moments: list[float] = [0.0, *accumulate(step * error for step, error in enumerate(noise))]
        self.has_noise = bool(noise)

    def series(self, step: int, tokens: int, pairs: float, sequences: int, cached: int) -> StepSeries:
        """Return the times of the steps from number `step` on with this work; with `tokens` prefilled there is only
        one.
        """
        c = self._current
        first_s = c.base + c.dec * sequences + c.ctx * cached
        if tokens:
            first_s += c.anypre + c.pretok * tokens + c.preattn * pairs
        above_hinge = sequences - max(0, self._hinge - tokens)
        if above_hinge > 0:
            first_s += self._hinge_s * above_hinge
        return StepSeries(first_s, c.ctx * sequences, step % NOISE_STEPS)

    def max_steps(self, step: int) -> int:
        """Largest number of steps from number `step` on in one series."""
        return NOISE_STEPS - step % NOISE_STEPS

    def duration_s(self, series: StepSeries, steps: int) -> float:
        """Duration of the first `steps` steps of a series."""
        mean = steps * series.first_s + series.increment_s * (steps * (steps - 1) // 2)
        if not self.has_noise:
            return mean
        first, end = series.noise_index, series.noise_index + steps
        noise = self._noise_sums[end] - self._noise_sums[first]
        moment = self._moments[end] - self._moments[first] - first * noise
        return mean + series.first_s * noise + series.increment_s * moment

    def completed_steps(self, series: StepSeries, elapsed_s: float, max_steps: int) -> int:
        """Steps of a series, at most max_steps, that have ended after elapsed_s."""
        if elapsed_s < 0.0:
            return 0
        half = series.increment_s / 2.0
        slope = series.first_s - half
        root = math.sqrt(slope * slope + 4.0 * half * elapsed_s)
        steps = min(max_steps, int(2.0 * elapsed_s / (slope + root)))
        while steps < max_steps and self.duration_s(series, steps + 1) <= elapsed_s:
            steps += 1
        while steps > 0 and self.duration_s(series, steps) > elapsed_s:
            steps -= 1
        return steps

    def add_compute(self, tokens: int, pairs: float, sequences: int) -> None:
        """Add the matrix products of composed steps to the heat."""
        if self.throttles:
            c = self._current
            self._compute_s += c.pretok * tokens + c.preattn * pairs + c.dec * sequences

    def update_heat(self, now_s: float) -> None:
        """Call when a step is composed at or after `next_heat_update_s`."""
        assert self._hot is not None
        elapsed_s = max(now_s - self._updated_s, self._compute_s)
        if elapsed_s < math.inf:
            decay = math.exp(-elapsed_s / _HEAT_TIME_CONSTANT_S)
            self._compute_share = decay * self._compute_share + (1.0 - decay) * self._compute_s / max(elapsed_s, 1e-12)
        self._updated_s, self._compute_s = now_s, 0.0
        self.next_heat_update_s = now_s + HEAT_UPDATE_S
        heat = min(MAX_HEAT, max(0.0, (self._compute_share - self._cool_share) / (self._hot_share - self._cool_share)))
        self._current = self._cool.interpolate(self._hot, heat)
