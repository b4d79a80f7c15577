"""The conditions of a service with targets, from the targets as last read and their pods. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from plimsoll.api.conditions import Condition, ConditionReason, ConditionType
from plimsoll.api.events import MAX_EVENT_MESSAGE_CHARS
from plimsoll.api.message_text import shorten
from plimsoll.controllers.reconcile.tier_health import TierStatusInputs
from plimsoll.controllers.targets.target_state import TargetState

DEMAND_SOURCE: Final = (
    "demand is read from the {} counters, because requests do not pass Plimsoll's gateway: requests rejected or"
    " abandoned before an engine are not seen, retries count as demand, TTFT is measured at {}, and there is no"
    " admission control"
)
OF_SERVE: Final = ("engines'", "the engine")
OF_PAIR: Final = (
    "prefill engines'",
    "the prefill engine and lacks the KV transfer and the first decode step, and requests that skip prefill",
)


def target_conditions(
    tiers: tuple[TierStatusInputs, ...], targets: Mapping[str, TargetState], reached: tuple[Condition, ...]
) -> tuple[Condition, ...]:
    """Ready, and TargetUnusable where a target is. Before the first reading, Ready says that there was none.

    reached: Ready as the gateways have it, for engines that take their requests; empty for others.
    """
    problem = next((state.problem for state in targets.values() if state.problem is not None), None)
    if problem is not None:
        brief = shorten(problem.message, MAX_EVENT_MESSAGE_CHARS)
        return (
            Condition(ConditionType.READY, False, problem.reason, problem.message, brief),
            Condition(ConditionType.TARGET_UNUSABLE, True, problem.reason, problem.message, brief),
        )
    ready = sum(tier.ready for tier in tiers)
    total = sum(state.scaled.replicas for state in targets.values() if state.scaled is not None)
    names = ", ".join(state.target.scale_target_ref.label for state in targets.values())
    if not targets:
        return (
            Condition(ConditionType.READY, None, ConditionReason.ENGINES_NOT_READY, "the target has not been read yet"),
        )
    count = (
        f"{ready} of {total} engines of {names} ready"
        if ready <= total
        else f"{ready} engines of {names} ready, {total} desired"
    )
    if not ready and not total and reached:
        message = f"{names} has 0 replicas, and targets do not scale from zero: set its count to 1 or more"
        return (Condition(ConditionType.READY, False, ConditionReason.SCALED_TO_ZERO, message),)
    if len(tiers) > 1:
        count = f"{count} ({', '.join(f'{tier.role} {tier.ready}' for tier in tiers)})"
    if not all(tier.ready for tier in tiers):
        return (Condition(ConditionType.READY, False, ConditionReason.ENGINES_NOT_READY, count),)
    if reached:
        return reached
    source = DEMAND_SOURCE.format(*(OF_PAIR if len(tiers) > 1 else OF_SERVE))
    return (Condition(ConditionType.READY, True, ConditionReason.ENGINES_READY, f"{count}; {source}", count),)
