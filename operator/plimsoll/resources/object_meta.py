"""Names, labels and owner references of the objects of one service."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson

from plimsoll.api import labels

Object = dict[str, Any]


def tier_name(service: str, tier: str) -> str:
    """Name of a tier's workload, Service and PodDisruptionBudget."""
    return f"{service}-{tier}"


def shared_name(service: str) -> str:
    """Name of the ServiceAccount and the NetworkPolicy, which all tiers share."""
    return f"{service}-engine"


def targets_name(service: str) -> str:
    """Name of the Service that selects the pods of a routed target."""
    return f"{service}-targets"


def service_labels(service: str) -> dict[str, str]:
    return {labels.NAME: "plimsoll", labels.INSTANCE: service, labels.MANAGED_BY: "plimsoll", labels.SERVICE: service}


def tier_labels(service: str, tier: str) -> dict[str, str]:
    return {**service_labels(service), labels.COMPONENT: tier, labels.ROLE: tier}


def tier_selector(service: str, tier: str) -> dict[str, str]:
    """The immutable selector of a tier's pods."""
    return {labels.SERVICE: service, labels.ROLE: tier}


def child_metadata(parent: Object, name: str, child_labels: dict[str, str]) -> Object:
    """Metadata of an object owned by `parent`, so that Kubernetes deletes it with the service.

    The parent's labels and annotations are not copied, because GitOps tools would take the object for theirs.
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
    return {"name": name, "namespace": meta["namespace"], "labels": child_labels, "ownerReferences": [owner]}


def short_hash(value: object, length: int = 10) -> str:
    """Short stable hash of a JSON-like value."""
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).hexdigest()[:length]


def owner_uid(child: Mapping[str, Any]) -> str | None:
    """The uid of the service that controls an object; None if there is none."""
    for owner in child["metadata"].get("ownerReferences", []):
        if owner.get("controller") and "uid" in owner:
            return str(owner["uid"])
    return None
