"""Five fleets that run before Plimsoll: from `helm install` to the first recommendation for each, nothing of theirs
changed.

The release is installed anew, so this comes after the scenarios that use the shared services.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml

from e2e.cluster.settings import KUBECONFIG
from e2e.lib import foreign_fleets, stack
from e2e.lib.foreign_fleets import FLEETS, PORT, Fleet, Object
from e2e.lib.kube import Cluster
from e2e.lib.service import START_S, Service
from e2e.lib.wait import wait_until
from plimsoll.api import labels

RECOMMENDATION_S = 300.0  # from `helm install` to the first recommendation
REQUESTS = 30  # to each fleet in one round: an engine's means count from 20 on
WORKERS = 8


class Recommendations:
    """The release, its services for all fleets, and what was seen of each."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace
        self.before = {fleet.name: foreign_fleets.snapshot(cluster, fleet, namespace) for fleet in FLEETS}
        self.after_s: dict[str, float] = {}  # from `helm install` to the first recommendation
        self._installed_s = time.monotonic()

    def adopt(self) -> dict[str, Object]:
        """Apply what `kubectl plimsoll adopt` prints, with no GPU for the simulators. Returns the manifests by name."""
        argv = ["adopt", "-n", self.namespace, "--kubeconfig", str(KUBECONFIG)]
        call = f"import sys; from plimsoll.cli.main import main; sys.exit(main({argv!r}))"
        done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=True, timeout=60)
        manifests = [one for one in yaml.safe_load_all(done.stdout) if one]
        for one in manifests:
            one["spec"]["targets"]["serve"]["gpus"] = 0
        self.cluster.apply(*manifests, namespace=self.namespace)
        return {one["metadata"]["name"]: one for one in manifests}

    def service(self, name: str) -> Service:
        return Service(self.cluster, self.namespace, name, stack.GATEWAY_URL)

    def is_complete(self) -> bool:
        """Send a round of requests to each fleet without a recommendation. Returns whether none is left."""
        for fleet in FLEETS:
            if fleet.name in self.after_s:
                continue
            self._send(fleet)
            if "capacityPerReplica" in self.service(fleet.name).status().get("tiers", {}).get("serve", {}):
                self.after_s[fleet.name] = time.monotonic() - self._installed_s
        return len(self.after_s) == len(FLEETS)

    def _send(self, fleet: Fleet) -> None:
        """Requests past the gateway, as the fleet's own clients send them."""
        pods = self.cluster.list("pods", self.namespace, fleet.selector)
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pods[0]['metadata']['name']}:{PORT}/proxy/v1/completions"

        def ask(number: int) -> None:
            body = {"model": "example/sim-8b", "prompt": f"{number} " * 200, "max_tokens": 16}
            self.cluster.call(path, body)

        with ThreadPoolExecutor(WORKERS) as workers:
            list(workers.map(ask, range(REQUESTS)))


@pytest.fixture(scope="module")
def recommendations(cluster: Cluster, namespace: str) -> Iterator[Recommendations]:
    """The fleets, then a release that is installed beside them; afterwards a release as before."""
    stack.uninstall(cluster)
    foreign_fleets.install_kinds(cluster)
    for fleet in FLEETS:
        foreign_fleets.create(cluster, fleet, namespace)
    for fleet in FLEETS:
        wait_until(f"{fleet.name} has a pod", lambda f=fleet: cluster.list("pods", namespace, f.selector), START_S)
        argv = ("wait", "-n", namespace, "--for=condition=Ready", "pod", "-l", fleet.selector, "--timeout=300s")
        cluster.kubectl(*argv, timeout_s=320)
    found = Recommendations(cluster, namespace)
    stack.install(cluster, "--set-json", f"targets={json.dumps(foreign_fleets.TARGETS)}")
    yield found
    cluster.delete(labels.PLURAL, "--all", namespace=namespace)
    foreign_fleets.remove_kinds(cluster)
    stack.install(cluster)


@pytest.fixture(scope="module")
def manifests(recommendations: Recommendations) -> dict[str, Object]:
    """What `adopt` printed, applied, once every fleet has its recommendation."""
    made = recommendations.adopt()
    assert set(made) == {fleet.name for fleet in FLEETS}
    wait_until("each fleet has a recommendation", recommendations.is_complete, RECOMMENDATION_S, every_s=2.0)
    return made


@pytest.mark.parametrize("fleet", FLEETS, ids=lambda fleet: f"{fleet.kind}-{fleet.name}")
def test_foreign_fleet_gets_recommendation_and_stays_unchanged(
    fleet: Fleet, manifests: dict[str, Object], recommendations: Recommendations
) -> None:
    service = recommendations.service(fleet.name)
    after_s = recommendations.after_s[fleet.name]
    print(f"{fleet.kind} {fleet.name}: {after_s / 60:.1f} min from helm install to the first recommendation")
    assert manifests[fleet.name]["spec"]["targets"]["serve"]["scaleTargetRef"] == fleet.reference
    assert after_s <= RECOMMENDATION_S
    ready = service.wait_condition("Ready", status="True", reason="EnginesReady")
    print(ready["message"])
    print(service.status()["tiers"]["serve"]["summary"])
    assert service.condition("ScalingInactive")["reason"] == "RecommendOnly"
    after = foreign_fleets.snapshot(recommendations.cluster, fleet, recommendations.namespace)
    assert after == recommendations.before[fleet.name]
