"""A gateway of another product: an Envoy in the cluster serves an InferencePool that the operator made.

The Envoy is configured from the pool as implementations do it: its endpoints are the pods that the pool selects, and
ext_proc asks the picker that it names. The kind is a small copy for tests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from e2e.lib import stack
from e2e.lib.kube import Cluster, Object
from e2e.lib.metrics import GatewayClient, Samples
from e2e.lib.service import START_S, Service, make_manifest
from e2e.lib.wait import wait_until
from plimsoll.api import labels
from tests.gateway.foreign_envoy import DUPLEX, envoy_config

CRD = stack.ROOT / "e2e" / "lib" / "inferencepools-crd.yaml"
KIND = "inferencepools.inference.networking.k8s.io"
POOL_PATH = f"/apis/{labels.POOL_API_VERSION}/namespaces/{stack.SYSTEM}/{labels.POOL_PLURAL}"
NAME, SOLO = "pooled", "alone"
FOREIGN = "e2e-foreign-gateway"
PORT, ADMIN_PORT = 10000, 9901
REQUESTS = 10
POOL_S = 90.0  # the operator looks for the kind every 30 s
SENT = "plimsoll_gateway_endpoint_picker_requests_total"


def _pool(cluster: Cluster, name: str = NAME) -> Object | None:
    response = cluster.raw(f"{POOL_PATH}/{name}")
    return dict(response.json()) if response.status_code == 200 else None


@pytest.fixture(scope="module")
def service(cluster: Cluster) -> Iterator[Service]:
    """A pair in the namespace of a release that makes pools; afterwards the release is as before."""
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": FOREIGN}}}
    picker = {"enabled": True, "inferencePools": True, "from": [peer]}
    stack.install(cluster, "--set-json", f"gateway.endpointPicker={json.dumps(picker)}")
    cluster.apply(make_manifest(NAME, {"prefill": {}, "decode": {"maxReplicas": 1}}), namespace=stack.SYSTEM)
    yield Service(cluster, stack.SYSTEM, NAME, stack.GATEWAY_URL)
    cluster.delete("inferenceservices", NAME, namespace=stack.SYSTEM)
    stack.install(cluster)
    cluster.kubectl("delete", "crd", KIND, "--ignore-not-found")


@pytest.fixture(scope="module")
def pool(service: Service, cluster: Cluster) -> Object:
    """The pool, which is made once the cluster has its kind."""
    service.wait_condition("InferencePoolUnusable", POOL_S, reason="PoolKindMissing")
    cluster.kubectl("apply", "-f", str(CRD))
    found = wait_until("the pool is made", lambda: _pool(cluster), POOL_S)
    service.wait_ready(START_S)
    return found


@pytest.fixture(scope="module")
def foreign(pool: Object, cluster: Cluster) -> Iterator[str]:
    """The API path of an Envoy that serves the pool."""
    spec = pool["spec"]
    selector = ",".join(f"{name}={value}" for name, value in spec["selector"]["matchLabels"].items())
    addresses = [pod["status"]["podIP"] for pod in cluster.list("pods", stack.SYSTEM, selector)]
    engines = tuple(f"{address}:{spec['targetPorts'][0]['number']}" for address in addresses)
    picker = spec["endpointPickerRef"]
    host = f"{picker['name']}.{stack.SYSTEM}.svc.cluster.local:{picker['port']['number']}"
    config = envoy_config(f"0.0.0.0:{PORT}", f"0.0.0.0:{ADMIN_PORT}", host, DUPLEX, engines)
    stack.make_namespace(cluster, FOREIGN)
    cluster.apply(*_envoy(cluster, config), namespace=FOREIGN)
    cluster.kubectl("wait", "-n", FOREIGN, "--for=condition=Ready", "pod/front", "--timeout=120s")
    yield f"/api/v1/namespaces/{FOREIGN}/pods/front:{PORT}/proxy"
    stack.drop_namespace(cluster, FOREIGN)


def _envoy(cluster: Cluster, config: Any) -> tuple[Object, Object]:
    """A pod of the Envoy that the gateway has, with another configuration."""
    (gateway, *_) = stack.gateway_pods(cluster)
    image = next(one["image"] for one in gateway["spec"]["initContainers"] if one["name"] == "envoy")  # a sidecar
    settings = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "front"},
        "data": {"envoy.json": json.dumps(config)},
    }
    container = {
        "name": "envoy",
        "image": image,
        "command": ["envoy", "-c", "/config/envoy.json", "--concurrency", "1"],
        "ports": [{"containerPort": PORT}],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": ADMIN_PORT}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "config", "mountPath": "/config"}],
    }
    security = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {
        "containers": [container],
        "securityContext": security,
        "automountServiceAccountToken": False,
        "volumes": [{"name": "config", "configMap": {"name": "front"}}],
    }
    return settings, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "front"}, "spec": spec}


def _sent(cluster: Cluster) -> float:
    gateways = GatewayClient(cluster, stack.SYSTEM)
    pages = [Samples.parse(cluster.in_pod(stack.SYSTEM, pod, 8081, "/metrics")) for pod in gateways.pods]
    return sum(page.total(SENT, outcome="sent") for page in pages)


def _ask(cluster: Cluster, path: str, model: str) -> Object:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    return cluster.call(f"{path}/v1/chat/completions", body)


def test_pool_names_the_decode_engines(pool: Object, service: Service) -> None:
    assert pool["spec"]["selector"]["matchLabels"] == {labels.SERVICE: NAME, labels.ROLE: "decode"}
    wait_until("nothing keeps gateways from the pool", lambda: not service.condition("InferencePoolUnusable"), POOL_S)


def test_requests_by_the_pool_are_picked_and_served(foreign: str, cluster: Cluster) -> None:
    before = _sent(cluster)
    served = [_ask(cluster, foreign, NAME) for _ in range(REQUESTS)]
    assert {one["model"] for one in served} == {NAME}
    assert _sent(cluster) - before == REQUESTS


def test_unknown_model_by_the_pool_gets_404(foreign: str, cluster: Cluster) -> None:
    with pytest.raises(httpx.HTTPStatusError) as caught:
        _ask(cluster, foreign, "nobody")
    assert caught.value.response.status_code == 404


def test_changed_pool_is_put_back(pool: Object, cluster: Cluster) -> None:
    cluster.patch(KIND, NAME, stack.SYSTEM, {"spec": {"endpointPickerRef": {"failureMode": "FailOpen"}}})
    wait_until("the pool is as before", lambda: (_pool(cluster) or {}).get("spec") == pool["spec"], POOL_S)


def test_pool_of_somebody_else_is_left_alone(service: Service, pool: Object, cluster: Cluster) -> None:
    theirs = {
        "apiVersion": labels.POOL_API_VERSION,
        "kind": labels.POOL_KIND,
        "metadata": {"name": SOLO},
        "spec": {**pool["spec"], "endpointPickerRef": {"name": "their-picker", "port": {"number": 9002}}},
    }
    cluster.apply(theirs, namespace=stack.SYSTEM)
    cluster.apply(
        make_manifest(SOLO, {"serve": {"minReplicas": 0}}, slo={"ttft": "5s", "tpot": "200ms"}), namespace=stack.SYSTEM
    )
    alone = Service(cluster, stack.SYSTEM, SOLO, stack.GATEWAY_URL)
    try:
        found = alone.wait_condition("InferencePoolUnusable", POOL_S, reason="PoolTaken")
        print(found["message"])
        live = _pool(cluster, SOLO)
        assert live is not None
        assert live["spec"]["endpointPickerRef"]["name"] == "their-picker"
        cluster.delete(KIND, SOLO, namespace=stack.SYSTEM)
        wait_until("the operator makes its own", lambda: _pool(cluster, SOLO), POOL_S)
    finally:
        cluster.delete("inferenceservices", SOLO, namespace=stack.SYSTEM)
    wait_until("the pool goes with its service", lambda: _pool(cluster, SOLO) is None, POOL_S)
