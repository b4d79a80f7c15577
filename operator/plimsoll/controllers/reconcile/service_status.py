"""Builds a service's status from the observed state: conditions, columns and Events. Pure.

A condition's message is for the person on call: it quotes the scheduler, the kubelet or the engine first, and then
names the next action.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import Any

from plimsoll.api import conditions
from plimsoll.api.conditions import ABNORMAL_TRUE, TIER_READY_TYPES, Condition, ConditionReason, ConditionType
from plimsoll.api.events import MAX_EVENT_MESSAGE_CHARS, Event, EventReason
from plimsoll.api.message_text import MAX_QUOTE_CHARS, join_within, shorten
from plimsoll.controllers import pod_startup
from plimsoll.controllers.autoscale.scaling_status import ScalingReport
from plimsoll.controllers.hardware_limits import with_hardware_limits
from plimsoll.controllers.namespace_leases import LEASE_NAME
from plimsoll.controllers.reconcile import pod_diagnosis
from plimsoll.controllers.reconcile.model_names import ModelNames
from plimsoll.controllers.reconcile.name_condition import name_accepted
from plimsoll.controllers.reconcile.observe import NameState
from plimsoll.core.types import Role

Object = dict[str, Any]

SCALING_FIELDS = (
    "slo",
    "limitedBy",
    "lastDecision",
    "cost",
)  # parts of the status
_SCALING_CONDITIONS = (
    ConditionType.SCALING_ACTIVE,
    ConditionType.SCALING_LIMITED,
    ConditionType.METRICS_AVAILABLE,
    ConditionType.SLO_FEASIBLE,
    ConditionType.SLO_MET,
    ConditionType.ADMISSION_HEALTHY,
)


@dataclass(frozen=True)
class TierStatusInputs:
    """One observed tier. desired: replicas that the autoscaler wants. deployment: None before it is created."""

    role: str
    desired: int
    deployment: Object | None
    pods: tuple[Object, ...]

    @property
    def ready(self) -> int:
        """Ready pods that are not being deleted. Counted here, because the Deployment's own count follows later."""
        return sum(pod_startup.is_ready(pod) and not pod_startup.is_terminating(pod) for pod in self.pods)

    @property
    def terminating(self) -> int:
        """Pods that are being deleted and still run."""
        return sum(pod_startup.is_terminating(pod) and not pod_startup.has_ended(pod) for pod in self.pods)

    @property
    def starting(self) -> int:
        """Pods that are neither ready nor being deleted, without those that have failed."""
        return sum(not pod_startup.is_ready(pod) and not pod_startup.is_terminating(pod) for pod in self.pods)


@dataclass(frozen=True)
class StatusInputs:
    """One observed service. routable_endpoints: endpoints in the gateways; None if no gateway replica answers."""

    service_object: Object
    tiers: tuple[TierStatusInputs, ...] = ()
    gateway_replicas: int = 0
    gateways_error: str = ""  # why no gateway replica's answer is usable
    routable_endpoints: int | None = None
    model_names: ModelNames = field(default_factory=ModelNames)
    name_state: NameState | None = None  # None: the service owns all its names
    spec_problems: tuple[str, ...] = ()
    rejection: str | None = None
    url: str = ""
    scaling_report: ScalingReport | None = None  # None before the first tick
    scales_to_zero: bool = False  # whether the autoscaler may scale all tiers to zero
    fallback: tuple[str, str] | None = None  # the fallback service, and why it cannot be used or ""
    hardware_limits: tuple[str, ...] = ()  # what no engine on the named GPUs can do
    internal_error: Condition | None = None  # unexpected error about the service or one of its objects


def build_conditions(inputs: StatusInputs) -> tuple[Condition, ...]:
    """Every condition that applies, most important first."""
    if inputs.spec_problems:
        return (
            *_ready(inputs, ()),
            _invalid_spec(ConditionType.STALLED, True, inputs.spec_problems),
            *_internal_error(inputs),
        )
    slow_transfer_message = inputs.scaling_report.slow_transfer_message if inputs.scaling_report else None
    tier_conditions = tuple(
        _tier_condition(tier, slow_transfer_message if tier.role == "prefill" else None) for tier in inputs.tiers
    )
    return (
        *_ready(inputs, tier_conditions),
        *_reconciling(inputs, tier_conditions),
        *_stalled(inputs),
        *tier_conditions,
        name_accepted(inputs.name_state, inputs.model_names),
        *(() if inputs.fallback is None else (fallback_resolved(*inputs.fallback),)),
        *_scaling_conditions(inputs),
        *_internal_error(inputs),
    )


