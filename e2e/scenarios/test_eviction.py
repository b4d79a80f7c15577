"""An evicted engine is reported in the kubelet's words, and its failed pod counts no more."""

from __future__ import annotations

from collections.abc import Callable

from e2e.lib.kube import Cluster
from e2e.lib.service import START_S, Service, make_manifest
from e2e.lib.wait import wait_until


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
