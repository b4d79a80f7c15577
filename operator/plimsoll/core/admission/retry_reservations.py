"""Retry reservations: `Retry-After` as a place in a virtual queue.

Problem: if all rejected clients get the start time of the next replica, they return together and are rejected again.
SDKs also retry several times for one demand, some of them at once.

Idea: a rejected request gets a place behind those rejected before it. Its due time is when capacity is expected, plus
the work ahead and its own over the spare capacity beyond new arrivals. A wait beyond two minutes gets no reservation;
`retry_advice` advises its client. A reservation is identified by the idempotency key, or by tenant and body
within twice the `Retry-After`, so that all attempts are one demand. A client that returns when due goes before new
requests. An unused reservation expires.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from plimsoll.core.admission.request import AdmissionRequest
from plimsoll.core.admission.retry_advice import (
    MAX_RESERVATION_S,
    NO_RETRY,
    UNKNOWN_RETRY_RANGE_S,
    UNKNOWN_TIME,
    RetryAdvice,
    advise_retry,
)

EARLY_TOLERANCE_S: Final = 1.0  # a client may return this early: Retry-After has whole seconds
SPARE_UTILIZATION: Final = 0.9  # share of the spare capacity to give away; the rest absorbs random variation
_STALE_ENTRIES_ALLOWED: Final = 64

ReservationKey = tuple[str, str | int]


@dataclass(slots=True)
class RetryReservation:
    """One rejected demand.

    `work_s` is its work in GPU-seconds, and `pending_work_s` the same until it is due, then 0. The client should return
    at `due_s`. The reservation expires at `expires_s`. `has_eta` says whether the due time is an estimate from expected
    capacity.
    """

    key: ReservationKey
    work_s: float
    pending_work_s: float
    due_s: float
    expires_s: float
    number: int
    has_eta: bool


class RetryReservations:
    """The open reservations of one service at one gateway. Times are of the controller's clock."""

    def __init__(self) -> None:
        self._reservations: dict[ReservationKey, RetryReservation] = {}
        self._expiry: list[tuple[float, int, ReservationKey]] = []
        self._last_number = 0
        self._work_s = self._pending_work_s = 0.0
        self._capacity_steps: tuple[tuple[float, float], ...] = ()  # (start time, usable spare rate)

    def __len__(self) -> int:
        return len(self._reservations)

    @property
    def work_s(self) -> float:
        """The work of all open reservations, in GPU-seconds."""
        return self._work_s

    @property
    def pending_work_s(self) -> float:
        """The work of reservations that are not yet due, in GPU-seconds."""
        return self._pending_work_s

    def set_capacity_steps(
        self, ready_at_s: float | None, spare_rate: float, later_steps: Iterable[tuple[float, float]] = ()
    ) -> None:
        """Set the expected capacity. `ready_at_s` is None if unknown.

        `spare_rate` is the capacity beyond new arrivals in GPU-seconds per second; NaN and negative values count as 0.
        `later_steps` are later (time, spare rate) steps in order.
        """
        if ready_at_s is None or math.isnan(ready_at_s):
            self._capacity_steps = ()
            return
        steps = ((ready_at_s, spare_rate), *later_steps)
        self._capacity_steps = tuple(
            (at_s, SPARE_UTILIZATION * rate if 0 < rate < math.inf else 0.0) for at_s, rate in steps
        )

    def find(self, request: AdmissionRequest, now: float) -> RetryReservation | None:
        """Returns the open reservation of this request, or None. It stays open."""
        if self._expiry and self._expiry[0][0] <= now:
            self.expire(now)
        return self._reservations.get(_reservation_key(request)) if self._reservations else None

    def is_due(self, reservation: RetryReservation, now: float) -> bool:
        """Whether the reservation is due now."""
        return reservation.due_s <= now + EARLY_TOLERANCE_S

    def reserve(self, request: AdmissionRequest, work_s: float, queued_work_s: float, now: float) -> RetryAdvice:
        """Reserve a retry for a rejected request. Returns the advice for its client.

        `queued_work_s` is the work queued at the gateway in GPU-seconds. A client that returns early gets the remaining
        time. One that returns when due and is rejected again gets a new place, and stays one demand.
        """
        previous = self.find(request, now)
        if previous is not None and not self.is_due(previous, now):
            return self._retry_advice(previous, now) if previous.has_eta else UNKNOWN_TIME
        if previous is not None:
            self.redeem(previous)
        if not self._capacity_steps:
            self._add(
                request, work_s, now, now + UNKNOWN_RETRY_RANGE_S[0], now + 2 * UNKNOWN_RETRY_RANGE_S[1], has_eta=False
            )
            return UNKNOWN_TIME
        due_s = self._completion_s(queued_work_s + self._work_s + work_s, now)
        if math.isinf(due_s):
            return NO_RETRY
        if not due_s - now <= MAX_RESERVATION_S:
            is_startup = self._completion_s(work_s, now) - now > MAX_RESERVATION_S  # also without others ahead
            return advise_retry(due_s - now, is_time_known=is_startup)
        return self._retry_advice(self._add(request, work_s, now, due_s, due_s, has_eta=True), now)

    def _completion_s(self, work_s: float, now: float) -> float:
        """Returns the time when the spare capacity has completed `work_s` GPU-seconds, infinity if never."""
        at_s, spare_rate, remaining_s = now, 0.0, work_s
        for next_s, next_rate in self._capacity_steps:
            if spare_rate > 0:
                if at_s + remaining_s / spare_rate <= next_s:
                    break
                remaining_s -= spare_rate * max(0.0, next_s - at_s)
            at_s, spare_rate = max(at_s, next_s), next_rate
        return at_s + remaining_s / spare_rate if spare_rate > 0 else math.inf

    def redeem(self, reservation: RetryReservation) -> None:
        """Close a reservation that its client used."""
        if self._reservations.get(reservation.key) is reservation:
            self._drop(reservation)
            self._compact()

    def _retry_advice(self, reservation: RetryReservation, now: float) -> RetryAdvice:
        advice = advise_retry(max(reservation.due_s - now, 0.0), sdk_limit_s=math.inf)
        expires_s = now + 2 * (advice.retry_after_s or 0)
        if expires_s > reservation.expires_s:
            reservation.expires_s = expires_s
            heapq.heappush(self._expiry, (expires_s, reservation.number, reservation.key))
        return advice

    def _add(
        self, request: AdmissionRequest, work_s: float, now: float, due_s: float, expires_s: float, has_eta: bool
    ) -> RetryReservation:
        self._last_number += 1
        reservation = RetryReservation(
            _reservation_key(request), work_s, work_s, due_s, expires_s, self._last_number, has_eta
        )
        self._reservations[reservation.key] = reservation
        heapq.heappush(self._expiry, (due_s, reservation.number, reservation.key))
        heapq.heappush(self._expiry, (expires_s, reservation.number, reservation.key))
        self._work_s += work_s
        self._pending_work_s += work_s
        return reservation

    def _drop(self, reservation: RetryReservation) -> None:
        del self._reservations[reservation.key]
        if not self._reservations:  # so that rounding never adds up
            self._work_s = self._pending_work_s = 0.0
            self._expiry.clear()
            return
        self._work_s = max(0.0, self._work_s - reservation.work_s)
        self._pending_work_s = max(0.0, self._pending_work_s - reservation.pending_work_s)

    def _compact(self) -> None:
        """Drop the entries of reservations that their clients used."""
        if len(self._expiry) > 2 * len(self._reservations) + _STALE_ENTRIES_ALLOWED:
            self._expiry = [(s, t.number, t.key) for t in self._reservations.values() for s in (t.due_s, t.expires_s)]
            heapq.heapify(self._expiry)

    def expire(self, now: float) -> None:
        """Clear the pending work of due reservations, and drop expired ones."""
        while self._expiry and self._expiry[0][0] <= now:
            _, number, key = heapq.heappop(self._expiry)
            reservation = self._reservations.get(key)
            if reservation is None or reservation.number != number:
                continue
            self._pending_work_s = max(0.0, self._pending_work_s - reservation.pending_work_s)
            reservation.pending_work_s = 0.0
            if reservation.expires_s <= now:
                self._drop(reservation)


def _reservation_key(request: AdmissionRequest) -> ReservationKey:
    if request.idempotency_key is not None:
        return request.tenant, request.idempotency_key
    return request.tenant, f"#{request.id}" if request.body_hash is None else request.body_hash
