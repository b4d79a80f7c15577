"""Who answers to which model name.

Every service answers to `NAMESPACE/NAME`; nobody else can take that. A bare name, chosen by the user, belongs over
all namespaces to the oldest service that claims it (then to the smaller uid), so a newcomer never takes a running
one's traffic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """One service's wish for a bare model name. created: RFC 3339 in UTC, as the API server writes it."""

    namespace: str
    name: str
    model: str
    created: str
    uid: str

    @property
    def long_name(self) -> str:
        return f"{self.namespace}/{self.name}"


def owners(claims: Iterable[Claim]) -> dict[str, Claim]:
    """Every name that is answered to, bare and long, with the claim that owns it."""
    by_age = sorted(claims, key=lambda claim: (claim.created, claim.uid))
    owned = {claim.long_name: claim for claim in by_age}
    for claim in by_age:
        owned.setdefault(claim.model, claim)
    return owned


def names_of(claim: Claim, owned: dict[str, Claim]) -> tuple[str, ...]:
    """The names that `claim` answers to: the bare one first, if it is its own."""
    bare = (claim.model,) if owned.get(claim.model) is claim else ()
    return tuple(dict.fromkeys((*bare, claim.long_name)))
