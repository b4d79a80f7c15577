"""NetworkPolicies that are enforced: what the fleet needs passes, and nothing else does.

Each refused connection is possible before, so that it is the policies that refuse it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from e2e.cluster.images import reference
from e2e.lib import policies, simulated_fleet, stack
from e2e.lib.kube import Cluster, Object
from e2e.lib.load import Load, poisson
from e2e.lib.metrics import GatewayClient
from e2e.lib.node import on_node
from e2e.lib.operator import OperatorClient
from e2e.lib.service import Service
from e2e.lib.wait import wait_until

METADATA = "169.254.169.254"
PORT = 8080  # of the stranger, and of a server at the metadata address
API_SERVER, DNS = "kubernetes.default:443", "kube-dns.kube-system:53"
OUTSIDE = "e2e-outside"
EGRESS = ("--set", "networkPolicy.egress.enabled=true")
EFFECTIVE_S = 60.0
RATE, LOAD_S = 2.0, 10.0
PROBE = """
import socket, sys
for address in sys.argv[1:]:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 3).close()
        print(address)
    except OSError:
        pass
"""


@dataclass(frozen=True)
class Place:
    """A container from which connections are tried."""

    cluster: Cluster
    namespace: str
    pod: str
    container: str
    ip: str

    def reached(self, *addresses: str) -> set[str]:
        """Those of these addresses, HOST:PORT, that take a connection."""
        command = ("python3", "-c", PROBE, *addresses)
        return set(self.cluster.execute(self.namespace, self.pod, self.container, *command).split())


def _place(cluster: Cluster, pod: Object, container: str) -> Place:
    metadata = pod["metadata"]
    return Place(cluster, metadata["namespace"], metadata["name"], container, pod["status"]["podIP"])


def _server(name: str, **spec: object) -> Object:
    """A pod that serves HTTP at PORT."""
    image = reference("engine-simulated")
    bind = METADATA if spec else "0.0.0.0"
    command = ["python3", "-m", "http.server", str(PORT), "--bind", bind, "--directory", "/var/empty"]
    container: Object = {"name": "server", "image": image, "command": command}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 0, **spec},
    }


@contextmanager
def _strangers(cluster: Cluster) -> Iterator[Place]:
    """A pod of another namespace, and a server at the metadata address."""
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": OUTSIDE}})
    on_node("ip", "address", "replace", f"{METADATA}/32", "dev", "lo")
    try:
        cluster.apply(_server("stranger"), _server("metadata", hostNetwork=True), namespace=OUTSIDE)
        cluster.kubectl("wait", "pod", "--all", "-n", OUTSIDE, "--for=condition=Ready", "--timeout=60s")
        pod = cluster.get("pods", "stranger", OUTSIDE)
        assert pod is not None
        yield _place(cluster, pod, "server")
    finally:
        on_node("ip", "address", "delete", f"{METADATA}/32", "dev", "lo")
        cluster.delete("namespace", OUTSIDE)


@pytest.fixture(scope="module")
def gateways(cluster: Cluster, gateway: GatewayClient) -> Iterator[list[Object]]:
    """Two gateways of a release that limits egress."""
    stack.install(cluster, *EGRESS)
    stack.scale_gateways(cluster, 2)
    yield stack.gateway_pods(cluster)
    stack.install(cluster)


@pytest.fixture(scope="module")
def services(cluster: Cluster, namespace: str, gateways: list[Object]) -> list[Service]:
    """Two services, of which one has two engines."""
    found = []
    for name, replicas in (("guarded", 2), ("other", 1)):
        tiers = {"serve": simulated_fleet.replica_bounds(replicas, replicas)}
        cluster.apply(simulated_fleet.fleet_manifest(name, tiers), namespace=namespace)
        found.append(Service(cluster, namespace, name, stack.GATEWAY_URL))
    for service in found:
        service.wait_ready()
    return found


def test_policies_pass_what_the_fleet_needs_and_no_more(
    cluster: Cluster, services: list[Service], gateways: list[Object], gateway: GatewayClient
) -> None:
    guarded, other = services
    first, second = (_place(cluster, pod, "engine") for pod in guarded.pods())
    (foreign,) = (_place(cluster, pod, "engine") for pod in other.pods())
    picker, other_picker = (_place(cluster, pod, "picker") for pod in gateways)
    (leader,) = (
        _place(cluster, pod, "operator")
        for pod in cluster.list("pods", stack.SYSTEM, "app.kubernetes.io/component=operator")
    )
    api, launcher = f"{first.ip}:8000", f"{first.ip}:8001"
    with _strangers(cluster) as stranger:
        outside, metadata = f"{stranger.ip}:{PORT}", f"{METADATA}:{PORT}"
        public, signals, peers = (f"{picker.ip}:{port}" for port in (8080, 8081, 8082))
        passes = {
            stranger: {public, DNS},
            second: {api, launcher, DNS},
            other_picker: {api, f"{foreign.ip}:8000", peers, API_SERVER, DNS},
            leader: {launcher, signals, API_SERVER, DNS},
        }
        refused = {
            stranger: {api, launcher, signals, peers, f"{leader.ip}:8081"},
            second: {metadata, outside, f"{foreign.ip}:8000", f"{foreign.ip}:8001", signals, API_SERVER},
            other_picker: {metadata, outside},
            leader: {metadata, outside, public},
        }
        for place in passes:
            every = passes[place] | refused[place]
            assert place.reached(*every) == every, f"{place.pod}: without enforcement"
        with policies.enforced(cluster):
            for place in passes:
                every = passes[place] | refused[place]
                _wait_reached(place, every, passes[place])
            _check_fleet(cluster, guarded, gateway)


def _wait_reached(place: Place, every: set[str], passes: set[str]) -> None:
    wait_until(f"{place.pod} reaches {sorted(passes)} alone", lambda: place.reached(*every) == passes, EFFECTIVE_S)


def _check_fleet(cluster: Cluster, service: Service, gateway: GatewayClient) -> None:
    """A new engine becomes ready, clients are served, gateways ask each other, and the operator reads them all."""
    operator = OperatorClient(cluster, stack.SYSTEM)
    cluster.delete("pod", service.ready_pods()[0], namespace=service.namespace)
    wait_until("its replacement is ready", lambda: len(service.ready_pods()) == 2, 120)
    wait_until("each gateway can ask the other", gateway.has_all_peers)
    read_before = operator.explain(service.key)["metrics"]["at"]
    with Load(service.target, poisson(RATE, LOAD_S, simulated_fleet.prompts("policies", 60, 8), seed=1)) as load:
        load.wait()

    def is_read() -> bool:
        metrics = operator.explain(service.key)["metrics"]
        parts = (metrics["gateways"], *metrics["tiers"].values())
        return bool(metrics["at"] > read_before and all(part["coverage"] == 1.0 for part in parts))

    wait_until("the operator reads gateways and engines", is_read, EFFECTIVE_S)
    assert not load.ledger.failures, load.ledger.explain()
