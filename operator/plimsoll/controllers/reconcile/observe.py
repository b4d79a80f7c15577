"""Reads the state of one service from the caches. Later steps of a reconcile do not read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plimsoll.adapters.normalize import value_at
from plimsoll.api import labels
from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.controllers.gateway_poller import GatewayView
from plimsoll.controllers.object_cache import Key, ObjectCache, key_of
from plimsoll.controllers.reconcile.ownership import is_owned_by
from plimsoll.controllers.tier_workload import TIER_WORKLOADS
from plimsoll.core.errors import InvalidSpec
from plimsoll.core.routing.model_names import (
    NameClaim,
    NameRejection,
    NameRules,
    find_holder,
    read_claims,
    resolve_owners,
)

Object = dict[str, Any]

NO_RULES = NameRules()  # every namespace may claim every name
FALLBACK_MISSING = "does not exist"
CHILD_KINDS = (
    *(one.kind for one in TIER_WORKLOADS),
    "Service",
    "ServiceAccount",
    "ConfigMap",
    "PodDisruptionBudget",
    "NetworkPolicy",
    labels.ADMISSION_KIND,
)


@dataclass(frozen=True)
class NameState:
    """A service's claim of a model name. holder: the claim that keeps it from this service, None if there is none.

    qualified_holder: the claim that keeps NAMESPACE/NAME from it. owned: the names that the service owns.
    """

    claim: NameClaim
    owned: frozenset[str]
    rejection: NameRejection | None = None
    holder: NameClaim | None = None
    qualified_holder: NameClaim | None = None


@dataclass(frozen=True)
class ObservedService:
    """A service and its objects. service: None if the spec is invalid; `problems` then has the errors."""

    service_object: Object
    service: InferenceService | None
    problems: tuple[str, ...]
    children: dict[tuple[str, str], Object]  # kind and name -> object
    revisions: dict[str, Object]  # ControllerRevisions by name
    pods: tuple[Object, ...]
    earlier_pods: tuple[Object, ...]  # that a deleted service of this name has left
    names: NameState
    gateway_view: GatewayView
    adapter_names: tuple[NameState, ...] = ()
    fallback: tuple[str, str] | None = None  # long name of the fallback, and why it cannot be used or ""


def observe(cache: ObjectCache, gateways: GatewayView, key: Key, rules: NameRules = NO_RULES) -> ObservedService | None:
    """The service; None if it does not exist or is being deleted, since Kubernetes removes its objects."""
    service_object = cache.get(labels.KIND, key)
    claims = () if service_object is None else read_claims(service_object)
    if service_object is None or not claims:
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
            if is_owned_by(child, service_object)
        },
        revisions={
            r["metadata"]["name"]: r
            for r in cache.children("ControllerRevision", key)
            if is_owned_by(r, service_object)
        },
        pods=tuple(cache.pods(key)),
        earlier_pods=tuple(pod for pod in cache.children("Pod", key) if cache.is_of_earlier_service(pod)),
        names=name_state(claims[0], related_claims(cache, claims[0]), rules),
        adapter_names=tuple(name_state(claim, related_claims(cache, claim), rules) for claim in claims[1:]),
        gateway_view=gateways,
        fallback=resolve_fallback(cache, service_object),
    )


def resolve_fallback(cache: ObjectCache, service_object: Object) -> tuple[str, str] | None:
    """Long name of the fallback service, and why it cannot be used, or "". None if the spec names no fallback.

    A fallback cannot be used if it does not exist, or if its chain of fallbacks leads back to this service.
    """
    key, path = fallback_key(service_object), [key_of(service_object)]
    if key is None:
        return None
    long_name = "/".join(key)
    if cache.get(labels.KIND, key) is None:
        return long_name, FALLBACK_MISSING
    next_key: Key | None = key
    while next_key is not None and next_key not in path:
        path.append(next_key)
        next_object = cache.get(labels.KIND, next_key)
        next_key = None if next_object is None else fallback_key(next_object)
    if next_key != key_of(service_object):
        return long_name, ""
    cycle = " -> ".join("/".join(one) for one in (*path, key_of(service_object)))
    return long_name, f"falls back to this service (cycle: {cycle})"


def fallback_key(service_object: Object) -> Key | None:
    """The fallback that the spec names; None without one."""
    name = value_at(service_object, "spec", "admission", "fallback", "name")
    return (service_object["metadata"]["namespace"], str(name)) if name else None


def related_claims(cache: ObjectCache, claim: NameClaim) -> list[NameClaim]:
    """The claims that share a name with `claim`, itself included, also of services with an invalid spec."""
    return cache.claims_of(claim.names)


def name_state(claim: NameClaim, claims: list[NameClaim], rules: NameRules) -> NameState:
    """What the service of `claim` may serve under. claims: at least those that share a name with it.

    A restricted namespace serves NAMESPACE/NAME only.
    """
    claim_by_name, rejection = resolve_owners(claims), rules.rejection(claim)
    owned = {name for name, owner in claim_by_name.items() if owner == claim}
    if rejection is NameRejection.RESTRICTED:
        owned &= {claim.qualified_name}
    qualified_holder = claim_by_name.get(claim.qualified_name)
    return NameState(
        claim,
        frozenset(owned),
        rejection,
        find_holder(claim, claims, rules),
        None if qualified_holder == claim else qualified_holder,
    )


def affected_services(cache: ObjectCache, before: Object | None, after: Object | None) -> list[Key]:
    """The services to reconcile after a service was added or deleted, or changed its names or fallback.

    These are the services that claim or still accept one of its names, and the services with a fallback.
    """
    changed = [service_object for service_object in (before, after) if service_object is not None]
    claims, fallbacks = (
        {read_claims(service_object) for service_object in changed},
        {fallback_key(service_object) for service_object in changed},
    )
    same_claim, same_fallback = len(changed) == 2 and len(claims) == 1, len(changed) == 2 and len(fallbacks) == 1
    if same_claim and same_fallback:
        return []
    shared = frozenset[str]().union(*(claim.names for found in claims for claim in found if not same_claim))
    related = {one.service for one in cache.claims_of(shared)}
    return [
        key_of(service_object)
        for service_object in cache.all(labels.KIND)
        if key_of(service_object) in related or fallback_key(service_object) is not None
    ]
