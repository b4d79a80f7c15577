"""How the gateway recognises a client's retry: by the digest of the body and by the SDK's retry header."""

from __future__ import annotations

import secrets

import xxhash

_SEED = secrets.randbits(63)  # prevents crafted digest collisions


def body_digest(body: bytes) -> int:
    """Returns a 64-bit digest of a body, stable for the life of this process."""
    return xxhash.xxh3_64_intdigest(body, _SEED)


def claims_retry(header: bytes | None) -> bool:
    """Whether the request's `x-stainless-retry-count` claims an earlier attempt."""
    return header not in (None, b"", b"0")
