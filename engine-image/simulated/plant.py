"""How long a step takes on this machine: the law of its profile, and what real machines do besides.

Problem: a controller that is tried only on its own formula learns nothing about itself.
Idea: the deviations that were measured. Decoding bends where matrix products turn from memory- to arithmetic-bound, at
so many tokens of a step: beside a prompt each sequence costs the bend's price. A card that computes much is
power-capped and slower; no two replicas and no two steps are quite alike.

The heat follows the mean share of the last seconds that went into matrix products: cool up to the profile's
`cool_share`, the `hot` set at `hot_share`, a fifth of that way beyond it at the most. How near this comes to recorded
loads of an H200 is said in docs/trust.md.
"""

from __future__ import annotations

import math
import random
from typing import Final

from plimsoll.sim.profiles import Coefficients, Profile

_HOTTEST: Final = 1.2
_HEAT_SECONDS: Final = 2.0
_LEAST: Final = 0.5  # of a step, whatever the noise says


class Plant:
    """The step time of one replica; `factor` multiplies every step, `noise` is a step's relative standard deviation."""

    def __init__(self, profile: Profile, factor: float = 1.0, noise: float = 0.0, seed: int = 0) -> None:
        self._profile = profile.scaled(factor)
        self._noise = noise
        self._random = random.Random(seed)
        self._share = 0.0
        self._seen = -math.inf
        self._now = self._profile.coefficients

    @property
    def coefficients(self) -> Coefficients:
        """Those that hold at the present heat."""
        return self._now

    def seconds(self, start: float, tokens: int, pairs: float, sequences: int, cached: int) -> float:
        """A step that begins at `start` (seconds on any clock) and prefills, decodes and reads so much."""
        c = self._now
        products = c.pretok * tokens + c.preattn * pairs + c.dec * sequences
        took = c.base + products + c.ctx * cached + (c.anypre if tokens else 0.0)
        bent = sequences - max(0, self._profile.hinge_sequences - tokens)
        if bent > 0:
            took += self._profile.hinge_dec * bent
        if self._noise:
            took *= max(_LEAST, 1.0 + self._noise * self._random.gauss(0.0, 1.0))
        if self._profile.hot is not None:
            self._warm(start + took, products)
        return took

    def _warm(self, end: float, products: float) -> None:
        """Takes a step into the mean share of products, idle time before it included."""
        assert self._profile.hot is not None
        passed = max(end - self._seen, products)
        self._seen = end
        kept = math.exp(-passed / _HEAT_SECONDS)
        self._share = kept * self._share + (1 - kept) * products / passed if passed < math.inf else 0.0
        cool, hot = self._profile.cool_share, self._profile.hot_share
        heat = min(_HOTTEST, max(0.0, (self._share - cool) / (hot - cool)))
        self._now = self._profile.coefficients.towards(self._profile.hot, heat)
