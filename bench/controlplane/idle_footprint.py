"""Memory and CPU of the idle operator's process, read in its own pod."""

from __future__ import annotations

from bench.controlplane import scratch_namespace
from e2e.lib import stack
from e2e.lib.kube import Cluster, is_true
from e2e.lib.wait import sleep, wait_until

SERVICES = 10
SETTLE_S = 20.0
MEASURE_S = 60.0
TICKS_PER_SECOND = 100  # USER_HZ, the same on every Linux


def measure(cluster: Cluster) -> dict[str, object]:
    """Resident megabytes, and percent of one core over a minute."""
    with scratch_namespace.namespace(cluster, "bench-rest") as namespace:
        cluster.apply(
            *(scratch_namespace.unschedulable_service(f"s{index}") for index in range(SERVICES)), namespace=namespace
        )
        wait_until(
            "all services have a status",
            lambda: all(s.get("status") for s in cluster.list("inferenceservices", namespace)),
        )
        sleep(SETTLE_S)
        pod = _operator_pod(cluster)
        before = _ticks(cluster, pod)
        sleep(MEASURE_S)
        used = (_ticks(cluster, pod) - before) / TICKS_PER_SECOND
        return {
            "resident MB": round(_resident_kb(cluster, pod) / 1024, 1),
            "percent of a core": round(100 * used / MEASURE_S, 2),
        }


def _operator_pod(cluster: Cluster) -> str:
    pods = cluster.list("pods", stack.SYSTEM, "app.kubernetes.io/component=operator")
    return str(next(p["metadata"]["name"] for p in pods if is_true(p, "Ready")))


def _ticks(cluster: Cluster, pod: str) -> int:
    fields = cluster.execute(stack.SYSTEM, pod, "operator", "cat", "/proc/1/stat").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])  # utime, stime


def _resident_kb(cluster: Cluster, pod: str) -> int:
    """Kilobytes."""
    status = cluster.execute(stack.SYSTEM, pod, "operator", "cat", "/proc/1/status")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))
