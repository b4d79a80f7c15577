"""Working state of one tier during a decision: current targets, limits and recorded steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from plimsoll.core.autoscaling.decision_state import TierDecisionState
from plimsoll.core.autoscaling.observations import TierObservation
from plimsoll.core.autoscaling.scaling_decision import DecisionStep, LimitNote, ScalingLimit
from plimsoll.core.autoscaling.scaling_policy import TierPolicy
from plimsoll.core.demand.standby_value import CostBenefit


@dataclass(slots=True)
class TierContext:
    """State of one tier within one decision.

    bounds: lower and upper bound of the count at this time. standby: standby replicas worth adding to the need.
    retained_standby: standby replicas worth keeping above the scale-down need. standby_value: cost and benefit of the
    standby replicas of all tiers. scale_up_target: the tier grows below this count. scale_down_target: the tier may
    shrink above this count; between the two, noise does not change the count. standby_base: needed replicas to which
    standby replicas are added. count: result of the last step.
    hold_reason: why the demand is unknown, else None. scaled_to_zero: the tier goes to zero because it is idle.
    """

    name: str
    observation: TierObservation
    policy: TierPolicy
    state: TierDecisionState
    bounds: tuple[int, int]
    standby: int = 0
    retained_standby: int = 0
    standby_value: CostBenefit | None = None
    scale_up_target: int = 0
    scale_down_target: int = 0
    standby_base: int = 0
    count: int = 0
    hold_reason: str | None = None
    scaled_to_zero: bool = False
    overdue: tuple[str, ...] = ()
    etas_s: tuple[float, ...] = ()
    limits: list[ScalingLimit] = field(default_factory=list)
    limit_notes: list[LimitNote] = field(default_factory=list)
    steps: list[DecisionStep] = field(default_factory=list)

    @property
    def target(self) -> int:
        """Count without stabilization and limits."""
        return max(self.scale_up_target, min(self.observation.replicas, self.scale_down_target))

    def add_step(self, name: str, message: str, *values: object, count: int | None = None, brief: str = "") -> None:
        """Record a step. Pass external text as a value, because `message` and `brief` are formats.

        count: replica count after the step; None for the current target. brief: as in `DecisionStep`.
        """
        self.count = self.target if count is None else count
        self.steps.append(DecisionStep(name, self.count, message, values, brief))

    def set_state(self, name: str, value: Any) -> None:
        """Set a field of the state for the next decision, without a copy if it is unchanged."""
        if getattr(self.state, name) != value:
            self.state = self.state._replace(**{name: value})

    def add_limit(self, limit: ScalingLimit, bound: str = "", detail: str = "") -> None:
        """Record a limit that applies. bound, detail: as in `LimitNote`; no bound: it does not withhold replicas."""
        if limit not in self.limits:
            self.limits.append(limit)
        if bound:
            self.limit_notes.append(LimitNote(limit, bound, detail))
