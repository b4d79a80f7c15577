"""Authenticated frames between two pickers, over one TCP connection.

Problem: any client of the port could take an engine's slots, read tenants' names, or fill this process's memory.

Idea: both sides send 20 bytes at once: a magic number and a nonce. The shared secret and both nonces make one key for
each direction. Each frame carries a keyed digest (BLAKE2b) of its number and its payload. Without the secret no frame
is valid, and none can be repeated, reordered or changed. Payloads are not encrypted: they hold sizes, hashes and names,
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

    def __init__(self, secret: bytes, *, is_client: bool) -> None:
        """Raises ValueError for a secret that is too short."""
        if len(secret) < MIN_SECRET_BYTES:
            raise ValueError(f"the secret must have at least {MIN_SECRET_BYTES} bytes, not {len(secret)}")
        self._secret = blake2b(secret, digest_size=32).digest()
        self._is_client = is_client
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._buffer = bytearray()
        self._send_key = self._receive_key = b""
        self._sent = self._received = 0
        self.hello = MAGIC + self._nonce

    @property
    def is_open(self) -> bool:
        """Whether the peer's hello has come, so that frames can be sent."""
        return bool(self._send_key)

    def encode(self, payload: bytes) -> bytes:
        """Returns the frame of a payload. Raises FrameError if it is too large."""
        if len(payload) > MAX_FRAME_BYTES:
            raise FrameError(f"a frame of {len(payload)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
        digest = _digest(self._send_key, self._sent, payload)
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
            if not hmac.compare_digest(digest, _digest(self._receive_key, self._received, payload)):
                raise FrameError("a frame has a wrong digest: the peer has another secret")
            self._received += 1
            payloads.append(payload)
            start = end
        del buffer[:start]
        return payloads

    def _make_keys(self, peer_nonce: bytes) -> None:
        nonces = self._nonce + peer_nonce if self._is_client else peer_nonce + self._nonce
        keys = [blake2b(side + nonces, key=self._secret, digest_size=32).digest() for side in (b"client", b"server")]
        self._send_key, self._receive_key = keys if self._is_client else keys[::-1]


def _digest(key: bytes, number: int, payload: bytes) -> bytes:
    return blake2b(_NUMBER.pack(number) + payload, key=key, digest_size=DIGEST_BYTES).digest()
