"""Builds a service's status from the observed state: conditions and columns. Pure.

A condition's message is for the person on call: it quotes the scheduler, the kubelet or the engine first, and then
names the next action.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plimsoll.adapters.kube_client import NAMESPACE_TERMINATING
from plimsoll.api.conditions import ABNORMAL_TRUE, Condition, ConditionReason, ConditionType
from plimsoll.api.message_text import MAX_QUOTE_CHARS, shorten
from plimsoll.api.starting_pods import StartingPods
from plimsoll.api.v1alpha1.status import MAX_REVISION_CHARS
from plimsoll.controllers.autoscale.scaling_conditions import SHEDDING_SHARE
from plimsoll.controllers.autoscale.scaling_status import ScalingReport
from plimsoll.controllers.hardware_limits import infeasible_by_hardware
from plimsoll.controllers.namespace_leases import LEASE_NAME
from plimsoll.controllers.reconcile.adapter_status import ReportsByPod, adapter_failed
from plimsoll.controllers.reconcile.condition_events import was_degraded
from plimsoll.controllers.reconcile.model_names import ModelNames
from plimsoll.controllers.reconcile.name_condition import accepted_again, adapter_name_rejected, name_rejected
from plimsoll.controllers.reconcile.observe import NameState
from plimsoll.controllers.reconcile.target_conditions import target_conditions
from plimsoll.controllers.reconcile.tier_health import TierHealth, TierStatusInputs, tier_health
from plimsoll.controllers.targets.target_state import TargetState, routed_selector
from plimsoll.core.types import KV_BLOCK_TOKENS, Role

Object = dict[str, Any]

MAX_OTHER_WRITER_CHARS = 512
_NO_PREFILL = (
    f"no prefill engine is ready, and spec.whenPrefillUnavailable is Reject: prompts of {KV_BLOCK_TOKENS} tokens or"
    " more are rejected with 503; see the prefill tier's pods, or set whenPrefillUnavailable: Serve"
)
SCALING_FIELDS = (
    "slo",
    "limitedBy",
    "recovery",
    "cost",
)  # parts of the status
_SCALING_CONDITIONS = (
    ConditionType.SCALING_INACTIVE,
    ConditionType.METRICS_DEGRADED,
    ConditionType.SLO_INFEASIBLE,
    ConditionType.MODEL_MISMATCH,
    ConditionType.SLO_MET,
    ConditionType.SCALING_LIMITED,
    ConditionType.SHEDDING,
    ConditionType.GATEWAY_CONFIG_STALE,
)


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
    adapter_names: tuple[NameState, ...] = ()
    adapters: ReportsByPod = field(default_factory=dict)  # of ready engines
    spec_problems: tuple[str, ...] = ()
    rejection: str | None = None
    url: str = ""
    scaling_report: ScalingReport | None = None  # None before the first tick
    scales_to_zero: bool = False  # whether the autoscaler may scale all tiers to zero
    has_stored_cost_model: bool = False  # whether the stored admission limits, of an earlier process, have one
    fallback: tuple[str, str] | None = None  # the fallback service, and why it cannot be used or ""
    hardware_limits: tuple[str, ...] = ()  # what no engine on the named GPUs can do
    targets: Mapping[str, TargetState] | None = None  # by role; None for a service with tiers
    takes_requests: bool = True  # whether gateways send requests to the engines
    engine_rollout: Condition | None = None  # EngineRolloutPending
    engine_tuning: str | None = None  # arguments that the operator has set on engines
    model_revisions: tuple[str, ...] = ()  # commits or digests that ready engines report
    inference_pool: Condition | None = None  # InferencePoolUnusable
    internal_error: Condition | None = None  # unexpected error about the service or one of its objects


def model_revision(inputs: StatusInputs, old_status: Mapping[str, Any]) -> dict[str, str]:
    """`status.modelRevision` as a field: what ready engines report, else what they reported last."""
    reported = shorten(", ".join(inputs.model_revisions), MAX_REVISION_CHARS) or old_status.get("modelRevision")
    return {"modelRevision": reported} if reported else {}


def build_conditions(inputs: StatusInputs) -> tuple[Condition, ...]:
    """Every condition that applies, most important first."""
    if inputs.spec_problems:
        return (
            *_ready(inputs, ()),
            _invalid_spec(ConditionType.STALLED, True, inputs.spec_problems),
            *_internal_error(inputs),
        )
    if inputs.targets is not None:
        return (
            *target_conditions(inputs.tiers, inputs.targets, _ready(inputs, ()) if inputs.takes_requests else ()),
            *_stalled(inputs),
            *_of(name_rejected(inputs.name_state, inputs.model_names)),
            *_of(None if inputs.fallback is None else fallback_unusable(*inputs.fallback)),
            *_of(inputs.inference_pool),
            *_scaling_conditions(inputs),
            *_internal_error(inputs),
        )
    slow_transfer_message = inputs.scaling_report.slow_transfer_message if inputs.scaling_report else None
    tiers = tuple(tier_health(tier, slow_transfer_message if tier.role == "prefill" else None) for tier in inputs.tiers)
    stated = (
        *_ready(inputs, tiers),
        *_stalled(inputs),  # before Reconciling: kstatus judges by the first of the two
        *_reconciling(inputs, tiers),
        *(tier.degraded for tier in tiers),
        name_rejected(inputs.name_state, inputs.model_names) or adapter_name_rejected(inputs.adapter_names),
        adapter_failed(
            [state.claim.model for state in inputs.adapter_names],
            inputs.adapters,
            _stored_conditions(inputs),
            (inputs.service_object.get("status") or {}).get("adapters") or (),
        ),
        None if inputs.fallback is None else fallback_unusable(*inputs.fallback),
        inputs.engine_rollout,
        inputs.inference_pool,
        *_scaling_conditions(inputs),
        *_internal_error(inputs),
    )
    return tuple(condition for condition in stated if condition is not None)


def _stored_conditions(inputs: StatusInputs) -> Sequence[Object]:
    stored: Sequence[Object] = (inputs.service_object.get("status") or {}).get("conditions") or ()
    return stored


def recovery_messages(inputs: StatusInputs) -> dict[ConditionType, str]:
    """The messages of the Events for conditions that end: of those types that the inputs tell about."""
    messages: dict[ConditionType, str] = {}
    if not inputs.spec_problems:
        messages[ConditionType.MODEL_NAME_REJECTED] = accepted_again(inputs.name_state)
        messages[ConditionType.ADAPTER_FAILED] = "no engine fails to load an adapter"
        messages[ConditionType.STALLED] = "the spec is valid, and the API server accepts all objects"
        messages[ConditionType.ENGINE_ROLLOUT_PENDING] = "the engines have the present generation of their settings"
        messages[ConditionType.INFERENCE_POOL_UNUSABLE] = "nothing keeps gateways from using the InferencePool"
        fallback = "no fallback is set" if inputs.fallback is None else f"the fallback {inputs.fallback[0]} can be used"
        messages[ConditionType.FALLBACK_UNUSABLE] = shorten(fallback, MAX_QUOTE_CHARS)
    if inputs.targets:  # empty before the first reading
        messages[ConditionType.TARGET_UNUSABLE] = "the target can be read and scaled"
    if inputs.tiers:
        ready = ", ".join(f"{tier.role} {tier.ready} of {tier.desired}" for tier in inputs.tiers)
        messages[ConditionType.RECONCILING] = f"engines start and run again; ready: {ready}"
    if inputs.scaling_report is not None and _has_slo(inputs.scaling_report):
        reporting = "all gateways and engines" if inputs.takes_requests else "all engines"
        messages[ConditionType.METRICS_DEGRADED] = f"{reporting} report metrics"
        if not any(
            condition.reason is ConditionReason.METRICS_MISSING for condition in inputs.scaling_report.conditions
        ):
            messages[ConditionType.SHEDDING] = f"at most {SHEDDING_SHARE:.0%} of requests are rejected"
        messages[ConditionType.MODEL_MISMATCH] = "no measurement contradicts the model"
        messages[ConditionType.GATEWAY_CONFIG_STALE] = "all gateways use the current admission limits"
        if inputs.scaling_report.is_feasibility_known:
            messages[ConditionType.SLO_INFEASIBLE] = "a replica count meets the SLO"
        if inputs.scaling_report.slow_transfer_message is None:
            messages[ConditionType.PREFILL_DEGRADED] = "transferring the KV cache pays again"
    return messages


def _has_slo(report: ScalingReport) -> bool:
    """Whether the report has the conditions of a service with an SLO."""
    return any(condition.type is ConditionType.SLO_MET for condition in report.conditions)


def _scaling_conditions(inputs: StatusInputs) -> tuple[Condition, ...]:
    """Those of the report; before the first report of this process, those in the status about the present spec."""
    report = inputs.scaling_report
    if report is not None:
        is_infeasible = inputs.hardware_limits and _has_slo(report) and not report.is_feasibility_known
        is_reported = any(condition.type is ConditionType.SLO_INFEASIBLE for condition in report.conditions)
        by_hardware = (infeasible_by_hardware(inputs.hardware_limits),) if is_infeasible and not is_reported else ()
        return (*by_hardware, *report.conditions)
    meta, status = inputs.service_object["metadata"], inputs.service_object.get("status") or {}
    if status.get("observedGeneration") != meta.get("generation", 0):
        return ()
    conditions = []
    for stored in status.get("conditions", ()):
        with contextlib.suppress(KeyError, ValueError):  # of another release
            if stored["type"] in _SCALING_CONDITIONS and (
                stored["status"] == "True" or stored["type"] not in ABNORMAL_TRUE
            ):
                holds = {"True": True, "False": False}.get(stored["status"])
                conditions.append(
                    Condition(
                        ConditionType(stored["type"]), holds, ConditionReason(stored["reason"]), stored["message"]
                    )
                )
    return tuple(conditions)


def _of(condition: Condition | None) -> tuple[Condition, ...]:
    return () if condition is None else (condition,)


def _internal_error(inputs: StatusInputs) -> tuple[Condition, ...]:
    return () if inputs.internal_error is None else (inputs.internal_error,)


def _ready(inputs: StatusInputs, tiers: tuple[TierHealth, ...]) -> tuple[Condition, ...]:
    if inputs.routable_endpoints:
        if _lacks_required_prefill(inputs):
            return (Condition(ConditionType.READY, False, ConditionReason.PREFILL_UNAVAILABLE, _NO_PREFILL),)
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
    if inputs.routable_endpoints is not None and (asleep_condition := _scaled_to_zero(inputs, tiers)) is not None:
        return (asleep_condition,)
    if inputs.tiers and not any(tier.desired for tier in inputs.tiers) and not inputs.scales_to_zero:
        problem = f"all tiers have 0 replicas, and {_no_scale_up(inputs.service_object)}; scale them by hand"
        return (Condition(ConditionType.READY, False, ConditionReason.SCALED_TO_ZERO, problem),)
    blocking = _blocking_tier(tiers)
    if blocking is not None:
        reason = blocking.problem or ConditionReason.STARTING
        return (Condition(ConditionType.READY, False, reason, blocking.message, blocking.event_message),)
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


def _lacks_required_prefill(inputs: StatusInputs) -> bool:
    """Whether gateways reject all prompts that only a prefill engine may compute."""
    prefill = [tier for tier in inputs.tiers if tier.role == Role.PREFILL]
    policy = (inputs.service_object.get("spec") or {}).get("whenPrefillUnavailable")
    return policy == "Reject" and bool(prefill) and not any(tier.ready for tier in prefill)


def _no_scale_up(service_object: Object) -> str:
    """Why the autoscaler starts no replica."""
    scaling = (service_object.get("spec") or {}).get("scaling") or {}
    if scaling.get("paused"):
        return "spec.scaling.paused is true"
    mode = scaling.get("mode", "Auto")
    return f"spec.scaling.mode is {mode}" if mode != "Auto" else "the autoscaler does not start one"


def _unroutable(ready: int) -> Condition:
    """Ready for a service that no gateway routes to. ready: engines that are ready to serve clients."""
    if not ready:
        message = "the tier is scaled to 0 replicas; gateways queue no request before an engine has reported its model"
        return Condition(ConditionType.READY, False, ConditionReason.SCALED_TO_ZERO, message)
    engines = "1 ready engine" if ready == 1 else f"{ready} ready engines"
    message = f"{engines}, but no gateway replica routes to {'it' if ready == 1 else 'them'} yet"
    return Condition(ConditionType.READY, False, ConditionReason.NO_ROUTABLE_ENDPOINT, message)


def _scaled_to_zero(inputs: StatusInputs, tiers: tuple[TierHealth, ...]) -> Condition | None:
    """Ready for a service that is scaled to zero or waking, since its gateways queue requests meanwhile.

    None if the service cannot scale to zero, if an engine is ready, or if a start-up fails.
    """
    if not inputs.scales_to_zero or not _has_cost_model(inputs):  # without a cost model gateways do not queue
        return None
    if not any(tier.desired for tier in inputs.tiers):
        message = (
            "all tiers are scaled to 0 replicas; the next request starts an engine and waits, at most maxQueueTime"
        )
        return Condition(ConditionType.READY, True, ConditionReason.SCALED_TO_ZERO, message)
    if all(tier.is_ready or tier.problem is None for tier in tiers):
        awaited = (
            "a gateway replica routes to the first engine" if _client_ready(inputs) else "the first engine is ready"
        )
        message = f"an engine starts; a request that can wait until {awaited} is queued, at most maxQueueTime"
        return Condition(ConditionType.READY, True, ConditionReason.WAKING, message)
    return None


def _has_cost_model(inputs: StatusInputs) -> bool:
    """Whether gateways have a cost model. Until the first report of this process the stored one stays."""
    if inputs.scaling_report is None:
        return inputs.has_stored_cost_model
    published = inputs.scaling_report.published
    return published is not None and published.cost_model is not None


def _blocking_tier(tiers: tuple[TierHealth, ...]) -> TierHealth | None:
    """The tier that prevents serving; None if none does."""
    terminating = (tier for tier in tiers if tier.problem is ConditionReason.NAMESPACE_TERMINATING)
    client_tier = (tier for tier in tiers if tier.role != Role.PREFILL and not tier.is_ready)
    return next(terminating, None) or next(client_tier, None)


def _client_ready(inputs: StatusInputs) -> int:
    """Ready engines of the tier that serves clients."""
    return sum(tier.ready for tier in inputs.tiers if tier.role != Role.PREFILL)


def _reconciling(inputs: StatusInputs, tiers: tuple[TierHealth, ...]) -> tuple[Condition, ...]:
    waiting = [
        f"{tier.role}: {tier.message if tier.degraded is None else f'see {tier.degraded.type}'}"
        for tier in tiers
        if not tier.is_settled
    ]
    if inputs.model_names.pending:
        waiting.append(f"model name {inputs.model_names.pending} is added when every gateway accepts it")
    if waiting or inputs.rejection:
        message = "; ".join(waiting) or "the API server rejected an object; condition Stalled has its message"
        is_degraded = any(tier.degraded is not None for tier in tiers)
        is_recovering = not is_degraded and was_degraded(_stored_conditions(inputs))
        reason = ConditionReason.RECOVERING if is_recovering else ConditionReason.PROGRESSING
        return (Condition(ConditionType.RECONCILING, True, reason, message),)
    return ()


def _stalled(inputs: StatusInputs) -> tuple[Condition, ...]:
    return (_apply_rejected(ConditionType.STALLED, True, inputs.rejection),) if inputs.rejection else ()


def _invalid_spec(kind: ConditionType, holds: bool, problems: tuple[str, ...]) -> Condition:
    others = f"; {len(problems) - 1} more in condition {kind}" if len(problems) > 1 else ""
    brief = f"the spec is invalid: {_quote(problems[0])}{others}"
    return Condition(kind, holds, ConditionReason.INVALID_SPEC, "; ".join(problems), brief)


def _apply_rejected(kind: ConditionType, holds: bool, rejection: str) -> Condition:
    brief = f"the API server rejected an object: {_quote(rejection)}; see Stalled"
    is_terminating = kind is ConditionType.READY and NAMESPACE_TERMINATING in rejection
    reason = ConditionReason.NAMESPACE_TERMINATING if is_terminating else ConditionReason.APPLY_REJECTED
    return Condition(kind, holds, reason, rejection, brief)


def other_release(namespace: str, release: str) -> Condition:
    """Stalled for a service in a namespace whose Lease another release holds."""
    holder = f"release {_quote(release)} holds the Lease {LEASE_NAME} of namespace {namespace}"
    advice = f"if it is not installed, delete the Lease and forbid users to write Leases in {namespace}"
    message = f"{holder}; this operator neither reconciles nor scales the service until the Lease expires; {advice}"
    brief = f"release {_quote(release)} holds the Lease {LEASE_NAME}: this operator leaves the service alone"
    return Condition(ConditionType.STALLED, True, ConditionReason.OTHER_RELEASE, message, brief)


def _quote(text: str) -> str:
    return shorten(text, MAX_QUOTE_CHARS)


def fallback_unusable(name: str, problem: str) -> Condition | None:
    """FallbackUnusable. name, problem: as `resolve_fallback` returns them."""
    if not problem:
        return None
    message = f"spec.admission.fallback.name: {name} {problem}; requests meant for it are rejected"
    brief = f"fallback {_quote(f'{name} {problem}')}; requests meant for it are rejected"
    return Condition(ConditionType.FALLBACK_UNUSABLE, True, ConditionReason.FALLBACK_UNUSABLE, message, brief)


def tiers_status(inputs: StatusInputs) -> dict[str, Object]:
    """`status.tiers`: the values of the columns and the figures of the report. `needed` only if it is not `desired`.

    The report is older than the pods. Their number is the present one, and none is expected that cannot start.
    """
    result = {}
    for tier in inputs.tiers:
        figures = dict(inputs.scaling_report.tiers.get(tier.role, {})) if inputs.scaling_report else {}
        if starting := figures.pop("starting", None):
            next_ready = "" if tier.cannot_start else starting.get("nextReady", "")
            if count := tier.starting_current:  # as in the tier's message: superseded pods are replaced
                figures["startingPods"] = str(StartingPods(count, min(starting.get("overdue", 0), count), next_ready))
        target = (inputs.targets or {}).get(tier.role)
        if target is not None and target.other_writer is not None:
            figures["yieldedTo"] = shorten(target.other_writer.name, MAX_OTHER_WRITER_CHARS)
            figures["yieldedCause"] = target.other_writer.cause.value
        if inputs.takes_requests and inputs.targets is not None:
            figures["podSelector"] = routed_selector(inputs.service_object, inputs.targets, tier.role)
        summary = f"{tier.ready}/{tier.desired}"
        shown = {n: v for n, v in figures.items() if v is not None and (n != "needed" or v != tier.desired)}
        result[tier.role] = {"summary": summary, **shown}
    return result


def scaling_fields(inputs: StatusInputs, old_status: Object) -> Object:
    """The other scaling fields of the status; before the first report of this process, the old values."""
    scaling_report = inputs.scaling_report
    if scaling_report is None:
        return {name: old_status[name] for name in SCALING_FIELDS if name in old_status}
    fields: Object = {
        "slo": scaling_report.slo,
        "limitedBy": scaling_report.limited_by,
        "recovery": scaling_report.recovery,
        "cost": scaling_report.cost,
    }
    return {name: value for name, value in fields.items() if value}
