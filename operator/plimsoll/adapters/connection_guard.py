"""Bounds the connections of a server that answers requests without a body, such as probes and metrics.

Problem: a peer that connects and sends nothing, or a byte now and then, keeps a connection for as long as it likes. A
server that waits for the end of its request ends up with none left for Prometheus and the kubelet.

Idea: a request's head must be complete some seconds after its first byte, the first one some seconds after the
connection is open. The number of connections is bounded. A connection that breaks a rule is cut, and counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import Final, cast

MAX_CONNECTIONS: Final = 512
HEAD_SECONDS: Final = 5.0
HEAD_END: Final = b"\r\n\r\n"


class CutReason(StrEnum):
    """Why a connection was cut."""

    SLOW_REQUEST = "slow_request"
    TOO_MANY = "too_many"


class ConnectionGuard:
    """Makes the protocols of one or more listeners, which share the bound."""

    def __init__(
        self,
        make: Callable[[], asyncio.BaseProtocol],
        on_cut: Callable[[CutReason], None],
        max_connections: int = MAX_CONNECTIONS,
        head_seconds: float = HEAD_SECONDS,
    ) -> None:
        """make: the protocol of one connection. on_cut: called with each connection that is cut."""
        self._make = make
        self._max_connections = max_connections
        self.head_seconds = head_seconds
        self.on_cut = on_cut
        self.open = 0

    def __call__(self) -> asyncio.Protocol:
        """Returns the protocol of a new connection."""
        return _Guarded(self, self._make)

    def admit(self) -> asyncio.Protocol | None:
        """Returns the protocol of a new connection, which counts from now on until it is lost. None: it is cut."""
        guarded = _Guarded(self, self._make)
        return guarded if guarded.take_place() else None

    @property
    def is_full(self) -> bool:
        """Whether a further connection is refused."""
        return self.open >= self._max_connections


class _Guarded(asyncio.Protocol):
    """Passes one connection on to the server's own protocol."""

    def __init__(self, guard: ConnectionGuard, make: Callable[[], asyncio.BaseProtocol]) -> None:
        self._guard, self._make = guard, make
        self._inner: asyncio.Protocol | None = None  # None before the connection is made, and if it is refused
        self._has_place = False
        self._timer: asyncio.TimerHandle | None = None
        self._end = b""  # the last bytes of a head that is not complete
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not self._has_place and not self.take_place():
            self._transport.abort()
            return
        self._inner = cast(asyncio.Protocol, self._make())
        self._start_timer()
        self._inner.connection_made(transport)

    def take_place(self) -> bool:
        """Count the connection. Returns False if there is no place for it."""
        if self._guard.is_full:
            self._guard.on_cut(CutReason.TOO_MANY)
            return False
        self._guard.open += 1
        self._has_place = True
        return True

    def data_received(self, data: bytes) -> None:
        if self._inner is None:
            return
        self._end = b"" if (self._end + data).endswith(HEAD_END) else (self._end + data)[1 - len(HEAD_END) :]
        if not self._end:
            self._stop_timer()
        elif self._timer is None:
            self._start_timer()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return None if self._inner is None else self._inner.eof_received()

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._has_place:
            self._guard.open -= 1
            self._has_place = False
        if self._inner is not None:
            self._inner.connection_lost(exc)

    def _start_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._guard.head_seconds, self._cut, CutReason.SLOW_REQUEST)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cut(self, reason: CutReason) -> None:
        self._guard.on_cut(reason)
        self._transport.abort()
