"""From `kubectl apply` to the last object of the service: the operator's reaction, by the API server's own clock."""

from __future__ import annotations

import statistics
import time

from bench.controlplane import scratch_namespace
from e2e.lib.kube import Cluster
from e2e.lib.wait import wait_until

RUNS = 5
EXPECTED_OBJECTS = {"deployments": 2, "poddisruptionbudgets": 2, "networkpolicies": 1, "controllerrevisions": 2}


def measure(cluster: Cluster) -> dict[str, object]:
    """Seconds from the return of `kubectl apply` until every object was seen, polling each 50 ms."""
    seconds = []
    with scratch_namespace.namespace(cluster, "bench-objects") as namespace:
        for n in range(RUNS):
            name = f"s{n}"
            cluster.apply(scratch_namespace.unschedulable_service(name), namespace=namespace)
            start = time.monotonic()
            wait_until(f"all objects of {name}", lambda name=name: _all_present(cluster, namespace, name), 60, 0.05)
            seconds.append(round(time.monotonic() - start, 2))
    return {"seconds": seconds, "median": statistics.median(seconds)}


def _all_present(cluster: Cluster, namespace: str, name: str) -> bool:
    selector = f"plimsoll.dev/service={name}"
    return all(len(cluster.list(kind, namespace, selector)) >= count for kind, count in EXPECTED_OBJECTS.items())
