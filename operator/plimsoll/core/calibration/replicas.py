"""How fast each replica is beside the others of its build.

Problem: replicas of one build differ by some ten percent, and who picks by predicted work gives the faster ones more of
it. In the pooled windows composition then goes with speed: windows rich in work come from fast engines, and the
regression takes for cheap work what is a fast engine (Simpson's paradox). At a spread of 10 % and a constant load the
knee came out half as high again as it was.

Idea: a random intercept for each replica (Gelman and Hill, Data Analysis Using Regression, chapter 12): the mean log
ratio of its windows to the law, shrunk towards zero while there are few. A window's time is set to what a replica of
mean speed would have needed. So composition is learned from what varies within replicas, the level from all of them,
and a single replica is left as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from plimsoll.core.calibration.belief import Floats

HALF_LIFE_S: Final = 300.0  # what a replica showed; it slows down when its card gets hot
GONE_S: Final = 60.0  # a replica that has not been heard for so long is none of those present
_SHRINK: Final = 1.0  # windows: noise of one over the spread between replicas, both about 5 %
_LEAST: Final = 1e-9
_CLIP: Final = 0.5  # of a log ratio: what is further off is no replica of this build, or no measurement


@dataclass(slots=True)
class _Pace:
    at_s: float
    weight: float = 0.0
    log_sum: float = 0.0

    def hear(self, at_s: float, log_ratio: float, weight: float) -> None:
        kept = 0.5 ** (max(0.0, at_s - self.at_s) / HALF_LIFE_S)
        self.at_s = at_s  # a clock that was set back is believed
        self.weight = kept * self.weight + weight
        self.log_sum = kept * self.log_sum + weight * log_ratio

    @property
    def log_factor(self) -> float:
        return self.log_sum / (self.weight + _SHRINK)


@dataclass(slots=True)
class Replicas:
    """Of one tier, by name."""

    _paces: dict[str, _Pace] = field(default_factory=dict)

    def evened(
        self, names: Sequence[str], ends_s: Sequence[float], ratios: Floats, expected: Floats, weights: Floats
    ) -> Floats:
        """The ratios (n,) as replicas of mean speed would have had them.

        ratios, expected: time over the prior's, measured and by what is believed now. weights: windows that each is
        worth. ends_s: of the windows, seconds on the caller's clock.
        """
        over = np.maximum(ratios, 0.0) / np.maximum(expected, _LEAST)  # a law that is not positive: clipped
        logs = np.clip(np.log(np.maximum(over, _LEAST)), -_CLIP, _CLIP)
        for name, at_s, log_ratio, weight in zip(names, ends_s, logs.tolist(), weights.tolist(), strict=True):
            known = self._paces.get(name)
            if known is None:
                known = self._paces[name] = _Pace(at_s)
            known.hear(at_s, log_ratio, weight)
        now_s, told = max(ends_s), set(names)
        here = {name: pace for name, pace in self._paces.items() if name in told or abs(now_s - pace.at_s) <= GONE_S}
        self._paces = here
        if len(here) < 2:
            return ratios
        mean = math.fsum(pace.log_factor for pace in here.values()) / len(here)
        found: Floats = ratios * np.exp([mean - here[name].log_factor for name in names])
        return found
