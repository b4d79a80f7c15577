"""A gated model from a hub: the engine gets its token from the named Secret, and without one the hub's refusal is told.

The hub is a small server in the cluster (hub/hub.py) that serves the tiny model's files to whoever has the token.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster, Object, is_true
from e2e.lib.load import Arrival, Load, OpenLoop
from e2e.lib.prober import Prober
from e2e.lib.service import START_S, Service, make_manifest
from e2e.lib.wait import wait_until

HUB = Path(__file__).with_name("hub") / "hub.py"
REPOSITORY, TOKEN = "example/tiny", "hf_only-for-this-test"
IMAGE = "localhost:5001/plimsoll/engine-cpu:dev"
CONTEXT = {
    "runAsNonRoot": True, "runAsUser": 1000, "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
}  # fmt: skip


def _hub_objects() -> list[Object]:
    container: Object = {
        "name": "hub",
        "image": IMAGE,
        "command": ["python3", "/hub/hub.py", "/models/tiny", REPOSITORY, TOKEN],
        "ports": [{"containerPort": 8080}],
        "readinessProbe": {"httpGet": {"path": "/healthz", "port": 8080}, "periodSeconds": 1},
        "securityContext": CONTEXT,
        "volumeMounts": [{"name": "hub", "mountPath": "/hub"}],
    }
    volumes = [{"name": "hub", "configMap": {"name": "hub"}}]
    pod: Object = {
        "containers": [container],
        "volumes": volumes,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
    }
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "hub"}, "data": {"hub.py": HUB.read_text()}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hugging-face"}, "stringData": {"token": TOKEN}},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "hub", "labels": {"app": "hub"}}, "spec": pod},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "hub"},
            "spec": {"selector": {"app": "hub"}, "ports": [{"port": 8080}]},
        },
    ]


@pytest.fixture(scope="module")
def hub(cluster: Cluster, namespace: str) -> str:
    """The hub's URL inside the cluster."""
    cluster.apply(*_hub_objects(), namespace=namespace)
    wait_until("the hub runs", lambda: is_true(cluster.get("pods", "hub", namespace), "Ready"), 90)
    return f"http://hub.{namespace}.svc:8080"


def _from_hub(name: str, url: str, secret: str | None) -> Object:
    model: Object = {"uri": f"hf://{REPOSITORY}", "cache": {"sizeLimit": "1Gi"}} | (
        {"secretRef": {"name": secret}} if secret else {}
    )
    return make_manifest(name, {"serve": {}}, model=model, engine={"env": [{"name": "HF_ENDPOINT", "value": url}]})


def test_gated_model_with_secret_is_served(
    hub: str, service: Callable[[str], Service], cluster: Cluster, prober: Prober
) -> None:
    gated = service("gated")
    cluster.apply(_from_hub("gated", hub, "hugging-face"), namespace=gated.namespace)
    gated.wait_ready()
    prober.watch(gated.key, gated.target, gated.get)
    ledger = Load(
        gated.target, OpenLoop([Arrival(0.2 * n, Prompt(f"Question {n}", max_tokens=8)) for n in range(5)])
    ).run()
    requested = [
        line for line in cluster.logs(gated.namespace, "hub", "hub", tail=-1).splitlines() if "healthz" not in line
    ]
    without = [line for line in requested if line.startswith("without")]
    prober.unwatch(gated.key)
    cluster.delete("inferenceservices", gated.name, namespace=gated.namespace)
    print(f"{ledger.summary()}; the hub answered {len(requested)} requests, {len(without)} of them without the token")
    assert not ledger.failures, ledger.explain()
    assert any(".safetensors" in line and "with token" in line for line in requested)


def test_gated_model_without_secret_reports_engine_failing(
    hub: str, service: Callable[[str], Service], cluster: Cluster
) -> None:
    open_handed = service("tokenless")
    cluster.apply(_from_hub("tokenless", hub, None), namespace=open_handed.namespace)
    condition = open_handed.wait_condition("ServeDegraded", START_S, reason="EngineFailing")
    cluster.delete("inferenceservices", open_handed.name, namespace=open_handed.namespace)
    print(f"{condition['reason']}: {condition['message']}")
    assert "exit code" in condition["message"]