def _scaling_conditions(inputs: StatusInputs) -> tuple[Condition, ...]:
    """Those of the report; before the first report of this process, those in the status about the present spec."""
    if inputs.scaling_report is not None:
        return tuple(with_hardware_limits(one, inputs.hardware_limits) for one in inputs.scaling_report.conditions)
    meta, status = inputs.service_object["metadata"], inputs.service_object.get("status") or {}
    if status.get("observedGeneration") != meta.get("generation", 0):
        return ()
    kept = []
    for stored in status.get("conditions", ()):
        with contextlib.suppress(KeyError, ValueError):  # of another release
            if stored["type"] in _SCALING_CONDITIONS and (
                stored["status"] == "True" or stored["type"] not in ABNORMAL_TRUE
            ):
                holds = {"True": True, "False": False}.get(stored["status"])
                kept.append(
                    Condition(
                        ConditionType(stored["type"]), holds, ConditionReason(stored["reason"]), stored["message"]
                    )
                )
    return tuple(kept)


def _internal_error(inputs: StatusInputs) -> tuple[Condition, ...]:
    return () if inputs.internal_error is None else (inputs.internal_error,)


def _ready(inputs: StatusInputs, tier_conditions: tuple[Condition, ...]) -> tuple[Condition, ...]:
    if inputs.routable_endpoints:
        return (
            Condition(
                ConditionType.READY,
                True,
                ConditionReason.SERVING,
                f"clients reach the service at {inputs.url}",
                f"clients reach the service at {_quote(inputs.url)}",
            ),
        )
    if inputs.spec_problems:
        return (_invalid_spec(ConditionType.READY, False, inputs.spec_problems),)
    if inputs.rejection:
        return (_apply_rejected(ConditionType.READY, False, inputs.rejection),)
    if (
        inputs.routable_endpoints is not None
        and (asleep_condition := _scaled_to_zero(inputs, tier_conditions)) is not None
    ):
        return (asleep_condition,)
    if inputs.tiers and not any(tier.desired for tier in inputs.tiers) and not inputs.scales_to_zero:
        problem = "all tiers have 0 replicas, and spec.scaling (mode or paused) prevents scale-up; scale them by hand"
        return (Condition(ConditionType.READY, False, ConditionReason.SCALED_TO_ZERO, problem),)
    blocking = _blocking_tier(tier_conditions)
    if blocking is not None:
        return (replace(blocking, type=ConditionType.READY, holds=False),)
    if inputs.routable_endpoints is None:
        holds = None if inputs.gateway_replicas else False
        problem = "no gateway replica answers" if inputs.gateway_replicas else "no gateway replica exists"
        brief = problem
        if inputs.gateways_error:
            problem = f"no gateway replica is usable: {inputs.gateways_error}"
            brief = f"no gateway replica is usable: {shorten(inputs.gateways_error, MAX_QUOTE_CHARS // 2)}"
        advice = "check with: kubectl get pods -A -l app.kubernetes.io/component=gateway"
        return (
            Condition(
                ConditionType.READY, holds, ConditionReason.NO_GATEWAY, f"{problem}; {advice}", f"{brief}; {advice}"
            ),
        )
    return (_unroutable(_client_ready(inputs)),)


def _unroutable(ready: int) -> Condition:
    """Ready for a service that no gateway routes to. ready: engines that are ready to serve clients."""
    if not ready:
        message = "the tier is scaled to 0 replicas; gateways queue no request before an engine has reported its model"
        return Condition(ConditionType.READY, False, ConditionReason.SCALED_TO_ZERO, message)
    engines = "1 ready engine" if ready == 1 else f"{ready} ready engines"
    message = f"{engines}, but no gateway replica routes to {'it' if ready == 1 else 'them'} yet"
    return Condition(ConditionType.READY, False, ConditionReason.NO_ROUTABLE_ENDPOINT, message)


