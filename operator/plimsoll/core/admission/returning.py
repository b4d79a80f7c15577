"""Which requests are a client's further try of one that was turned away at this gateway.

Problem: SDKs come back up to four times with the same body. Retries are not demand, but not every client says that it
is one: LiteLLM begins to count anew after three attempts, and does not look at `x-should-retry`. And what a header says
must not hide demand.

Idea: what came to nothing is remembered by tenant and body. Who says that it has tried before is believed where that
was seen. Who does not say so is taken for the same client within twice the time that it was told, or, where it was
told none, for as long as a client's own backoff takes; and only as often as one client comes. Who comes back with a
ticket of a gate is known there, header or not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

KEPT: Final = 10_000
SECONDS: Final = 300.0  # longer than any SDK waits between two tries
BACKOFF_S: Final = 10.0  # longer than the longest backoff of SDKs, 8 s
REPEATS: Final = 4  # of one client: LiteLLM makes five attempts


@dataclass(slots=True)
class _Seen:
    at_s: float
    until_s: float
    repeats: int = 0


class Refused:
    """Demands that have lately come to nothing."""

    def __init__(self) -> None:
        self._seen: OrderedDict[Hashable, _Seen] = OrderedDict()

    def remember(self, demand: Hashable, now: float, told_s: float | None = None) -> None:
        """It came to nothing now. told_s: it was told to come back after so long; None: not to come back. With 0 it is
        known again only by its own word."""
        until_s = now + (BACKOFF_S if told_s is None else 2 * told_s)
        seen = self._seen.get(demand)
        if seen is None:
            self._seen[demand] = _Seen(now, until_s)
        else:
            seen.at_s, seen.until_s = now, until_s
        self._seen.move_to_end(demand)
        if len(self._seen) > KEPT:
            self._seen.popitem(last=False)

    def forget(self, demand: Hashable) -> None:
        """It goes to an engine: the same words later are another demand, unless that comes to nothing, too."""
        self._seen.pop(demand, None)

    def is_retry(self, claimed: bool, demand: Hashable, now: float) -> bool:
        """Whether this is the same demand once more. claimed: the client says that it has tried before."""
        seen = self._seen.get(demand)
        if seen is None or now - seen.at_s >= SECONDS:
            return False
        if claimed:
            return True
        if now <= seen.until_s and seen.repeats < REPEATS:
            seen.repeats += 1
            return True
        seen.repeats = 0  # another client, whose attempts are another demand
        return False
