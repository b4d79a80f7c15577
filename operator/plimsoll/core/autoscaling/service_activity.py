"""Whether a service has requests and ready replicas, and for how long it has been without."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from plimsoll.core.autoscaling.inputs import ServiceSnapshot
from plimsoll.core.autoscaling.snapshot_signals import idle_status, plausible_rate
from plimsoll.core.demand import idle_periods
from plimsoll.core.demand.idle_periods import IdlePeriod, IdleStats
from plimsoll.core.demand.request_lengths import TOO_FEW_COMPLETED
from plimsoll.core.types import Unavailable

NO_IDLE_STATS: Final = IdleStats()


@dataclass(slots=True)
class ServiceActivity:
    """Activity of one service. is_idle: without arriving, queued or running requests."""

    idle_stats: IdleStats = NO_IDLE_STATS
    is_idle: bool | Unavailable = TOO_FEW_COMPLETED
    _sampled_s: float | None = field(default=None, repr=False)  # time of the last arrival sample
    _unready_s: float = field(default=-math.inf, repr=False)  # last time a tier had no ready replica
    _was_active: bool = field(default=False, repr=False)  # a request was seen

    def update(self, snapshot: ServiceSnapshot, horizon_s: float, now_s: float) -> None:
        """Process one tick. horizon_s: the longest forecast horizon of the tiers."""
        if any([tier_snapshot.ready == 0 for tier_snapshot in snapshot.tiers.values()]):
            self._unready_s = now_s
        rate, arrivals = plausible_rate(snapshot.metrics), 0.0
        if snapshot.metrics.has_new_rate and not isinstance(rate, Unavailable):
            elapsed_s = 0.0 if self._sampled_s is None else max(0.0, now_s - self._sampled_s)
            arrivals, self._sampled_s = rate * elapsed_s, now_s
        self.is_idle = idle_status(snapshot)
        is_idle = None if isinstance(self.is_idle, Unavailable) else self.is_idle
        self._was_active = self._was_active or is_idle is False
        self.idle_stats = idle_periods.update_idle(self.idle_stats, now_s, is_idle, arrivals, horizon_s)

    def idle_period(self, now_s: float) -> IdlePeriod | Unavailable:
        """Return the present idle period."""
        if isinstance(self.is_idle, Unavailable):
            return self.is_idle
        return idle_periods.current_idle(self.idle_stats, now_s)

    def serving_s(self, now_s: float) -> float:
        """Return for how long every tier has had a ready replica, s; infinite if no request was seen before that."""
        serving_s = max(0.0, now_s - self._unready_s)
        return serving_s if serving_s == 0.0 or self._was_active else math.inf
