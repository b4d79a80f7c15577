"""What is not ready says why, in the words of whoever refused: the scheduler or the kubelet."""

from __future__ import annotations

from collections.abc import Callable

from e2e.lib.kube import Cluster, condition
from e2e.lib.service import START_S, Service, make_manifest
from e2e.lib.wait import wait_until


def test_unschedulable_tier_reports_scheduler_message(service: Callable[[str], Service], cluster: Cluster) -> None:
    def refused() -> str | None:
        return next((words for p in big.pods() if (words := condition(p, "PodScheduled").get("message"))), None)

    big = service("big")
    cluster.apply(make_manifest("big", {"serve": {"gpus": 64}}), namespace=big.namespace)
    words = wait_until("the scheduler refuses", refused)
    told = big.wait_condition("ServeDegraded", reason="Unschedulable")
    [event] = big.wait_events("Unschedulable")
    print(f"ServeDegraded {told['reason']}: {told['message']}\nEvent: {event['message']}")
    assert words in told["message"]
    assert "nvidia.com/gpu" in told["message"]
    assert big.condition("Ready")["status"] == "False"
    cluster.delete("inferenceservices", "big", namespace=big.namespace)


def test_missing_secret_reports_kubelet_message(service: Callable[[str], Service], cluster: Cluster) -> None:
    gated = service("gated")
    model = {"uri": "hf://example/gated", "secretRef": {"name": "nowhere"}}
    cluster.apply(make_manifest("gated", {"serve": {}}, model=model), namespace=gated.namespace)
    told = gated.wait_condition("ServeDegraded", 120, reason="ConfigError")
    [event] = gated.wait_events("ConfigError")
    print(f"ServeDegraded {told['reason']}: {told['message']}\nEvent: {event['message']}")
    assert 'secret "nowhere" not found' in told["message"]
    cluster.delete("inferenceservices", "gated", namespace=gated.namespace)


def test_evicted_pod_reports_kubelet_message(service: Callable[[str], Service], cluster: Cluster) -> None:
    """An engine that writes more than a volume's limit; its failed pod stays, and is not counted."""
    full = service("full")
    pod = {
        "volumes": [{"name": "small", "emptyDir": {"sizeLimit": "1Mi"}}],
        "volumeMounts": [{"name": "small", "mountPath": "/small"}],
    }
    cluster.apply(make_manifest("full", {"serve": {"pod": pod}}), namespace=full.namespace)
    full.wait_ready()
    [engine] = full.ready_pods()
    write = "open('/small/file', 'wb').write(bytes(8 << 20))"
    cluster.kubectl("exec", "-n", full.namespace, engine, "-c", "engine", "--", "python3", "-c", write)
    [event] = full.wait_events("PodFailed", 240)  # the kubelet measures volumes every minute or so
    print(f"Event: {event['message']}")
    assert "Evicted" in event["message"]
    assert "small" in event["message"]
    wait_until("another engine is ready", lambda: set(full.ready_pods()) - {engine}, START_S)
    wait_until("the failed pod is not counted", lambda: full.status()["tiers"]["serve"]["summary"] == "1/1", 30)
    full.wait_condition("Ready", 30, status="True")
    cluster.delete("inferenceservices", "full", namespace=full.namespace)


def test_missing_image_reports_kubelet_message(service: Callable[[str], Service], cluster: Cluster) -> None:
    lost = service("lost")
    cluster.apply(make_manifest("lost", {"serve": {}}, engine={"version": "no-such-tag"}), namespace=lost.namespace)
    told = lost.wait_condition("ServeDegraded", 120, reason="ImageUnavailable")
    print(f"ServeDegraded {told['reason']}: {told['message']}")
    assert "no-such-tag" in told["message"]
    assert lost.condition("Ready")["status"] == "False"
    cluster.delete("inferenceservices", "lost", namespace=lost.namespace)