def _scaled_to_zero(inputs: StatusInputs, tier_conditions: tuple[Condition, ...]) -> Condition | None:
    """Ready for a service that is scaled to zero or waking, since its gateways queue requests meanwhile.

    None if the service cannot scale to zero, if an engine is ready, or if a start-up fails.
    """
    published = inputs.scaling_report.published if inputs.scaling_report else None
    if (
        not inputs.scales_to_zero or published is None or published.cost_model is None
    ):  # without a cost model gateways do not queue
        return None
    if not any(tier.desired for tier in inputs.tiers):
        message = "all tiers are scaled to 0 replicas; the next request is queued while an engine starts"
        return Condition(ConditionType.READY, True, ConditionReason.SCALED_TO_ZERO, message)
    if all(c.holds or c.reason is ConditionReason.STARTING for c in tier_conditions):
        awaited = (
            "a gateway replica routes to the first engine" if _client_ready(inputs) else "the first engine is ready"
        )
        return Condition(ConditionType.READY, True, ConditionReason.WAKING, f"requests are queued until {awaited}")
    return None


def _blocking_tier(tier_conditions: tuple[Condition, ...]) -> Condition | None:
    """The condition of the tier that prevents serving; None if none does."""
    going = (c for c in tier_conditions if c.reason is ConditionReason.NAMESPACE_TERMINATING)
    client_tier = (c for c in tier_conditions if c.type is not ConditionType.PREFILL_READY)
    return next(going, None) or next((c for c in client_tier if not c.holds), None)


def _client_ready(inputs: StatusInputs) -> int:
    """Ready engines of the tier that serves clients."""
    return sum(tier.ready for tier in inputs.tiers if tier.role != Role.PREFILL)


def _tier_condition(tier: TierStatusInputs, slow_transfer_message: str | None) -> Condition:
    """Whether a tier has its replicas; if not, with the most severe problem of its pods.

    slow_transfer_message: why remote prefill does not pay; None if it pays or is unknown.
    """
    kind = TIER_READY_TYPES[tier.role]
    ready, total = tier.ready, tier.desired
    problem = pod_diagnosis.most_severe(tier.deployment, tier.pods)
    count = f"{ready} of {total} ready" if ready <= total else f"{ready} ready, {total} desired"
    if ready >= total and _is_rolled_out(tier):
        if not total:
            return Condition(kind, True, ConditionReason.SCALED_TO_ZERO, "0 replicas, scaled to zero")
        if slow_transfer_message is not None:
            return Condition(kind, True, ConditionReason.TRANSFER_SLOW, f"{count}, but {slow_transfer_message}")
        return Condition(kind, True, ConditionReason.ALL_REPLICAS_READY, count)
    holds = ready >= total
    if problem is not None:
        reason = ConditionReason.ROLLING_OUT if holds else problem.reason
        advice = f"; spec.tiers.{tier.role}.rollout.maxSurge starts this pod before an old one stops" if holds else ""
        brief = join_within(MAX_EVENT_MESSAGE_CHARS, f"{tier.role} {count}: {_quote(problem.message)}", f"see {kind}")
        return Condition(kind, holds, reason, f"{count}: {problem.message}{advice}", brief)
    if tier.deployment is not None and _updated_replicas(tier) < _replicas(tier) and ready:
        return Condition(
            kind, holds, ConditionReason.ROLLING_OUT, f"{count}, {_updated_replicas(tier)} at the new revision"
        )
    if not holds:
        return Condition(kind, False, ConditionReason.STARTING, f"{count}: {_missing(tier)}")
    if max(ready + tier.starting, _replicas(tier)) > total:
        return Condition(kind, True, ConditionReason.SCALING_DOWN, f"{count}: the surplus is removed")
    return Condition(
        kind, True, ConditionReason.ROLLING_OUT, f"{count}, the Deployment's status does not cover its newest spec yet"
    )


def _missing(tier: TierStatusInputs) -> str:
    """What the replicas that are not ready wait for."""
    pending = tier.desired - tier.ready - tier.starting
    counts = {"starting": tier.starting, "not created yet": pending, "terminating": tier.terminating}
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count > 0)


_SETTLED_REASONS = (ConditionReason.ALL_REPLICAS_READY, ConditionReason.SCALED_TO_ZERO, ConditionReason.TRANSFER_SLOW)


def _reconciling(inputs: StatusInputs, tier_conditions: tuple[Condition, ...]) -> tuple[Condition, ...]:
    waiting = [
        f"{tier.role}: {condition.message}"
        for tier, condition in zip(inputs.tiers, tier_conditions, strict=True)
        if condition.reason not in _SETTLED_REASONS
    ]
    if waiting or inputs.rejection:
        message = "; ".join(waiting) or "the API server rejected an object; condition Stalled has its message"
        return (Condition(ConditionType.RECONCILING, True, ConditionReason.PROGRESSING, message),)
    return ()


