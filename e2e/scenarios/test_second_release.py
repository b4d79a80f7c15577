"""Another release of Plimsoll manages a namespace: this one leaves it alone, and takes over when it is gone."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from e2e.lib import stack
from e2e.lib.kube import Cluster, Object
from e2e.lib.operator import OperatorClient
from e2e.lib.service import Service, make_manifest
from e2e.lib.wait import sleep, wait_until

NOWHERE = {"serve": {"pod": {"nodeSelector": {"example.com/nowhere": "yes"}}}}
LEASE = "plimsoll-release"
OTHER = "other-release"
RENEWALS, RENEW_S = 12, 10.0  # twice as long as an unrenewed Lease lasts
TAKEOVER_S = 120.0


def _lease() -> Object:
    """The Lease of another release, renewed now."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    spec = {"holderIdentity": OTHER, "leaseDurationSeconds": 60, "renewTime": now}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": LEASE}, "spec": spec}


def test_second_release_waits_until_first_is_gone(
    service: Callable[[str], Service], cluster: Cluster, namespace: str
) -> None:
    waiting = service("waiting")
    cluster.apply(_lease(), namespace=namespace)
    cluster.apply(make_manifest("waiting", NOWHERE), namespace=namespace)
    waiting.wait_condition("Stalled", reason="OtherRelease")
    for _ in range(RENEWALS):
        sleep(RENEW_S)
        assert waiting.condition("Stalled")["reason"] == "OtherRelease"
        assert not cluster.list("deployments", namespace)
        cluster.apply(_lease(), namespace=namespace)
    page = OperatorClient(cluster, stack.SYSTEM).metrics()
    assert page.total("plimsoll_operator_foreign_namespaces") == 1
    wait_until("this release takes over", lambda: cluster.list("deployments", namespace), TAKEOVER_S)
    wait_until("nothing stalls it", lambda: not waiting.condition("Stalled"))
    wait_until("it has its name", lambda: waiting.status().get("modelNames"))
    lease = cluster.get("leases", LEASE, namespace)
    assert lease is not None
    print(f"the Lease is held by {lease['spec']['holderIdentity']}")
    assert lease["spec"]["holderIdentity"] == stack.SYSTEM
    cluster.delete("inferenceservices", "waiting", namespace=namespace)
    wait_until("the Lease is gone", lambda: cluster.get("leases", LEASE, namespace) is None, 60)
