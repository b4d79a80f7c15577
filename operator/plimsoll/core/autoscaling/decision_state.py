"""State that one decision passes to the next. It is small, so that it fits the service's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, NamedTuple, TypeAlias

from plimsoll.core import codec
from plimsoll.core.autoscaling.startup_time import Backoff
from plimsoll.core.codec import Amount, Count, Length, Number

MAX_MARKS: Final = 32  # entries per list; the oldest are dropped
NO_BACKOFF: Final = Backoff()
MIN_TAIL_SCALE: Final = 0.6
MAX_TAIL_SCALE: Final = 2.0  # larger deviations have other causes than the tail


class TimedReplicas(NamedTuple):
    """A replica count, and the time since which it applies, s."""

    replicas: Count
    since_s: float


_Marks: TypeAlias = Annotated[tuple[TimedReplicas, ...], Length(0, MAX_MARKS)]


class DownscaleRegret(NamedTuple):
    """Statistics of load returns (see `downscale_regret`).

    idle: sufficient counts, largest first, with the time since which each is sufficient; the first is the starting
    count. served: replicas that the load has needed while they were ready, and that have not been idle for too long.
    trials: discounted number of idle replicas. needed_again: those of them that were needed again.
    """

    idle: _Marks = ()
    served: Count = 0
    trials: Amount = 0.0
    needed_again: Amount = 0.0

    def validate(self) -> None:
        """Raise ValueError for more replicas needed again than trials."""
        if self.needed_again > self.trials:
            raise ValueError(f"{self.needed_again} returns of {self.trials} trials is out of range")


NO_REGRET: Final = DownscaleRegret()


@codec.stored_as(
    "a scaling state of a tier",
    optional=("ready", "ready_increased_s", "downscale_regret", "standby_base"),
    downscale_candidates="lower",
    order_history="ordered",
    tpot_tail_scale="tailScale",
    scheduling_backoff="backoff",
    ready_increased_s="grown",
    downscale_regret="returns",
)
class TierDecisionState(NamedTuple):
    """State of one tier.

    downscale_candidates: sufficient counts, largest first, with the time since which each is sufficient. order_history:
    ordered counts, oldest first, for the rate limits. tpot_tail_scale: measured TPOT tail over its prior, for the next
    sizing. scheduling_backoff: back-off after unschedulable pods. replicas: last decided count. ready: ready replicas
    at the last decision, None before it. ready_increased_s: time of their last increase, None without one.
    standby_base: needed replicas to which standby replicas are added.
    """

    downscale_candidates: _Marks = ()
    order_history: _Marks = ()
    tpot_tail_scale: Annotated[float, Number(MIN_TAIL_SCALE, MAX_TAIL_SCALE)] = 1.0
    scheduling_backoff: Backoff = NO_BACKOFF
    replicas: Count = 0
    ready: Count | None = None
    ready_increased_s: float | None = None
    downscale_regret: DownscaleRegret = NO_REGRET
    standby_base: Count = 0


@codec.stored_as("a scaling state", version=1, at_s="at")
@dataclass(frozen=True, slots=True)
class DecisionState:
    """State of one service. at_s: time of the decision, seconds since the epoch; None before the first."""

    at_s: float | None = None
    tiers: Mapping[str, TierDecisionState] = field(default_factory=dict)
