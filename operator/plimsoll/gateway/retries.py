"""What a request says of itself by which a client's second try is known: its body's number, and the SDK's header."""

from __future__ import annotations

import secrets

import xxhash

_SEED = secrets.randbits(63)  # so that nobody can make two bodies of one digest


def digest(body: bytes) -> int:
    """A body's number, the same while this process lives."""
    return xxhash.xxh3_64_intdigest(body, _SEED)


def claimed(header: bytes | None) -> bool:
    """Whether the request's `x-stainless-retry-count` says that there was an attempt before."""
    return header not in (None, b"", b"0")
