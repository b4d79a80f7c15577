"""One TCP connection between two pickers, of either side: hello, frames, bounds and silence.

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
        secret: bytes,
        decode: Callable[[bytes], Received],
        on_open: Callable[[PeerConnection[Received]], None],
        on_message: Callable[[PeerConnection[Received], Received], None],
        on_close: Callable[[PeerConnection[Received]], None],
        *,
        is_client: bool,
    ) -> None:
        self._session = FrameSession(secret, is_client=is_client)
        self._decode = decode
        self._on_open = on_open
        self._on_message = on_message
        self._on_close = on_close
        self._is_client = is_client
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._made_s = self._last_frame_s = 0.0
        self.peer = ""  # the name of the other gateway, "" before it is known
        self.closed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether frames can be sent."""
        return self._session.is_open and self._transport is not None and not self._transport.is_closing()

    @property
    def address(self) -> str:
        """The address of the other side, for a log."""
        name = None if self._transport is None else self._transport.get_extra_info("peername")
        return "unknown address" if not name else str(name[0])

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        loop = asyncio.get_running_loop()
        self._last_frame_s = loop.time()
        self._transport.write(self._session.hello)
        self._made_s = self._last_frame_s
        self._timer = loop.call_later(PING_SECONDS, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._transport = None
        self.closed.set()
        self._on_close(self)

    def data_received(self, data: bytes) -> None:
        was_open = self.is_open
        try:
            payloads = self._session.feed(data)
            if not was_open and self.is_open:
                self._on_open(self)
            for payload in payloads:
                if not self.is_open:
                    return
                self._last_frame_s = asyncio.get_running_loop().time()
                self._on_message(self, self._decode(payload))
        except (FrameError, msgspec.DecodeError) as error:
            log.warning("closing the connection to the gateway %s at %s: %s", self.peer or "?", self.address, error)
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
        transport.write(self._session.encode(messages.encode(message)))
        return True

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
        if loop.time() - self._last_frame_s > SILENCE_SECONDS:
            log.warning("closing the connection to the gateway %s: it is silent", self.peer or self.address)
            self.close()
            return
        if self._is_client:
            self.send(messages.Ping())
        self._timer = loop.call_later(PING_SECONDS, self._check)


Connection = PeerConnection[Any]
