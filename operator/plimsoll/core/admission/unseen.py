"""What the model does not say of a first token's time at one replica, learned from first tokens.

Problem: on a slow host a request takes a tenth of a second and more before and after the engine, the more the more
streams there are, and the model has the same few milliseconds for every host. A margin for the error of predictions
hides that only as far as a margin may go: no place is to be kept free for long for what may be chance.

Idea: what is late in the mean is no chance. It is a part of the prediction, in proportion to how full the replica is,
by least squares through the origin over the last seconds, shrunk by a few requests of a full replica that were on time
(ridge regression, Hoerl and Kennard 1970). The margin is left with what differs from request to request. An empty
replica owes nothing: however late all have been, one that has emptied is tried again.
"""

from __future__ import annotations

import math
from typing import Final

MEMORY_S: Final = 10.0  # an observation counts less by e after that
PRIOR: Final = 5.0  # requests of a full replica, on time, that are believed in beside what was seen


class Unseen:
    """Of one replica; nothing at first. full: how full it is as a request is sent there, 0 to 1."""

    __slots__ = ("_at_s", "_late_s", "_weight")

    def __init__(self) -> None:
        self._late_s = self._weight = 0.0
        self._at_s = -math.inf

    def observe(self, late_s: float, full: float, now: float) -> None:
        """A first token came so much later than the model alone said, negative for earlier. What is no number says
        nothing."""
        if not math.isfinite(late_s):
            return
        kept = math.exp(min(0.0, self._at_s - now) / MEMORY_S)
        self._late_s = kept * self._late_s + full * late_s
        self._weight = kept * self._weight + full * full
        self._at_s = max(self._at_s, now)

    def seconds(self, full: float) -> float:
        """Expected of one that is sent there now, at least 0."""
        return full * max(0.0, self._late_s / (self._weight + PRIOR))
