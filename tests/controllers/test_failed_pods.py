"""Pods that the kubelet has ended or refused: quoted while their replacement is missing, and never counted."""

from __future__ import annotations

from typing import Any

from plimsoll.api.conditions import Condition, ConditionReason, ConditionType
from plimsoll.api.events import EventReason
from plimsoll.controllers.reconcile import service_status
from plimsoll.controllers.reconcile.service_status import TierStatusInputs
from tests import builders
from tests.controllers.test_service_status import PARENT, by_type, events, status_inputs, tier

EVICTED = {
    "phase": "Failed",
    "reason": "Evicted",
    "message": "The node was low on resource: memory. Threshold quantity: 100Mi, available: 90Mi.",
    "conditions": [
        {"type": "DisruptionTarget", "status": "True", "lastTransitionTime": "2026-01-02T00:00:00Z"},
        {"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-02T00:00:00Z"},
    ],
    "containerStatuses": [{"ready": False, "state": {"terminated": {"reason": "Error", "exitCode": 137}}}],
}


def with_failed(decode: TierStatusInputs, **other: Any) -> tuple[Condition, ...]:
    return service_status.build_conditions(status_inputs(tier("prefill"), decode, **other))


def pod_created(name: str, created: str, **status: Any) -> Any:
    made = builders.pod(PARENT, "decode", name, **status)
    made["metadata"]["creationTimestamp"] = created
    return made


def test_conditions_evicted_pod_has_the_kubelets_words() -> None:
    evicted = pod_created("decode-old", "2026-01-01T00:00:00Z", **EVICTED)
    found = with_failed(tier("decode", ready=0, pods=(evicted,)), routable_endpoints=0)
    decode = by_type(found)[ConditionType.DECODE_DEGRADED]
    assert decode.reason is ConditionReason.POD_FAILED
    assert f"pod decode-old failed (Evicted): {EVICTED['message']}" in decode.message
    assert by_type(found)[ConditionType.READY].message == decode.message
    sent = {event.reason: event.message for event in events([], found, "7")}
    assert "The node was low on resource: memory" in sent[EventReason.POD_FAILED]


def test_conditions_rejected_pod_without_conditions_is_reported() -> None:
    status = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "Allocate failed due to no GPU"}
    refused = pod_created("decode-0", "2026-01-03T00:00:00Z", **status)
    decode = by_type(with_failed(tier("decode", ready=0, pods=(refused,))))[ConditionType.DECODE_DEGRADED]
    assert "pod decode-0 failed (UnexpectedAdmissionError): Allocate failed due to no GPU" in decode.message


def test_failed_pods_never_count_as_replicas() -> None:
    old = tuple(pod_created(f"old-{n}", "2026-01-01T00:00:00Z", **EVICTED) for n in range(5))
    replaced = pod_created(
        "new", "2026-01-02T00:00:05Z", conditions=[{"type": "Ready", "status": "True"}], phase="Running"
    )
    healthy = TierStatusInputs(
        "decode", 1, builders.deployment(PARENT, "decode", replicas=1, ready=1), (replaced, *old)
    )
    assert (healthy.ready, healthy.starting, healthy.terminating) == (1, 0, 0)
    assert ConditionType.DECODE_DEGRADED not in by_type(with_failed(healthy))


def test_replaced_failed_pod_explains_no_later_start() -> None:
    """Kubernetes keeps it for long: what scales up a day later is only starting."""
    old = pod_created("old", "2026-01-01T00:00:00Z", **EVICTED)
    ready = [{"type": "Ready", "status": "True"}]
    new = pod_created("new", "2026-01-02T00:00:05Z", conditions=ready, phase="Running")
    starting = pod_created("starting", "2026-01-03T00:00:00Z", phase="Pending")
    deployment = builders.deployment(PARENT, "decode", replicas=2, ready=1)
    growing = TierStatusInputs("decode", 2, deployment, (old, new, starting))
    found = by_type(with_failed(growing))
    assert ConditionType.DECODE_DEGRADED not in found
    assert found[ConditionType.RECONCILING].message == "decode: 1 of 2 ready: 1 starting"
