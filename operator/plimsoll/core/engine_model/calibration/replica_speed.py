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

from plimsoll.core.engine_model.calibration.posterior_model import Floats

SPEED_HALF_LIFE_S: Final = 300.0  # what a replica showed; it slows down when its card gets hot
REPLICA_EXPIRY_S: Final = 60.0  # a replica that has not been heard for so long is none of those present
_PRIOR_WINDOWS: Final = 1.0  # windows: noise of one over the spread between replicas, both about 5 %
_EPSILON: Final = 1e-9
_MAX_LOG_RATIO: Final = 0.5  # of a log ratio: what is further off is no replica of this build, or no measurement


@dataclass(slots=True)
class _ReplicaSpeed:
    at_s: float
    weight: float = 0.0
    log_sum: float = 0.0

    def update(self, at_s: float, log_ratio: float, weight: float) -> None:
        decay = 0.5 ** (max(0.0, at_s - self.at_s) / SPEED_HALF_LIFE_S)
        self.at_s = at_s  # a clock that was set back is believed
        self.weight = decay * self.weight + weight
        self.log_sum = decay * self.log_sum + weight * log_ratio

    @property
    def log_factor(self) -> float:
        return self.log_sum / (self.weight + _PRIOR_WINDOWS)


@dataclass(slots=True)
class ReplicaSpeeds:
    """Of one tier, by name."""

    _speeds: dict[str, _ReplicaSpeed] = field(default_factory=dict)

    def normalize(
        self, names: Sequence[str], ends_s: Sequence[float], ratios: Floats, expected: Floats, weights: Floats
    ) -> Floats:
        """The ratios (n,) as replicas of mean speed would have had them.

        ratios, expected: time over the prior's, measured and by what is believed now. weights: windows that each is
        worth. ends_s: of the windows, seconds on the caller's clock.
        """
        relative = np.maximum(ratios, 0.0) / np.maximum(expected, _EPSILON)  # a law that is not positive: clipped
        logs = np.clip(np.log(np.maximum(relative, _EPSILON)), -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        for name, at_s, log_ratio, weight in zip(names, ends_s, logs.tolist(), weights.tolist(), strict=True):
            speed = self._speeds.get(name)
            if speed is None:
                speed = self._speeds[name] = _ReplicaSpeed(at_s)
            speed.update(at_s, log_ratio, weight)
        now_s, updated = max(ends_s), set(names)
        present = {
            name: replica_speed
            for name, replica_speed in self._speeds.items()
            if name in updated or abs(now_s - replica_speed.at_s) <= REPLICA_EXPIRY_S
        }
        self._speeds = present
        if len(present) < 2:
            return ratios
        mean = math.fsum(replica_speed.log_factor for replica_speed in present.values()) / len(present)
        normalized: Floats = ratios * np.exp([mean - present[name].log_factor for name in names])
        return normalized
