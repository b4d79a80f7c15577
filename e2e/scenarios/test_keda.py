"""KEDA itself scales a Deployment by Plimsoll's recommendation: from zero by its push stream, between by its HPA, which
reads external.metrics.k8s.io, and back to zero.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from e2e.cluster.settings import ROOT
from e2e.lib import keda, simulated_fleet, stack
from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster, Object, condition
from e2e.lib.load import Arrival, Load, OpenLoop, poisson, unique_text
from e2e.lib.service import Service
from e2e.lib.wait import wait_until
from plimsoll.controllers.keda_scaler.answers import METRIC_NAME

PAGE = ROOT / "docs" / "tasks" / "keda.md"
MAX_REPLICAS = 6
RATE = 12.0  # requests/s; one replica carries about 6
PATIENCE_S = 180.0  # of the client that wakes it
SCALED_S = 240.0  # a polling interval of KEDA, one of the HPA, a busy machine
METRIC = f"s0-{METRIC_NAME}"


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


def prompts(name: str) -> Callable[[int], Prompt]:
    return lambda n: Prompt(unique_text(300, f"{name} {n}"), max_tokens=48)


def external_metric(cluster: Cluster, service: Service) -> int | None:
    """The count by external.metrics.k8s.io, as the HPA reads it; None while there is none."""
    path = f"/apis/external.metrics.k8s.io/v1beta1/namespaces/{service.namespace}/{METRIC}"
    response = cluster.raw(f"{path}?labelSelector=scaledobject.keda.sh%2Fname%3D{service.name}")
    items = response.json().get("items") if response.status_code == 200 else None
    return int(items[0]["value"]) if items else None


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
    manifest = simulated_fleet.fleet_manifest("followed", {"serve": simulated_fleet.replica_bounds(0, MAX_REPLICAS)})
    manifest["spec"]["scaling"] = {"mode": "Recommend", "sloMissCost": 0, "horizon": "10s"}
    manifest["spec"]["admission"] = {"classes": [{"name": "default", "maxQueueTime": "120s"}]}
    cluster.apply(manifest, namespace=followed.namespace)
    wait_until("its Deployment exists", lambda: cluster.get("deployments", "followed-serve", followed.namespace))
    cluster.apply(scaled_object("followed"), namespace=followed.namespace)

    def is_active(status: str) -> bool:
        scaled = cluster.get_object("scaledobjects.keda.sh", "followed", followed.namespace)
        return [condition(scaled, kind).get("status") for kind in ("Ready", "Active")] == ["True", status]

    wait_until("KEDA follows it at zero", lambda: is_active("False") and not followed.pods(), SCALED_S)

    one = OpenLoop([Arrival(0.0, prompts("wake")(0))])
    (woken,) = Load(followed.target, one, patience_s=PATIENCE_S).run().records
    assert woken.ok, woken.detail
    with Load(followed.target, poisson(RATE, 240, prompts("load"), seed=4)) as load:
        most = wait_until("the HPA gives it more", lambda: (n := replicas(cluster, followed)) > 1 and n, SCALED_S)
        metric = wait_until("the metric is served", lambda: external_metric(cluster, followed), SCALED_S)
        writers = writers_of_replicas(cluster, followed)
    print(
        f"first token after {woken.ttft_s:.1f} s from zero; {most} replicas, metric {metric}, set by {sorted(writers)}"
    )
    print(load.ledger.summary())
    assert writers <= {"keda", "kube-controller-manager"}, writers
    assert metric <= MAX_REPLICAS

    wait_until("KEDA takes the last engine", lambda: replicas(cluster, followed) == 0, SCALED_S)
    wait_until("KEDA calls it inactive", lambda: is_active("False"), SCALED_S)


@pytest.mark.usefixtures("running")
def test_keda_reports_what_the_scaler_says(cluster: Cluster, namespace: str) -> None:
    """A trigger that names no service: KEDA's Event has the scaler's own words."""
    absent = scaled_object("absent")
    absent["spec"]["scaleTargetRef"] = {"name": "followed-serve"}
    absent["metadata"]["annotations"] = {"note": json.dumps("a second one for the same Deployment")}
    cluster.kubectl("delete", "scaledobject", "followed", "-n", namespace, "--ignore-not-found")
    cluster.apply(absent, namespace=namespace)

    def failure() -> str:
        events = [one for one in cluster.list("events", namespace) if one["involvedObject"]["name"] == "absent"]
        return next((one["message"] for one in events if f"{namespace}/absent" in one["message"]), "")

    message = wait_until("KEDA tells why", failure, SCALED_S)
    print(message)
    assert "correct service and namespace" in message
