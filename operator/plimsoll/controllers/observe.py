"""Observe: one service as the caches know it. The only reads of a round; judging and planning never read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plimsoll.adapters.normalize import value_at
from plimsoll.api import labels
from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.controllers.gateways import View
from plimsoll.controllers.store import Key, Store, key_of
from plimsoll.core.errors import InvalidSpec
from plimsoll.core.picking.names import Claim, owners, published

Object = dict[str, Any]

CHILDREN = ("Deployment", "Service", "ServiceAccount", "PodDisruptionBudget", "NetworkPolicy")


@dataclass(frozen=True)
class Observed:
    """A service and what belongs to it. service: None if the spec cannot be acted on; then `problems` says why."""

    raw: Object
    service: InferenceService | None
    problems: tuple[str, ...]
    children: dict[tuple[str, str], Object]  # kind and name -> object
    revisions: dict[str, Object]  # ControllerRevisions by name
    pods: tuple[Object, ...]
    owned_by: dict[str, str]  # model name -> long name of the service that owns it
    gateways: View
    fallback: tuple[str, str] | None = None  # the long name that it falls back to, and why that cannot be, or ""


def observe(store: Store, gateways: View, key: Key) -> Observed | None:
    """None if there is no such service, or if it is being deleted: Kubernetes removes what it owns."""
    raw = store.get(labels.KIND, key)
    if raw is None or raw["metadata"].get("deletionTimestamp"):
        return None
    service = store.typed(raw)
    return Observed(
        raw=raw,
        service=None if isinstance(service, InvalidSpec) else service,
        problems=service.problems if isinstance(service, InvalidSpec) else (),
        children={
            (kind, child["metadata"]["name"]): child
            for kind in CHILDREN
            for child in store.children(kind, key)
            if _owned(child, raw)
        },
        revisions={r["metadata"]["name"]: r for r in store.children("ControllerRevision", key) if _owned(r, raw)},
        pods=tuple(store.children("Pod", key)),
        owned_by={name: claim.long_name for name, claim in owners(claims(store)).items()},
        gateways=gateways,
        fallback=fallback(store, raw),
    )


def fallback(store: Store, raw: Object) -> tuple[str, str] | None:
    """The service that takes what this one cannot, by its long name, and why it cannot: it is not there, or the way
    from fallback to fallback leads back here; "" where it can. None if the service names none."""
    key, way = _falls_back_to(raw), [key_of(raw)]
    if key is None:
        return None
    named = "/".join(key)
    if store.get(labels.KIND, key) is None:
        return named, "is not there"
    following: Key | None = key
    while following is not None and following not in way:
        way.append(following)
        there = store.get(labels.KIND, following)
        following = None if there is None else _falls_back_to(there)
    if following != key_of(raw):
        return named, ""
    ring = " -> ".join("/".join(one) for one in (*way, key_of(raw)))
    return named, f"falls back to this service in turn ({ring})"


def _falls_back_to(raw: Object) -> Key | None:
    name = value_at(raw, "spec", "admission", "fallback", "name")
    return (raw["metadata"]["namespace"], str(name)) if name else None


def claims(store: Store) -> list[Claim]:
    """Every service's claim to a model name, whatever else is wrong with it."""
    found = []
    for raw in store.all(labels.KIND):
        meta = raw["metadata"]
        namespace, name = key_of(raw)
        created, uid = meta.get("creationTimestamp", ""), meta["uid"]
        found.append(Claim(namespace, name, claimed(raw), created, uid, published(raw)))
    return found


def claimed(raw: Object) -> str:
    """The bare model name that a service claims."""
    return str(value_at(raw, "spec", "model", "name") or raw["metadata"]["name"])


def _names(raw: Object) -> frozenset[str]:
    """The names that a service claims, or has claimed and still answers to."""
    return frozenset((claimed(raw), *published(raw)))


def rivals(store: Store, before: Object | None, after: Object | None) -> list[Key]:
    """The services for which something changes when a service comes, goes, claims another name or another fallback:
    those that claim or still answer to the same name, and those that fall back to anybody."""
    changed = [raw for raw in (before, after) if raw is not None]
    names, ways = {_names(raw) for raw in changed}, {_falls_back_to(raw) for raw in changed}
    same_name, same_way = len(changed) == 2 and len(names) == 1, len(changed) == 2 and len(ways) == 1
    shared = frozenset[str]().union(*names)
    if same_name and same_way:
        return []
    return [
        key_of(raw)
        for raw in store.all(labels.KIND)
        if (not same_name and _names(raw) & shared) or _falls_back_to(raw) is not None
    ]


def _owned(child: Object, parent: Object) -> bool:
    uid = parent["metadata"]["uid"]
    return any(owner.get("uid") == uid for owner in child["metadata"].get("ownerReferences", []))
