"""The copy of a target's pod, by which operator and gateway treat it as a pod of the service.

Problem: pods of a target have no label of Plimsoll, and nothing of them may be changed.

Idea: each process that reads them makes a copy with the labels of a service's pod, and says in it what the pod itself
does not: ports, GPUs and the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plimsoll.api import labels

Object = dict[str, Any]


def adopted_copy(pod: Object, service: str, role: str, facts: Mapping[str, Any]) -> Object:
    """Return the copy. service: name of the service whose engine the pod is. facts: as `labels.ADOPTED` says."""
    meta = pod["metadata"]
    own = {labels.SERVICE: service, labels.ROLE: role}
    return {
        **pod,
        "kind": labels.ADOPTED_POD_KIND,
        "metadata": {**meta, "labels": {**(meta.get("labels") or {}), **own}},
        labels.ADOPTED: dict(facts),
    }


def is_of_tier(pod: Mapping[str, Any]) -> bool:
    """Whether a pod belongs to a tier, so that it is no engine of a target."""
    own = pod["metadata"].get("labels") or {}
    return own.get(labels.MANAGED_BY) == "plimsoll" and (labels.ROLE in own or labels.WORKER_OF in own)