def _stalled(inputs: StatusInputs) -> tuple[Condition, ...]:
    return (_apply_rejected(ConditionType.STALLED, True, inputs.rejection),) if inputs.rejection else ()


def _invalid_spec(kind: ConditionType, holds: bool, problems: tuple[str, ...]) -> Condition:
    others = f"; {len(problems) - 1} more in condition {kind}" if len(problems) > 1 else ""
    brief = f"the spec is invalid: {_quote(problems[0])}{others}"
    return Condition(kind, holds, ConditionReason.INVALID_SPEC, "; ".join(problems), brief)


def _apply_rejected(kind: ConditionType, holds: bool, rejection: str) -> Condition:
    brief = f"the API server rejected an object: {_quote(rejection)}"
    is_going = kind is ConditionType.READY and pod_diagnosis.NAMESPACE_TERMINATING in rejection
    reason = ConditionReason.NAMESPACE_TERMINATING if is_going else ConditionReason.APPLY_REJECTED
    return Condition(kind, holds, reason, rejection, brief)


def other_release(namespace: str, release: str) -> Condition:
    """Stalled for a service in a namespace whose Lease another release holds."""
    holder = f"release {_quote(release)} holds the Lease {LEASE_NAME} of namespace {namespace}"
    advice = f"if it is not installed, delete the Lease and forbid users to write Leases in {namespace}"
    message = f"{holder}; this operator neither reconciles nor scales the service until the Lease expires; {advice}"
    brief = f"{holder}, so this operator leaves the service alone; see condition Stalled"
    return Condition(ConditionType.STALLED, True, ConditionReason.OTHER_RELEASE, message, brief)


def _quote(text: str) -> str:
    return shorten(text, MAX_QUOTE_CHARS)


def fallback_resolved(name: str, problem: str) -> Condition:
    """FallbackResolved. name, problem: as `resolve_fallback` returns them."""
    if not problem:
        return Condition(
            ConditionType.FALLBACK_RESOLVED,
            True,
            ConditionReason.FALLBACK_RESOLVED,
            f"{name} receives the requests that this service cannot serve",
        )
    message = f"spec.admission.fallback.name: {name} {problem}; requests meant for it are rejected"
    brief = f"fallback {_quote(f'{name} {problem}')}; requests meant for it are rejected"
    return Condition(ConditionType.FALLBACK_RESOLVED, False, ConditionReason.FALLBACK_UNUSABLE, message, brief)


def _replicas(tier: TierStatusInputs) -> int:
    return int(_deployment_status(tier).get("replicas", 0))


def _updated_replicas(tier: TierStatusInputs) -> int:
    return int(_deployment_status(tier).get("updatedReplicas", 0))


def _deployment_status(tier: TierStatusInputs) -> Object:
    status: Object = (tier.deployment or {}).get("status", {})
    return status


def _is_rolled_out(tier: TierStatusInputs) -> bool:
    """True if the Deployment has observed its newest spec and runs exactly the desired pods of it."""
    if tier.deployment is None:
        return False
    is_observed = _deployment_status(tier).get("observedGeneration", 0) >= tier.deployment["metadata"].get(
        "generation", 0
    )
    has_exact_count = _updated_replicas(tier) == tier.desired == _replicas(tier)
    return bool(is_observed and has_exact_count and tier.deployment["spec"].get("replicas") == tier.desired)


def is_fully_rolled_out(tier: TierStatusInputs) -> bool:
    """True if no pod of an older revision is left, so that its stored template can be deleted."""
    return _is_rolled_out(tier) and tier.ready >= tier.desired


def tiers_status(inputs: StatusInputs) -> dict[str, Object]:
    """`status.tiers`: the values of the columns."""
    return {
        tier.role: {
            "ready": tier.ready,
            "desired": tier.desired,
            "summary": f"{tier.ready}/{tier.desired}",
            **(inputs.scaling_report.tiers.get(tier.role, {}) if inputs.scaling_report else {}),
        }
        for tier in inputs.tiers
    }


def scaling_fields(inputs: StatusInputs, old_status: Object) -> Object:
    """The other scaling fields of the status; before the first report of this process, the old values."""
    scaling_report = inputs.scaling_report
    if scaling_report is None:
        return {name: old_status[name] for name in SCALING_FIELDS if name in old_status}
    fields: Object = {
        "slo": scaling_report.slo,
        "limitedBy": scaling_report.limited_by,
        "lastDecision": scaling_report.last_decision,
        "cost": scaling_report.cost,
    }
    return {name: value for name, value in fields.items() if value}


