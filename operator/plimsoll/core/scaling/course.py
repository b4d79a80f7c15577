"""One tier on its way through the steps: what is aimed at so far, and what has been said."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from plimsoll.core.forecast import SpareWorth
from plimsoll.core.scaling.decision import Limit, Step
from plimsoll.core.scaling.observation import TierObservation
from plimsoll.core.scaling.policy import TierPolicy
from plimsoll.core.scaling.state import TierState


@dataclass(slots=True)
class Course:
    """Lives within one decision.

    bounds: least and most replicas at this time. spare: worth having in reserve beyond the need, kept: worth keeping
    beyond what may be released, worth: what the reserve of all tiers saves and takes. up: the count below which the
    fleet is too small. release: the count above which it is too large; up <= release, and between the two nothing
    moves, so that chance does not. count: after the last step. held: why demand is not known. asleep: nothing runs,
    since no request is worth waiting for.
    """

    name: str
    seen: TierObservation
    policy: TierPolicy
    state: TierState
    bounds: tuple[int, int]
    spare: int = 0
    kept: int = 0
    worth: SpareWorth | None = None
    up: int = 0
    release: int = 0
    count: int = 0
    held: str | None = None
    asleep: bool = False
    overdue: tuple[str, ...] = ()
    etas_s: tuple[float, ...] = ()
    limits: list[Limit] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @property
    def aim(self) -> int:
        """What the fleet should become when nothing delays or limits it."""
        return max(self.up, min(self.seen.replicas, self.release))

    def say(self, name: str, said: str, *values: object, count: int | None = None) -> None:
        """Add a step; words of others belong into the values. count: replicas after it; None: what is aimed at."""
        self.count = self.aim if count is None else count
        self.steps.append(Step(name, self.count, said, values))

    def keep(self, name: str, value: Any) -> None:
        """Put a value into the state that is left to the next decision; mostly it is there already."""
        if getattr(self.state, name) != value:
            self.state = self.state._replace(**{name: value})

    def limited_by(self, limit: Limit) -> None:
        if limit not in self.limits:
            self.limits.append(limit)
