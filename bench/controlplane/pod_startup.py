"""Time of an engine pod from its container's start until it is ready, and Plimsoll's part of it.

The launcher times every phase; all but vLLM's own start is the launcher's and the kubelet's.
"""

from __future__ import annotations

from datetime import datetime

from bench.controlplane import scratch_namespace
from e2e.lib import stack
from e2e.lib.kube import Cluster, Object, condition
from e2e.lib.metrics import Samples
from e2e.lib.service import LAUNCHER_PORT, Service, make_manifest
from plimsoll.api.contract import engine_contract


def measure(cluster: Cluster) -> dict[str, object]:
    """Seconds by phase, and from the container's start to the pod's Ready."""
    with scratch_namespace.namespace(cluster, "bench-start") as namespace:
        cluster.apply(make_manifest("one", {"serve": {}}), namespace=namespace)
        service = Service(cluster, namespace, "one", stack.GATEWAY_URL)
        service.wait_ready()
        (pod,) = service.pods()
        page = cluster.in_pod(namespace, pod["metadata"]["name"], LAUNCHER_PORT, engine_contract().paths["metrics"])
        phases = Samples.parse(page).by(engine_contract().metrics["startup_phase"], "phase")
        return {"started to ready": _started_to_ready(pod), **{k: round(v, 2) for k, v in phases.items()}}


def _started_to_ready(pod: Object) -> float:
    (container,) = pod["status"]["containerStatuses"]
    started = datetime.fromisoformat(container["state"]["running"]["startedAt"])
    ready = datetime.fromisoformat(condition(pod, "Ready")["lastTransitionTime"])
    return (ready - started).total_seconds()
