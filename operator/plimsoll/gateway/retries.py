"""Which requests are a client's second try of one that was refused here.

SDKs come back up to four times with the same body, and say so in `x-stainless-retry-count`. Retries are not demand;
but a header alone must not hide demand, so it counts only where the first attempt was seen.
"""

from __future__ import annotations

from collections import OrderedDict

KEPT = 10_000
SECONDS = 300.0  # longer than any SDK waits between two tries


class Refused:
    """Hashes of lately refused bodies."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, float] = OrderedDict()

    def remember(self, body: bytes, now: float) -> None:
        digest = hash(body)
        self._seen[digest] = now
        self._seen.move_to_end(digest)
        if len(self._seen) > KEPT:
            self._seen.popitem(last=False)

    def is_retry(self, header: bytes | None, body: bytes, now: float) -> bool:
        """header: the request's `x-stainless-retry-count`."""
        if header is None or header in (b"", b"0"):
            return False
        return now - self._seen.get(hash(body), float("-inf")) < SECONDS
