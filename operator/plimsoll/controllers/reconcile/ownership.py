"""Checks before an object is created for a service: that the service still exists, and that the name is free."""

from __future__ import annotations

from typing import Any

from plimsoll.adapters.kube_client import BY_KIND, INFERENCESERVICES, KubeClient
from plimsoll.api import labels
from plimsoll.core.errors import Conflict, NotFound, ObjectRejected, ServiceDeleted

Object = dict[str, Any]


async def require_parent(kube: KubeClient, parent: Object) -> None:
    """Raise ServiceDeleted if the service was deleted, though its watch has not said so yet.

    What is created for it then is garbage-collected at once and created again: pods that start and end in a loop.
    """
    meta = parent["metadata"]
    live = await get_live(kube, {"kind": INFERENCESERVICES.kind, "metadata": meta})
    if live is None or live["metadata"]["uid"] != meta["uid"]:
        raise ServiceDeleted(f"InferenceService {meta['name']} was deleted")


async def require_unowned(kube: KubeClient, desired: Object, parent: Object) -> None:
    """Raise unless the object can be created: Conflict for a leftover, ObjectRejected for a foreign object."""
    kind, name = desired["kind"], desired["metadata"]["name"]
    live = await get_live(kube, desired)
    if live is None or is_owned_by(live, parent):
        return
    if is_leftover(live, parent):
        raise Conflict(f"{kind} {name} of a deleted InferenceService of this name still exists")
    raise ObjectRejected(f"{kind} {name} exists and is not owned by this InferenceService; rename one of them")


async def get_live(kube: KubeClient, desired: Object) -> Object | None:
    """The object of this kind and name in the API server; None if there is none."""
    meta = desired["metadata"]
    try:
        return await kube.get(BY_KIND[desired["kind"]], meta["namespace"], meta["name"])
    except NotFound:
        return None


def is_owned_by(child: Object, parent: Object) -> bool:
    """Whether the service is an owner of the object."""
    uid = parent["metadata"]["uid"]
    return any(owner.get("uid") == uid for owner in child["metadata"].get("ownerReferences", []))


def is_leftover(child: Object, parent: Object) -> bool:
    """Whether an earlier service of this name is an owner of the object, which Kubernetes thus deletes soon."""
    former = (labels.KIND, parent["metadata"]["name"])
    return not is_owned_by(child, parent) and any(
        (owner.get("kind"), owner.get("name")) == former for owner in child["metadata"].get("ownerReferences", [])
    )
