"""Counts by a name that a service's spec chooses, such as a class, in bounded number.

Problem: a service has few classes at a time, but each edit can name others, and counters live as long as the gateway.

Idea: the names that were counted last are kept, twice as many as a service can have. A name that comes back after all
others starts at 0.
"""

from __future__ import annotations

from typing import Final, TypeVar

from plimsoll.api.v1alpha1.admission import MAX_CLASSES

MAX_NAMES: Final = 2 * MAX_CLASSES

NameT = TypeVar("NameT")


class RecentCounter(dict[NameT, int]):
    """Counts by name; the one that was counted last is the last."""

    def add(self, name: NameT, count: int = 1) -> None:
        """Add to the count of a name."""
        self[name] = self.pop(name, 0) + count
        if len(self) > MAX_NAMES:
            del self[next(iter(self))]
