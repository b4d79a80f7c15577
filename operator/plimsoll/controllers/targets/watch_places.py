"""Which targets have a place among those whose pods the gateways watch, when there are more than places.

Problem: by age alone, one namespace can take all places for ever.

Idea: max-min fairness. A namespace that asks for fewer places than an equal share has them all; the others share the
rest equally. Within its namespace a target that has a place keeps it, then the oldest one comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class WatchCandidate(NamedTuple):
    """A target that asks for a place, and whether it has one."""

    namespace: str
    name: str
    has_place: bool


def watched_targets(candidates: Sequence[WatchCandidate], places: int) -> set[WatchCandidate]:
    """Returns those that get a place. `candidates` are in the order of their age."""
    by_namespace: dict[str, list[WatchCandidate]] = {}
    for candidate in sorted(candidates, key=lambda one: not one.has_place):
        by_namespace.setdefault(candidate.namespace, []).append(candidate)
    shares = dict.fromkeys(by_namespace, 0)
    while places and (open_to := [name for name, found in by_namespace.items() if shares[name] < len(found)]):
        if (each := places // len(open_to)) == 0:  # the last ones go to namespaces that would lose one
            open_to.sort(key=lambda name: not by_namespace[name][shares[name]].has_place)
            open_to, each = open_to[:places], 1
        for name in open_to:
            added = min(each, len(by_namespace[name]) - shares[name])
            shares[name] += added
            places -= added
    return {candidate for name, found in by_namespace.items() for candidate in found[: shares[name]]}
