"""How long the steps of one replica take, one at a time or thousands at once.

Problem: a day of a million requests has half a billion steps, and the plant must not be the controller's own formula:
decoding bends at a batch, a card that computes much is power-capped, no two replicas and no two steps are alike.

Idea: while the batch stays the same its context grows by a token a sequence and step, so that many steps sum up in
closed form. Noise is drawn beforehand into a table of one replica's steps whose prefix sums are kept, and heat moves on
a grid of time, not with every step: both sum up as well, and leaping is exact.

Decoding bends where matrix products turn from memory- to arithmetic-bound, at so many tokens of a step, not sequences:
a prompt in the same step has passed that point, so that each sequence beside it costs the bend's price too (seen in
recorded steps of an H200: 2 ms more for 124 sequences beside 200 prompt tokens).

Heat follows the mean share of the last seconds that went into matrix products: cool up to the profile's `cool_share`,
its `hot` set at `hot_share`, a fifth of that way beyond it at the most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Final

import numpy as np

from plimsoll.sim.profile import Profile

HEAT_GRID_S: Final = 0.5
_HEAT_MEMORY_S: Final = 2.0
HOTTEST: Final = 1.2
_TABLE: Final = 1024  # steps after which the noise comes again
_LEAST: Final = 0.5  # of a step, whatever the noise says


@dataclass(slots=True)
class Stretch:
    """Steps of one batch: the first of them takes `first_s` without noise, each further one `more_s` more.

    at: place of the first one in the table of noise.
    """

    first_s: float
    more_s: float
    at: int


class Pace:
    """The step times of one replica. noise: relative standard deviation of a step."""

    def __init__(self, profile: Profile, noise: float, random: Random) -> None:
        self._cool, self._hot = profile.coefficients, profile.hot
        self._hinge, self._hinge_s = profile.hinge_sequences, profile.hinge_dec
        self._cool_share, self._hot_share = profile.cool_share, profile.hot_share
        self._now = profile.coefficients
        self._share = self._products_s = 0.0
        self._since_s = -math.inf
        self.heats = profile.hot is not None
        self.next_heat_s = -math.inf if self.heats else math.inf
        drawn = np.random.default_rng(random.getrandbits(64)).standard_normal(_TABLE) if noise else np.zeros(_TABLE)
        errors = np.maximum(noise * drawn, _LEAST - 1.0)
        self._sums: list[float] = [0.0, *np.cumsum(errors).tolist()]
        self._moments: list[float] = [0.0, *np.cumsum(np.arange(_TABLE) * errors).tolist()]
        self._noisy = noise > 0.0

    def stretch(self, step: int, tokens: int, pairs: float, sequences: int, cached: int) -> Stretch:
        """Steps from number `step` on that prefill, decode and read so much; with `tokens` there is one only."""
        c = self._now
        first_s = c.base + c.dec * sequences + c.ctx * cached
        if tokens:
            first_s += c.anypre + c.pretok * tokens + c.preattn * pairs
        bent = sequences - max(0, self._hinge - tokens)
        if bent > 0:
            first_s += self._hinge_s * bent
        return Stretch(first_s, c.ctx * sequences, step % _TABLE)

    def longest(self, step: int) -> int:
        """Steps from number `step` on that one stretch may hold."""
        return _TABLE - step % _TABLE

    def seconds(self, stretch: Stretch, steps: int) -> float:
        """What the first so many steps of a stretch take."""
        mean = steps * stretch.first_s + stretch.more_s * (steps * (steps - 1) // 2)
        if not self._noisy:
            return mean
        at, until = stretch.at, stretch.at + steps
        plain = self._sums[until] - self._sums[at]
        moment = self._moments[until] - self._moments[at] - at * plain
        return mean + stretch.first_s * plain + stretch.more_s * moment

    def within(self, stretch: Stretch, seconds: float, most: int) -> int:
        """How many steps of a stretch, at most `most`, have ended after so many seconds."""
        if seconds < 0.0:
            return 0
        half = stretch.more_s / 2.0
        line = stretch.first_s - half
        root = math.sqrt(line * line + 4.0 * half * seconds)
        steps = min(most, int(2.0 * seconds / (line + root)))
        while steps < most and self.seconds(stretch, steps + 1) <= seconds:
            steps += 1
        while steps > 0 and self.seconds(stretch, steps) > seconds:
            steps -= 1
        return steps

    def spend(self, tokens: int, pairs: float, sequences: int) -> None:
        """Steps that were composed have so much for matrix products."""
        if self.heats:
            c = self._now
            self._products_s += c.pretok * tokens + c.preattn * pairs + c.dec * sequences

    def heat(self, now_s: float) -> None:
        """To be called when a step is composed at or after `next_heat_s`."""
        assert self._hot is not None
        passed_s = max(now_s - self._since_s, self._products_s)
        if passed_s < math.inf:
            kept = math.exp(-passed_s / _HEAT_MEMORY_S)
            self._share = kept * self._share + (1.0 - kept) * self._products_s / max(passed_s, 1e-12)
        self._since_s, self._products_s = now_s, 0.0
        self.next_heat_s = now_s + HEAT_GRID_S
        heat = min(HOTTEST, max(0.0, (self._share - self._cool_share) / (self._hot_share - self._cool_share)))
        self._now = self._cool.towards(self._hot, heat)
