"""What the user allows and wants: the bounds of each tier, and how decisions are used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from plimsoll.core.forecast import MISS_COST
from plimsoll.core.slo import Slo


class Mode(StrEnum):
    """What is done with a decision."""

    AUTO = "Auto"
    RECOMMEND = "Recommend"  # decide and tell, but change nothing
    OFF = "Off"


@dataclass(frozen=True, slots=True)
class RateLimit:
    """At most so many replicas more, or fewer, within any `per_s` seconds. Raises ValueError."""

    replicas: int
    per_s: float

    def __post_init__(self) -> None:
        if self.replicas < 1 or not 0.0 < self.per_s < math.inf:
            raise ValueError(
                f"a rate limit is 1 replica or more in a finite time, not {self.replicas} in {self.per_s} s"
            )


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time, seconds since the epoch, with other bounds; None: as outside of it.

    Whoever knows the time zone turns a schedule into its next windows. Replicas that a window asks for are ordered one
    start-up before it begins.
    """

    from_s: float
    until_s: float
    min_replicas: int | None = None
    max_replicas: int | None = None


@dataclass(frozen=True)
class TierPolicy:
    """The user's bounds on one tier, in replicas. Raises ValueError.

    warm_replicas: kept beyond the need. gpus: of one replica. up, down: limits on change, None for none.
    """

    min_replicas: int
    max_replicas: int
    warm_replicas: int = 0
    gpus: int = 1
    up: RateLimit | None = None
    down: RateLimit | None = None
    schedule: tuple[Window, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas:
            raise ValueError(f"0 <= min_replicas <= max_replicas, not {self.min_replicas} and {self.max_replicas}")
        if self.warm_replicas < 0 or self.gpus < 0:
            raise ValueError("warm_replicas and gpus are 0 or more")

    def bounds(self, now_s: float, start_s: float) -> tuple[int, int]:
        """Least and most replicas now; a window's least is ordered one start-up (start_s) early."""
        least, most = self.min_replicas, self.max_replicas
        for window in self.schedule:
            if window.min_replicas is not None and window.from_s - start_s <= now_s < window.until_s:
                least = window.min_replicas
            if window.max_replicas is not None and window.from_s <= now_s < window.until_s:
                most = window.max_replicas
        return min(least, most), most


@dataclass(frozen=True)
class Policy:
    """All that the user says of one service. Raises ValueError.

    slo: what the measured percentiles are held against. miss_cost: what a missed request costs, in multiples of the
    GPU-seconds that it takes. prefill_per_decode: least and most prefill replicas for one decode replica.
    """

    tiers: Mapping[str, TierPolicy]
    slo: Slo | None = None
    mode: Mode = Mode.AUTO
    paused: bool = False
    miss_cost: float = MISS_COST
    prefill_per_decode: tuple[float, float] = (0.0, math.inf)

    def __post_init__(self) -> None:
        least, most = self.prefill_per_decode
        if not 0.0 <= least <= most or most == 0.0 or math.isinf(least):
            raise ValueError(f"prefill_per_decode is a least and a most ratio, not {self.prefill_per_decode}")
        if not 0.0 <= self.miss_cost < math.inf:
            raise ValueError(f"miss_cost must be finite and 0 or more, not {self.miss_cost}")
