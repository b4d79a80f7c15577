"""The TTFT safety margin: a high quantile of the error of TTFT predictions.

Problem: a request admitted at the last moment misses its target by the smallest prediction error. Under overload every
request is admitted late.

Idea: track the quantile by stochastic approximation (Robbins and Monro 1951). A first token later than the margin
widens it a little, one in time narrows it by much less. So it settles where `ON_TIME_QUANTILE` are in time. The margin
applies only under contention: without it, a late request costs no more than a rejected one.
"""

from __future__ import annotations

import math
from typing import Final

ON_TIME_QUANTILE: Final = 0.98  # share of first tokens within prediction plus margin
CONTENTION_WINDOW_S: Final = 10.0  # time constant of contention after a rejection; longer than a burst
_STEP: Final = 0.02  # fraction of the target by which a late first token moves the margin
_INITIAL: Final = 0.3  # fraction of the target before the first measurement
_MAX_MARGIN: Final = 0.5  # fraction of the target


class TtftMargin:
    """The margin of one class in seconds, 0 without a TTFT target. It never exceeds `max_margin_s`."""

    def __init__(self, target_s: float | None) -> None:
        self._target_s = 0.0 if target_s is None else target_s
        self.max_margin_s = _MAX_MARGIN * self._target_s
        self.margin_s = _INITIAL * self._target_s

    def observe(self, error_s: float) -> None:
        """Record a prediction error in seconds, positive if late. NaN counts as in time."""
        step = ON_TIME_QUANTILE if error_s > self.margin_s else ON_TIME_QUANTILE - 1
        self.margin_s = min(max(self.margin_s + step * _STEP * self._target_s, 0.0), self.max_margin_s)

    def safety_s(self, shorter_s: float, since_full_s: float) -> float:
        """Returns how much earlier than its deadline the first token must be predicted under contention, in seconds.

        It covers the prediction error, and `shorter_s`: by how much a mean prompt takes longer at the prefill replicas.
        Otherwise short prompts fill every gap there, and only long prompts are shed. `since_full_s` is the time since a
        request was shed because all replicas were full.
        """
        contention = math.exp(-since_full_s / CONTENTION_WINDOW_S)
        return contention * (self.margin_s + min(max(0.0, shorter_s), self.max_margin_s))
