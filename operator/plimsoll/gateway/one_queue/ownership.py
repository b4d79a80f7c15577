"""Which gateway owns a service or an API key: rendezvous hashing over the ready gateway pods.

Problem: every gateway must name the same owner without asking anyone, and a pod that comes or goes must move few keys.

Idea: each pod gets a score for each key, from a hash of both names. The highest score owns the key. Services that are
linked by a fallback are one key, because one request may use the capacity of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Final

RULE: Final = "rendezvous-blake2b/1"  # names how owners are found; gateways with another rule have another view
MAX_REMEMBERED: Final = 20_000  # owners of services and keys


def rendezvous_owner(key: str, names: Iterable[str]) -> str:
    """Returns the name that owns the key. Raises ValueError without names."""
    return max(names, key=lambda name: (_score(key, name), name))


def _score(key: str, name: str) -> bytes:
    return blake2b(f"{key}\0{name}".encode(), digest_size=8).digest()


def fallback_groups(fallbacks: Mapping[str, str]) -> dict[str, str]:
    """Returns the group of each service that has a fallback or is one: the first of its names in order.

    `fallbacks` maps the key of a service to that of its fallback.
    """
    parents: dict[str, str] = {}

    def root(key: str) -> str:
        while (parent := parents.setdefault(key, key)) != key:
            key = parent
        return key

    for service, fallback in fallbacks.items():
        first, second = sorted((root(service), root(fallback)))
        parents[second] = first
    return {key: root(key) for key in parents}


class Ownership:
    """The owners by the ready gateway pods. `own_name` is this pod. Until pods are known it owns everything."""

    def __init__(self, own_name: str) -> None:
        self.own_name = own_name
        self._candidates: frozenset[str] = frozenset()
        self._groups: dict[str, str] = {}
        self._owners: dict[str, str] = {}
        self._next_owners: dict[str, str] = {}
        self._view = b""

    @property
    def candidates(self) -> frozenset[str]:
        """The pods that may own."""
        return self._candidates

    @property
    def view(self) -> bytes:
        """A digest of all that owners follow from: gateways with the same view name the same owners."""
        if not self._view:
            known = [RULE, *sorted(self._candidates), "", *(f"{k} {v}" for k, v in sorted(self._groups.items()))]
            self._view = blake2b("\0".join(known).encode(), digest_size=16).digest()
        return self._view

    @property
    def gateways(self) -> int:
        """The number of gateways that take requests, this one included."""
        return len(self._candidates | {self.own_name})

    def set_candidates(self, names: Iterable[str]) -> bool:
        """Set the pods that may own. Returns whether they changed."""
        candidates = frozenset(names)
        if candidates == self._candidates:
            return False
        self._candidates = candidates
        self._owners.clear()
        self._next_owners.clear()
        self._view = b""
        return True

    def set_fallbacks(self, fallbacks: Mapping[str, str]) -> bool:
        """Set the fallback of each service that has one. Returns whether the groups changed."""
        groups = fallback_groups(fallbacks)
        if groups == self._groups:
            return False
        self._groups = groups
        self._owners.clear()
        self._next_owners.clear()
        self._view = b""
        return True

    def owner_of(self, service: str) -> str:
        """Returns the name of the pod that owns a service, by its key."""
        return self._owner(f"service/{self._groups.get(service, service)}")

    def next_owner_of(self, service: str) -> str:
        """Returns the pod that owns a service once its owner is gone, "" without one."""
        return self._next_owner(f"service/{self._groups.get(service, service)}")

    def next_owner_of_key(self, name: str) -> str:
        """Returns the pod that counts the requests of an API key once its owner is gone, "" without one."""
        return self._next_owner(f"key/{name}")

    def owner_of_key(self, name: str) -> str:
        """Returns the name of the pod that counts the requests of an API key, by the key's name."""
        return self._owner(f"key/{name}")

    def _next_owner(self, key: str) -> str:
        if (owner := self._next_owners.get(key)) is None:
            others = self._candidates - {self._owner(key)}
            if len(self._next_owners) >= MAX_REMEMBERED:
                self._next_owners.clear()
            owner = self._next_owners[key] = rendezvous_owner(key, others) if others else ""
        return owner

    def _owner(self, key: str) -> str:
        owner = self._owners.get(key)
        if owner is None:
            if len(self._owners) >= MAX_REMEMBERED:
                self._owners.clear()
            owner = self._owners[key] = rendezvous_owner(key, self._candidates or (self.own_name,))
        return owner
