"""A bound on the request bodies that Envoy holds at once.

Problem: Envoy reads a whole body before it asks the picker, and keeps up to three copies until the request ends. Some
60 bodies of 7.5 MB end a gateway of 1 GiB, and with it all streams.

Idea: Envoy asks for room before it reads a large body. The room is the length that the client announces, or the largest
one if it announces none, and later the true one. It is given back with the access-log record, which Envoy writes for
every request.
"""

from __future__ import annotations

from collections.abc import Iterable

from plimsoll.core.admission.retry_advice import advise_retry
from plimsoll.gateway.errors import Rejection, RejectionReason

MAX_AGE_SECONDS = 7200.0  # an older request has lost its access-log record
IDLE_AGE_SECONDS = 10.0  # a request that Envoy does not know appears in its statistics by then
RETRY_SECONDS = 2.0


class BodyBudget:
    """Bytes of request bodies by request ID. Times are monotonic seconds."""

    def __init__(self, limit_bytes: int, max_body_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.reserved_bytes = 0
        self._max_body_bytes = max_body_bytes
        self._reservations: dict[str, tuple[int, float]] = {}  # bytes and time of the first reservation

    def reserve(self, request_id: str, announced: bytes, now: float) -> Rejection | None:
        """Reserve room for a body of `announced` bytes, in decimal; without a number, for the largest body.

        Returns a rejection if there is none. A single body always fits.
        """
        size = int(announced) if announced.isdigit() and len(announced) < 16 else self._max_body_bytes
        if size > self._max_body_bytes:
            return None  # Envoy rejects it itself, with a better message
        if self.reserved_bytes + size > self.limit_bytes and self._reservations:
            return self._rejection(size)
        self.record(request_id, size, now)
        return None

    def record(self, request_id: str, size: int, now: float) -> None:
        """Record the true size of a body that was read."""
        previous, since_s = self._reservations.get(request_id, (0, now))
        self._reservations[request_id] = size, since_s
        self.reserved_bytes += size - previous

    def release(self, request_id: str) -> None:
        """Give back the room of a request that ended."""
        size, _ = self._reservations.pop(request_id, (0, 0.0))
        self.reserved_bytes -= size

    def expire(self, now: float, *, envoy_is_idle: bool) -> None:
        """Give back what has lost its access-log record. `envoy_is_idle` says that Envoy has no request at all."""
        age_s = IDLE_AGE_SECONDS if envoy_is_idle else MAX_AGE_SECONDS
        self._release_all(
            [request_id for request_id, (_, since_s) in self._reservations.items() if now - since_s > age_s]
        )

    def clear(self) -> None:
        """Give back all, for a new Envoy."""
        self._release_all(list(self._reservations))

    def _release_all(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.release(request_id)

    def _rejection(self, size: int) -> Rejection:
        mib = 1 << 20
        message = (
            f"This gateway instance holds {self.reserved_bytes / mib:.0f} MiB of request bodies and may hold"
            f" {self.limit_bytes / mib:.0f} MiB, so it cannot take a body of {size / mib:.1f} MiB now."
        )
        return Rejection(RejectionReason.GATEWAY_FULL, message, retry=advise_retry(RETRY_SECONDS))
