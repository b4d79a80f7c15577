"""A small controller of LeaderWorkerSets for tests: it makes the pods of each group, with the real one's labels."""

from __future__ import annotations

from typing import Any

from plimsoll.adapters.kube_client import LEADERWORKERSETS, PODS, KubeClient
from plimsoll.api import labels
from plimsoll.controllers.operator import WATCHED_RESOURCES

Object = dict[str, Any]


async def make_groups(kube: KubeClient, namespace: str, name: str) -> list[Object]:
    """Create the pods of a LeaderWorkerSet that are missing; returns all, leaders and workers, by group and rank."""
    found = await kube.get(LEADERWORKERSETS, namespace, name)
    template = found["spec"]["leaderWorkerTemplate"]
    made: list[Object] = []
    for group in range(found["spec"]["replicas"]):
        for rank in range(template["size"]):
            part = "workerTemplate" if rank else "leaderTemplate"
            suffix = f"-{rank}" if rank else ""
            made.append(await _make(kube, namespace, f"{name}-{group}{suffix}", name, template[part]))
    return made


async def _make(kube: KubeClient, namespace: str, pod: str, set_name: str, template: Object) -> Object:
    own = {labels.SET_NAME: set_name, labels.SET_REVISION: "first"}
    meta = {"namespace": namespace, "name": pod, "labels": {**template["metadata"]["labels"], **own}}
    return await kube.apply({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": template["spec"]}, "sets")


async def set_conditions(kube: KubeClient, pod: Object, **conditions: str) -> Object:
    """Set conditions of a pod's status. conditions: status by type, such as `Ready="True"`."""
    common = {"message": "0/2 nodes fit", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    stated = [{"type": kind, "status": status, **common} for kind, status in conditions.items()]
    meta = {name: pod["metadata"][name] for name in ("namespace", "name")}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "status": {"conditions": stated}}
    return await kube.apply(body, "kubelet", subresource="status")


async def pods_of(kube: KubeClient, namespace: str) -> tuple[Object, ...]:
    """The pods of a namespace as the operator's watch lists them."""
    items, _ = await kube.list(PODS, namespace, dict(WATCHED_RESOURCES)[PODS])
    return tuple(items)
