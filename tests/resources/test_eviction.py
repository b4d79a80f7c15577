"""Eviction of engines on a real API server, as `kubectl drain` does it, with the budget that the operator renders."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from plimsoll.adapters.kube_client import PODDISRUPTIONBUDGETS, PODS, KubeClient
from plimsoll.cli.render import render_manifest
from plimsoll.core.errors import BackendUnavailable
from tests import builders
from tests.apiserver import ApiServer

pytestmark = pytest.mark.api

Object = dict[str, Any]

NAMESPACE = "drained"
PARENT = builders.service("two", NAMESPACE, tiers={"serve": {"minReplicas": 2}})


@pytest.fixture
async def kube(cluster: ApiServer) -> AsyncIterator[KubeClient]:
    connected = await KubeClient.connect(str(cluster.kubeconfig))
    await connected._json("POST", "/api/v1/namespaces", None, {"metadata": {"name": NAMESPACE}}, "application/json")
    yield connected
    await connected._json("DELETE", f"/api/v1/namespaces/{NAMESPACE}")
    await connected.close()


async def patch_status(kube: KubeClient, path: str, status: Object) -> None:
    await kube._json("PATCH", f"{path}/status", None, {"status": status}, "application/merge-patch+json")


async def test_only_engines_that_cannot_start_can_be_evicted(kube: KubeClient) -> None:
    made = render_manifest(PARENT, builders.PLATFORM)
    (budget,) = [one for one in made if one["kind"] == "PodDisruptionBudget"]
    (deployment,) = [one for one in made if one["kind"] == "Deployment"]
    del budget["metadata"]["ownerReferences"]
    live = await kube.create(budget)
    template = deployment["spec"]["template"]
    for name, ready in (("two-serve-0", "False"), ("two-serve-1", "True")):
        pod = {
            "kind": "Pod",
            "metadata": {"name": name, "namespace": NAMESPACE, "labels": template["metadata"]["labels"]},
            "spec": {**template["spec"], "nodeName": "node-a", "serviceAccountName": "default"},
        }
        await kube.create(pod)
        status = {"phase": "Running", "conditions": [{"type": "Ready", "status": ready}]}
        await patch_status(kube, PODS.path(NAMESPACE, name), status)
    budget_path = PODDISRUPTIONBUDGETS.path(NAMESPACE, "two-serve")
    # No controller runs here, so the test writes what the disruption controller would, with too few healthy engines.
    counts = {"expectedPods": 2, "currentHealthy": 0, "desiredHealthy": 1, "disruptionsAllowed": 0}
    await patch_status(kube, budget_path, {"observedGeneration": live["metadata"]["generation"], **counts})
    await evict(kube, "two-serve-0")
    await patch_status(kube, budget_path, {"currentHealthy": 1})
    with pytest.raises(BackendUnavailable, match="disruption budget"):
        await evict(kube, "two-serve-1")


async def evict(kube: KubeClient, name: str) -> None:
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": NAMESPACE}}
    await kube._json("POST", PODS.path(NAMESPACE, name, "eviction"), None, body, "application/json")
