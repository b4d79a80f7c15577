"""Names, labels and owners of everything that belongs to one service."""

from __future__ import annotations

import hashlib
from typing import Any

import orjson

from plimsoll.api import labels

Object = dict[str, Any]


def tier_name(service: str, tier: str) -> str:
    """Name of a tier's Deployment, Service and PodDisruptionBudget."""
    return f"{service}-{tier}"


def engine_name(service: str) -> str:
    """Name of what all tiers share: the ServiceAccount and the NetworkPolicy."""
    return f"{service}-engine"


def service_labels(service: str) -> dict[str, str]:
    return {labels.NAME: "plimsoll", labels.INSTANCE: service, labels.MANAGED_BY: "plimsoll", labels.SERVICE: service}


def tier_labels(service: str, tier: str) -> dict[str, str]:
    return {**service_labels(service), labels.COMPONENT: tier, labels.ROLE: tier}


def selector(service: str, tier: str) -> dict[str, str]:
    """The immutable selector of a tier's pods."""
    return {labels.SERVICE: service, labels.ROLE: tier}


def metadata(parent: Object, name: str, with_labels: dict[str, str]) -> Object:
    """Metadata of a child: owned by `parent`, so that Kubernetes removes it with the service.

    Nothing of the parent's own labels and annotations is copied: GitOps tools would take the child for theirs.
    """
    meta = parent["metadata"]
    owner = {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND,
        "name": meta["name"],
        "uid": meta["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {"name": name, "namespace": meta["namespace"], "labels": with_labels, "ownerReferences": [owner]}


def digest(value: object, length: int = 10) -> str:
    """Short stable hash of a JSON-like value."""
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).hexdigest()[:length]


def owner_uid(child: Object) -> str | None:
    """The uid of the service that controls an object, if one does."""
    for owner in child["metadata"].get("ownerReferences", []):
        if owner.get("controller") and "uid" in owner:
            return str(owner["uid"])
    return None
