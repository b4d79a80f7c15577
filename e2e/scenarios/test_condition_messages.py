"""What is not ready says why, in the words of whoever refused: the scheduler or the kubelet."""

from __future__ import annotations

from collections.abc import Callable

from e2e.lib.kube import Cluster, Object, condition
from e2e.lib.service import Service, make_manifest
from e2e.lib.wait import wait_until


def test_unschedulable_tier_reports_scheduler_message(service: Callable[[str], Service], cluster: Cluster) -> None:
    def scheduler_message() -> str | None:
        return next((words for p in big.pods() if (words := condition(p, "PodScheduled").get("message"))), None)

    big = service("big")
    cluster.apply(make_manifest("big", {"serve": {"gpus": 64}}), namespace=big.namespace)
    wait_until("the scheduler refuses", scheduler_message)
    big.wait_condition("ServeDegraded", reason="Unschedulable")

    def quoted() -> Object | None:  # the scheduler's words may change with the next try
        words, found = scheduler_message(), big.condition("ServeDegraded")
        return found if words and words in found.get("message", "") else None

    reported_condition = wait_until("the condition quotes the scheduler", quoted)
    [event] = big.wait_events("Unschedulable")
    print(f"ServeDegraded {reported_condition['reason']}: {reported_condition['message']}\nEvent: {event['message']}")
    assert reported_condition["reason"] == "Unschedulable"
    assert "nvidia.com/gpu" in reported_condition["message"]
    assert big.condition("Ready")["status"] == "False"
    cluster.delete("inferenceservices", "big", namespace=big.namespace)


def test_missing_secret_reports_kubelet_message(service: Callable[[str], Service], cluster: Cluster) -> None:
    gated = service("gated")
    model = {"uri": "hf://example/gated", "secretRef": {"name": "nowhere"}}
    cluster.apply(make_manifest("gated", {"serve": {}}, model=model), namespace=gated.namespace)
    condition = gated.wait_condition("ServeDegraded", 120, reason="ConfigError")
    [event] = gated.wait_events("ConfigError")
    print(f"ServeDegraded {condition['reason']}: {condition['message']}\nEvent: {event['message']}")
    assert 'secret "nowhere" not found' in condition["message"]
    cluster.delete("inferenceservices", "gated", namespace=gated.namespace)


def test_missing_volume_reports_kubelet_message(service: Callable[[str], Service], cluster: Cluster) -> None:
    unmounted = service("unmounted")
    extra = {
        "volumes": [{"name": "extra", "secret": {"secretName": "nowhere"}}],
        "volumeMounts": [{"name": "extra", "mountPath": "/extra"}],
    }
    cluster.apply(make_manifest("unmounted", {"serve": {"pod": extra}}), namespace=unmounted.namespace)
    condition = unmounted.wait_condition("ServeDegraded", 120, reason="VolumeUnavailable")
    print(f"ServeDegraded {condition['reason']}: {condition['message']}")
    assert 'secret "nowhere" not found' in condition["message"]
    cluster.delete("inferenceservices", "unmounted", namespace=unmounted.namespace)


def test_missing_image_reports_kubelet_message(service: Callable[[str], Service], cluster: Cluster) -> None:
    lost = service("lost")
    cluster.apply(make_manifest("lost", {"serve": {}}, engine={"version": "no-such-tag"}), namespace=lost.namespace)
    condition = lost.wait_condition("ServeDegraded", 120, reason="ImageUnavailable")
    print(f"ServeDegraded {condition['reason']}: {condition['message']}")
    assert "no-such-tag" in condition["message"]
    assert lost.condition("Ready")["status"] == "False"
    cluster.delete("inferenceservices", "lost", namespace=lost.namespace)
