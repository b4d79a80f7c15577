"""Reads the state of one service from the caches. Later steps of a reconcile do not read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plimsoll.adapters.normalize import value_at
from plimsoll.api import labels
from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.controllers.gateway_poller import GatewayView
from plimsoll.controllers.object_cache import Key, ObjectCache, key_of
from plimsoll.core.errors import InvalidSpec
from plimsoll.core.routing.model_names import NameClaim, published, resolve_owners

Object = dict[str, Any]

CHILD_KINDS = (
    "Deployment",
    "Service",
    "ServiceAccount",
    "PodDisruptionBudget",
    "NetworkPolicy",
    labels.ADMISSION_KIND,
)


@dataclass(frozen=True)
class ObservedService:
    """A service and its objects. service: None if the spec is invalid; `problems` then has the errors."""

    service_object: Object
    service: InferenceService | None
    problems: tuple[str, ...]
    children: dict[tuple[str, str], Object]  # kind and name -> object
    revisions: dict[str, Object]  # ControllerRevisions by name
    pods: tuple[Object, ...]
    name_owners: dict[str, NameClaim]  # model name -> the claim that owns it
    gateway_view: GatewayView
    fallback: tuple[str, str] | None = None  # long name of the fallback, and why it cannot be used or ""


def observe(cache: ObjectCache, gateways: GatewayView, key: Key) -> ObservedService | None:
    """The service; None if it does not exist or is being deleted, since Kubernetes removes its objects."""
    service_object = cache.get(labels.KIND, key)
    if service_object is None or service_object["metadata"].get("deletionTimestamp"):
        return None
    service = cache.parsed(service_object)
    return ObservedService(
        service_object=service_object,
        service=None if isinstance(service, InvalidSpec) else service,
        problems=service.problems if isinstance(service, InvalidSpec) else (),
        children={
            (kind, child["metadata"]["name"]): child
            for kind in CHILD_KINDS
            for child in cache.children(kind, key)
            if _is_owned_by(child, service_object)
        },
        revisions={
            r["metadata"]["name"]: r
            for r in cache.children("ControllerRevision", key)
            if _is_owned_by(r, service_object)
        },
        pods=tuple(cache.children("Pod", key)),
        name_owners=resolve_owners(name_claims(cache)),
        gateway_view=gateways,
        fallback=resolve_fallback(cache, service_object),
    )


def resolve_fallback(cache: ObjectCache, service_object: Object) -> tuple[str, str] | None:
    """Long name of the fallback service, and why it cannot be used, or "". None if the spec names no fallback.

    A fallback cannot be used if it does not exist, or if its chain of fallbacks leads back to this service.
    """
    key, path = _fallback_key(service_object), [key_of(service_object)]
    if key is None:
        return None
    long_name = "/".join(key)
    if cache.get(labels.KIND, key) is None:
        return long_name, "does not exist"
    next_key: Key | None = key
    while next_key is not None and next_key not in path:
        path.append(next_key)
        next_object = cache.get(labels.KIND, next_key)
        next_key = None if next_object is None else _fallback_key(next_object)
    if next_key != key_of(service_object):
        return long_name, ""
    cycle = " -> ".join("/".join(one) for one in (*path, key_of(service_object)))
    return long_name, f"falls back to this service (cycle: {cycle})"


def _fallback_key(service_object: Object) -> Key | None:
    name = value_at(service_object, "spec", "admission", "fallback", "name")
    return (service_object["metadata"]["namespace"], str(name)) if name else None


def name_claims(cache: ObjectCache) -> list[NameClaim]:
    """Every service's claim to a model name, including services with an invalid spec."""
    return [name_claim(service_object) for service_object in cache.all(labels.KIND)]


def name_claim(service_object: Object) -> NameClaim:
    """The claim of one service to a model name."""
    namespace, name = key_of(service_object)
    created, uid = service_object["metadata"].get("creationTimestamp", ""), service_object["metadata"]["uid"]
    return NameClaim(namespace, name, claimed_name(service_object), created, uid, published(service_object))


def claimed_name(service_object: Object) -> str:
    """The model name that a service claims, without its namespace."""
    return str(value_at(service_object, "spec", "model", "name") or service_object["metadata"]["name"])


def _names(raw: Object) -> frozenset[str]:
    """The names that a service claims, or has claimed before and still accepts."""
    return frozenset((claimed_name(raw), *published(raw)))


def affected_services(cache: ObjectCache, before: Object | None, after: Object | None) -> list[Key]:
    """The services to reconcile after a service was added or deleted, or changed its name or fallback.

    These are the services that claim or still accept the same name, and the services with a fallback.
    """
    changed = [service_object for service_object in (before, after) if service_object is not None]
    names, fallbacks = (
        {_names(service_object) for service_object in changed},
        {_fallback_key(service_object) for service_object in changed},
    )
    same_name, same_fallback = len(changed) == 2 and len(names) == 1, len(changed) == 2 and len(fallbacks) == 1
    shared = frozenset[str]().union(*names)
    if same_name and same_fallback:
        return []
    return [
        key_of(service_object)
        for service_object in cache.all(labels.KIND)
        if (not same_name and _names(service_object) & shared) or _fallback_key(service_object) is not None
    ]


def _is_owned_by(child: Object, parent: Object) -> bool:
    uid = parent["metadata"]["uid"]
    return any(owner.get("uid") == uid for owner in child["metadata"].get("ownerReferences", []))
