"""What the status says, from what was seen. Pure: the same sight gives the same conditions, columns and Events.

A condition's message is for the person who reads it at night: the scheduler's, the kubelet's or the engine's own
words first, then what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plimsoll.api.conditions import TIER_READY, Condition, Reason, Type
from plimsoll.api.events import Event, EventReason
from plimsoll.controllers import troubles
from plimsoll.controllers.modelnames import Former
from plimsoll.controllers.report import Report
from plimsoll.core.admission.published import to_dict
from plimsoll.resources import meta

Object = dict[str, Any]

SCALING = (
    "slo",
    "coldStart",
    "limitedBy",
    "lastDecision",
    "decisions",
    "learned",
    "cost",
    "admission",
)  # parts of the status


@dataclass(frozen=True)
class TierSight:
    """One tier as it is. desired: what the scaler wants; deployment: None before it was made."""

    kind: str
    desired: int
    deployment: Object | None
    pods: tuple[Object, ...]
    revision: str  # name of the kept pod template


@dataclass(frozen=True)
class Sight:
    """One service as it is. routable: endpoints that the gateway lists; None when no replica could be asked."""

    service: Object
    tiers: tuple[TierSight, ...] = ()
    gateways_present: int = 0
    gateways_say: str = ""  # what is wrong with what they say, where none can be asked
    routable: int | None = None
    model_names: tuple[str, ...] = ()
    former: tuple[Former, ...] = ()  # names that the spec has no more
    name_pending: str = ""  # our name, where some gateway does not answer to it yet
    name_taken_by: str | None = None  # namespace/name of the service that owns our model name
    invalid: tuple[str, ...] = ()
    rejected: str | None = None
    url: str = ""
    report: Report | None = None  # of the autoscaler, None before its first word
    sleeps: bool = False  # may have no replica at all
    fallback: tuple[str, str] | None = None  # the service that takes what this one cannot, and why it cannot, or ""
    internal_error: Condition | None = None  # of the operator, about the service or one of its objects


def conditions(sight: Sight) -> tuple[Condition, ...]:
    """Every condition that applies, in the order in which they are read."""
    if sight.invalid:
        message = "; ".join(sight.invalid)
        return (
            *_ready(sight, ()),
            Condition(Type.RECONCILING, False, Reason.INVALID_SPEC, "waiting for a spec that can be acted on"),
            Condition(Type.STALLED, True, Reason.INVALID_SPEC, message),
            *_internal_error(sight),
        )
    slow = sight.report.slow_transfer if sight.report else None
    tiers = tuple(_tier(tier, slow if tier.kind == "prefill" else None) for tier in sight.tiers)
    return (
        *_ready(sight, tiers),
        _reconciling(sight, tiers),
        _stalled(sight),
        *tiers,
        _name_owned(sight),
        *_fallback(sight),
        *(sight.report.conditions if sight.report else ()),
        *_internal_error(sight),
    )


def _internal_error(sight: Sight) -> tuple[Condition, ...]:
    return () if sight.internal_error is None else (sight.internal_error,)


def _ready(sight: Sight, tiers: tuple[Condition, ...]) -> tuple[Condition, ...]:
    if sight.routable:
        return (Condition(Type.READY, True, Reason.SERVING, f"clients reach it at {sight.url}"),)
    if sight.invalid:
        return (Condition(Type.READY, False, Reason.INVALID_SPEC, "; ".join(sight.invalid)),)
    if sight.rejected:
        return (Condition(Type.READY, False, Reason.APPLY_REJECTED, sight.rejected),)
    if sight.routable is not None and (asleep := _asleep(sight, tiers)) is not None:
        return (asleep,)
    if sight.tiers and not any(tier.desired for tier in sight.tiers) and not sight.sleeps:
        words = "nothing runs, and spec.scaling keeps it so (mode or paused): scale it by hand"
        return (Condition(Type.READY, False, Reason.SCALED_TO_ZERO, words),)
    answering = next((c for c in tiers if c.type is not Type.PREFILL_READY), None)
    if answering is not None and not answering.holds:
        return (Condition(Type.READY, False, answering.reason, answering.message),)
    if sight.routable is None:
        holds = None if sight.gateways_present else False
        words = "no gateway replica answers" if sight.gateways_present else "there is no gateway replica"
        if sight.gateways_say:
            words = f"no gateway replica is of use: {sight.gateways_say}"
        advice = "look at it with: kubectl get pods -A -l app.kubernetes.io/component=gateway"
        return (Condition(Type.READY, holds, Reason.NO_GATEWAY, f"{words}; {advice}"),)
    message = "the engines are ready, but no gateway replica lists one of them yet"
    return (Condition(Type.READY, False, Reason.NO_ROUTABLE_ENDPOINT, message),)


def _asleep(sight: Sight, tiers: tuple[Condition, ...]) -> Condition | None:
    """Of a service that may go to zero: a request that comes while nothing runs is held, not refused.

    None where something runs, or where waiting helps nobody.
    """
    told = sight.report.told if sight.report else None
    if not sight.sleeps or told is None or told.limits is None:  # without a model gateways hold nobody
        return None
    if not any(tier.desired for tier in sight.tiers):
        words = "nothing runs; the next request is held while an engine starts"
        return Condition(Type.READY, True, Reason.SCALED_TO_ZERO, words)
    if all(c.holds or c.reason is Reason.STARTING for c in tiers):
        return Condition(Type.READY, True, Reason.WAKING, "requests are held until the first engine is ready")
    return None


def _tier(tier: TierSight, slow_transfer: str | None) -> Condition:
    """Whether a tier has its replicas, and if not, the most telling trouble of its pods.

    slow_transfer: why what it computes does not pay, although it is there.
    """
    kind = TIER_READY[tier.kind]
    ready, total = _ready_replicas(tier), tier.desired
    found = troubles.worst(tier.deployment, tier.pods)
    count = f"{ready} of {total} ready"
    if ready >= total and _rolled_out(tier):
        if not total:
            return Condition(kind, True, Reason.SCALED_TO_ZERO, "nothing runs, and nothing is asked")
        if slow_transfer is not None:
            return Condition(kind, True, Reason.TRANSFER_SLOW, f"{count}, but {slow_transfer}")
        return Condition(kind, True, Reason.ALL_REPLICAS_READY, count)
    holds = ready >= total
    if found is not None:
        reason = Reason.ROLLING_OUT if holds else found.reason
        advice = f"; tiers.{tier.kind}.rollout.maxSurge adds this pod before an old one goes" if holds else ""
        return Condition(kind, holds, reason, f"{count}: {found.message}{advice}")
    if tier.deployment is not None and _updated(tier) < total and ready:
        return Condition(kind, holds, Reason.ROLLING_OUT, f"{count}, {_updated(tier)} of the new revision")
    return Condition(kind, holds, Reason.STARTING, f"{count}: engines are starting")


_SETTLED = (Reason.ALL_REPLICAS_READY, Reason.SCALED_TO_ZERO, Reason.TRANSFER_SLOW)


def _reconciling(sight: Sight, tiers: tuple[Condition, ...]) -> Condition:
    waiting = [
        f"{tier.kind}: {condition.message}"
        for tier, condition in zip(sight.tiers, tiers, strict=True)
        if condition.reason not in _SETTLED
    ]
    if waiting or sight.rejected:
        message = "; ".join(waiting) or "an object was rejected"
        return Condition(Type.RECONCILING, True, Reason.PROGRESSING, message)
    return Condition(Type.RECONCILING, False, Reason.CONVERGED, "everything is as the spec wants it")


def _stalled(sight: Sight) -> Condition:
    if sight.rejected:
        return Condition(Type.STALLED, True, Reason.APPLY_REJECTED, sight.rejected)
    return Condition(Type.STALLED, False, Reason.NOT_STALLED, "nothing stands in the way")


def _name_owned(sight: Sight) -> Condition:
    if sight.name_taken_by is None:
        message = f"clients may say {', '.join(sight.model_names)}{_passing(sight)}"
        return Condition(Type.MODEL_NAME_OWNED, True, Reason.OWNED, message)
    meta = sight.service["metadata"]
    long_name = f"{meta['namespace']}/{meta['name']}"
    message = f"{sight.name_taken_by} is older and owns this model name; clients reach this service as {long_name}"
    message += _passing(sight)
    return Condition(Type.MODEL_NAME_OWNED, False, Reason.MODEL_NAME_TAKEN, message)


def _passing(sight: Sight) -> str:
    """What of the names is about to change."""
    pending = f"; {sight.name_pending} follows when every gateway answers to it" if sight.name_pending else ""
    return pending + "".join(f"; {one.name} is answered until {one.until}" for one in sight.former)


def _fallback(sight: Sight) -> tuple[Condition, ...]:
    if sight.fallback is None:
        return ()
    name, why_not = sight.fallback
    if not why_not:
        return (Condition(Type.FALLBACK_FOUND, True, Reason.FALLBACK_FOUND, f"{name} takes what this one cannot"),)
    message = f"spec.admission.fallback.name: {name} {why_not}; what it should take is refused"
    return (Condition(Type.FALLBACK_FOUND, False, Reason.FALLBACK_UNUSABLE, message),)


def _ready_replicas(tier: TierSight) -> int:
    return int(_status(tier).get("readyReplicas", 0))


def _updated(tier: TierSight) -> int:
    return int(_status(tier).get("updatedReplicas", 0))


def _status(tier: TierSight) -> Object:
    found: Object = (tier.deployment or {}).get("status", {})
    return found


def _rolled_out(tier: TierSight) -> bool:
    """True if the Deployment has seen its newest spec and runs exactly the wanted pods of it."""
    if tier.deployment is None:
        return False
    seen = _status(tier).get("observedGeneration", 0) >= tier.deployment["metadata"].get("generation", 0)
    exact = _updated(tier) == tier.desired == _status(tier).get("replicas", 0)
    return bool(seen and exact and tier.deployment["spec"].get("replicas") == tier.desired)


def rolled_out(tier: TierSight) -> bool:
    """True if nothing of an older revision is left, so that its kept pod template may go."""
    return _rolled_out(tier) and _ready_replicas(tier) >= tier.desired


def tiers(sight: Sight) -> dict[str, Object]:
    """`status.tiers`: the numbers behind the columns."""
    return {
        tier.kind: {
            "replicas": int(_status(tier).get("replicas", 0)),
            "ready": _ready_replicas(tier),
            "desired": tier.desired,
            "summary": f"{_ready_replicas(tier)}/{tier.desired}",
            "revision": tier.revision,
            "selector": _selector(sight, tier.kind),
            **(sight.report.tiers.get(tier.kind, {}) if sight.report else {}),
        }
        for tier in sight.tiers
    }


def scaling(sight: Sight, old: Object) -> Object:
    """The rest of what the autoscaler says; before its first word, what it said before this process."""
    report = sight.report
    if report is None:
        return {name: old[name] for name in SCALING if name in old}
    found: Object = {
        "slo": report.slo,
        "coldStart": report.cold_start,
        "limitedBy": report.limited_by,
        "lastDecision": report.last_decision,
        "decisions": list(report.decisions),
        "learned": report.learned,
        "cost": report.cost,
        "admission": None if report.told is None else to_dict(report.told),
    }
    return {name: value for name, value in found.items() if value}


def _selector(sight: Sight, kind: str) -> str:
    chosen = meta.selector(sight.service["metadata"]["name"], kind)
    return ",".join(f"{key}={value}" for key, value in chosen.items())


_TOLD: dict[Reason, EventReason] = {
    Reason.UNSCHEDULABLE: EventReason.UNSCHEDULABLE,
    Reason.IMAGE_UNAVAILABLE: EventReason.IMAGE_UNAVAILABLE,
    Reason.CONFIG_ERROR: EventReason.CONFIG_ERROR,
    Reason.ENGINE_FAILING: EventReason.ENGINE_FAILING,
    Reason.PODS_REFUSED: EventReason.PODS_REFUSED,
    Reason.TRANSFER_SLOW: EventReason.TRANSFER_SLOW,
    Reason.GATEWAYS_BEHIND: EventReason.GATEWAYS_BEHIND,
}


def events(old: list[Object], new: tuple[Condition, ...]) -> list[Event]:
    """What changed between the status as it is and as it will be."""
    before = {c.get("type"): c for c in old}
    told = []
    for condition in new:
        was = before.get(condition.type.value, {})
        event = _event(condition, was)
        if event is not None:
            since = "/".join((condition.type, str(was.get("lastTransitionTime")), str(was.get("reason"))))
            told.append(Event(event, condition.message, since))
    return told


# What a flip of a condition is told as; a condition that was not there before has not become well again.
_BROKEN: dict[Type, EventReason] = {
    Type.MODEL_NAME_OWNED: EventReason.MODEL_NAME_TAKEN,
    Type.METRICS_AVAILABLE: EventReason.METRICS_LOST,
    Type.SLO_FEASIBLE: EventReason.SLO_INFEASIBLE,
    Type.ADMITTING: EventReason.SHEDDING_STARTED,
    Type.FALLBACK_FOUND: EventReason.FALLBACK_UNUSABLE,
}
# What its end is told as: by the reason that it had, or else by the condition.
_MENDED: dict[Type, EventReason] = {
    Type.MODEL_NAME_OWNED: EventReason.MODEL_NAME_OWNED,
    Type.METRICS_AVAILABLE: EventReason.METRICS_RECOVERED,
    Type.ADMITTING: EventReason.SHEDDING_STOPPED,
}
_RETURNED: dict[str | None, EventReason] = {Reason.GATEWAYS_BEHIND.value: EventReason.GATEWAYS_IN_LINE}


def _event(condition: Condition, was: Object) -> EventReason | None:
    if was.get("status") == condition.status and was.get("reason") == condition.reason.value:
        return None
    flipped = was.get("status") != condition.status
    match condition.type:
        case Type.READY if flipped and condition.holds:
            return EventReason.READY
        case Type.READY if was.get("status") == "True" and not condition.holds:
            return EventReason.NOT_READY
        case Type.STALLED if condition.holds:
            return EventReason(condition.reason.value)
        case Type.PREFILL_READY | Type.DECODE_READY | Type.SERVE_READY | Type.ADMITTING if condition.reason in _TOLD:
            return _TOLD[condition.reason]
        case Type.SCALING_LIMITED if condition.holds:
            return EventReason.SCALING_LIMITED
        case _ if flipped and condition.holds is False:
            return _BROKEN.get(condition.type)
        case _ if flipped and was and condition.holds:
            return _RETURNED.get(was.get("reason")) or _MENDED.get(condition.type)
        case _:
            return None
