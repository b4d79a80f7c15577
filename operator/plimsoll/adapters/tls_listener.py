"""A port with TLS whose connections count before their handshake, and not only after it.

Problem: the event loop's own listener hides a connection until its handshake is over. A peer that connects and sends
nothing takes memory for as long as a handshake may last, and no bound on connections sees it.

Idea: accept connections here, add them to the guard first, and only then give them to the event loop's TLS.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Final

from plimsoll.adapters.connection_guard import ConnectionGuard, GuardedConnection

HANDSHAKE_SECONDS: Final = 10.0
BACKLOG: Final = 128
RETRY_SECONDS: Final = 0.1  # after a connection that could not be accepted, such as without a free file descriptor


class TlsListener:
    """Listens until it is closed. Make it in the event loop; it raises OSError if the port is taken.

    address: None for all of IPv4 and IPv6, where the host has both.
    """

    def __init__(
        self,
        guard: ConnectionGuard,
        address: str | None,
        port: int,
        tls: ssl.SSLContext,
        handshake_seconds: float = HANDSHAKE_SECONDS,
    ) -> None:
        self._guard, self._tls, self._handshake_seconds = guard, tls, handshake_seconds
        is_dual = address is None and socket.has_dualstack_ipv6()
        host = address if address is not None else "::" if is_dual else ""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=is_dual)
        self._socket.setblocking(False)
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Accept no more connections. Open ones go on."""
        self._accepting.cancel()
        self._accepting.add_done_callback(lambda _: self._socket.close())

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except OSError:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            guarded = self._guard.admit()
            handshake = asyncio.create_task(self._shake_hands(connection, guarded))
            guarded.abort = handshake.cancel
            self._handshakes.add(handshake)
            handshake.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, connection: socket.socket, guarded: GuardedConnection) -> None:
        """Shake hands. Without success, the connection ends and its place is free."""
        is_made = False
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: guarded, connection, ssl=self._tls, ssl_handshake_timeout=self._handshake_seconds
            )
            is_made = True
        except OSError:  # of TLS too
            pass
        finally:
            if not is_made:
                self._guard.remove(guarded)
