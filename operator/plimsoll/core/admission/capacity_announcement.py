"""The capacity that the operator expects, as admission control needs it: when it comes, and how much."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CapacityAnnouncement:
    """The expected capacity of starting replicas. Times are absolute, on the controller's clock.

    `ready_at_s` is the time of the next capacity, None if unknown. `spare_rate` is its capacity beyond new arrivals, in
    GPU-seconds of work per second. `starting` is False if no replica is starting or will start on demand, so that
    queueing is useless. `later_steps` are the later (time, spare rate) steps in order. `startup_s` is the usual
    start-up time of a replica that a request would start, None if unknown; it counts while `ready_at_s` is None.
    `arrival_rate` is the work of new arrivals, in GPU-seconds per second.
    """

    ready_at_s: float | None = None
    spare_rate: float = 0.0
    starting: bool = True
    later_steps: tuple[tuple[float, float], ...] = ()
    startup_s: float | None = None
    arrival_rate: float = 0.0

    def expected_s(self, now: float) -> float | None:
        """Returns the time of the next capacity for a request that comes `now`, None if unknown."""
        if self.ready_at_s is not None or self.startup_s is None:
            return self.ready_at_s
        return now + self.startup_s
