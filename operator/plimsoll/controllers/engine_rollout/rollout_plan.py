"""Decides which services get new engines now, and says it of each service. Pure.

Problem: a new engine image or setting reaches every service of a platform. A bad one must hit few services, and the
least important ones, and a person must see where the rollout is and what stops it.

Idea: a Deployment's rollout one level up. At most `max_unavailable_services` services are rolled out at once. First
come services that an earlier rollout broke, so that the next generation mends them. Then the others by importance, the
least important first, and last the services that fail for another reason. No service starts while one fails since the
rollout reached it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from plimsoll.api.conditions import Condition, ConditionReason, ConditionType
from plimsoll.api.message_text import MAX_QUOTE_CHARS, shorten
from plimsoll.controllers.engine_rollout.rollout_state import RolloutState
from plimsoll.controllers.object_cache import Key
from plimsoll.resources.platform_config import EngineRolloutSettings

GENERATION_VALUE: Final = "engine.rollout.generation"  # of the chart
PAUSED_VALUE: Final = "engine.rollout.paused"


class Phase(StrEnum):
    """How far a service is."""

    UPDATED = "updated"
    UPDATING = "updating"
    WAITING = "waiting"
    FAILED = "failed"


@dataclass(frozen=True)
class RolloutPlan:
    """turns: the services whose engines may be replaced now. conditions: of services that are not updated."""

    phases: dict[Key, Phase] = field(default_factory=dict)
    turns: frozenset[Key] = frozenset()
    conditions: dict[Key, Condition] = field(default_factory=dict)


def plan_rollout(
    states: Sequence[RolloutState], settings: EngineRolloutSettings, granted: Set[Key], now_s: float
) -> RolloutPlan:
    """The plan. granted: services that have got their turn, also those whose objects do not show it yet."""
    waiting = sorted((one for one in states if _is_waiting(one)), key=_order)
    members = [one for one in states if one.rolled_at_s is not None and one not in waiting]
    failed = sorted((one for one in members if one.failure and (waiting or not one.is_settled)), key=_order)
    updating = [one for one in members if one not in failed and not one.is_settled]
    turns = {one.key for one in updating if not one.is_current}
    if not failed and not settings.paused:
        ready = [one.key for one in waiting if not one.obstacle]
        granted_before = [key for key in ready if key in granted]
        occupied = sum(_occupies(one, settings, now_s) for one in updating)
        free = max(0, settings.max_unavailable_services - occupied - len(granted_before))
        turns.update(granted_before, [key for key in ready if key not in granted][:free])
    phases = {one.key: Phase.UPDATED for one in states}
    conditions: dict[Key, Condition] = {}
    for one in (*updating, *(one for one in waiting if one.key in turns)):
        phases[one.key], conditions[one.key] = Phase.UPDATING, _rolling_out(settings)
    for one in failed:
        phases[one.key], conditions[one.key] = Phase.FAILED, _failed(one, settings)
    ahead = next((one.key for one in states if phases[one.key] is Phase.UPDATING), None)
    for one in waiting:
        if one.key not in turns:
            phases[one.key], conditions[one.key] = Phase.WAITING, _waiting(one, settings, failed, ahead)
            ahead = one.key
    return RolloutPlan(phases, frozenset(turns), conditions)


def _is_waiting(state: RolloutState) -> bool:
    """Whether a service has another generation. One that has the new templates of a tier has had its turn."""
    return not state.is_current and state.rolled_at_s is None


def _order(state: RolloutState) -> tuple[int, tuple[bool, float], Key]:
    return (0 if state.failure else 2 if state.was_failing else 1), state.importance, state.key


def _occupies(state: RolloutState, settings: EngineRolloutSettings, now_s: float) -> bool:
    """Whether a service that is rolled out counts against the limit.

    One that failed before may never settle. It counts for as long as others are watched.
    """
    age_s = now_s - (state.rolled_at_s or now_s)
    return not state.was_failing or age_s < settings.min_ready_seconds


def _rolling_out(settings: EngineRolloutSettings) -> Condition:
    message = (
        f"engines of generation {settings.generation} ({GENERATION_VALUE}) replace the others; afterwards they are "
        f"watched for {settings.min_ready_seconds} s"
    )
    return _pending(ConditionReason.ROLLING_OUT, message, message)


def _failed(state: RolloutState, settings: EngineRolloutSettings) -> Condition:
    failure = shorten(state.failure, MAX_QUOTE_CHARS)
    brief = f"{failure}, and was not before the service got engines of generation {settings.generation}"
    advice = f"no other service gets them until this ends: fix it, or undo the change of {GENERATION_VALUE}"
    return _pending(ConditionReason.ROLLOUT_FAILED, f"{brief}; {advice}", f"{brief}; fix it, or undo the change")


def _waiting(
    state: RolloutState, settings: EngineRolloutSettings, failed: Sequence[RolloutState], ahead: Key | None
) -> Condition:
    subject = f"engines of generation {settings.generation} ({GENERATION_VALUE})"
    if settings.paused:
        return _pending(ConditionReason.ROLLOUT_PAUSED, f"{subject} wait until {PAUSED_VALUE} is false")
    if failed:
        cause = f"{'/'.join(failed[0].key)}, {shorten(failed[0].failure, MAX_QUOTE_CHARS)}"
        return _pending(
            ConditionReason.ROLLOUT_STOPPED, f"{subject} wait, because a service that has them fails: {cause}"
        )
    if state.obstacle:
        return _pending(ConditionReason.ROLLOUT_WAITING, f"{subject} wait until {state.obstacle}")
    after = "" if ahead is None else f" after service {'/'.join(ahead)}"
    return _pending(ConditionReason.ROLLOUT_WAITING, f"{subject} come{after}")


def _pending(reason: ConditionReason, message: str, event_message: str = "") -> Condition:
    return Condition(ConditionType.ENGINE_ROLLOUT_PENDING, True, reason, message, event_message)
