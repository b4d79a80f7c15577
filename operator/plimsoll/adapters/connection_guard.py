"""Bounds the connections of a server of small requests, such as probes, metrics and reviews.

Problem: a peer that connects and sends nothing, or a byte now and then, keeps a connection for as long as it likes. A
server that waits for the end of its request ends up with none left for Prometheus and the kubelet.

Idea: a request's head must be complete some seconds after its first byte, the first one some seconds after the
connection is open. The number of connections is bounded: a further one takes the place of that which has sent nothing
for the longest time, so a probe is answered even if a peer keeps many connections. A peer that does not read its
response has some seconds too, and the number of such peers is bounded. A connection that is cut is counted.
Of requests with bodies, only the first head is timed: the server bounds the time of bodies and between two requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import Final, cast

MAX_CONNECTIONS: Final = 512
HEAD_SECONDS: Final = 5.0
MAX_UNREAD: Final = 8  # responses that wait for their peers, such as pages of metrics; each can take megabytes
WRITE_SECONDS: Final = 30.0  # for a peer to read a response
BUFFER_BYTES: Final = 64 * 1024  # of a response that does not wait for its peer
HEAD_END: Final = b"\r\n\r\n"


class CutReason(StrEnum):
    """Why a connection was cut."""

    SLOW_REQUEST = "slow_request"
    TOO_MANY = "too_many"
    SLOW_READER = "slow_reader"


class ConnectionGuard:
    """Makes the protocols of one or more listeners, which share the bound."""

    def __init__(
        self,
        make: Callable[[], asyncio.BaseProtocol],
        on_cut: Callable[[CutReason], None],
        max_connections: int = MAX_CONNECTIONS,
        head_seconds: float = HEAD_SECONDS,
        has_bodies: bool = False,
        write_seconds: float = WRITE_SECONDS,
    ) -> None:
        """make: the protocol of one connection. on_cut: called with each connection that is cut."""
        self._make = make
        self._max_connections = max_connections
        self.head_seconds, self.write_seconds = head_seconds, write_seconds
        self.has_bodies = has_bodies
        self.on_cut = on_cut
        self._open: dict[GuardedConnection, None] = {}  # the longest silent first
        self._unread: dict[GuardedConnection, None] = {}  # whose response waits; the longest waiting first

    def __call__(self) -> GuardedConnection:
        """Returns the protocol of a new connection."""
        return GuardedConnection(self, cast(asyncio.Protocol, self._make()))

    def admit(self) -> GuardedConnection:
        """Returns the protocol of a connection that counts before it is made, or is given up with `remove`."""
        connection = self()
        self.add(connection)
        return connection

    @property
    def open(self) -> int:
        """The number of connections."""
        return len(self._open)

    def add(self, connection: GuardedConnection) -> None:
        """Add a connection, in place of another one if there are as many as allowed."""
        if self.open >= self._max_connections:
            next(iter(self._open)).cut(CutReason.TOO_MANY)
        self._open[connection] = None

    def refresh(self, connection: GuardedConnection) -> bool:
        """Note that a connection has sent something. Returns False if it was cut."""
        if connection not in self._open:
            return False
        del self._open[connection]
        self._open[connection] = None
        return True

    def remove(self, connection: GuardedConnection) -> None:
        """Remove a connection, if it is there."""
        self._open.pop(connection, None)
        self._unread.pop(connection, None)

    def add_unread(self, connection: GuardedConnection) -> None:
        """Note that a response waits for its peer, in place of another one if there are as many as allowed."""
        if len(self._unread) >= MAX_UNREAD:
            next(iter(self._unread)).cut(CutReason.SLOW_READER)
        self._unread[connection] = None

    def remove_unread(self, connection: GuardedConnection) -> None:
        """Note that a peer has read its response."""
        self._unread.pop(connection, None)


class GuardedConnection(asyncio.Protocol):
    """Passes one connection on to the server's own protocol."""

    def __init__(self, guard: ConnectionGuard, inner: asyncio.Protocol) -> None:
        self._guard, self._inner = guard, inner
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._is_timed = True
        self._end = b""  # the last bytes of a head that is not complete
        self.abort: Callable[[], object]  # ends the connection at once, also before it is made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.abort = cast(asyncio.Transport, transport).abort
        cast(asyncio.Transport, transport).set_write_buffer_limits(BUFFER_BYTES)
        if not self._guard.refresh(self):
            self._guard.add(self)
        self._start_timer()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if not self._guard.refresh(self):
            return
        if self._is_timed:
            self._time(data)
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        loop = asyncio.get_running_loop()
        self._write_timer = loop.call_later(self._guard.write_seconds, self.cut, CutReason.SLOW_READER)
        self._guard.add_unread(self)
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._stop_write_timer()
        self._guard.remove_unread(self)
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_write_timer()
        self._guard.remove(self)
        self._inner.connection_lost(exc)

    def cut(self, reason: CutReason) -> None:
        """Close the connection at once."""
        self._stop_timer()
        self._stop_write_timer()
        self._guard.remove(self)
        self._guard.on_cut(reason)
        self.abort()

    def _time(self, data: bytes) -> None:
        """Stop the timer at the end of a head, and start it with the first bytes of another."""
        read = self._end + data
        if HEAD_END in read if self._guard.has_bodies else read.endswith(HEAD_END):
            self._end = b""
            self._stop_timer()
            self._is_timed = not self._guard.has_bodies
            return
        self._end = read[1 - len(HEAD_END) :]
        if self._timer is None:
            self._start_timer()

    def _start_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._guard.head_seconds, self.cut, CutReason.SLOW_REQUEST)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
