"""Several tools deliver one service, and the operator runs it: none of them ever sees a difference to correct."""

from __future__ import annotations

import json
from collections.abc import Callable

from e2e.lib import simulated_fleet
from e2e.lib.kube import Cluster, KubectlError, Object
from e2e.lib.service import Service
from e2e.lib.wait import wait_until

WAYS = {"client-side": (), "server-side": ("--server-side", "--field-manager=delivery")}
USERS = {"kubectl-client-side-apply", "kubectl-last-applied", "kubectl", "delivery"}


def _difference(cluster: Cluster, manifest: Object, way: str) -> str:
    """What `kubectl diff` shows; "" for no difference."""
    try:
        return cluster.kubectl("diff", *WAYS[way], "-f", "-", stdin=json.dumps(manifest))
    except KubectlError as error:
        return str(error)


def test_no_tool_sees_a_difference(cluster: Cluster, service: Callable[[str], Service]) -> None:
    """Also after the operator has written status and replica counts, whichever tool applied last."""
    delivered = service("delivered")
    manifest = simulated_fleet.fleet_manifest("delivered", {"serve": simulated_fleet.replica_bounds(2, 4)})
    manifest["metadata"]["namespace"] = delivered.namespace
    manifest["spec"]["admission"] = {"classes": [{"name": "people", "priority": 10}, {"name": "jobs"}]}
    for way in (*WAYS, *WAYS):
        cluster.kubectl("apply", *WAYS[way], "-f", "-", stdin=json.dumps(manifest))
        delivered.wait_ready()
        wait_until("both replicas are ready", lambda: len(delivered.ready_pods("serve")) == 2, 120)
        assert {reader: _difference(cluster, manifest, reader) for reader in WAYS} == dict.fromkeys(WAYS, ""), way
    live = json.loads(
        cluster.kubectl("get", "plim", "delivered", "-n", delivered.namespace, "--show-managed-fields", "-o", "json")
    )
    managers = {entry["manager"]: entry["fieldsV1"] for entry in live["metadata"]["managedFields"]}
    print(f"managers: {sorted(managers)}")
    assert [name for name, fields in managers.items() if "f:spec" in fields and name not in USERS] == []
    assert live["metadata"]["generation"] == 1


def test_pruned_service_takes_its_engines_along(cluster: Cluster, service: Callable[[str], Service]) -> None:
    delivered = service("delivered")
    cluster.delete("inferenceservices", "delivered", namespace=delivered.namespace)
    wait_until("its pods are gone", lambda: not delivered.pods(), 120)
    assert cluster.get("deployments", "delivered-serve", delivered.namespace) is None
