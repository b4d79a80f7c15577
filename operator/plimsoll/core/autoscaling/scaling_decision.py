"""The scaling decision of a service. Status, Events, logs and `explain` render it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from plimsoll.core.autoscaling.decision_state import DecisionState
from plimsoll.core.units import format_message

STABILIZE_STEP: Final = "stabilization"  # the step that applies the stabilization window
MODE_STEP: Final = "mode"  # the step that applies the scaling mode


class ScalingLimit(StrEnum):
    """Limit that keeps a tier from the replicas that it needs."""

    MIN = "minReplicas"
    MAX = "maxReplicas"
    RATE = "rate limit"
    UNSCHEDULABLE = "unschedulable"
    INFEASIBLE = "infeasible SLO"


class DecisionStep(NamedTuple):
    """One step of a decision: its name, the replica count after it, and its reason as a format and values.

    The reason is formatted only when it is read, because most decisions change nothing and are not read. brief: format
    of the short reason in Events and the status, with the same values; if it is empty, the reason is short.
    """

    name: str
    replicas: int
    message: str
    values: tuple[object, ...] = ()
    brief: str = ""

    @property
    def reason(self) -> str:
        return format_message(self.message, self.values)

    @property
    def brief_reason(self) -> str:
        return format_message(self.brief or self.message, self.values)


class LimitNote(NamedTuple):
    """A limit that applies to a tier.

    bound: the limit without figures that follow the load, such as `maxReplicas is 9`. detail: those figures, such as
    `12 needed`; may be empty.
    """

    limit: ScalingLimit
    bound: str
    detail: str = ""


@dataclass(frozen=True)
class TierDecision:
    """Desired replica count of a tier, and the steps of its decision.

    previous_replicas: count ordered before, None if it was not observed. recommended: the count that mode Auto would
    set, None if nothing was observed. limits: limits that reduced or raised the count. limit_notes: those
    that withhold replicas. counterfactual: expected latency
    or attainment without the change, as a sentence. is_held: the demand is unknown, so the count is frozen. overdue:
    names of pods beyond the start-up limit, which do not count as expected capacity. etas_s: expected times until the
    starting pods are ready, seconds, ascending. replicas_set_by: who else ordered `previous_replicas`,
    None if no other did.
    """

    replicas: int
    steps: tuple[DecisionStep, ...]
    previous_replicas: int | None = None
    recommended: int | None = None
    limits: tuple[ScalingLimit, ...] = ()
    limit_notes: tuple[LimitNote, ...] = ()
    counterfactual: str | None = None
    is_held: bool = False
    overdue: tuple[str, ...] = ()
    etas_s: tuple[float, ...] = ()
    replicas_set_by: str | None = None

    @property
    def override(self) -> str | None:
        """Who else ordered the count before this decision, as a clause; None if no other did."""
        return (
            None
            if self.replicas_set_by is None
            else f"{self.replicas_set_by} set the replica count to {self.previous_replicas}"
        )

    @property
    def summary(self) -> str:
        """One line: the reasons of the steps that changed the count (else of the last step), and the counterfactual.

        It begins with who else ordered the count before. A scale-down always includes the reason of the stabilization
        step.
        """
        reasons = [step.reason for step in self._deciding_steps() or self.steps[-1:]]
        return "; ".join(part for part in (self.override, *reasons, self.counterfactual) if part is not None)

    @property
    def brief_reasons(self) -> tuple[str, ...]:
        """The short reasons of the same steps, after who else ordered the count before. Never empty."""
        reasons = [step.brief_reason for step in self._deciding_steps()] or [f"{self.replicas} decided before"]
        return tuple(reasons if self.override is None else (self.override, *reasons))

    def _deciding_steps(self) -> list[DecisionStep]:
        """The steps that changed the count; at a scale-down also the stabilization step.

        At a scale-up these are the steps after the count was last at the previous one or below: what would have been
        enough for another step did not raise it.
        """
        previous, count = self.previous_replicas, self.previous_replicas
        found: list[DecisionStep] = []
        for step in self.steps:
            if previous is not None and count is not None and count <= previous < self.replicas:
                found = []
            scales_down = (
                step.name == STABILIZE_STEP
                and self.previous_replicas is not None
                and step.replicas < self.previous_replicas
            )
            if step.replicas != count or scales_down:
                found.append(step)
            count = step.replicas
        return found


@dataclass(frozen=True)
class ScalingDecision:
    """Decision for one service.

    binding_tier: the tier nearest to its SLO capacity, None if no utilization is known. state: input of the next
    decision.
    """

    tiers: Mapping[str, TierDecision]
    binding_tier: str | None
    state: DecisionState
