"""Conditions and their reasons: the contract that people, `kubectl wait`, Flux and Argo CD read.

Closed lists, so that a reason can be documented, alerted on and tested. All but `InternalError`, `ScalingLimited`,
`Reconciling` and `Stalled` (the latter two as kstatus has them, abnormal-true) are true when things are well. A
condition that does not apply is absent. The transition time moves only when the status flips; `observedGeneration` is
that of the object judged.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MESSAGE_LIMIT = 1024  # characters; the API allows 32768, a terminal does not


class Type(StrEnum):
    """What a condition speaks about."""

    READY = "Ready"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"
    PREFILL_READY = "PrefillReady"
    DECODE_READY = "DecodeReady"
    SERVE_READY = "ServeReady"
    MODEL_NAME_OWNED = "ModelNameOwned"
    SCALING_ACTIVE = "ScalingActive"
    SCALING_LIMITED = "ScalingLimited"
    METRICS_AVAILABLE = "MetricsAvailable"
    SLO_FEASIBLE = "SLOFeasible"
    SLO_MET = "SLOMet"
    ADMITTING = "Admitting"
    FALLBACK_FOUND = "FallbackFound"
    INTERNAL_ERROR = "InternalError"


class Reason(StrEnum):
    """Why a condition has its status."""

    SERVING = "Serving"
    NO_GATEWAY = "NoGateway"
    NO_ROUTABLE_ENDPOINT = "NoRoutableEndpoint"
    ALL_REPLICAS_READY = "AllReplicasReady"
    STARTING = "Starting"
    SCALED_TO_ZERO = "ScaledToZero"
    WAKING = "Waking"
    TRANSFER_SLOW = "TransferSlow"
    ROLLING_OUT = "RollingOut"
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_UNAVAILABLE = "ImageUnavailable"
    CONFIG_ERROR = "ConfigError"
    ENGINE_FAILING = "EngineFailing"
    PODS_REFUSED = "PodsRefused"
    CONVERGED = "Converged"
    PROGRESSING = "Progressing"
    INVALID_SPEC = "InvalidSpec"
    APPLY_REJECTED = "ApplyRejected"
    NOT_STALLED = "NotStalled"
    OWNED = "Owned"
    MODEL_NAME_TAKEN = "ModelNameTaken"
    SCALING_ON_FORECAST = "ScalingOnForecast"
    DEMAND_UNKNOWN = "DemandUnknown"
    DECISION_FAILED = "DecisionFailed"
    NO_PROMISE = "NoPromise"
    PAUSED = "Paused"
    RECOMMEND_ONLY = "RecommendOnly"
    SCALING_OFF = "ScalingOff"
    NOT_LIMITED = "NotLimited"
    AT_MAXIMUM = "AtMaximum"
    RATE_LIMITED = "RateLimited"
    BUDGET_EXHAUSTED = "BudgetExhausted"
    METRICS_FRESH = "MetricsFresh"
    METRICS_PARTIAL = "MetricsPartial"
    METRICS_MISSING = "MetricsMissing"
    FEASIBLE = "Feasible"
    INFEASIBLE = "Infeasible"
    PROMISE_KEPT = "PromiseKept"
    PROMISE_BROKEN = "PromiseBroken"
    PROMISE_UNDECIDED = "PromiseUndecided"
    NOT_MEASURED = "NotMeasured"
    LETTING_ALL_IN = "LettingAllIn"
    SHEDDING = "Shedding"
    GATEWAYS_BEHIND = "GatewaysBehind"
    FALLBACK_FOUND = "FallbackFound"
    FALLBACK_UNUSABLE = "FallbackUnusable"
    OPERATOR_ERROR = "OperatorError"


MEANING: dict[Reason, str] = {
    Reason.SERVING: "A gateway replica lists an endpoint that answers for this service.",
    Reason.NO_GATEWAY: "No gateway replica could be asked, so no client can reach the service.",
    Reason.NO_ROUTABLE_ENDPOINT: "The engines are ready, but no gateway replica lists one of them yet.",
    Reason.ALL_REPLICAS_READY: "Every wanted replica of the tier is ready.",
    Reason.STARTING: "Engines are starting: image, weights, compilation, warm-up.",
    Reason.SCALED_TO_ZERO: "Nothing runs and nothing is asked; the next request is held while an engine starts.",
    Reason.WAKING: "Requests are held at the gateway until the first engine is ready.",
    Reason.TRANSFER_SLOW: "The tier is ready, but moving the KV cache costs more than computing it where it is needed.",
    Reason.ROLLING_OUT: "Replicas of a new revision replace those of the old one.",
    Reason.UNSCHEDULABLE: "A pod fits on no node; the message has the scheduler's words.",
    Reason.IMAGE_UNAVAILABLE: "The engine image cannot be pulled; the message has the kubelet's words.",
    Reason.CONFIG_ERROR: "A Secret, ConfigMap, volume or claim is missing; the message has the kubelet's words.",
    Reason.ENGINE_FAILING: "An engine ended by itself; the message has its last words and exit code.",
    Reason.PODS_REFUSED: "The cluster refuses the pods (quota, pod security, admission); its words are the message.",
    Reason.CONVERGED: "Everything is as the spec wants it.",
    Reason.PROGRESSING: "The cluster is on its way to what the spec wants.",
    Reason.INVALID_SPEC: "The spec cannot be acted on; the message names each field.",
    Reason.APPLY_REJECTED: "The API server rejected an object made from the spec; its words are the message.",
    Reason.NOT_STALLED: "Nothing keeps the operator from working on this service.",
    Reason.OWNED: "Clients reach this service by its model name.",
    Reason.MODEL_NAME_TAKEN: "An older service owns the model name; this one answers to its long name only.",
    Reason.SCALING_ON_FORECAST: "Each tier is sized for its forecast; the message names the tier that binds.",
    Reason.DEMAND_UNKNOWN: "What is coming or what it needs is not known, so replicas are held; the message says why.",
    Reason.DECISION_FAILED: "An error in the operator kept it from deciding; its log has it. Replicas are held.",
    Reason.NO_PROMISE: "`spec.slo` is not set, so nothing is sized: each tier keeps `minReplicas`.",
    Reason.PAUSED: "`spec.scaling.paused` is true: decisions are shown, nothing is set.",
    Reason.RECOMMEND_ONLY: "`spec.scaling.mode` is Recommend: decisions are shown, nothing is set.",
    Reason.SCALING_OFF: "`spec.scaling.mode` is Off: nothing is set.",
    Reason.NOT_LIMITED: "Nothing stands between the tiers and the replicas that they need.",
    Reason.AT_MAXIMUM: "A tier needs more than its `maxReplicas`.",
    Reason.RATE_LIMITED: "`spec.scaling.scaleUp` or `scaleDown` spreads a change over time.",
    Reason.BUDGET_EXHAUSTED: "A tier needs more GPUs than it is granted.",
    Reason.METRICS_FRESH: "Gateways and engines answer with their metrics.",
    Reason.METRICS_PARTIAL: "Some gateways or engines do not answer: what is known is scaled up, nothing goes down.",
    Reason.METRICS_MISSING: "Nobody tells of the requests, or no engine of its work; replicas are held.",
    Reason.FEASIBLE: "Enough replicas keep the promise at the present mix of requests.",
    Reason.INFEASIBLE: "No number of replicas keeps the promise; the message has the nearest one that can be kept.",
    Reason.PROMISE_KEPT: "The promised share of the last minute's answers, at least, was within all targets.",
    Reason.PROMISE_BROKEN: "Fewer answers than promised were within their targets, or gaps between tokens were longer.",
    Reason.PROMISE_UNDECIDED: "Enough answers may have been within all their targets; what is measured leaves it open.",
    Reason.NOT_MEASURED: "There is nothing yet to judge by; the message has what is not known, and why.",
    Reason.LETTING_ALL_IN: "The ready engines serve all that comes within the promise.",
    Reason.SHEDDING: "More comes than the ready engines can serve within the promise; the rest is refused.",
    Reason.GATEWAYS_BEHIND: "A gateway does not let in by what the operator tells it; the message has the remedy.",
    Reason.FALLBACK_FOUND: "The service that takes what this one cannot is there.",
    Reason.FALLBACK_UNUSABLE: "The fallback is not there, or falls back to this service in turn.",
    Reason.OPERATOR_ERROR: "An error in the operator about the object that the message names; other objects go on.",
}

TIER_READY = {"prefill": Type.PREFILL_READY, "decode": Type.DECODE_READY, "serve": Type.SERVE_READY}


@dataclass(frozen=True)
class Condition:
    """One statement; `holds` None means that it is not known."""

    type: Type
    holds: bool | None
    reason: Reason
    message: str

    @property
    def status(self) -> str:
        return "Unknown" if self.holds is None else str(self.holds)


def merge(old: list[dict[str, Any]], new: tuple[Condition, ...], generation: int, now: str) -> list[dict[str, Any]]:
    """The conditions as the status keeps them: transition times are carried over unless the status flipped.

    old: what the status has now; new: every condition that applies; now: RFC 3339 time.
    """
    before = {c.get("type"): c for c in old}
    merged = []
    for condition in new:
        known = before.get(condition.type.value, {})
        same = known.get("status") == condition.status
        merged.append(
            {
                "type": condition.type.value,
                "status": condition.status,
                "reason": condition.reason.value,
                "message": condition.message[:MESSAGE_LIMIT],
                "observedGeneration": generation,
                "lastTransitionTime": known.get("lastTransitionTime", now) if same else now,
            }
        )
    return merged
