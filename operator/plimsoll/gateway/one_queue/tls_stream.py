"""TLS of one connection between two pickers, without I/O: bytes of the network in, bytes of frames out, and back.

Problem: connections that have proved nothing have few places and little time (`owner_server`). The event loop's own TLS
hides a connection until its handshake is over, so that nothing could bound these.

Idea: the standard library's TLS in memory. The connection owns its transport from the start, and cuts it as before.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Final, NamedTuple

from plimsoll.adapters.internal_tls import TlsIdentity, has_name, tls_reason
from plimsoll.gateway.one_queue.frames import FrameError

_READ_BYTES: Final = 1 << 16


class PeerTls(NamedTuple):
    """The identity of this moment, None without one, and the name in the certificates of all gateways."""

    identity: Callable[[], TlsIdentity | None]
    name: str


class TlsError(FrameError):
    """The peer has no certificate of a gateway, or does not accept ours."""


class TlsStream:
    """Both directions of one connection. Send what `outgoing` returns after each call."""

    def __init__(self, tls: PeerTls, *, is_client: bool) -> None:
        """Raises TlsError without an identity."""
        identity = tls.identity()
        if identity is None:
            raise TlsError("this gateway has no certificate: see internalTls.secretName")
        self._name = tls.name
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = (identity.client if is_client else identity.server).wrap_bio(
            self._incoming, self._outgoing, server_side=not is_client, server_hostname=tls.name if is_client else None
        )
        self._is_client = is_client
        self.is_open = False  # whether the handshake is over and the peer has the name
        self._shake_hands()

    def feed(self, data: bytes) -> bytes:
        """Returns what the peer has sent. Raises TlsError."""
        self._incoming.write(data)
        if not self.is_open:
            self._shake_hands()
        plain = bytearray()
        try:
            while self.is_open and (part := self._tls.read(_READ_BYTES)):
                plain += part
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise TlsError(f"TLS failed: {tls_reason(error)}") from error
        return bytes(plain)

    def write(self, data: bytes) -> None:
        """Encrypt data for the peer."""
        self._tls.write(data)

    def outgoing(self) -> bytes:
        """Returns the bytes for the network."""
        return self._outgoing.read()

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLError as error:
            raise TlsError(f"TLS handshake failed: {tls_reason(error)}") from error
        if not self._is_client and not has_name(self._tls.getpeercert(), self._name):
            raise TlsError(f"it has no certificate with the name {self._name}")
        self.is_open = True
