"""Conditions and their reasons: the contract with users, `kubectl wait`, Flux and Argo CD.

The lists are closed, so that every reason can be documented, alerted on and tested. `Ready` and `SLOMet` are true when
all is well. The types in `ABNORMAL_TRUE` exist only while they are true, as kstatus expects of `Reconciling` and
`Stalled`: each names something that users may have to act on, and `kubectl describe` of a healthy service stays short.
The transition time changes only with the status. `status.observedGeneration` is the generation that all conditions were
computed from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from plimsoll.api.message_text import shorten
from plimsoll.engines.redaction import redact

MAX_MESSAGE_CHARS = 1024  # characters; the API allows 32768, which is too long for a terminal


class ConditionType(StrEnum):
    """Type of a condition."""

    READY = "Ready"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"
    PREFILL_DEGRADED = "PrefillDegraded"
    DECODE_DEGRADED = "DecodeDegraded"
    SERVE_DEGRADED = "ServeDegraded"
    MODEL_NAME_REJECTED = "ModelNameRejected"
    ADAPTER_FAILED = "AdapterFailed"
    FALLBACK_UNUSABLE = "FallbackUnusable"
    ENGINE_ROLLOUT_PENDING = "EngineRolloutPending"
    TARGET_UNUSABLE = "TargetUnusable"
    INFERENCE_POOL_UNUSABLE = "InferencePoolUnusable"
    SCALING_INACTIVE = "ScalingInactive"
    METRICS_DEGRADED = "MetricsDegraded"
    SLO_INFEASIBLE = "SLOInfeasible"
    SLO_MET = "SLOMet"
    SCALING_LIMITED = "ScalingLimited"
    REPLICAS_CONTESTED = "ReplicasContested"
    SHEDDING = "Shedding"
    MODEL_MISMATCH = "ModelMismatch"
    GATEWAY_CONFIG_STALE = "GatewayConfigStale"
    INTERNAL_ERROR = "InternalError"


ABNORMAL_TRUE: Final = frozenset(ConditionType) - {ConditionType.READY, ConditionType.SLO_MET}

TYPE_MEANINGS: dict[ConditionType, str] = {
    ConditionType.READY: "Clients reach the service through the gateway. With targets without a port: an engine is "
    "ready.",
    ConditionType.RECONCILING: "The cluster does not match the spec yet.",
    ConditionType.STALLED: "The operator cannot go on: the spec is invalid, or the API server rejected an object.",
    ConditionType.PREFILL_DEGRADED: "Prefill engines cannot start or fail, or their KV cache transfer is slow.",
    ConditionType.DECODE_DEGRADED: "Decode engines cannot start, or fail.",
    ConditionType.SERVE_DEGRADED: "Engines of the tier `serve` cannot start, or fail.",
    ConditionType.MODEL_NAME_REJECTED: "Clients do not reach the service by one of its names.",
    ConditionType.ADAPTER_FAILED: "An engine cannot load a LoRA adapter. The model and other adapters are served.",
    ConditionType.FALLBACK_UNUSABLE: "The service of `admission.fallback` does not exist, or falls back to this one.",
    ConditionType.ENGINE_ROLLOUT_PENDING: "The rollout of `engine.rollout.generation` is not over for the service.",
    ConditionType.TARGET_UNUSABLE: "A target of `spec.targets` cannot be read or scaled.",
    ConditionType.INFERENCE_POOL_UNUSABLE: "Other gateways cannot use the InferencePool.",
    ConditionType.SCALING_INACTIVE: "The autoscaler does not change the replica counts.",
    ConditionType.METRICS_DEGRADED: "Metrics of gateways or engines are missing or late.",
    ConditionType.SLO_INFEASIBLE: "No number of replicas meets the SLO.",
    ConditionType.SLO_MET: "The responses of the last minute met the SLO. Unknown: not measured, or undecided.",
    ConditionType.SCALING_LIMITED: "A limit keeps a tier from the replicas that it needs.",
    ConditionType.REPLICAS_CONTESTED: "In mode `Auto` something else sets the replica count of a tier again and again.",
    ConditionType.SHEDDING: "Gateways reject requests. It ends after a minute without a rejection.",
    ConditionType.MODEL_MISMATCH: "Engines differ from the latency model. Sizing uses what is measured.",
    ConditionType.GATEWAY_CONFIG_STALE: "A gateway does not use the current admission limits.",
    ConditionType.INTERNAL_ERROR: "The operator failed for the service or for one of its objects.",
}


class ConditionReason(StrEnum):
    """Reason for the status of a condition."""

    SERVING = "Serving"
    NO_GATEWAY = "NoGateway"
    NO_ROUTABLE_ENDPOINT = "NoRoutableEndpoint"
    PREFILL_UNAVAILABLE = "PrefillUnavailable"
    STARTING = "Starting"
    SCALED_TO_ZERO = "ScaledToZero"
    WAKING = "Waking"
    TRANSFER_SLOW = "TransferSlow"
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_UNAVAILABLE = "ImageUnavailable"
    VOLUME_UNAVAILABLE = "VolumeUnavailable"
    CONFIG_ERROR = "ConfigError"
    ENGINE_FAILING = "EngineFailing"
    POD_FAILED = "PodFailed"
    NODE_NOT_READY = "NodeNotReady"
    PODS_REJECTED = "PodsRejected"
    NAMESPACE_TERMINATING = "NamespaceTerminating"
    LEADER_WORKER_SETS_UNUSABLE = "LeaderWorkerSetsUnusable"
    PROGRESSING = "Progressing"
    RECOVERING = "Recovering"
    INVALID_SPEC = "InvalidSpec"
    APPLY_REJECTED = "ApplyRejected"
    OTHER_RELEASE = "OtherRelease"
    MODEL_NAME_TAKEN = "ModelNameTaken"
    MODEL_NAME_RESERVED = "ModelNameReserved"
    SHORT_NAMES_RESTRICTED = "ShortNamesRestricted"
    ADAPTER_FAILED = "AdapterFailed"
    ENGINES_READY = "EnginesReady"
    ENGINES_NOT_READY = "EnginesNotReady"
    TARGET_NOT_FOUND = "TargetNotFound"
    TARGET_FORBIDDEN = "TargetForbidden"
    TARGET_NOT_SCALABLE = "TargetNotScalable"
    TARGET_UNREADABLE = "TargetUnreadable"
    TARGET_TAKEN = "TargetTaken"
    TARGET_OVERLAPS = "TargetOverlaps"
    REPLICAS_OWNED = "ReplicasOwned"
    DEMAND_UNKNOWN = "DemandUnknown"
    DECISION_FAILED = "DecisionFailed"
    NO_SLO = "NoSLO"
    PAUSED = "Paused"
    RECOMMEND_ONLY = "RecommendOnly"
    SCALING_OFF = "ScalingOff"
    AT_MAX_REPLICAS = "AtMaxReplicas"
    RATE_LIMITED = "RateLimited"
    METRICS_DELAYED = "MetricsDelayed"
    METRICS_PARTIAL = "MetricsPartial"
    METRICS_MISSING = "MetricsMissing"
    LABELS_MATCH_NOTHING = "LabelsMatchNothing"
    GATEWAYS_BYPASSED = "GatewaysBypassed"
    INFEASIBLE = "Infeasible"
    SLO_MET = "SLOMet"
    SLO_VIOLATED = "SLOViolated"
    SLO_UNDETERMINED = "SLOUndetermined"
    NOT_MEASURED = "NotMeasured"
    SHEDDING = "Shedding"
    MEASURED_OTHERWISE = "MeasuredOtherwise"
    GATEWAY_CONFIG_STALE = "GatewayConfigStale"
    FALLBACK_UNUSABLE = "FallbackUnusable"
    POOL_KIND_MISSING = "PoolKindMissing"
    POOL_TAKEN = "PoolTaken"
    POOL_REJECTED = "PoolRejected"
    POOL_NOT_ACCEPTED = "PoolNotAccepted"
    ROLLING_OUT = "RollingOut"
    ROLLOUT_WAITING = "RolloutWaiting"
    ROLLOUT_PAUSED = "RolloutPaused"
    ROLLOUT_STOPPED = "RolloutStopped"
    ROLLOUT_FAILED = "RolloutFailed"
    OPERATOR_ERROR = "OperatorError"


# Most severe first: causes that prevent pods from being created, then from running, then from staying up.
POD_PROBLEMS = (
    ConditionReason.LEADER_WORKER_SETS_UNUSABLE,
    ConditionReason.PODS_REJECTED,
    ConditionReason.CONFIG_ERROR,
    ConditionReason.IMAGE_UNAVAILABLE,
    ConditionReason.VOLUME_UNAVAILABLE,
    ConditionReason.ENGINE_FAILING,
    ConditionReason.UNSCHEDULABLE,
    ConditionReason.NODE_NOT_READY,
    ConditionReason.POD_FAILED,
)

REASON_MEANINGS: dict[ConditionReason, str] = {
    ConditionReason.SERVING: "At least one gateway pod lists a routable endpoint of the service.",
    ConditionReason.NO_GATEWAY: "The operator cannot reach any gateway pod, so clients cannot reach the service.",
    ConditionReason.NO_ROUTABLE_ENDPOINT: "Engines are ready, but no gateway pod lists one of them yet.",
    ConditionReason.PREFILL_UNAVAILABLE: "No prefill engine is ready, and `whenPrefillUnavailable` is `Reject`.",
    ConditionReason.STARTING: "Engines are starting: image pull, weights, compilation, warm-up.",
    ConditionReason.SCALED_TO_ZERO: "The tier has no replica and no request. The next request is queued while an "
    "engine starts.",
    ConditionReason.WAKING: "Requests are queued at the gateway until the first engine is ready.",
    ConditionReason.TRANSFER_SLOW: "The tier is ready, but transferring the KV cache takes longer than computing it "
    "locally.",
    ConditionReason.UNSCHEDULABLE: "A pod cannot be scheduled on any node.",
    ConditionReason.IMAGE_UNAVAILABLE: "The engine image cannot be pulled.",
    ConditionReason.VOLUME_UNAVAILABLE: "A volume of a pod cannot be attached or mounted.",
    ConditionReason.CONFIG_ERROR: "A Secret, ConfigMap, volume or claim is missing.",
    ConditionReason.POD_FAILED: "The kubelet ended or rejected a pod, such as by an eviction, and no ready pod "
    "replaces it. Or a container from elsewhere failed.",
    ConditionReason.NODE_NOT_READY: "The node of a pod no longer reports to Kubernetes.",
    ConditionReason.ENGINE_FAILING: "An engine exited on its own.",
    ConditionReason.PODS_REJECTED: "The cluster rejects the pods (quota, pod security or admission webhook).",
    ConditionReason.NAMESPACE_TERMINATING: "The namespace is being deleted, so no engine can be created.",
    ConditionReason.LEADER_WORKER_SETS_UNUSABLE: "The cluster has no LeaderWorkerSet v1, or the operator may not read "
    "it. Tiers with `nodes` above 1 need it.",
    ConditionReason.PROGRESSING: "The operator is changing the cluster to match the spec.",
    ConditionReason.RECOVERING: "A tier was degraded, its problem is gone, and its replicas start.",
    ConditionReason.INVALID_SPEC: "The spec is invalid.",
    ConditionReason.APPLY_REJECTED: "The API server rejected an object of the service.",
    ConditionReason.OTHER_RELEASE: "Another release of Plimsoll holds the namespace's Lease `plimsoll-release`, so "
    "this one leaves the service alone. If that one runs, it replaces the condition.",
    ConditionReason.MODEL_NAME_TAKEN: "Another service holds the model name.",
    ConditionReason.MODEL_NAME_RESERVED: "The model name begins with the name of another namespace that has or had "
    "services.",
    ConditionReason.SHORT_NAMES_RESTRICTED: "The chart value `gateway.shortModelNames.namespaces` does not list the "
    "service's namespace. Clients reach it as NAMESPACE/NAME.",
    ConditionReason.ADAPTER_FAILED: "An engine cannot load a LoRA adapter.",
    ConditionReason.ENGINES_READY: "An engine of the target is ready. Clients reach it by their own route.",
    ConditionReason.ENGINES_NOT_READY: "No engine of the target is ready.",
    ConditionReason.TARGET_NOT_FOUND: "The target, or its kind, does not exist.",
    ConditionReason.TARGET_FORBIDDEN: "The operator may not read the target or its scale. The chart value "
    "`targets.resources` lists the kinds that it may scale.",
    ConditionReason.TARGET_NOT_SCALABLE: "The target has no `scale` subresource, or that names no pods.",
    ConditionReason.TARGET_UNREADABLE: "The API server fails to return the target, its scale or its pods.",
    ConditionReason.TARGET_TAKEN: "Another InferenceService sizes the target already.",
    ConditionReason.TARGET_OVERLAPS: "An older InferenceService already has pods of the target as its engines.",
    ConditionReason.REPLICAS_OWNED: "Something else sets the replica count. For a target, Plimsoll then only "
    "recommends. For a tier it sets the count back.",
    ConditionReason.DEMAND_UNKNOWN: "The load or the model of a tier is unknown, so its replica count is frozen.",
    ConditionReason.DECISION_FAILED: "The scaling decision failed with an error: replica counts are frozen.",
    ConditionReason.NO_SLO: "`spec.slo` is not set, so nothing is sized: each tier keeps `minReplicas`. "
    "Reported where `maxReplicas` is larger.",
    ConditionReason.PAUSED: "`spec.scaling.paused` is true.",
    ConditionReason.RECOMMEND_ONLY: "`spec.scaling.mode` is Recommend.",
    ConditionReason.SCALING_OFF: "`spec.scaling.mode` is Off.",
    ConditionReason.AT_MAX_REPLICAS: "A tier needs more replicas than its `maxReplicas`.",
    ConditionReason.RATE_LIMITED: "`spec.scaling.scaleUp` or `scaleDown` limits the rate of a change.",
    ConditionReason.METRICS_DELAYED: "Engines do not answer the operator. Their metrics come from Prometheus, with a "
    "delay.",
    ConditionReason.METRICS_PARTIAL: "Some gateways or engines report no metrics. Load is extrapolated, and no tier "
    "scales down.",
    ConditionReason.METRICS_MISSING: "No gateway reports request metrics, or no engine reports engine metrics. The "
    "replica count is frozen.",
    ConditionReason.LABELS_MATCH_NOTHING: "A workload or target counts pods, and no pod has the labels by which its "
    "engines are found.",
    ConditionReason.GATEWAYS_BYPASSED: "Engines run requests that no gateway has sent, so their demand is not seen.",
    ConditionReason.INFEASIBLE: "No number of replicas meets the SLO.",
    ConditionReason.SLO_MET: "In the last minute, at least the SLO's share of the responses met all targets.",
    ConditionReason.SLO_VIOLATED: "In the last minute, too few responses met their targets, or inter-token latency "
    "exceeded its target.",
    ConditionReason.SLO_UNDETERMINED: "The measurements allow both that the SLO is met and that it is violated.",
    ConditionReason.NOT_MEASURED: "The attainment cannot be computed yet.",
    ConditionReason.SHEDDING: "The arrival rate exceeds the SLO capacity of the ready engines. Gateways reject the "
    "excess requests.",
    ConditionReason.MEASURED_OTHERWISE: "Measured slots, KV cache, first tokens or rejections contradict the model.",
    ConditionReason.GATEWAY_CONFIG_STALE: "A gateway is not using the current admission limits.",
    ConditionReason.FALLBACK_UNUSABLE: "The fallback service does not exist, or falls back to this service.",
    ConditionReason.POOL_KIND_MISSING: "The cluster has no InferencePool v1.",
    ConditionReason.POOL_TAKEN: "A pool of this name that Plimsoll did not create has other fields.",
    ConditionReason.POOL_REJECTED: "The API server rejects the pool or does not answer, or the selector of a target is "
    "more than NAME=VALUE pairs.",
    ConditionReason.POOL_NOT_ACCEPTED: "A gateway reports that it does not accept the pool.",
    ConditionReason.ROLLING_OUT: "The engines are being replaced, or are watched afterwards.",
    ConditionReason.ROLLOUT_WAITING: "Other services come first, or the message names an obstacle.",
    ConditionReason.ROLLOUT_PAUSED: "`engine.rollout.paused` is true.",
    ConditionReason.ROLLOUT_STOPPED: "The named service fails after its rollout.",
    ConditionReason.ROLLOUT_FAILED: "The service fails or misses its SLO after its rollout. Others wait.",
    ConditionReason.OPERATOR_ERROR: "The operator failed with an error for an object. Other objects are not affected.",
}

TIER_DEGRADED_TYPES = {
    "prefill": ConditionType.PREFILL_DEGRADED,
    "decode": ConditionType.DECODE_DEGRADED,
    "serve": ConditionType.SERVE_DEGRADED,
}


@dataclass(frozen=True)
class Condition:
    """One condition; `holds` is None if its status is unknown.

    event_message: the sentence for the condition's Event; empty if `message` is short enough for it. bound: the limit
    that applies, without measured figures; the message starts with it. A change of status, reason or bound is a
    transition. Other changes of the message are not.
    """

    type: ConditionType
    holds: bool | None
    reason: ConditionReason
    message: str
    event_message: str = field(default="", compare=False)
    bound: str = ""

    @property
    def status(self) -> str:
        return "Unknown" if self.holds is None else str(self.holds)


def has_bound(message: str, bound: str) -> bool:
    """Whether a stored message is about the bound: it is its first clause."""
    return message == bound or message.startswith(f"{bound};")


def merge(old: list[dict[str, Any]], new: tuple[Condition, ...], now: str) -> list[dict[str, Any]]:
    """Return the conditions to store in the status; an unchanged status keeps its transition time.

    old: the stored conditions; new: every condition that applies; now: RFC 3339 time.
    """
    previous_by_type = {c.get("type"): c for c in old}
    merged = []
    for condition in new:
        previous = previous_by_type.get(condition.type.value, {})
        is_status_unchanged = previous.get("status") == condition.status
        merged.append(
            {
                "type": condition.type.value,
                "status": condition.status,
                "reason": condition.reason.value,
                "message": shorten(redact(condition.message), MAX_MESSAGE_CHARS),
                "lastTransitionTime": previous.get("lastTransitionTime", now) if is_status_unchanged else now,
            }
        )
    return merged
