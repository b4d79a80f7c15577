"""Mutual TLS in the cluster: operator, gateways and engines serve with it, and renewed Secrets fail no request."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from e2e.lib import simulated_fleet, stack
from e2e.lib.kube import Cluster, uids
from e2e.lib.load import Load, poisson
from e2e.lib.operator import OperatorClient
from e2e.lib.service import Service
from e2e.lib.wait import wait_until
from plimsoll.adapters.certificate_files import CERTIFICATE_FILE, expiry_s
from plimsoll.api import labels
from plimsoll.api.contract import engine_contract, engine_tls_name, internal_tls_name
from tests.certificates import Authority

GATEWAYS = 2
INTERNAL, ENGINE = "e2e-internal-tls", "e2e-engine-tls"  # Secrets
PICKER_PORT, OPERATOR_PORT, LAUNCHER_PORT = 8081, 8081, engine_contract().ports["launcher"]
RATE, LOAD_S = 2.0, 300.0
RENEWED_S = 180.0  # the kubelet writes a changed Secret within two minutes


@dataclass(frozen=True)
class SecureService:
    """A service of which every connection has TLS, and the authority of all."""

    cluster: Cluster
    service: Service
    authority: Authority

    def renew(self, days: int) -> float:
        """Write new certificates into both Secrets; returns their end, Unix time."""
        ends = set()
        for namespace, secret, name in (
            (stack.SYSTEM, INTERNAL, internal_tls_name(stack.SYSTEM)),
            (self.service.namespace, ENGINE, engine_tls_name(self.service.namespace)),
        ):
            files = self.authority.issue(name, days=days)
            data = {file: base64.b64encode(content).decode() for file, content in files.items()}
            metadata = {"name": secret, "namespace": namespace}
            self.cluster.apply({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})
            ends.add(expiry_s(files[CERTIFICATE_FILE].decode()))
        return min(ends)

    def gateways(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in stack.gateway_pods(self.cluster)]

    def engines(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.service.pods()]

    def operators(self) -> list[str]:
        found = self.cluster.list("pods", stack.SYSTEM, "app.kubernetes.io/component=operator")
        return [pod["metadata"]["name"] for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def values(self, metric: str) -> list[float]:
        """Of the metric `plimsoll_PART_{metric}` of gateways, operators and engines."""
        pages = [self.page(stack.SYSTEM, pod, PICKER_PORT, "/metrics") for pod in self.gateways()]
        pages += [self.page(self.service.namespace, pod, LAUNCHER_PORT, "/metrics") for pod in self.engines()]
        pages += [self.cluster.in_pod(stack.SYSTEM, pod, OPERATOR_PORT, "/metrics") for pod in self.operators()]
        names = [f"plimsoll_{part}_{metric}" for part in ("gateway", "operator", "engine")]
        lines = [line for page in pages for line in page.splitlines() if not line.startswith("#")]
        return [float(line.split()[-1]) for line in lines if line.split()[0].partition("{")[0] in names]

    def page(self, namespace: str, pod: str, port: int, path: str) -> str:
        """A page for a client without a certificate; raises httpx.HTTPStatusError."""
        return self.cluster.in_pod(namespace, f"https:{pod}", port, path)


@pytest.fixture(scope="module")
def secure(cluster: Cluster, namespace: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureService]:
    """One replica behind two gateways; afterwards the chart is as before."""
    service = Service(cluster, namespace, "secure", stack.GATEWAY_URL)
    found = SecureService(cluster, service, Authority(tmp_path_factory.mktemp("tls") / "ca", "plimsoll"))
    found.renew(days=30)
    values = f"internalTls.secretName={INTERNAL},engine.tls.secretName={ENGINE},gateway.replicas={GATEWAYS}"
    stack.install(cluster, "--set", values)
    stack.wait_for_gateways(cluster, GATEWAYS)
    manifest = simulated_fleet.fleet_manifest("secure", {"serve": simulated_fleet.replica_bounds(1, 1)})
    cluster.apply(manifest, namespace=namespace)
    service.wait_ready()
    yield found
    cluster.delete("inferenceservices", "secure", namespace=namespace)
    stack.install(cluster)
    cluster.kubectl("delete", "secret", INTERNAL, "-n", stack.SYSTEM)


def test_every_connection_has_tls(secure: SecureService) -> None:
    """Gateways know each other, and the operator reads gateways and engines."""
    pods = [*stack.gateway_pods(secure.cluster), *secure.service.pods()]
    assert {pod["metadata"]["labels"].get(labels.TLS) for pod in pods} == {labels.MUTUAL_TLS}
    wait_until(
        "each gateway has the other one",
        lambda: secure.values("peers_connected") == [GATEWAYS - 1] * GATEWAYS,
        60,
    )
    operator = OperatorClient(secure.cluster, stack.SYSTEM)

    def is_read() -> bool:
        found = operator.explain(secure.service.key)["metrics"]
        parts = (found["gateways"], *found["tiers"].values()) if found else ()
        return bool(parts) and all(part["coverage"] == 1.0 for part in parts)

    wait_until("the operator reads gateways and engines", is_read, 60)
    for namespace, pod, port, path in (
        (stack.SYSTEM, secure.gateways()[0], PICKER_PORT, "/signals"),
        (secure.service.namespace, secure.engines()[0], LAUNCHER_PORT, engine_contract().paths["about"]),
    ):
        with pytest.raises(httpx.HTTPStatusError) as error:
            secure.page(namespace, pod, port, path)
        assert error.value.response.status_code == 403
        with pytest.raises(httpx.HTTPStatusError):
            secure.cluster.in_pod(namespace, pod, port, "/metrics")


def test_renewed_secrets_fail_no_request(secure: SecureService) -> None:
    before = uids([*stack.gateway_pods(secure.cluster), *secure.service.pods()])
    prompts = simulated_fleet.prompts("renewed", 100, 20)
    with Load(secure.service.target, poisson(RATE, LOAD_S, prompts)) as load:
        end_s = secure.renew(days=60)
        certificates = len(secure.gateways()) + len(secure.engines()) + len(secure.operators())

        def is_used() -> bool:
            return [value for value in secure.values("certificate_expiry_seconds") if value >= end_s] == [
                pytest.approx(end_s, abs=60)
            ] * certificates

        wait_until("all pods use the new certificates", is_used, RENEWED_S, 2.0)
        load.stop()
        load.wait()
    assert load.ledger.records
    assert not load.ledger.failures, load.ledger.explain()
    assert uids([*stack.gateway_pods(secure.cluster), *secure.service.pods()]) == before
    assert not any(secure.values("certificate_invalid"))
    assert secure.values("peers_connected") == [GATEWAYS - 1] * GATEWAYS
