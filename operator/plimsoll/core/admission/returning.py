"""Which requests are a client's second try of one that was refused at this gateway.

SDKs come back up to four times with the same body, and say so in a header. Retries are not demand; but a header alone
must not hide demand, so it counts only where the first attempt was seen. Who comes back with a ticket of a gate is
known there, header or not.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

KEPT: Final = 10_000
SECONDS: Final = 300.0  # longer than any SDK waits between two tries


class Refused:
    """Digests of lately refused bodies."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, float] = OrderedDict()

    def remember(self, digest: int, now: float) -> None:
        self._seen[digest] = now
        self._seen.move_to_end(digest)
        if len(self._seen) > KEPT:
            self._seen.popitem(last=False)

    def is_retry(self, claimed: bool, digest: int, now: float) -> bool:
        """claimed: the client says that it has tried before."""
        return claimed and now - self._seen.get(digest, float("-inf")) < SECONDS
