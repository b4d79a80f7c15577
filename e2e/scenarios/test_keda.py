"""KEDA itself scales a Deployment by Plimsoll's recommendation: from zero by its push stream, and back to zero.

Between, its HPA would set the count; its metrics server does not run here (`e2e.lib.keda`).
"""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from e2e.cluster.settings import ROOT
from e2e.lib import keda, simulated_fleet, stack
from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster, Object, condition
from e2e.lib.load import Load, poisson, unique_text
from e2e.lib.service import Service
from e2e.lib.wait import wait_until

PAGE = ROOT / "docs" / "tasks" / "keda.md"
MAX_REPLICAS = 6
RATE = 1.0  # requests/s: one replica carries about 6
SCALED_S = 240.0  # a polling interval of KEDA, the horizon, a busy machine


@pytest.fixture(scope="module")
def running(cluster: Cluster) -> Iterator[None]:
    """The chart with the scaler, and KEDA; afterwards without both."""
    stack.install(cluster, "--set", "operator.kedaScaler.enabled=true")
    with keda.installed(cluster):
        yield
    stack.install(cluster)


def scaled_object(service: str) -> Object:
    """The ScaledObject of the page, for a service of this scenario."""
    documented = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    made: Any = next(
        one for one in map(yaml.safe_load, map(textwrap.dedent, documented)) if one.get("kind") == "ScaledObject"
    )
    made["metadata"] = {"name": service}
    spec = made["spec"]
    spec |= {"scaleTargetRef": {"name": f"{service}-serve"}, "maxReplicaCount": MAX_REPLICAS}
    spec["triggers"][0]["metadata"]["service"] = service
    return dict(made)


def recommend(cluster: Cluster, service: Service) -> None:
    """A service with a recommendation, which is 0, and its Deployment."""
    manifest = simulated_fleet.fleet_manifest(service.name, {"serve": simulated_fleet.replica_bounds(0, MAX_REPLICAS)})
    manifest["spec"]["scaling"] = {"mode": "Recommend", "sloMissCost": 0, "horizon": "10s"}
    cluster.apply(manifest, namespace=service.namespace)
    name = f"{service.name}-serve"
    wait_until("its Deployment exists", lambda: cluster.get("deployments", name, service.namespace))


def replicas(cluster: Cluster, service: Service) -> int:
    deployment = cluster.get("deployments", f"{service.name}-serve", service.namespace)
    assert deployment is not None
    return int(deployment["spec"]["replicas"])


def writers_of_replicas(cluster: Cluster, service: Service) -> set[str]:
    live = cluster.get_object("deployments.apps", f"{service.name}-serve", service.namespace)
    managers = live["metadata"]["managedFields"]
    return {one["manager"] for one in managers if "f:replicas" in one["fieldsV1"].get("f:spec", {})}


@pytest.mark.usefixtures("running")
def test_keda_scales_from_zero_and_back(cluster: Cluster, service: Callable[[str], Service]) -> None:
    followed = service("followed")
    recommend(cluster, followed)
    cluster.apply(scaled_object("followed"), namespace=followed.namespace)

    def is_active(status: str) -> bool:
        scaled = cluster.get_object("scaledobjects.keda.sh", "followed", followed.namespace)
        return [condition(scaled, kind).get("status") for kind in ("Ready", "Active")] == ["True", status]

    wait_until("KEDA follows it at zero", lambda: is_active("False") and not followed.pods(), SCALED_S)

    def prompt(number: int) -> Prompt:
        return Prompt(unique_text(300, f"followed {number}"), max_tokens=48)

    started_s = time.monotonic()
    with Load(followed.target, poisson(RATE, 90, prompt, seed=4)) as load:
        wait_until("KEDA starts an engine", lambda: replicas(cluster, followed) == 1, SCALED_S)
        activated_s = time.monotonic() - started_s
        followed.wait_ready()
        writers = writers_of_replicas(cluster, followed)
    print(f"KEDA scaled from zero {activated_s:.1f} s after the first request as {writers}; {load.ledger.summary()}")
    assert not [one for one in writers if "plimsoll" in one], "only KEDA sets the count"
    assert any(record.ok for record in load.ledger.records)

    wait_until("KEDA takes the last engine", lambda: replicas(cluster, followed) == 0, SCALED_S)
    wait_until("KEDA calls it inactive", lambda: is_active("False"), SCALED_S)


@pytest.mark.usefixtures("running")
def test_keda_reports_what_the_scaler_says(cluster: Cluster, namespace: str, service: Callable[[str], Service]) -> None:
    """A trigger that names no service: KEDA's Event has the scaler's own words."""
    recommend(cluster, service("other"))
    absent = scaled_object("absent")
    absent["spec"]["scaleTargetRef"] = {"name": "other-serve"}
    cluster.apply(absent, namespace=namespace)

    def failure() -> str:
        events = [one for one in cluster.list("events", namespace) if one["involvedObject"]["name"] == "absent"]
        return next((one["message"] for one in events if f"{namespace}/absent" in one["message"]), "")

    message = wait_until("KEDA reports why", failure, SCALED_S)
    print(message)
    assert "correct service and namespace" in message
