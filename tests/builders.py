"""Objects as the API server sends them, for tests: start from a whole one, say what differs."""

from __future__ import annotations

import copy
from typing import Any

from plimsoll.api import labels
from plimsoll.resources.platform_config import EngineDefaults, EngineSettings, GatewaySettings, PlatformConfig

Object = dict[str, Any]

PLATFORM = PlatformConfig(
    engine=EngineSettings(
        image="example.com/engine:1",
        defaults=EngineDefaults(
            args=("--enforce-eager",),
            env=({"name": "OMP_NUM_THREADS", "value": "1"},),
            resources={"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
        ),
    ),
    gateway=GatewaySettings(namespace="plimsoll-system", pod_selector={labels.COMPONENT: "gateway"}),
)


def service(name: str = "chat", namespace: str = "team", **spec: Any) -> Object:
    """An InferenceService with a prefill and a decode tier; `spec` replaces whole parts of the spec."""
    base: Object = {
        "model": {"uri": "file:///models/tiny"},
        "tiers": {"prefill": {"minReplicas": 1}, "decode": {"minReplicas": 1}},
    }
    return {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND,
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-of-{namespace}-{name}",
            "generation": 1,
            "resourceVersion": "1",
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": base | copy.deepcopy(spec),
    }


def deployment(parent: Object, tier: str, *, replicas: int = 1, ready: int = 0, status: Object | None = None) -> Object:
    """A tier's Deployment as the API server has it after its controller saw it."""
    meta = parent["metadata"]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": f"{meta['name']}-{tier}",
            "namespace": meta["namespace"],
            "uid": f"uid-{tier}",
            "generation": 1,
            "resourceVersion": "10",
            "labels": {labels.SERVICE: meta["name"], labels.ROLE: tier},
            "ownerReferences": [{"uid": meta["uid"], "kind": labels.KIND, "name": meta["name"], "controller": True}],
        },
        "spec": {"replicas": replicas},
        "status": {
            "observedGeneration": 1,
            "replicas": replicas,
            "updatedReplicas": replicas,
            "readyReplicas": ready,
        }
        | (status or {}),
    }


def pod(parent: Object, tier: str, name: str = "p", **status: Any) -> Object:
    """A pod of a tier."""
    meta = parent["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": meta["namespace"],
            "uid": f"uid-{name}",
            "resourceVersion": "5",
            "labels": {labels.SERVICE: meta["name"], labels.ROLE: tier},
        },
        "status": status,
    }


def leader_worker_set(
    parent: Object, *, replicas: int = 1, template: str = "new", status: Object | None = None
) -> Object:
    """The LeaderWorkerSet of a tier `serve` in a release whose status does not say which spec it is of."""
    parts = {
        "leaderTemplate": {"metadata": {"labels": {labels.ROLE: "serve", labels.TEMPLATE: template}}, "spec": {}},
        "workerTemplate": {"metadata": {"labels": {labels.WORKER_OF: "serve", labels.TEMPLATE: template}}, "spec": {}},
    }
    own = {"replicas": replicas, "updatedReplicas": replicas, "readyReplicas": replicas}
    return deployment(parent, "serve") | {
        "apiVersion": labels.SET_API_VERSION,
        "kind": labels.SET_KIND,
        "spec": {"replicas": replicas, "leaderWorkerTemplate": {"size": 2, **parts}},
        "status": own | (status or {}),
    }


def group_pod(parent: Object, name: str, *, template: str = "new", is_worker: bool = False, **status: Any) -> Object:
    """A pod of a LeaderWorkerSet, by default a leader."""
    made = pod(parent, "serve", name, **status)
    place = {labels.WORKER_OF: "serve"} if is_worker else {labels.ROLE: "serve"}
    made["metadata"]["labels"] = {labels.SERVICE: parent["metadata"]["name"], labels.TEMPLATE: template, **place}
    return made
