"""Who owns a model name.

Clients of one gateway say a model's name, and services of all namespaces may claim the same one. The oldest service
owns it, then the one with the smaller uid: an order that nobody can change by editing an object. The long name
NAMESPACE/NAME belongs to its service always.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Claim:
    """One service's claim to a bare model name; the least claim of a name owns it. created: RFC 3339 time."""

    created: str
    uid: str
    service: tuple[str, str]  # namespace, name
    model_name: str

    @property
    def long_name(self) -> str:
        return "/".join(self.service)


def owners(claims: Iterable[Claim]) -> dict[str, Claim]:
    """The owner of each name that clients may say, long names included."""
    everyone = sorted(claims)
    owned = {claim.long_name: claim for claim in everyone}
    for claim in everyone:
        owned.setdefault(claim.model_name, claim)
    return owned
