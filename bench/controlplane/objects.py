"""From `kubectl apply` to the last object of the service: the operator's reaction, by the API server's own clock."""

from __future__ import annotations

import statistics
import time

from bench.controlplane import space
from e2e.lib.kube import Cluster
from e2e.lib.wait import until

RUNS = 5
KINDS = {"deployments": 2, "poddisruptionbudgets": 2, "networkpolicies": 1, "controllerrevisions": 2}


def measure(cluster: Cluster) -> dict[str, object]:
    """Seconds from the return of `kubectl apply` until every object was seen, polling each 50 ms."""
    seconds = []
    with space.namespace(cluster, "bench-objects") as namespace:
        for n in range(RUNS):
            name = f"s{n}"
            cluster.apply(space.weightless(name), namespace=namespace)
            start = time.monotonic()
            until(f"all objects of {name}", lambda name=name: _whole(cluster, namespace, name), 60, 0.05)
            seconds.append(round(time.monotonic() - start, 2))
    return {"seconds": seconds, "median": statistics.median(seconds)}


def _whole(cluster: Cluster, namespace: str, name: str) -> bool:
    selector = f"plimsoll.dev/service={name}"
    return all(len(cluster.list(kind, namespace, selector)) >= count for kind, count in KINDS.items())
