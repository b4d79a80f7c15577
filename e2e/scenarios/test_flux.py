"""Flux's own controllers deliver a service from an OCI artifact: change it, roll it back and prune it, and know its
health by the Kustomization of examples/gitops.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

import pytest
import yaml

from e2e.cluster.settings import ROOT
from e2e.lib import modules, oci_artifact, simulated_fleet
from e2e.lib.kube import Cluster, Object, condition
from e2e.lib.service import Service
from e2e.lib.wait import wait_until
from plimsoll.api import labels

EXAMPLE = ROOT / "examples" / "gitops" / "flux" / "kustomizations.yaml"
KUSTOMIZATIONS = "kustomizations.kustomize.toolkit.fluxcd.io"
REPOSITORY, TAG, SOURCE = "fleet", "main", "fleet"
TIMEOUT_S = 60  # of Flux's health check
DELIVERED_S = 240.0
Delivery = Callable[..., str]


class Flux:
    """The Kustomization `services`, and what it delivers."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace

    def manifests(self) -> list[Object]:
        """The source, and the example's Kustomization of services, with this source and without Plimsoll's chart."""
        made = next(one for one in yaml.safe_load_all(EXAMPLE.read_text()) if one["metadata"]["name"] == "services")
        spec: Object = made["spec"]
        del spec["dependsOn"]
        spec |= {"sourceRef": {"kind": "OCIRepository", "name": SOURCE}, "path": "./", "timeout": f"{TIMEOUT_S}s"}
        url = f"oci://{oci_artifact.registry_address()}/{REPOSITORY}"
        source = {
            "apiVersion": "source.toolkit.fluxcd.io/v1",
            "kind": "OCIRepository",
            "metadata": {"name": SOURCE, "namespace": modules.FLUX},
            "spec": {"interval": "5s", "url": url, "insecure": True, "ref": {"tag": TAG}},
        }
        return [source, made]

    def push(self, *services: Object) -> str:
        """What a commit does. Returns the artifact's digest. A ConfigMap stays when there is no service."""
        for one in services:
            one["metadata"]["namespace"] = self.namespace
        meta = {"name": "fleet", "namespace": self.namespace}
        settings = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta}
        files = {f"{one['metadata']['name']}.yaml": yaml.safe_dump(one) for one in (settings, *services)}
        listed = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": sorted(files)}
        return oci_artifact.push(REPOSITORY, TAG, {**files, "kustomization.yaml": yaml.safe_dump(listed)})

    def status(self) -> Object:
        found = self.cluster.get_object(KUSTOMIZATIONS, "services", modules.FLUX)
        return {**found.get("status", {}), "ready": condition(found, "Ready")}

    def wait_applied(self, digest: str) -> None:
        """Until Flux has applied this artifact and found it healthy."""

        def is_applied() -> bool:
            status = self.status()
            return str(status.get("lastAppliedRevision")).endswith(digest) and status["ready"].get("status") == "True"

        wait_until(f"{digest} is delivered", is_applied, DELIVERED_S)

    def wait_failed(self, digest: str) -> Object:
        """The condition Ready of the Kustomization once Flux gives this artifact up."""

        def failed() -> Object | None:
            status = self.status()
            is_attempted = str(status.get("lastAttemptedRevision")).endswith(digest)
            return status["ready"] if is_attempted and status["ready"].get("status") == "False" else None

        return wait_until(f"{digest} has failed", failed, DELIVERED_S)

    def reconcile(self) -> None:
        """What `flux reconcile` does: Flux applies all again, and has done so when this returns."""
        now = str(time.time())
        annotation = f"reconcile.fluxcd.io/requestedAt={now}"
        self.cluster.kubectl("annotate", KUSTOMIZATIONS, "services", "-n", modules.FLUX, "--overwrite", annotation)
        wait_until("Flux has applied it again", lambda: self.status().get("lastHandledReconcileAt") == now, DELIVERED_S)


@pytest.fixture(scope="module")
def flux(cluster: Cluster, namespace: str) -> Iterator[Flux]:
    delivery = Flux(cluster, namespace)
    with modules.flux(cluster):
        yield delivery


def service_manifest(replicas: int, **flags: object) -> Object:
    tiers = {"serve": simulated_fleet.replica_bounds(replicas, 4)}
    return simulated_fleet.fleet_manifest("delivered", tiers, **flags)


def pod_uids(service: Service) -> set[str]:
    return {one["metadata"]["uid"] for one in service.pods("serve")}


def test_flux_delivers_changes_rolls_back_and_prunes(
    cluster: Cluster, flux: Flux, service: Callable[[str], Service]
) -> None:
    delivered = service("delivered")
    first = flux.push(service_manifest(1))
    cluster.apply(*flux.manifests())
    flux.wait_applied(first)
    assert delivered.condition("Ready")["status"] == "True", "Flux waits for the service, not for its object"
    flux.reconcile()
    live = cluster.get_object(labels.PLURAL, "delivered", flux.namespace)
    assert live["metadata"]["generation"] == 1, "a second apply changes nothing"

    changed = flux.push(service_manifest(2))
    flux.wait_applied(changed)
    assert len(delivered.ready_pods("serve")) == 2
    before = pod_uids(delivered)

    broken = flux.push(service_manifest(2, max_num_seqs="none"))
    failure = flux.wait_failed(broken)
    print(f"an engine that cannot start: {failure['reason']}: {failure['message'][:300]}")
    assert failure["reason"] == "HealthCheckFailed"
    assert before <= pod_uids(delivered), "engines of the former manifest serve"
    refused = flux.push(service_manifest(9))
    failure = flux.wait_failed(refused)
    print(f"a manifest that the API server refuses: {failure['reason']}: {failure['message'][:300]}")

    assert flux.push(service_manifest(2)) == changed
    flux.wait_applied(changed)
    assert pod_uids(delivered) == before, "what served before serves again, without a start"

    flux.wait_applied(flux.push())
    assert delivered.get() is None
    wait_until("its engines are gone", lambda: not delivered.pods(), DELIVERED_S)
    managers = {one["manager"] for one in live["metadata"]["managedFields"]}
    print(f"field managers: {json.dumps(sorted(managers))}")
