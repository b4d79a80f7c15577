"""Which requests are a client's second try of one that was refused here.

SDKs come back up to four times with the same body, and say so in `x-stainless-retry-count`. Retries are not demand;
but a header alone must not hide demand, so it counts only where the first attempt was seen. Who comes back with a
ticket of a gate is known there, header or not.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict

import xxhash

KEPT = 10_000
SECONDS = 300.0  # longer than any SDK waits between two tries

_SEED = secrets.randbits(63)  # so that nobody can make two bodies of one digest


def digest(body: bytes) -> int:
    """A body's number, the same while this process lives."""
    return xxhash.xxh3_64_intdigest(body, _SEED)


class Refused:
    """Digests of lately refused bodies."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, float] = OrderedDict()

    def remember(self, digest: int, now: float) -> None:
        self._seen[digest] = now
        self._seen.move_to_end(digest)
        if len(self._seen) > KEPT:
            self._seen.popitem(last=False)

    def is_retry(self, header: bytes | None, digest: int, now: float) -> bool:
        """header: the request's `x-stainless-retry-count`."""
        if header is None or header in (b"", b"0"):
            return False
        return now - self._seen.get(digest, float("-inf")) < SECONDS