_REASON_EVENTS: dict[ConditionReason, EventReason] = {
    ConditionReason.UNSCHEDULABLE: EventReason.UNSCHEDULABLE,
    ConditionReason.IMAGE_UNAVAILABLE: EventReason.IMAGE_UNAVAILABLE,
    ConditionReason.CONFIG_ERROR: EventReason.CONFIG_ERROR,
    ConditionReason.ENGINE_FAILING: EventReason.ENGINE_FAILING,
    ConditionReason.POD_FAILED: EventReason.POD_FAILED,
    ConditionReason.PODS_REJECTED: EventReason.PODS_REJECTED,
    ConditionReason.TRANSFER_SLOW: EventReason.TRANSFER_SLOW,
    ConditionReason.GATEWAY_CONFIG_STALE: EventReason.GATEWAY_CONFIG_STALE,
    ConditionReason.MODEL_NAME_TAKEN: EventReason.MODEL_NAME_TAKEN,
    ConditionReason.MODEL_NAME_RESERVED: EventReason.MODEL_NAME_REJECTED,
    ConditionReason.SHORT_NAMES_RESTRICTED: EventReason.MODEL_NAME_REJECTED,
}


def changed_events(old: list[Object], new: tuple[Condition, ...], resource_version: str) -> list[Event]:
    """Events for the conditions that differ between the old status and the new one.

    resource_version: of the object with the old status. It tells two times apart at which a condition appears.
    """
    previous_by_type = {c.get("type"): c for c in old}
    result = []
    for condition in new:
        previous = previous_by_type.get(condition.type.value, {})
        reason = _event_reason(condition, previous)
        if reason is not None:
            since_s = previous.get("lastTransitionTime", resource_version)
            since = "/".join((condition.type, str(since_s), str(previous.get("reason")), condition.bound))
            result.append(Event(reason, condition.event_message or condition.message, since))
    return result


# Event of a condition that becomes False.
_DEGRADED_EVENTS: dict[ConditionType, EventReason] = {
    ConditionType.METRICS_AVAILABLE: EventReason.METRICS_LOST,
    ConditionType.SLO_FEASIBLE: EventReason.SLO_INFEASIBLE,
    ConditionType.ADMISSION_HEALTHY: EventReason.SHEDDING_STARTED,
    ConditionType.FALLBACK_RESOLVED: EventReason.FALLBACK_UNUSABLE,
}
# Event of a condition that becomes True again, by its previous reason or else by its type. A new condition has none.
_RECOVERED_EVENTS: dict[ConditionType, EventReason] = {
    ConditionType.MODEL_NAME_ACCEPTED: EventReason.MODEL_NAME_ACCEPTED,
    ConditionType.METRICS_AVAILABLE: EventReason.METRICS_RECOVERED,
    ConditionType.ADMISSION_HEALTHY: EventReason.SHEDDING_STOPPED,
}
_RECOVERED_REASON_EVENTS: dict[str | None, EventReason] = {
    ConditionReason.GATEWAY_CONFIG_STALE.value: EventReason.GATEWAY_CONFIG_SYNCED
}


def _event_reason(condition: Condition, previous: Object) -> EventReason | None:
    if (
        previous.get("status") == condition.status
        and previous.get("reason") == condition.reason.value
        and (not condition.bound or conditions.has_bound(str(previous.get("message")), condition.bound))
    ):
        return None
    is_flipped = previous.get("status") != condition.status
    match condition.type:
        case ConditionType.READY if is_flipped and condition.holds:
            return EventReason.READY
        case ConditionType.READY if previous.get("status") == "True" and not condition.holds:
            return EventReason.NOT_READY
        case ConditionType.STALLED if condition.holds:
            return EventReason(condition.reason.value)
        case (
            ConditionType.PREFILL_READY
            | ConditionType.DECODE_READY
            | ConditionType.SERVE_READY
            | ConditionType.ADMISSION_HEALTHY
            | ConditionType.MODEL_NAME_ACCEPTED
        ) if condition.reason in _REASON_EVENTS:
            return _REASON_EVENTS[condition.reason]
        case ConditionType.SCALING_LIMITED if condition.holds:
            return EventReason.SCALING_LIMITED
        case _ if is_flipped and condition.holds is False:
            return _DEGRADED_EVENTS.get(condition.type)
        case _ if is_flipped and previous and condition.holds:
            return _RECOVERED_REASON_EVENTS.get(previous.get("reason")) or _RECOVERED_EVENTS.get(condition.type)
        case _:
            return None
