"""State of one service over time. The phases of a tick (`fleet_decisions`) read and update it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from plimsoll.core.autoscaling.cadence import DecisionBasis
from plimsoll.core.autoscaling.class_targets import ClassTargets
from plimsoll.core.autoscaling.decision_cache import DecisionCache
from plimsoll.core.autoscaling.decision_state import DecisionState
from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot
from plimsoll.core.autoscaling.observations import SizingResult
from plimsoll.core.autoscaling.rejection_feedback import CapacityCorrection
from plimsoll.core.autoscaling.retuning_state import RetuningState
from plimsoll.core.autoscaling.scaling_decision import ScalingDecision
from plimsoll.core.autoscaling.service_activity import ServiceActivity
from plimsoll.core.autoscaling.sizing_requests import client_tier
from plimsoll.core.autoscaling.startup_models import UNKNOWN_VARIANT, Variant, record_startup
from plimsoll.core.autoscaling.tier_state import TierState
from plimsoll.core.autoscaling.ttft_feedback import TtftFeedback
from plimsoll.core.demand.request_lengths import TOO_FEW_COMPLETED
from plimsoll.core.types import Role, Unavailable
from plimsoll.core.workload import Workload

TICK_S: Final = 1.0
MAX_KEPT_DECISIONS: Final = 6  # last decisions that changed a count
NOT_RETUNED: Final = RetuningState()


class TimedDecision(NamedTuple):
    """A decision and its time, seconds since the epoch."""

    at_s: float
    decision: ScalingDecision


@dataclass
class ServiceState:
    """State of one InferenceService.

    decisions: those that changed a count, newest last. basis: what the last decision was made from.
    """

    tiers: dict[str, TierState]
    workload: Workload | Unavailable = TOO_FEW_COMPLETED
    activity: ServiceActivity = field(default_factory=ServiceActivity)
    ttft_feedback: TtftFeedback = field(default_factory=TtftFeedback)
    class_targets: ClassTargets = field(default_factory=ClassTargets)
    sizings: dict[str, SizingResult | Unavailable] = field(default_factory=dict)
    corrections: dict[str, CapacityCorrection] = field(default_factory=dict)
    decision_state: DecisionState = field(default_factory=DecisionState)
    decisions: deque[TimedDecision] = field(default_factory=lambda: deque(maxlen=MAX_KEPT_DECISIONS))
    last_decision: TimedDecision | None = None
    basis: DecisionBasis | None = field(default=None, repr=False)
    retuning: RetuningState = NOT_RETUNED
    cache: DecisionCache = field(default_factory=DecisionCache, repr=False)

    @classmethod
    def for_roles(cls, roles: Sequence[str]) -> ServiceState:
        return cls({role: TierState.for_role(Role(role)) for role in roles})

    @property
    def client_tier(self) -> str:
        """Tier that serves client requests: decode or serve."""
        return client_tier(self.tiers)

    def horizon_s(self, tier: str, spec: ScalingSpec) -> float:
        """Return the forecast horizon of a tier, s."""
        return self.tiers[tier].startup_s + TICK_S if spec.horizon_s is None else spec.horizon_s

    def record_startup(
        self,
        tier: str,
        phases_s: Sequence[tuple[str, float]],
        variant: Variant = UNKNOWN_VARIANT,
        is_restart: bool = False,
    ) -> None:
        """Record the start-up of an engine that became ready. Invalid durations are ignored.

        is_restart: whether the engine restarted in its pod.
        """
        if phases_s and all(0.0 <= seconds < 86400.0 for _, seconds in phases_s):
            models = self.tiers[tier].startup_models
            self.tiers[tier].startup_models = record_startup(models, variant, phases_s, is_restart)


class ServiceTick(NamedTuple):
    """A service with what one tick knows of it. now_s: seconds since the epoch.

    spec: with the SLO that the classes of requests call for.
    """

    state: ServiceState
    snapshot: ServiceSnapshot
    spec: ScalingSpec
    now_s: float
