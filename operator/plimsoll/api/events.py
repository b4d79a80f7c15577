"""Events: one constructor for each thing worth telling, told when it changes and never again.

An Event's name is derived from the object, the reason and the moment at which the state before it began. Writing
it twice meets the first one (409), so a restart, or a crash between the Event and the status, adds nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from plimsoll.api import labels

MESSAGE_LIMIT = 1024  # characters, the API server's limit


class EventReason(StrEnum):
    """The closed list of Event reasons."""

    READY = "Ready"
    NOT_READY = "NotReady"
    SCALED_UP = "ScaledUp"
    SCALED_DOWN = "ScaledDown"
    SCALED_TO_ZERO = "ScaledToZero"
    SCALED_FROM_ZERO = "ScaledFromZero"
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_UNAVAILABLE = "ImageUnavailable"
    CONFIG_ERROR = "ConfigError"
    ENGINE_FAILING = "EngineFailing"
    PODS_REFUSED = "PodsRefused"
    INVALID_SPEC = "InvalidSpec"
    APPLY_REJECTED = "ApplyRejected"
    MODEL_NAME_TAKEN = "ModelNameTaken"
    MODEL_NAME_OWNED = "ModelNameOwned"
    SCALING_LIMITED = "ScalingLimited"
    METRICS_LOST = "MetricsLost"
    METRICS_RECOVERED = "MetricsRecovered"
    SLO_INFEASIBLE = "SLOInfeasible"
    SHEDDING_STARTED = "SheddingStarted"
    SHEDDING_STOPPED = "SheddingStopped"
    GATEWAYS_BEHIND = "GatewaysBehind"
    GATEWAYS_IN_LINE = "GatewaysInLine"
    FALLBACK_UNUSABLE = "FallbackUnusable"
    TRANSFER_SLOW = "TransferSlow"
    DRAIN_TIMED_OUT = "DrainTimedOut"


MEANING: dict[EventReason, str] = {
    EventReason.READY: "The service answers through the gateway.",
    EventReason.NOT_READY: "The service stopped answering through the gateway; the message says why.",
    EventReason.SCALED_UP: "A tier was given more replicas; the message says from, to and why.",
    EventReason.SCALED_DOWN: "A tier was given fewer replicas; the message says from, to, why and which pods go.",
    EventReason.SCALED_TO_ZERO: "A tier has no replica any more, since nothing is asked of it.",
    EventReason.SCALED_FROM_ZERO: "A tier that had none is given replicas, since requests wait.",
    EventReason.UNSCHEDULABLE: "A pod of a tier fits on no node.",
    EventReason.IMAGE_UNAVAILABLE: "The engine image of a tier cannot be pulled.",
    EventReason.CONFIG_ERROR: "A tier's pod names a Secret, ConfigMap, volume or claim that is not there.",
    EventReason.ENGINE_FAILING: "An engine of a tier ended by itself.",
    EventReason.PODS_REFUSED: "The cluster refuses to create a tier's pods.",
    EventReason.INVALID_SPEC: "The spec cannot be acted on.",
    EventReason.APPLY_REJECTED: "The API server rejected an object made from the spec.",
    EventReason.MODEL_NAME_TAKEN: "An older service owns the model name.",
    EventReason.MODEL_NAME_OWNED: "The model name is free now and belongs to this service.",
    EventReason.SCALING_LIMITED: "A tier needs more replicas than it may have; the message says why.",
    EventReason.METRICS_LOST: "Nobody tells of the service's requests or work any more; its replicas are held.",
    EventReason.METRICS_RECOVERED: "The service's metrics are there again.",
    EventReason.SLO_INFEASIBLE: "No number of replicas keeps the promise; the message has the nearest one that works.",
    EventReason.SHEDDING_STARTED: "Requests are refused, since the ready engines cannot serve all within the promise.",
    EventReason.SHEDDING_STOPPED: "No request has been refused for a minute.",
    EventReason.TRANSFER_SLOW: "Moving the KV cache costs more than computing it where it is needed.",
    EventReason.DRAIN_TIMED_OUT: "A pod ended before all its requests had; the message says how many were cut off.",
    EventReason.GATEWAYS_BEHIND: "A gateway does not let in by what the operator tells it; the message says why.",
    EventReason.GATEWAYS_IN_LINE: "All gateways let in by what the operator tells them again.",
    EventReason.FALLBACK_UNUSABLE: "The fallback is not there, or falls back to this service in turn.",
}

NORMAL = frozenset(
    {
        EventReason.READY,
        EventReason.SCALED_UP,
        EventReason.SCALED_DOWN,
        EventReason.SCALED_TO_ZERO,
        EventReason.SCALED_FROM_ZERO,
        EventReason.SHEDDING_STOPPED,
        EventReason.GATEWAYS_IN_LINE,
        EventReason.MODEL_NAME_OWNED,
        EventReason.METRICS_RECOVERED,
    }
)


@dataclass(frozen=True)
class Event:
    """Something that changed.

    since: names the state that it ended (tier, time, replica counts); two Events with one `since` are one.
    """

    reason: EventReason
    message: str
    since: str = ""

    def manifest(self, service: dict[str, Any], reporter: str, now: str) -> dict[str, Any]:
        """The core/v1 Event about `service` (an InferenceService object); now: RFC 3339 time."""
        meta = service["metadata"]
        identity = "\n".join((meta["uid"], self.reason.value, self.since))
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
            "type": "Normal" if self.reason in NORMAL else "Warning",
            "reason": self.reason.value,
            "message": self.message[:MESSAGE_LIMIT],
            "source": {"component": "plimsoll"},
            "reportingComponent": "plimsoll.dev/operator",
            "reportingInstance": reporter,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
