"""Who answers to which model name.

Every service answers to `NAMESPACE/NAME`; nobody else can take that. A bare name, chosen by the user, belongs over
all namespaces to the oldest service that claims it (then to the smaller uid), so a newcomer never takes a running
one's traffic. A name that its owner has dropped goes on to be answered for a while, as long as no service claims it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Claim:
    """One service's wish for a bare model name. created: RFC 3339 in UTC, as the API server writes it.

    published: the names that its status lists, those that it has dropped since among them.
    """

    namespace: str
    name: str
    model: str
    created: str
    uid: str
    published: tuple[str, ...] = ()

    @property
    def long_name(self) -> str:
        return f"{self.namespace}/{self.name}"


def published(inference_service: Mapping[str, Any]) -> tuple[str, ...]:
    """The model names in the status of an InferenceService; what is no name is passed over."""
    names = (inference_service.get("status") or {}).get("modelNames")
    return tuple(name for name in names if isinstance(name, str) and name) if isinstance(names, list) else ()


def owners(claims: Iterable[Claim]) -> dict[str, Claim]:
    """Every name that is answered to, bare and long, with the claim that owns it."""
    by_age = sorted(claims, key=lambda claim: (claim.created, claim.uid))
    owned = {claim.long_name: claim for claim in by_age}
    for claim in by_age:
        owned.setdefault(claim.model, claim)
    for claim in by_age:
        for name in claim.published:
            owned.setdefault(name, claim)
    return owned


def names_of(claim: Claim, owned: dict[str, Claim]) -> tuple[str, ...]:
    """The names that `claim` answers to: the bare one first, if it is its own, and those that it has dropped last."""
    bare = (claim.model,) if owned.get(claim.model) is claim else ()
    dropped = (name for name in claim.published if owned.get(name) is claim)
    return tuple(dict.fromkeys((*bare, claim.long_name, *dropped)))
