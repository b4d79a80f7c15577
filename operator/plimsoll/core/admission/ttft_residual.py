"""The TTFT residual of one replica: the mean TTFT that the cost model does not predict.

Problem: on a slow host a request spends 0.1 s and more outside the engine, growing with the number of streams. The cost
model assumes the same few milliseconds for every host. The TTFT margin covers this only up to its bound, because it
must not reserve capacity for random errors.

Idea: the mean lateness is not random, so it is part of the prediction. It is proportional to the utilization of the
replica: least squares through the origin over the last seconds, shrunk by a few on-time requests of a full replica
(ridge regression, Hoerl and Kennard 1970). The margin then covers only the variation between requests. An empty replica
has no residual, so a replica that has emptied is tried again.
"""

from __future__ import annotations

import math
from typing import Final

RESIDUAL_WINDOW_S: Final = 10.0  # time constant of the decay
PRIOR_REQUESTS: Final = 5.0  # weight of the prior: on-time requests of a full replica


class TtftResidual:
    """The residual of one replica, initially 0. `utilization` (0 to 1) is that when a request is admitted."""

    __slots__ = ("_updated_s", "_weight", "_weighted_residual_s")

    def __init__(self) -> None:
        self._weighted_residual_s = self._weight = 0.0
        self._updated_s = -math.inf

    def observe(self, residual_s: float, utilization: float, now: float) -> None:
        """Record how much later than the cost model predicts a first token was. Ignores non-finite values."""
        if not math.isfinite(residual_s):
            return
        decay = math.exp(min(0.0, self._updated_s - now) / RESIDUAL_WINDOW_S)
        self._weighted_residual_s = decay * self._weighted_residual_s + utilization * residual_s
        self._weight = decay * self._weight + utilization * utilization
        self._updated_s = max(self._updated_s, now)

    def expected_s(self, utilization: float) -> float:
        """Returns the expected residual of a request admitted now, in seconds, at least 0."""
        return utilization * max(0.0, self._weighted_residual_s / (self._weight + PRIOR_REQUESTS))
