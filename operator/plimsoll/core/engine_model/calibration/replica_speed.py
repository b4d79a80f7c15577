"""Speed of each replica relative to the others of its build.

Problem: replicas of one build differ by some ten percent, and a picker that uses predicted work sends the faster ones
more of it. In the pooled windows composition then correlates with speed: windows with much work come from fast engines,
and the regression attributes their speed to cheap work (Simpson's paradox). At a spread of 10 % and a constant load the
SLO capacity was overestimated by half.

Idea: a random intercept for each replica (Gelman and Hill, Data Analysis Using Regression, chapter 12): the mean log
ratio of its windows to the model, shrunk towards zero for few windows. A window's time is converted to that of a
replica of mean speed. So composition is learned from variation within replicas, the level from all of them, and a
single replica is unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from plimsoll.core.engine_model.calibration.posterior_model import Floats

SPEED_HALF_LIFE_S: Final = 300.0  # of a measured speed, which falls when the GPU gets hot
REPLICA_EXPIRY_S: Final = 60.0  # a replica without a window for this long is dropped
_PRIOR_WINDOWS: Final = 1.0  # windows: noise of one over the spread between replicas, both about 5 %
_EPSILON: Final = 1e-9
_MAX_LOG_RATIO: Final = 0.5  # larger log ratios are another build or an invalid measurement


@dataclass(slots=True)
class _ReplicaSpeed:
    at_s: float
    weight: float = 0.0
    log_sum: float = 0.0

    def update(self, at_s: float, log_ratio: float, weight: float) -> None:
        decay = 0.5 ** (max(0.0, at_s - self.at_s) / SPEED_HALF_LIFE_S)
        self.at_s = at_s  # a clock that was set back applies
        self.weight = decay * self.weight + weight
        self.log_sum = decay * self.log_sum + weight * log_ratio

    @property
    def log_factor(self) -> float:
        return self.log_sum / (self.weight + _PRIOR_WINDOWS)


@dataclass(slots=True)
class ReplicaSpeeds:
    """Relative speeds of a tier's replicas, by name."""

    _speeds: dict[str, _ReplicaSpeed] = field(default_factory=dict)

    def normalize(
        self, names: Sequence[str], ends_s: Sequence[float], ratios: Floats, expected: Floats, weights: Floats
    ) -> Floats:
        """Return the ratios (n,) converted to replicas of mean speed.

        ratios, expected: time over the prior's, measured and by the current estimate. weights: effective windows of
        each. ends_s: ends of the windows, s.
        """
        relative = np.maximum(ratios, 0.0) / np.maximum(expected, _EPSILON)  # clip a model time that is not positive
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
