"""What was decided and why: one value, of which status, Event, log line and `explain` are renderings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from plimsoll.core.scaling.state import State

DIRECTION: Final = "direction"  # the step that says from when on a smaller need is believed


class Limit(StrEnum):
    """What kept a tier from the replicas that it needs."""

    MIN = "minReplicas"
    MAX = "maxReplicas"
    RATE = "rate limit"
    BUDGET = "GPU budget"
    UNSCHEDULABLE = "unschedulable"
    INFEASIBLE = "infeasible promise"


class Step(NamedTuple):
    """One consideration on the way: its name, the replicas after it, and why, as a format and its values.

    Words are made of it when somebody reads them: most decisions of a tick change nothing, and nobody does.
    """

    name: str
    replicas: int
    said: str
    values: tuple[object, ...] = ()

    @property
    def why(self) -> str:
        return self.said.format(*self.values)


@dataclass(frozen=True)
class TierDecision:
    """The replicas that a tier should have, and the steps that led there.

    before: replicas ordered until now, None where that was not observed. recommended: what `replicas` would be if the
    mode let it act, None where nothing was observed. limits: what stood between need and replicas. counterfactual: what
    would come without the change, in words. held: demand is not known, so nothing is concluded from it. overdue: pods
    that take too long to start to be counted on. etas_s: seconds from now at which those that are starting will
    likely be ready, the next one first.
    """

    replicas: int
    steps: tuple[Step, ...]
    before: int | None = None
    recommended: int | None = None
    limits: tuple[Limit, ...] = ()
    counterfactual: str | None = None
    held: bool = False
    overdue: tuple[str, ...] = ()
    etas_s: tuple[float, ...] = ()

    @property
    def why(self) -> str:
        """In one line: the steps that moved the count (the last one if none did), how long a smaller need was waited
        for, and the counterfactual."""
        count, telling = self.before, []
        for step in self.steps:
            gives_back = step.name == DIRECTION and self.before is not None and step.replicas < self.before
            if step.replicas != count or gives_back:
                telling.append(step.why)
            count = step.replicas
        words = telling or [self.steps[-1].why]
        return "; ".join(words if self.counterfactual is None else [*words, self.counterfactual])


@dataclass(frozen=True)
class Decision:
    """Of one service. binding: the tier nearest to its load line, None if none is known.

    state: what the next decision must be given.
    """

    tiers: Mapping[str, TierDecision]
    binding: str | None
    state: State
