"""Events of an InferenceService: their reasons and manifests. The operator emits one Event per change.

An Event's name is a hash of the object, the reason and the deduplication key. A second write of the same Event fails
with 409, so a restart, or a crash between the Event and the status, creates no duplicate.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from plimsoll.api import labels
from plimsoll.api.message_text import shorten
from plimsoll.engines.redaction import redact

MAX_EVENT_MESSAGE_CHARS = 250  # one or two lines of a terminal; the API server's limit is 1024


class EventReason(StrEnum):
    """The closed list of Event reasons."""

    READY = "Ready"
    NOT_READY = "NotReady"
    SCALED_UP = "ScaledUp"
    SCALED_DOWN = "ScaledDown"
    SCALED_TO_ZERO = "ScaledToZero"
    SCALED_FROM_ZERO = "ScaledFromZero"
    RECOMMENDED = "Recommended"
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_UNAVAILABLE = "ImageUnavailable"
    VOLUME_UNAVAILABLE = "VolumeUnavailable"
    CONFIG_ERROR = "ConfigError"
    ENGINE_FAILING = "EngineFailing"
    POD_FAILED = "PodFailed"
    NODE_NOT_READY = "NodeNotReady"
    PODS_REJECTED = "PodsRejected"
    INVALID_SPEC = "InvalidSpec"
    APPLY_REJECTED = "ApplyRejected"
    ENGINES_LEFT_OUT = "EnginesLeftOut"
    OTHER_RELEASE = "OtherRelease"
    MODEL_NAME_TAKEN = "ModelNameTaken"
    MODEL_NAME_REJECTED = "ModelNameRejected"
    MODEL_NAME_ACCEPTED = "ModelNameAccepted"
    ADAPTER_FAILED = "AdapterFailed"
    ADAPTERS_LOADED = "AdaptersLoaded"
    SCALING_LIMITED = "ScalingLimited"
    TARGET_UNUSABLE = "TargetUnusable"
    REPLICAS_OWNED = "ReplicasOwned"
    INFERENCE_POOL_UNUSABLE = "InferencePoolUnusable"
    METRICS_LOST = "MetricsLost"
    METRICS_RECOVERED = "MetricsRecovered"
    SLO_INFEASIBLE = "SLOInfeasible"
    SHEDDING_STARTED = "SheddingStarted"
    SHEDDING_STOPPED = "SheddingStopped"
    GATEWAY_CONFIG_STALE = "GatewayConfigStale"
    GATEWAY_CONFIG_SYNCED = "GatewayConfigSynced"
    FALLBACK_UNUSABLE = "FallbackUnusable"
    ENGINE_ROLLOUT_STARTED = "EngineRolloutStarted"
    ENGINE_ROLLOUT_STOPPED = "EngineRolloutStopped"
    ENGINE_ROLLOUT_COMPLETED = "EngineRolloutCompleted"
    ENGINE_TUNED = "EngineTuned"
    TRANSFER_SLOW = "TransferSlow"
    DRAIN_TIMED_OUT = "DrainTimedOut"
    RECOVERED = "Recovered"


EVENT_MEANINGS: dict[EventReason, str] = {
    EventReason.READY: "The service is reachable through the gateway.",
    EventReason.NOT_READY: "The service is no longer reachable through the gateway.",
    EventReason.SCALED_UP: "A tier's replica count increased.",
    EventReason.SCALED_DOWN: "A tier's replica count decreased.",
    EventReason.SCALED_TO_ZERO: "A tier has no replica, because there are no requests for it.",
    EventReason.SCALED_FROM_ZERO: "A tier without replicas gets replicas, because requests are waiting.",
    EventReason.RECOMMENDED: "The recommended replica count of a tier changed, and Plimsoll does not set it, "
    "because of mode `Recommend` or another writer. At most one per tier and minute.",
    EventReason.UNSCHEDULABLE: "A pod of a tier cannot be scheduled on any node.",
    EventReason.IMAGE_UNAVAILABLE: "The engine image of a tier cannot be pulled.",
    EventReason.VOLUME_UNAVAILABLE: "A volume of a tier's pod cannot be attached or mounted.",
    EventReason.CONFIG_ERROR: "A tier's pod refers to a Secret, ConfigMap, volume or claim that does not exist.",
    EventReason.POD_FAILED: "The kubelet ended or rejected a pod of a tier, such as by an eviction.",
    EventReason.NODE_NOT_READY: "The node of a tier's pod no longer reports to Kubernetes.",
    EventReason.ENGINE_FAILING: "An engine of a tier exited on its own.",
    EventReason.PODS_REJECTED: "The cluster rejects the pods of a tier.",
    EventReason.INVALID_SPEC: "The spec is invalid.",
    EventReason.APPLY_REJECTED: "The API server rejected an object of the service.",
    EventReason.ENGINES_LEFT_OUT: "More engines differ from their tier than can be published. Those beyond get "
    "no requests.",
    EventReason.OTHER_RELEASE: "Another release of Plimsoll holds the Lease of the service's namespace, so this one "
    "leaves the service alone.",
    EventReason.MODEL_NAME_TAKEN: "Another service holds the model name.",
    EventReason.MODEL_NAME_REJECTED: "The service's namespace may not claim the model name.",
    EventReason.MODEL_NAME_ACCEPTED: "The model name is free and belongs to this service.",
    EventReason.ADAPTER_FAILED: "An engine cannot load a LoRA adapter.",
    EventReason.ADAPTERS_LOADED: "No engine fails to load a LoRA adapter any more.",
    EventReason.SCALING_LIMITED: "A tier needs more replicas than its limits allow.",
    EventReason.TARGET_UNUSABLE: "A target cannot be read or scaled.",
    EventReason.REPLICAS_OWNED: "Something else sets the replica count of a target, to which Plimsoll yields, or of a "
    "tier, to which it does not.",
    EventReason.INFERENCE_POOL_UNUSABLE: "Other gateways cannot use the InferencePool.",
    EventReason.METRICS_LOST: "No gateway or no engine reports metrics of the service, or no pod has the labels of its "
    "engines. Replica counts are frozen.",
    EventReason.METRICS_RECOVERED: "Gateways and engines report metrics of the service again.",
    EventReason.SLO_INFEASIBLE: "No number of replicas meets the SLO.",
    EventReason.SHEDDING_STARTED: "Gateways reject requests, because the arrival rate exceeds the SLO capacity of "
    "the ready engines.",
    EventReason.SHEDDING_STOPPED: "Gateways have rejected no request for a minute.",
    EventReason.TRANSFER_SLOW: "Transferring the KV cache takes longer than computing it locally.",
    EventReason.DRAIN_TIMED_OUT: "A pod terminated before its requests finished.",
    EventReason.GATEWAY_CONFIG_STALE: "A gateway is not using the current admission limits.",
    EventReason.GATEWAY_CONFIG_SYNCED: "All gateways use the current admission limits again.",
    EventReason.FALLBACK_UNUSABLE: "The fallback service does not exist, or falls back to this service.",
    EventReason.ENGINE_ROLLOUT_STARTED: "The platform's rollout replaces the engines.",
    EventReason.ENGINE_ROLLOUT_STOPPED: "The service fails after its rollout, which stops there.",
    EventReason.ENGINE_ROLLOUT_COMPLETED: "The platform's rollout has replaced the engines.",
    EventReason.ENGINE_TUNED: "New engines of a tier get other arguments from the SLO, or none.",
    EventReason.RECOVERED: "What an earlier Warning is about is over.",
}

NORMAL_REASONS = frozenset(
    {
        EventReason.READY,
        EventReason.SCALED_UP,
        EventReason.SCALED_DOWN,
        EventReason.SCALED_TO_ZERO,
        EventReason.SCALED_FROM_ZERO,
        EventReason.RECOMMENDED,
        EventReason.SHEDDING_STOPPED,
        EventReason.GATEWAY_CONFIG_SYNCED,
        EventReason.MODEL_NAME_ACCEPTED,
        EventReason.ADAPTERS_LOADED,
        EventReason.METRICS_RECOVERED,
        EventReason.ENGINE_ROLLOUT_STARTED,
        EventReason.ENGINE_ROLLOUT_COMPLETED,
        EventReason.ENGINE_TUNED,
        EventReason.RECOVERED,
    }
)


@dataclass(frozen=True)
class Event:
    """A change to report.

    message: one short sentence with the object, the value, the limit and the next action, at most
    MAX_EVENT_MESSAGE_CHARS; a longer one is cut. The condition or `kubectl plimsoll explain` has the explanation.
    dedup_key: identifies the state before the change (tier, time, replica counts). Events of one object and reason with
    equal keys are one Event.
    """

    reason: EventReason
    message: str
    dedup_key: str = ""

    def manifest(self, service: dict[str, Any], reporter: str, now: str) -> dict[str, Any]:
        """Return the core/v1 Event about `service` (an InferenceService manifest); now: RFC 3339 time."""
        meta = service["metadata"]
        identity = "\n".join((meta["uid"], self.reason.value, self.dedup_key))
        digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{meta['name']}.{digest}", "namespace": meta["namespace"]},
            "involvedObject": {
                "apiVersion": labels.API_VERSION,
                "kind": labels.KIND,
                "namespace": meta["namespace"],
                "name": meta["name"],
                "uid": meta["uid"],
            },
            "type": "Normal" if self.reason in NORMAL_REASONS else "Warning",
            "reason": self.reason.value,
            "message": shorten(redact(self.message), MAX_EVENT_MESSAGE_CHARS),
            "source": {"component": "plimsoll"},
            "reportingComponent": "plimsoll.dev/operator",
            "reportingInstance": reporter,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
