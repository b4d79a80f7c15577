"""Estimates the work rate of new arrivals at one gateway, which retry reservations must leave free.

Problem: often only a tenth of the expected capacity is spare. A 10 s mean at 20 requests per second has an error of
that size, so after random bursts rejected clients would be advised not to retry. Just after a level shift such a mean
shows only half of it, and the first rejected clients would retry too soon.

Idea: apply the estimator that sizes the replicas (`core.demand.level_tracker`) to this gateway's own arrivals: a long
mean that restarts at a level shift. It works without the operator, and it follows this gateway's share of the clients.
"""

from __future__ import annotations

from plimsoll.core.demand import level_tracker


class ArrivalEstimator:
    """The estimator of one controller. Times are of its clock."""

    def __init__(self, now: float) -> None:
        self._level = level_tracker.EMPTY_TRACKER
        self._offered_work_s = 0.0
        self._updated_s = now

    @property
    def work_rate(self) -> float:
        """The estimated work of arrivals, in GPU-seconds per second."""
        return self._level.estimate.level

    def update(self, offered_work_s: float, now: float) -> None:
        """Update the estimate, about once a second. `offered_work_s` is the cumulative work, in GPU-seconds."""
        elapsed_s = now - self._updated_s
        if not elapsed_s > 0.0:
            return
        work_rate = (offered_work_s - self._offered_work_s) / elapsed_s
        self._offered_work_s, self._updated_s = offered_work_s, now
        if work_rate > 0.0 or self.work_rate > 0.0:  # skips idle services
            self._level, _ = level_tracker.add_sample(self._level, work_rate, elapsed_s, elapsed_s)
