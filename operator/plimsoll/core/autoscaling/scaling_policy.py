"""Scaling policy of a service: bounds of each tier, rate limits, schedule and mode."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from plimsoll.core.demand.standby_value import MISS_COST
from plimsoll.core.slo import Slo


class ScalingMode(StrEnum):
    """Use of a decision."""

    AUTO = "Auto"
    RECOMMEND = "Recommend"  # show decisions, but change nothing
    OFF = "Off"


@dataclass(frozen=True, slots=True)
class ReplicaRateLimit:
    """Largest change of the replica count within any `per_s` seconds. Raises ValueError."""

    replicas: int
    per_s: float

    def __post_init__(self) -> None:
        if self.replicas < 1 or not 0.0 < self.per_s < math.inf:
            raise ValueError(
                f"a rate limit must be at least 1 replica in a finite time, not {self.replicas} in {self.per_s} s"
            )


@dataclass(frozen=True, slots=True)
class ScheduleWindow:
    """An interval, in seconds since the epoch, with other bounds; None keeps the tier's bound.

    The caller resolves time zones. Replicas for `min_replicas` are ordered one start-up time before the window begins.
    """

    from_s: float
    until_s: float
    min_replicas: int | None = None
    max_replicas: int | None = None


@dataclass(frozen=True)
class TierPolicy:
    """Bounds of one tier, in replicas. Raises ValueError.

    warm_replicas: replicas kept beyond the need. scale_up_limit, scale_down_limit: rate limits, None for no limit.
    """

    min_replicas: int
    max_replicas: int
    warm_replicas: int = 0
    gpus_per_replica: int = 1
    scale_up_limit: ReplicaRateLimit | None = None
    scale_down_limit: ReplicaRateLimit | None = None
    schedule: tuple[ScheduleWindow, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas:
            raise ValueError(
                f"must be 0 <= min_replicas <= max_replicas, not {self.min_replicas} and {self.max_replicas}"
            )
        if self.warm_replicas < 0 or self.gpus_per_replica < 0:
            raise ValueError("warm_replicas and gpus_per_replica must be at least 0")

    def bounds(self, now_s: float, startup_s: float) -> tuple[int, int]:
        """Return the bounds at `now_s`; a window's minimum applies `startup_s` early."""
        minimum, maximum = self.min_replicas, self.max_replicas
        for window in self.schedule:
            if window.min_replicas is not None and window.from_s - startup_s <= now_s < window.until_s:
                minimum = window.min_replicas
            if window.max_replicas is not None and window.from_s <= now_s < window.until_s:
                maximum = window.max_replicas
        return min(minimum, maximum), maximum


@dataclass(frozen=True)
class ScalingPolicy:
    """Scaling policy of one service. Raises ValueError.

    slo: targets for measured percentiles. miss_cost: cost of a missed request, in multiples of its GPU-seconds.
    prefill_per_decode: lower and upper bound of prefill replicas per decode replica.
    """

    tiers: Mapping[str, TierPolicy]
    slo: Slo | None = None
    mode: ScalingMode = ScalingMode.AUTO
    paused: bool = False
    miss_cost: float = MISS_COST
    prefill_per_decode: tuple[float, float] = (0.0, math.inf)

    def __post_init__(self) -> None:
        minimum, maximum = self.prefill_per_decode
        if not 0.0 <= minimum <= maximum or maximum == 0.0 or math.isinf(minimum):
            raise ValueError(f"prefill_per_decode must be a lower and an upper bound, not {self.prefill_per_decode}")
        if not 0.0 <= self.miss_cost < math.inf:
            raise ValueError(f"miss_cost must be finite and at least 0, not {self.miss_cost}")

    def sizes(self, tier: str) -> bool:
        """Whether the tier is sized: a target of the SLO depends on it."""
        return self.slo is not None and self.slo.has_target_for(tier)
