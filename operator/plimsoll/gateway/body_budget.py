"""A bound on the request bodies that Envoy holds at once.

Problem: Envoy reads a whole body before it asks the picker, and keeps up to three copies until the request ends. Some
60 bodies of 7.5 MB end a gateway of 1 GiB, and with it all streams.

Idea: Envoy asks for room before it reads a large body. The room is the length that the client announces, or the largest
one if it announces none, and later the true one. It is given back with the access-log record, which Envoy writes for
every request. That record can come before the picker has read the body, if the client left: such a body takes no room.
One client gets three quarters at most, so that others have room while it announces bodies that it does
not send.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from plimsoll.core.admission.retry_advice import advise_retry
from plimsoll.gateway.errors import Rejection, RejectionReason
from plimsoll.gateway.gateway_limit import GatewayLimit

MAX_AGE_SECONDS = 7200.0  # an older request has lost its access-log record
IDLE_AGE_SECONDS = 10.0  # a request that Envoy does not know appears in its statistics by then
MAX_ENDED = 10_000  # requests that ended before their body was read, which are remembered
RETRY_SECONDS = 2.0
CLIENT_SHARE = 0.75  # of the limit


class _Reservation(msgspec.Struct):
    """The bytes of a body, the time of its first reservation, its client, and whether the body was read."""

    size: int
    since_s: float
    client: str
    is_read: bool = False


class BodyBudget:
    """Bytes of request bodies by request ID. Times are monotonic seconds."""

    def __init__(
        self,
        limit_bytes: int,
        max_body_bytes: int,
        limit: GatewayLimit = GatewayLimit.BODY_BYTES,
        client_limit: GatewayLimit = GatewayLimit.CLIENT_BODY_BYTES,
    ) -> None:
        """limit, client_limit: the names of the bound of all clients and of that of one."""
        self._limit, self._client_limit = limit, client_limit
        self.limit_bytes = limit_bytes
        self.client_limit_bytes = int(CLIENT_SHARE * limit_bytes)
        self.reserved_bytes = 0
        self._client_bytes: dict[str, int] = {}
        self._max_body_bytes = max_body_bytes
        self._reservations: dict[str, _Reservation] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()  # requests that ended before their body was read

    def reserve(self, request_id: str, announced: bytes, now: float, client: str) -> Rejection | None:
        """Reserve room for a client's body of `announced` bytes, in decimal; without a number, for the largest body.

        Returns a rejection if there is none. A single body always fits, and a client's single body into its share.
        """
        size = int(announced) if announced.isdigit() and len(announced) < 16 else self._max_body_bytes
        if size > self._max_body_bytes:
            return None  # Envoy rejects it itself, with a better message
        if self.reserved_bytes + size > self.limit_bytes and self._reservations:
            return _rejection(self._limit, "", self.reserved_bytes, self.limit_bytes, size)
        held = self._client_bytes.get(client, 0)
        if held and held + size > self.client_limit_bytes:
            return _rejection(self._client_limit, " for this client", held, self.client_limit_bytes, size)
        self._drop(request_id)
        if not self._has_ended(request_id):
            self._reservations[request_id] = _Reservation(size, now, client)
            self._add(client, size)
        return None

    def record(self, request_id: str, size: int, now: float) -> None:
        """Record the true size of a body that was read."""
        previous = self._reservations.get(request_id)
        if previous is not None:
            self._add(previous.client, size - previous.size)
            previous.size, previous.is_read = size, True
        elif not self._has_ended(request_id):  # most bodies are small and were read without a question
            self._reservations[request_id] = _Reservation(size, now, "", True)
            self._add("", size)

    def release(self, request_id: str) -> None:
        """Give back the room of a request that ended."""
        previous = self._drop(request_id)
        if previous is None or not previous.is_read:
            self._ended[request_id] = None
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)

    def _has_ended(self, request_id: str) -> bool:
        """Whether the request ended before. The answer is given once."""
        return bool(self._ended) and self._ended.pop(request_id, self) is None

    def _drop(self, request_id: str) -> _Reservation | None:
        """Remove the reservation of a request, if it has one."""
        previous = self._reservations.pop(request_id, None)
        if previous is not None:
            self._add(previous.client, -previous.size)
        return previous

    def _add(self, client: str, size: int) -> None:
        self.reserved_bytes += size
        client_bytes = self._client_bytes.get(client, 0) + size
        if client_bytes:
            self._client_bytes[client] = client_bytes
        else:
            self._client_bytes.pop(client, None)

    def expire(self, now: float, *, envoy_is_idle: bool) -> None:
        """Give back what has lost its access-log record. `envoy_is_idle` says that Envoy has no request at all."""
        age_s = IDLE_AGE_SECONDS if envoy_is_idle else MAX_AGE_SECONDS
        self._release_all([request_id for request_id, one in self._reservations.items() if now - one.since_s > age_s])

    def clear(self) -> None:
        """Give back all, for a new Envoy."""
        self._release_all(list(self._reservations))

    def _release_all(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._drop(request_id)


def _rejection(limit: GatewayLimit, for_whom: str, held: int, limit_bytes: int, size: int) -> Rejection:
    mib = 1 << 20
    message = (
        f"This gateway instance holds{for_whom} {held / mib:.0f} MiB of request bodies and may hold"
        f" {limit_bytes / mib:.0f} MiB, so it cannot take a body of {size / mib:.1f} MiB now."
    )
    return Rejection(RejectionReason.GATEWAY_FULL, message, retry=advise_retry(RETRY_SECONDS), limit=limit)
