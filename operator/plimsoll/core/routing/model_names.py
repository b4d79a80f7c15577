"""Ownership of model names.

Every service serves `NAMESPACE/NAME`, which no other service can claim. A bare name belongs, across all namespaces, to
the oldest service that claims it, then to the one with the smaller UID. So a new service never takes the traffic of a
running one. A name that its owner dropped is still served for a while, unless another service claims it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class NameClaim:
    """One service's claim of a bare model name.

    `created` is in RFC 3339, UTC, as the API server writes it. `published` are the names in its status, including
    those that it has dropped since.
    """

    namespace: str
    name: str
    model: str
    created: str
    uid: str
    published: tuple[str, ...] = ()

    @property
    def qualified_name(self) -> str:
        return f"{self.namespace}/{self.name}"


def published(inference_service: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the model names in the status of an InferenceService. Ignores invalid entries."""
    names = (inference_service.get("status") or {}).get("modelNames")
    return tuple(name for name in names if isinstance(name, str) and name) if isinstance(names, list) else ()


def resolve_owners(claims: Iterable[NameClaim]) -> dict[str, NameClaim]:
    """Returns every served name, bare and qualified, with the claim that owns it."""
    by_age = sorted(claims, key=lambda claim: (claim.created, claim.uid))
    claim_by_name = {claim.qualified_name: claim for claim in by_age}
    for claim in by_age:
        claim_by_name.setdefault(claim.model, claim)
    for claim in by_age:
        for name in claim.published:
            claim_by_name.setdefault(name, claim)
    return claim_by_name


def ownership_reason(owner: NameClaim, claim: NameClaim) -> str:
    """Returns why `owner` owns the model name of `claim`, as a clause."""
    if owner.qualified_name == claim.model:
        return "it is its NAMESPACE/NAME"
    if owner.created == claim.created:
        return f"both were created at {owner.created} and its UID is smaller"
    return f"it is older (created {owner.created}, this service {claim.created})"


def served_names(claim: NameClaim, claim_by_name: dict[str, NameClaim]) -> tuple[str, ...]:
    """Returns the names that `claim` owns: the bare name first, dropped names last."""
    short_name = (claim.model,) if claim_by_name.get(claim.model) is claim else ()
    dropped = (name for name in claim.published if claim_by_name.get(name) is claim)
    return tuple(dict.fromkeys((*short_name, claim.qualified_name, *dropped)))
