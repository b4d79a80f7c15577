"""The Events for conditions that begin, change their reason, or end. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from plimsoll.api import conditions
from plimsoll.api.conditions import TIER_DEGRADED_TYPES, Condition, ConditionReason, ConditionType
from plimsoll.api.events import Event, EventReason

Object = dict[str, Any]

# Event of a condition that begins, or that gets this reason.
_REASON_EVENTS: dict[ConditionReason, EventReason] = {
    ConditionReason.UNSCHEDULABLE: EventReason.UNSCHEDULABLE,
    ConditionReason.IMAGE_UNAVAILABLE: EventReason.IMAGE_UNAVAILABLE,
    ConditionReason.VOLUME_UNAVAILABLE: EventReason.VOLUME_UNAVAILABLE,
    ConditionReason.CONFIG_ERROR: EventReason.CONFIG_ERROR,
    ConditionReason.ENGINE_FAILING: EventReason.ENGINE_FAILING,
    ConditionReason.POD_FAILED: EventReason.POD_FAILED,
    ConditionReason.NODE_NOT_READY: EventReason.NODE_NOT_READY,
    ConditionReason.PODS_REJECTED: EventReason.PODS_REJECTED,
    ConditionReason.TRANSFER_SLOW: EventReason.TRANSFER_SLOW,
    ConditionReason.INVALID_SPEC: EventReason.INVALID_SPEC,
    ConditionReason.APPLY_REJECTED: EventReason.APPLY_REJECTED,
    ConditionReason.MODEL_NAME_TAKEN: EventReason.MODEL_NAME_TAKEN,
    ConditionReason.MODEL_NAME_RESERVED: EventReason.MODEL_NAME_REJECTED,
    ConditionReason.SHORT_NAMES_RESTRICTED: EventReason.MODEL_NAME_REJECTED,
    ConditionReason.ADAPTER_FAILED: EventReason.ADAPTER_FAILED,
    ConditionReason.FALLBACK_UNUSABLE: EventReason.FALLBACK_UNUSABLE,
    ConditionReason.TARGET_NOT_FOUND: EventReason.TARGET_UNUSABLE,
    ConditionReason.TARGET_FORBIDDEN: EventReason.TARGET_UNUSABLE,
    ConditionReason.TARGET_NOT_SCALABLE: EventReason.TARGET_UNUSABLE,
    ConditionReason.TARGET_UNREADABLE: EventReason.TARGET_UNUSABLE,
    ConditionReason.TARGET_TAKEN: EventReason.TARGET_UNUSABLE,
    ConditionReason.TARGET_OVERLAPS: EventReason.TARGET_UNUSABLE,
    ConditionReason.REPLICAS_OWNED: EventReason.REPLICAS_OWNED,
    ConditionReason.POOL_KIND_MISSING: EventReason.INFERENCE_POOL_UNUSABLE,
    ConditionReason.POOL_TAKEN: EventReason.INFERENCE_POOL_UNUSABLE,
    ConditionReason.POOL_REJECTED: EventReason.INFERENCE_POOL_UNUSABLE,
    ConditionReason.POOL_NOT_ACCEPTED: EventReason.INFERENCE_POOL_UNUSABLE,
    ConditionReason.METRICS_MISSING: EventReason.METRICS_LOST,
    ConditionReason.LABELS_MATCH_NOTHING: EventReason.METRICS_LOST,
    ConditionReason.INFEASIBLE: EventReason.SLO_INFEASIBLE,
    ConditionReason.SHEDDING: EventReason.SHEDDING_STARTED,
    ConditionReason.GATEWAY_CONFIG_STALE: EventReason.GATEWAY_CONFIG_STALE,
    ConditionReason.ROLLING_OUT: EventReason.ENGINE_ROLLOUT_STARTED,
    ConditionReason.ROLLOUT_FAILED: EventReason.ENGINE_ROLLOUT_STOPPED,
}
# Event of a condition that ends, or that no longer has this reason.
_RECOVERY_EVENTS: dict[str, EventReason] = {
    ConditionReason.METRICS_MISSING.value: EventReason.METRICS_RECOVERED,
    ConditionReason.LABELS_MATCH_NOTHING.value: EventReason.METRICS_RECOVERED,
    ConditionReason.SHEDDING.value: EventReason.SHEDDING_STOPPED,
    ConditionReason.GATEWAY_CONFIG_STALE.value: EventReason.GATEWAY_CONFIG_SYNCED,
    ConditionReason.MODEL_NAME_TAKEN.value: EventReason.MODEL_NAME_ACCEPTED,
    ConditionReason.MODEL_NAME_RESERVED.value: EventReason.MODEL_NAME_ACCEPTED,
    ConditionReason.SHORT_NAMES_RESTRICTED.value: EventReason.MODEL_NAME_ACCEPTED,
    ConditionReason.ADAPTER_FAILED.value: EventReason.ADAPTERS_LOADED,
    ConditionReason.INVALID_SPEC.value: EventReason.RECOVERED,
    ConditionReason.APPLY_REJECTED.value: EventReason.RECOVERED,
    ConditionReason.OTHER_RELEASE.value: EventReason.RECOVERED,
    ConditionReason.FALLBACK_UNUSABLE.value: EventReason.RECOVERED,
    ConditionReason.TARGET_NOT_FOUND.value: EventReason.RECOVERED,
    ConditionReason.TARGET_FORBIDDEN.value: EventReason.RECOVERED,
    ConditionReason.TARGET_NOT_SCALABLE.value: EventReason.RECOVERED,
    ConditionReason.TARGET_UNREADABLE.value: EventReason.RECOVERED,
    ConditionReason.TARGET_TAKEN.value: EventReason.RECOVERED,
    ConditionReason.TARGET_OVERLAPS.value: EventReason.RECOVERED,
    ConditionReason.POOL_KIND_MISSING.value: EventReason.RECOVERED,
    ConditionReason.POOL_TAKEN.value: EventReason.RECOVERED,
    ConditionReason.POOL_REJECTED.value: EventReason.RECOVERED,
    ConditionReason.POOL_NOT_ACCEPTED.value: EventReason.RECOVERED,
    ConditionReason.INFEASIBLE.value: EventReason.RECOVERED,
    ConditionReason.TRANSFER_SLOW.value: EventReason.RECOVERED,
    ConditionReason.RECOVERING.value: EventReason.RECOVERED,
    ConditionReason.ROLLING_OUT.value: EventReason.ENGINE_ROLLOUT_COMPLETED,
    ConditionReason.ROLLOUT_FAILED.value: EventReason.RECOVERED,
}
_TIER_TYPES = frozenset(TIER_DEGRADED_TYPES.values())


def changed_events(
    old: list[Object], new: tuple[Condition, ...], recovered: Mapping[ConditionType, str], resource_version: str
) -> list[Event]:
    """Events for the conditions that differ between the old status and the new one.

    recovered: for each type whose absence means that all is well, the message of the Event for its end.
    resource_version: of the object with the old status. It tells two times apart at which a condition begins.
    """
    previous_by_type = {c.get("type"): c for c in old}
    result = []
    for condition in new:
        previous = previous_by_type.get(condition.type.value, {})
        reason = _event_reason(condition, previous)
        if reason is not None:
            began = previous
            if condition.type in _TIER_TYPES and not previous:
                # A crashing engine starts again and again. That is one failure while the tier is not settled.
                is_settled = condition.reason is ConditionReason.TRANSFER_SLOW
                kind = ConditionType.READY if is_settled else ConditionType.RECONCILING
                began = previous_by_type.get(kind.value, {})
            since_s = began.get("lastTransitionTime", resource_version)
            since = "/".join((condition.type, str(since_s), str(previous.get("reason")), condition.bound))
            result.append(Event(reason, condition.event_message or condition.message, since))
    present = {condition.type for condition in new}
    for kind, message in recovered.items():
        previous = previous_by_type.get(kind.value, {})
        reason = _RECOVERY_EVENTS.get(str(previous.get("reason")))
        if kind is ConditionType.RECONCILING and was_degraded(old) and not present & _TIER_TYPES:
            reason = EventReason.RECOVERED
        if kind not in present and reason is not None:
            since = "/".join((kind, str(previous.get("lastTransitionTime")), str(previous.get("reason"))))
            result.append(Event(reason, message, since))
    return result


def was_degraded(stored: Iterable[Object]) -> bool:
    """Whether stored conditions tell of a tier that had a problem and has not all its replicas since."""
    return any(
        one.get("reason") == ConditionReason.RECOVERING
        or (one.get("type") in _TIER_TYPES and one.get("reason") != ConditionReason.TRANSFER_SLOW)
        for one in stored
    )


def _event_reason(condition: Condition, previous: Object) -> EventReason | None:
    """The Event for a condition that is stated; None if it has not changed or has no Event."""
    if (
        previous.get("status") == condition.status
        and previous.get("reason") == condition.reason.value
        and (not condition.bound or conditions.has_bound(str(previous.get("message")), condition.bound))
    ):
        return None
    match condition.type:
        case ConditionType.READY if condition.holds and previous.get("status") != "True":
            return EventReason.READY
        case ConditionType.READY if previous.get("status") == "True" and not condition.holds:
            return EventReason.NOT_READY
        case ConditionType.READY | ConditionType.RECONCILING | ConditionType.SLO_MET | ConditionType.INTERNAL_ERROR:
            return None
        case ConditionType.SCALING_LIMITED:
            return EventReason.SCALING_LIMITED
        case ConditionType.METRICS_DEGRADED if condition.reason not in _REASON_EVENTS:
            was_lost = previous.get("reason") in (ConditionReason.METRICS_MISSING, ConditionReason.LABELS_MATCH_NOTHING)
            return EventReason.METRICS_RECOVERED if was_lost else None
        case _:
            return _REASON_EVENTS.get(condition.reason)
