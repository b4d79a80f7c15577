"""What the gateway's catalog reads of one engine pod.

Problem: some pods have no address yet, and some fields of a pod may be unreadable.

Idea: each function reads one part of a pod. The caller decides what an error in one part means for the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plimsoll.adapters.engine_of_pod import api_port, engine_args, engine_of
from plimsoll.adapters.pod_tls import tls_name
from plimsoll.api import labels
from plimsoll.api.contract import engine_contract
from plimsoll.core.admission.request import MAX_REQUEST_SEQUENCES
from plimsoll.core.routing.endpoint import Endpoint
from plimsoll.core.types import Role
from plimsoll.gateway.handover import is_unplaced, leaving

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EnginePod:
    """An engine pod with an address. `max_model_len` is in tokens, 0 if its arguments leave it to the model."""

    obj: Object
    endpoint: Endpoint
    max_queued: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class UnplacedPod:
    """An engine pod that waits for room in the cluster."""

    obj: Object
    role: Role


def max_queued(pod: Object) -> int:
    """Returns how many sequences the engine of a pod accepts at once, by the rule that its launcher uses too."""
    if labels.ADOPTED in pod:  # no launcher limits it
        return MAX_REQUEST_SEQUENCES
    limits = engine_contract().limits
    limit = engine_of(pod).queue_limit(engine_args(pod), limits["queued_requests"], limits["queued_per_sequence"])
    return limit or MAX_REQUEST_SEQUENCES


def max_model_len(pod: Object) -> int:
    """Returns the longest sequence of an engine in tokens by its arguments, 0 if they leave it to the model."""
    return engine_of(pod).max_model_len(engine_args(pod)) or 0


def unplaced_role(pod: Object) -> tuple[str, Role] | None:
    """Returns the service key and role of an engine pod that waits for room in the cluster, None for another pod."""
    pod_labels = pod["metadata"].get("labels") or {}
    service, role = pod_labels.get(labels.SERVICE), pod_labels.get(labels.ROLE)
    if not service or role not in set(Role) or not is_unplaced(pod):
        return None
    return f"{pod['metadata']['namespace']}/{service}", Role(role)


def endpoint_of(pod: Object) -> tuple[str, Endpoint] | None:
    """Returns the service key and endpoint of an engine pod, or None for another pod or one without an address."""
    meta, status = pod["metadata"], pod.get("status", {})
    pod_labels = meta.get("labels") or {}
    service, role, ip = pod_labels.get(labels.SERVICE), pod_labels.get(labels.ROLE), status.get("podIP")
    if not service or role not in set(Role) or not ip or status.get("phase") in ("Succeeded", "Failed"):
        return None
    conditions = status.get("conditions") or ()
    endpoint = Endpoint(
        address=f"[{ip}]:{api_port(pod)}" if ":" in ip else f"{ip}:{api_port(pod)}",
        pod=meta["name"],
        role=Role(role),
        revision=pod_labels.get(labels.REVISION, ""),
        ready=any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions),
        leaving=leaving(pod),
        tls_name=tls_name(pod),
    )
    return f"{meta['namespace']}/{service}", endpoint
