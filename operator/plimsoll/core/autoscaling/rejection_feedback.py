"""Capacity correction from rejections that occur although all required replicas are ready.

Problem: the sizing is as accurate as its model, which learns from completed requests. While the mix shifts, or if the
model is wrong, gateways reject requests that the forecast counted as carried.

Idea: admitted requests fit on the ready replicas, so all arrivals would have needed ready / (1 - rejected share). The
ratio to the largest count that the model required in the same window is the correction. It rises at once and decays
slowly. It is updated only if all replicas were ready for the whole window, and the rejections exceed random variation
(`rejection_significance`). Excess minutes accumulate until one is within the error budget.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from plimsoll.core.autoscaling.rejection_significance import insignificant_rejections

REJECTION_WINDOW_S: Final = 60.0  # window of the rejected share
CORRECTION_MEMORY_S: Final = 600.0  # decay time, in which the model can adapt
MAX_CORRECTION: Final = 3.0  # a larger ratio has other causes than the model
_NEGLIGIBLE_CORRECTION: Final = 1.005


class RejectionSample(NamedTuple):
    """First attempts of the last REJECTION_WINDOW_S: the rejected share, and the number of arrivals.

    budget: share that the SLO allows to miss. in_flight, arrival_cv2: as for `insignificant_rejections`.
    """

    share: float
    arrivals: float
    budget: float
    in_flight: float
    arrival_cv2: float = 1.0

    def insignificant_rejections(self, requests: float) -> float:
        """Largest number of rejections among `requests` that random variation explains."""
        return insignificant_rejections(self.budget, requests, self.in_flight, self.arrival_cv2)


@dataclass(slots=True)
class CapacityCorrection:
    """Correction of one tier. factor: required replicas over those that the model computes, at least 1."""

    factor: float = 1.0
    _at_s: float | None = None
    _fully_ready_since: tuple[float, int] | None = (
        None  # start of the time in which all desired replicas were ready, and their number
    )
    _arrivals: float = 0.0  # first attempts while more than the budget were rejected
    _rejections: float = 0.0  # rejected of these
    _waiting: tuple[float, int] | None = None  # when requests waited last at each engine, and how many
    _required_history: deque[tuple[float, float]] = field(default_factory=deque)  # times and counts; counts decrease

    @property
    def is_negligible(self) -> bool:
        """Whether the correction changes nothing."""
        return self.factor < _NEGLIGIBLE_CORRECTION

    def recent_waiting(self, waiting: int, now_s: float) -> int:
        """Return how many requests waited at each engine, when any did last in REJECTION_WINDOW_S. waiting: those now.

        Admission keeps these queues short, so that one is empty at times while its rejections are in the window.
        """
        if waiting > 0:
            self._waiting = now_s, waiting
        is_recent = self._waiting is not None and 0.0 <= now_s - self._waiting[0] <= REJECTION_WINDOW_S
        return self._waiting[1] if self._waiting is not None and is_recent else 0

    def update(self, required: float, ready: int, fully_ready: bool, sample: RejectionSample, now_s: float) -> None:
        """Process one tick. required: replicas by the model, not rounded up. fully_ready: all ordered replicas are
        ready. now_s: seconds since the epoch.
        """
        elapsed_s = 0.0 if self._at_s is None else max(0.0, now_s - self._at_s)
        self._at_s = now_s
        self.factor = 1.0 + (self.factor - 1.0) * math.exp(-elapsed_s / CORRECTION_MEMORY_S)
        if not fully_ready:
            self._fully_ready_since = None
        elif (
            self._fully_ready_since is None or self._fully_ready_since[1] != ready or now_s < self._fully_ready_since[0]
        ):
            self._fully_ready_since = now_s, ready
        is_settled = self._fully_ready_since is not None and now_s - self._fully_ready_since[0] >= REJECTION_WINDOW_S
        max_required = self._max_required(required, now_s)
        if not is_settled or max_required <= 0 or not sample.budget < sample.share < 1.0:
            self._arrivals = self._rejections = 0.0
            return
        new_arrivals = sample.arrivals * (min(elapsed_s / REJECTION_WINDOW_S, 1.0) if self._arrivals else 1.0)
        self._arrivals += new_arrivals
        self._rejections += new_arrivals * sample.share
        if self._rejections > sample.insignificant_rejections(self._arrivals):
            self.factor = max(self.factor, min(ready / (1.0 - sample.share) / max_required, MAX_CORRECTION))

    def _max_required(self, required: float, now_s: float) -> float:
        """Return the largest requirement of the last REJECTION_WINDOW_S."""
        history = self._required_history
        while history and not (history[-1][0] < now_s and history[-1][1] > required):
            history.pop()
        history.append((now_s, required))
        while history[0][0] < now_s - REJECTION_WINDOW_S:
            history.popleft()
        return history[0][1]
