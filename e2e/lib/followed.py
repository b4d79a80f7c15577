"""Services in mode Recommend whose replica count another autoscaler sets."""

from __future__ import annotations

from typing import Final

from e2e.lib import simulated_fleet
from e2e.lib.kube import Cluster
from e2e.lib.service import Service
from e2e.lib.wait import wait_until

MAX_REPLICAS: Final = 6
RATE: Final = 12.0  # requests/s that need several replicas: one carries about 6
SCALED_S: Final = 240.0  # a polling interval of KEDA, the horizon, two periods of an HPA, a busy machine
HPA_MANAGER: Final = "kube-controller-manager"


def recommend(cluster: Cluster, service: Service, min_replicas: int) -> None:
    """The service, and its Deployment."""
    bounds = simulated_fleet.replica_bounds(min_replicas, MAX_REPLICAS)
    manifest = simulated_fleet.fleet_manifest(service.name, {"serve": bounds})
    manifest["spec"]["scaling"] = {"mode": "Recommend", "sloMissCost": 0, "horizon": "10s"}
    cluster.apply(manifest, namespace=service.namespace)
    name = f"{service.name}-serve"
    wait_until("its Deployment exists", lambda: cluster.get("deployments", name, service.namespace))


def replicas(cluster: Cluster, service: Service) -> int:
    """The ordered count."""
    deployment = cluster.get("deployments", f"{service.name}-serve", service.namespace)
    assert deployment is not None
    return int(deployment["spec"]["replicas"])


def writers_of_replicas(cluster: Cluster, service: Service) -> set[str]:
    """The field managers that own the count."""
    live = cluster.get_object("deployments.apps", f"{service.name}-serve", service.namespace)
    managers = live["metadata"]["managedFields"]
    return {one["manager"] for one in managers if "f:replicas" in one["fieldsV1"].get("f:spec", {})}
