"""Authenticated frames between two pickers, over one TCP connection.

Problem: any client of the port could take an engine's slots, read tenants' names, or fill this process's memory.

Idea: both sides send 20 bytes at once: a magic number and a nonce. The shared secret and both nonces make one key for
each direction. Each frame carries a keyed digest (BLAKE2b) of its number and its payload. Without the secret no frame
is valid, and none can be repeated, reordered or changed. The side that is connected to accepts several secrets, and the
first frame shows which one the peer uses. Payloads are not encrypted: they hold sizes, hashes and names,
never a prompt. A frame is at most `MAX_FRAME_BYTES`, and `MAX_FIRST_BYTES` until one has proved the secret.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from hashlib import blake2b
from typing import Final

MAGIC: Final = b"PLQ1"
NONCE_BYTES: Final = 16
HELLO_BYTES: Final = len(MAGIC) + NONCE_BYTES
DIGEST_BYTES: Final = 16
MAX_FRAME_BYTES: Final = 1 << 20
MAX_FIRST_BYTES: Final = 2048
MIN_SECRET_BYTES: Final = 16

_LENGTH: Final = struct.Struct("!I")
_NUMBER: Final = struct.Struct("!Q")
_HEAD_BYTES: Final = _LENGTH.size + DIGEST_BYTES


class FrameError(Exception):
    """The peer does not know the secret, or sent something else than frames."""


class FrameSession:
    """Both directions of one connection. Send `hello` first."""

    def __init__(self, *accepted: bytes, is_client: bool) -> None:
        """`accepted`: those that the peer may use. A client has one. Raises ValueError for one that is too short."""
        for secret in accepted:
            if len(secret) < MIN_SECRET_BYTES:
                raise ValueError(f"the secret must have at least {MIN_SECRET_BYTES} bytes, not {len(secret)}")
        self._secrets = accepted
        self._keys: list[tuple[bytes, bytes]] = []  # to send and to receive, by secret
        self._is_client = is_client
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._buffer = bytearray()
        self.proved_secret: bytes | None = None  # the one that the peer has shown to know
        self._sent = self._received = 0
        self.hello = MAGIC + self._nonce

    @property
    def is_open(self) -> bool:
        """Whether the peer's hello has come, so that frames can be sent."""
        return bool(self._keys)

    def encode(self, payload: bytes) -> bytes:
        """Returns the frame of a payload. Raises FrameError if it is too large."""
        if len(payload) > MAX_FRAME_BYTES:
            raise FrameError(f"a frame of {len(payload)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
        digest = _digest(self._keys[0][0], self._sent, payload)
        self._sent += 1
        return _LENGTH.pack(len(payload)) + digest + payload

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the payloads of the frames that are complete. Raises FrameError."""
        buffer = self._buffer
        buffer += data
        if not self.is_open:
            if not MAGIC.startswith(bytes(buffer[: len(MAGIC)])):
                raise FrameError("the peer speaks another protocol")
            if len(buffer) < HELLO_BYTES:
                return []
            self._make_keys(bytes(buffer[len(MAGIC) : HELLO_BYTES]))
            del buffer[:HELLO_BYTES]
        payloads, start = [], 0
        while len(buffer) - start >= _HEAD_BYTES:
            (length,) = _LENGTH.unpack_from(buffer, start)
            limit = MAX_FRAME_BYTES if self._received else MAX_FIRST_BYTES
            if length > limit:
                raise FrameError(f"a frame of {length} bytes exceeds the limit of {limit}")
            end = start + _HEAD_BYTES + length
            if len(buffer) < end:
                break
            digest, payload = (
                buffer[start + _LENGTH.size : start + _HEAD_BYTES],
                bytes(buffer[start + _HEAD_BYTES : end]),
            )
            self._verify(bytes(digest), payload)
            self._received += 1
            payloads.append(payload)
            start = end
        del buffer[:start]
        return payloads

    def _verify(self, digest: bytes, payload: bytes) -> None:
        """Check a frame. The first one decides which of the secrets is the peer's."""
        for secret, keys in zip(self._secrets, self._keys, strict=True):
            if hmac.compare_digest(digest, _digest(keys[1], self._received, payload)):
                self._secrets, self._keys, self.proved_secret = (secret,), [keys], secret
                return
        raise FrameError("a frame has a wrong digest: the peer has another secret")

    def _make_keys(self, peer_nonce: bytes) -> None:
        nonces = self._nonce + peer_nonce if self._is_client else peer_nonce + self._nonce
        for secret in self._secrets:
            key = blake2b(secret, digest_size=32).digest()
            keys = [blake2b(side + nonces, key=key, digest_size=32).digest() for side in (b"client", b"server")]
            self._keys.append((keys[0], keys[1]) if self._is_client else (keys[1], keys[0]))


def _digest(key: bytes, number: int, payload: bytes) -> bytes:
    return blake2b(_NUMBER.pack(number) + payload, key=key, digest_size=DIGEST_BYTES).digest()
