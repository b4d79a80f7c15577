"""The ScalingLimited condition: which limit keeps a tier from the replicas that it needs. Pure.

Problem: load near a limit crosses it again and again, and the number of replicas that it needs changes all the time.
Idea: the condition is about a limit and its value (its bound), and the figures follow once a minute. It stays for a
minute after the limit last applied. It changes at once if the limit gets another value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from plimsoll.api.conditions import Condition, ConditionReason, ConditionType
from plimsoll.api.events import MAX_EVENT_MESSAGE_CHARS
from plimsoll.api.message_text import join_within
from plimsoll.core.autoscaling.scaling_decision import LimitNote, ScalingDecision, ScalingLimit

FIGURES_SECONDS: Final = 60.0  # at least so long the figures of a condition stay
LIMIT_RECOVERY_SECONDS: Final = 60.0  # ScalingLimited stays for so long after its limit last applied
_LIMIT_REASONS: Final = {
    ScalingLimit.MAX: ConditionReason.AT_MAX_REPLICAS,
    ScalingLimit.RATE: ConditionReason.RATE_LIMITED,
    ScalingLimit.UNSCHEDULABLE: ConditionReason.UNSCHEDULABLE,
}
_ADVICE: Final = {
    ScalingLimit.MAX: "raise spec.{}.{}.maxReplicas if the cluster has room",
    ScalingLimit.UNSCHEDULABLE: "add nodes; condition ScalingLimited quotes the scheduler",
}


@dataclass
class LimitTracker:
    """The ScalingLimited condition of one service; None while each tier has the replicas that it needs.

    form: the field of the spec that has the limits, tiers or targets.
    """

    form: str = "tiers"
    condition: Condition | None = None
    _generation: int | None = None
    _stated_s: float = -math.inf  # time of the figures in the condition
    _lifted_s: float = math.inf  # time since which the limit in the condition no longer applies; infinite while it does

    def update(self, decision: ScalingDecision, now_s: float, generation: int | None = None) -> Condition | None:
        """The condition after a decision. A limit of an earlier generation of the spec does not stay.

        now_s: seconds since the epoch. generation: of the spec, which sets the limits.
        """
        if generation != self._generation:
            self._generation, self.condition = generation, None
        notes = [(name, note) for name, tier in decision.tiers.items() for note in tier.limit_notes]
        limits = [_limit_condition(self.form, name, note) for name, note in notes]
        found, previous = None, self.condition
        if previous is not None:
            found = next((condition for condition in limits if condition.bound == previous.bound), None)
            has_new_value = any(condition.reason is previous.reason for condition in limits)
            if found is None and not has_new_value:
                self._lifted_s = min(self._lifted_s, now_s)
                if now_s - self._lifted_s < LIMIT_RECOVERY_SECONDS:
                    return previous
        self._lifted_s = math.inf
        if found is None or now_s - self._stated_s >= FIGURES_SECONDS:
            self.condition, self._stated_s = found or next(iter(limits), None), now_s
        return self.condition


def _limit_condition(form: str, tier: str, note: LimitNote) -> Condition:
    bound = f"{tier}: {note.bound}"
    detail = "" if note.limit is ScalingLimit.UNSCHEDULABLE else note.detail  # quotes the scheduler
    return Condition(
        ConditionType.SCALING_LIMITED,
        True,
        _LIMIT_REASONS[note.limit],
        f"{bound}; {note.detail}" if note.detail else bound,
        join_within(MAX_EVENT_MESSAGE_CHARS, bound, detail, _ADVICE.get(note.limit, "").format(form, tier)),
        bound,
    )
