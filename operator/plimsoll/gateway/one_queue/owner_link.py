"""The link from this picker to another gateway that owns services: its connection, and the questions without an answer.

Problem: an owner may be killed, hang, or be slow. No request may wait for that.

Idea: the owner acknowledges each question at once, by a decision or by `Queued`. Without that within `ack_seconds`, the
question is withdrawn and the caller decides. No question follows for a pause, and until the owner has sent a
message again. When the connection ends, all questions without an answer fail at once.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Final, TypeAlias

from plimsoll.gateway.one_queue import messages
from plimsoll.gateway.one_queue.connection import Connection, PeerConnection
from plimsoll.gateway.one_queue.peer_secret import PeerSecret
from plimsoll.gateway.one_queue.peer_views import PeerViews
from plimsoll.gateway.one_queue.tls_stream import PeerTls

log = logging.getLogger(__name__)

MAX_UNANSWERED: Final = 20_000  # questions per owner, queued ones included
PAUSE_SECONDS: Final = 0.25  # without questions after a missing acknowledgement
LATE_READ_SECONDS: Final = 0.005  # an answer may lie unread in the socket when its time is over
CONNECT_SECONDS: Final = 2.0
MIN_RETRY_SECONDS: Final = 0.1
MAX_RETRY_SECONDS: Final = 1.0


class FallbackReason(StrEnum):
    """Why this gateway decided about a request that another one owns."""

    DISCONNECTED = "disconnected"  # no connection, or it was lost before the answer
    TIMEOUT = "timeout"  # no acknowledgement in time, or shortly after such a case
    BUSY = "busy"  # too many questions are without an answer
    REFUSED = "refused"  # the other gateway does not consider itself the owner

    __hash__ = str.__hash__  # Enum.__hash__ is slow Python code


Result: TypeAlias = messages.Answer | messages.Charged | messages.Refused | FallbackReason
OnResult: TypeAlias = Callable[[Result], None]


class _Unanswered:
    __slots__ = ("on_result", "request_id", "timer")

    def __init__(self, request_id: str, on_result: OnResult, timer: asyncio.TimerHandle) -> None:
        self.request_id = request_id
        self.on_result = on_result
        self.timer = timer


class OwnerLink:
    """The link to one gateway. Start it with `run`."""

    def __init__(
        self,
        name: str,
        address: str,
        port: int,
        own_name: str,
        peer_secret: PeerSecret,
        views: PeerViews,
        ack_seconds: float,
        on_ready: Callable[[OwnerLink], None],
        tls: PeerTls | None = None,
    ) -> None:
        """`on_ready` is called when the owner has proved that it knows the secret, after each new connection."""
        self.name = name
        self.address, self._port, self._own_name = address, port, own_name
        self._peer_secret = peer_secret
        self._views = views
        self._ack_seconds = ack_seconds
        self._on_ready = on_ready
        self._tls = tls
        self._connection: Connection | None = None
        self._is_ready = False
        self._was_ready = False  # on the last connection
        self._unanswered: dict[int, _Unanswered] = {}
        self._number = 0
        self._paused_until_s = 0.0
        self._was_silent = False  # since a missing acknowledgement
        self.takes_first_tokens = False  # on this connection, as the next one
        self.takes_spent_limits = False
        self.instance = b""  # of the other process; empty of an earlier release

    @property
    def is_ready(self) -> bool:
        """Whether messages reach the owner."""
        return self._is_ready

    def obstacle(self) -> FallbackReason | None:
        """Returns why no question can be sent to the owner now, None if one can."""
        if not self._is_ready:
            return FallbackReason.DISCONNECTED
        if self._was_silent or self._paused_until_s > time.monotonic():
            return FallbackReason.TIMEOUT
        return FallbackReason.BUSY if len(self._unanswered) >= MAX_UNANSWERED else None

    def next_number(self) -> int:
        """Returns the number of the next question."""
        self._number += 1
        return self._number

    def ask(self, question: messages.Question | messages.Charge, request_id: str, on_result: OnResult) -> None:
        """Send a question. `on_result` is called once with its result, unless it is withdrawn."""
        number = question.number
        timer = asyncio.get_running_loop().call_later(self._ack_seconds, self._on_due, number)
        self._unanswered[number] = _Unanswered(request_id, on_result, timer)
        if not self.send(question):
            self._finish(number, FallbackReason.DISCONNECTED)

    def withdraw(self, number: int) -> None:
        """Take a question back: its client has left."""
        unanswered = self._unanswered.pop(number, None)
        if unanswered is not None:
            unanswered.timer.cancel()
            self.send(messages.Withdrawn(number, unanswered.request_id))

    def send(self, message: messages.Message) -> bool:
        """Send a message that has no answer. Returns False if it cannot be sent."""
        return self._is_ready and self._connection is not None and self._connection.send(message)

    async def run(self) -> None:
        """Connect, and connect again whenever the connection ends. Never returns.

        After a failure the next of the accepted secrets is offered: the owner may have the former one still.
        """
        loop = asyncio.get_running_loop()
        wait_s, is_logged, failures = MIN_RETRY_SECONDS, False, 0
        while True:
            self._was_ready = False
            try:
                accepted = self._peer_secret.accepted
                secret = accepted[failures % len(accepted)]
                async with asyncio.timeout(CONNECT_SECONDS):
                    make = functools.partial(self._make_connection, secret)
                    _, connection = await loop.create_connection(make, self.address, self._port)
                try:
                    await connection.closed.wait()
                finally:
                    connection.close()
                if connection.has_tls_failure and not self._was_ready:
                    raise ConnectionError(connection.failure)
            except (OSError, TimeoutError) as error:
                if not is_logged:
                    log.warning("cannot reach the gateway %s at %s:%d: %s", self.name, self.address, self._port, error)
                    is_logged = True
            failures += 1
            if self._was_ready:
                wait_s, is_logged, failures = MIN_RETRY_SECONDS, False, 0
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2.0 * wait_s, MAX_RETRY_SECONDS)

    def _make_connection(self, secret: bytes) -> PeerConnection[messages.FromOwner]:
        connection = PeerConnection(
            (secret,),
            self._peer_secret,
            messages.decode_from_owner,
            self._on_open,
            self._on_message,
            self._on_close,
            ping=self._make_ping,
            tls=self._tls,
        )
        connection.peer = self.name
        return connection

    def ping(self) -> None:
        """Tell the owner at once that this gateway's view has changed, and ask for its own."""
        self.send(self._make_ping())

    def _make_ping(self) -> messages.Ping:
        return messages.Ping(self._views.own)

    def _on_open(self, connection: Connection) -> None:
        connection.send(messages.Greeting(self._own_name))
        connection.send(self._make_ping())
        self._connection = connection

    def _on_message(self, connection: Connection, message: messages.FromOwner) -> None:
        self._was_silent = False
        if isinstance(message, messages.Pong):
            self._views.record(self.name, message.view)
            self.takes_first_tokens = message.takes_first_tokens
            self.takes_spent_limits, self.instance = message.takes_spent_limits, message.instance
        if not self._is_ready:
            self._is_ready = self._was_ready = True
            self._paused_until_s = 0.0
            self._on_ready(self)
        if isinstance(message, messages.Queued):
            if (unanswered := self._unanswered.get(message.number)) is not None:
                unanswered.timer.cancel()
        elif not isinstance(message, messages.Pong):
            self._finish(message.number, message)

    def _on_close(self, connection: Connection) -> None:
        if connection is not self._connection:
            return
        self._connection, self._is_ready, self._was_silent = None, False, False
        self.takes_first_tokens = self.takes_spent_limits = False
        self.instance = b""
        self._views.drop(self.name)
        for number in list(self._unanswered):
            self._finish(number, FallbackReason.DISCONNECTED)

    def _on_due(self, number: int) -> None:
        """Let this process read what has come, because it may have been busy itself."""
        loop = asyncio.get_running_loop()
        self._unanswered[number].timer = loop.call_later(LATE_READ_SECONDS, self._on_timeout, number)

    def _on_timeout(self, number: int) -> None:
        self._paused_until_s, self._was_silent = time.monotonic() + PAUSE_SECONDS, True
        unanswered = self._unanswered[number]
        self.send(messages.Withdrawn(number, unanswered.request_id))
        self._finish(number, FallbackReason.TIMEOUT)

    def _finish(self, number: int, result: Result) -> None:
        unanswered = self._unanswered.pop(number, None)
        if unanswered is not None:
            unanswered.timer.cancel()
            unanswered.on_result(result)
