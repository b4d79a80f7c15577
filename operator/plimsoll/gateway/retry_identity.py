"""How the gateway recognises a client's retry: by the digest of the body and by the SDK's retry header."""

from __future__ import annotations

import secrets
from hashlib import blake2b

import xxhash

from plimsoll.gateway.request_body import Body

OWN_SEED = secrets.randbits(63)  # prevents crafted digest collisions


def body_digest(body: Body, seed: int = OWN_SEED) -> int:
    """Returns a 64-bit digest of a body. With the own seed it is stable for the life of this process."""
    if isinstance(body, bytes):
        return xxhash.xxh3_64_intdigest(body, seed)
    digest = xxhash.xxh3_64(seed=seed)
    for piece in body:
        digest.update(piece)
    return digest.intdigest()


def shared_seed(secret: bytes) -> int:
    """Returns the seed of all gateways that know a secret, so that each recognises the retry of another's request."""
    return int.from_bytes(blake2b(secret, person=b"body-digest", digest_size=8).digest()) >> 1


def claims_retry(header: bytes | None) -> bool:
    """Whether the request's `x-stainless-retry-count` claims an earlier attempt."""
    return header not in (None, b"", b"0")
