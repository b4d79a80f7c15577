"""One TCP connection between two pickers, of either side: TLS if it is on, hello, frames, bounds and silence.

A connection ends when the peer sends no hello within `HELLO_SECONDS`, sends nothing for `SILENCE_SECONDS`, breaks a
bound, or reads so slowly that `MAX_UNSENT_BYTES` wait for it. What it carried is then decided elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar, cast

import msgspec

from plimsoll.gateway.one_queue import messages
from plimsoll.gateway.one_queue.frames import FrameError, FrameSession
from plimsoll.gateway.one_queue.peer_secret import PeerSecret
from plimsoll.gateway.one_queue.tls_stream import PeerTls, TlsError, TlsStream

log = logging.getLogger(__name__)

HELLO_SECONDS: Final = 2.0
PING_SECONDS: Final = 0.5
SILENCE_SECONDS: Final = 2.0
MAX_UNSENT_BYTES: Final = 32 << 20  # a new owner gets all running requests at once: 6,000 requests with long prompts

Received = TypeVar("Received")


class PeerConnection(asyncio.Protocol, Generic[Received]):
    """One connection. `on_open` is called once frames can be sent, `on_close` in any case."""

    def __init__(
        self,
        offered: tuple[bytes, ...],
        peer_secret: PeerSecret,
        decode: Callable[[bytes], Received],
        on_open: Callable[[PeerConnection[Received]], None],
        on_message: Callable[[PeerConnection[Received], Received], None],
        on_close: Callable[[PeerConnection[Received]], None],
        *,
        ping: Callable[[], messages.Ping] | None,
        tls: PeerTls | None = None,
    ) -> None:
        """`ping`: makes the pings of the side that connects; None for the other side. `tls`: None for plain TCP.

        `offered`: the secrets that this side uses. The connection ends when the proved one is no longer accepted."""
        self._session = FrameSession(*offered, is_client=ping is not None)
        self._peer_secret = peer_secret
        self._decode = decode
        self._on_open = on_open
        self._on_message = on_message
        self._on_close = on_close
        self._ping = ping
        self._tls = tls
        self._stream: TlsStream | None = None
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._made_s = self._last_frame_s = 0.0
        self.peer = ""  # the name of the other gateway, "" before it is known
        self.failure = "it did not prove the secret in time"  # of a peer that is not known
        self.has_tls_failure = False  # then `failure` is its reason
        self.address = "unknown address"  # of the other side
        self.closed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether frames can be sent."""
        return self._session.is_open and self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        name = self._transport.get_extra_info("peername")
        self.address = str(name[0]) if name else self.address
        loop = asyncio.get_running_loop()
        self._made_s = self._last_frame_s = loop.time()
        self._timer = loop.call_later(PING_SECONDS, self._check)
        if self._tls is None:
            self._transport.write(self._session.hello)
            return
        try:
            self._stream = TlsStream(self._tls, is_client=self._ping is not None)
        except TlsError as error:
            self._end_tls(error)
            return
        self._transport.write(self._stream.outgoing())

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._transport = None
        self.closed.set()
        self._on_close(self)

    def data_received(self, data: bytes) -> None:
        was_open = self.is_open
        try:
            payloads = self._session.feed(data if self._stream is None else self._decrypt(self._stream, data))
            if not was_open and self.is_open:
                self._on_open(self)
            for payload in payloads:
                if not self.is_open:
                    return
                self._last_frame_s = asyncio.get_running_loop().time()
                self._on_message(self, self._decode(payload))
        except TlsError as error:
            self._end_tls(error)
        except (FrameError, msgspec.DecodeError) as error:
            self.failure = str(error)
            if self.peer:
                log.warning("closing the connection to the gateway %s at %s: %s", self.peer, self.address, error)
            self.close()
        except Exception:  # one peer's failure must not affect the others
            log.exception("closing the connection to the gateway %s at %s", self.peer or "?", self.address)
            self.close()

    def send(self, message: messages.Message) -> bool:
        """Send a message. Returns False if the connection is closed, or closes it if the peer reads too slowly."""
        transport = self._transport
        if transport is None or not self.is_open:
            return False
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            log.warning("closing the connection to the gateway %s: it reads too slowly", self.peer or self.address)
            self.close()
            return False
        self._write(self._session.encode(messages.encode(message)))
        return True

    def _write(self, data: bytes) -> None:
        if self._stream is not None:
            self._stream.write(data)
            data = self._stream.outgoing()
        if self._transport is not None:
            self._transport.write(data)

    def _decrypt(self, stream: TlsStream, data: bytes) -> bytes:
        """Returns the plain bytes, and says hello once TLS is there. Raises TlsError."""
        was_open = stream.is_open
        try:
            plain = stream.feed(data)
        finally:
            if self._transport is not None and (outgoing := stream.outgoing()):
                self._transport.write(outgoing)  # the peer hears why the handshake failed
        if stream.is_open and not was_open:
            self._write(self._session.hello)
        return plain

    def _end_tls(self, error: TlsError) -> None:
        """End the connection after what is written. The sides that open connections log why."""
        self.failure, self.has_tls_failure = str(error), True
        if self._transport is not None:
            self._transport.close()

    def close(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        is_known = self.is_open and bool(self.peer)
        if not is_known and loop.time() - self._made_s > HELLO_SECONDS:
            self.close()
            return
        proved = self._session.proved_secret
        if proved is not None and proved not in self._peer_secret.accepted:
            log.info("closing the connection to the gateway %s: its secret is no longer valid", self.peer)
            self.close()
            return
        if loop.time() - self._last_frame_s > SILENCE_SECONDS:
            log.warning("closing the connection to the gateway %s: it is silent", self.peer or self.address)
            self.close()
            return
        if self._ping is not None:
            self.send(self._ping())
        self._timer = loop.call_later(PING_SECONDS, self._check)


Connection = PeerConnection[Any]
