"""Retry-After as a ticket in a virtual queue.

Problem: refused clients that are all told when the next replica is ready come back together and are refused again, and
SDKs come back several times for one demand, some of them at once.

Idea: a refused request is given a place behind those refused before it: the time when capacity is there, and the work
ahead and its own over the capacity that newcomers leave spare. At most a minute is told at a time, since SDKs take no
more; a longer ticket is told in steps, and one beyond two minutes is none. A ticket is known again by the client's
idempotency key, or by tenant and body within twice the time told, so that all its attempts are one demand. Who comes
back when it is due goes before newcomers. A ticket that nobody redeems ends by itself.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from plimsoll.core.admission.outcome import NOT_AGAIN, Request, Told

LONGEST_TOLD_S: Final = 60  # what every SDK honours
LONGEST_S: Final = 120.0  # told in two steps
UNKNOWN_S: Final = (10.0, 30.0)  # what clients are told, spread, where nobody knows the time
EARLY_S: Final = 1.0  # a client may be so much early: Retry-After has whole seconds
SPARE_USED: Final = 0.9  # of the spare capacity: full use of it would leave no room for chance
_SPARE_ENTRIES: Final = 64

_UNKNOWN: Final = Told(None, None, True)

Key = tuple[str, str | int]


@dataclass(slots=True)
class Ticket:
    """One refused demand. work_s: GPU seconds. coming_s: of it, what is still to come: nothing once it is due.
    due_s: when it is to come. ends_s: when it is given up. known: whether its time comes from an expectation."""

    key: Key
    work_s: float
    coming_s: float
    due_s: float
    ends_s: float
    number: int
    known: bool


class Tickets:
    """All tickets that are out, of one service at one gateway. Times of the gate's clock."""

    def __init__(self) -> None:
        self._of: dict[Key, Ticket] = {}
        self._ends: list[tuple[float, int, Key]] = []
        self._number = 0
        self._work_s = self._coming_s = 0.0
        self._steps: tuple[tuple[float, float], ...] = ()  # from when on, and how much is then to be given

    def __len__(self) -> int:
        return len(self._of)

    @property
    def work_s(self) -> float:
        """GPU seconds of all tickets that are out: demand that is still to come."""
        return self._work_s

    @property
    def coming_s(self) -> float:
        """GPU seconds of the tickets that are not due yet."""
        return self._coming_s

    def expect(self, ready_at_s: float | None, spare: float, later: Iterable[tuple[float, float]] = ()) -> None:
        """From now on capacity is expected at that time (None: nobody knows), and then leaves so much spare.

        spare: GPU seconds of work a second beyond what newcomers bring, NaN and below 0 taken as none. later: times at
        which there is more, each with the spare from then on, in their order.
        """
        if ready_at_s is None or math.isnan(ready_at_s):
            self._steps = ()
            return
        steps = ((ready_at_s, spare), *later)
        self._steps = tuple((at_s, SPARE_USED * some if 0 < some < math.inf else 0.0) for at_s, some in steps)

    def find(self, request: Request, now: float) -> Ticket | None:
        """The ticket that this request comes back with, if there is one; it stays out."""
        if self._ends and self._ends[0][0] <= now:
            self.pass_time(now)
        return self._of.get(_key(request)) if self._of else None

    def is_due(self, ticket: Ticket, now: float) -> bool:
        """Whether who comes with it is to be let in now."""
        return ticket.due_s <= now + EARLY_S

    def issue(self, request: Request, work_s: float, held_s: float, now: float) -> Told:
        """What the refused client is told. held_s: GPU seconds of work that waits at the gateway.

        A client that is back before its ticket is due is told the rest. One that was due and finds no room is given
        a new place, and stays one demand.
        """
        old = self.find(request, now)
        if old is not None and not self.is_due(old, now):
            return self._tell(old, now) if old.known else _UNKNOWN
        if old is not None:
            self.settle(old)
        if not self._steps:
            self._add(request, work_s, now, now + UNKNOWN_S[0], now + 2 * UNKNOWN_S[1], known=False)
            return _UNKNOWN
        due_s = self._served_s(held_s + self._work_s + work_s, now)
        if not due_s - now <= LONGEST_S:
            return NOT_AGAIN if math.isinf(due_s) else Told(due_s - now, None, False)
        return self._tell(self._add(request, work_s, now, due_s, due_s, known=True), now)

    def _served_s(self, work_s: float, now: float) -> float:
        """When the spare of all that is expected will have done so much work; infinity for never."""
        at_s, spare, left_s = now, 0.0, work_s
        for next_s, more in self._steps:
            if spare > 0:
                if at_s + left_s / spare <= next_s:
                    break
                left_s -= spare * max(0.0, next_s - at_s)
            at_s, spare = max(at_s, next_s), more
        return at_s + left_s / spare if spare > 0 else math.inf

    def settle(self, ticket: Ticket) -> None:
        """It was redeemed."""
        if self._of.get(ticket.key) is ticket:
            self._drop(ticket)

    def _tell(self, ticket: Ticket, now: float) -> Told:
        left_s = max(ticket.due_s - now, 0.0)
        told_s = min(LONGEST_TOLD_S, max(1, math.ceil(left_s)))
        ends_s = now + 2 * told_s
        if ends_s > ticket.ends_s:
            ticket.ends_s = ends_s
            heapq.heappush(self._ends, (ends_s, ticket.number, ticket.key))
        return Told(left_s, told_s, True)

    def _add(self, request: Request, work_s: float, now: float, due_s: float, ends_s: float, known: bool) -> Ticket:
        self._number += 1
        ticket = Ticket(_key(request), work_s, work_s, due_s, ends_s, self._number, known)
        self._of[ticket.key] = ticket
        heapq.heappush(self._ends, (due_s, ticket.number, ticket.key))
        heapq.heappush(self._ends, (ends_s, ticket.number, ticket.key))
        self._work_s += work_s
        self._coming_s += work_s
        return ticket

    def _drop(self, ticket: Ticket) -> None:
        del self._of[ticket.key]
        if not self._of:  # so that rounding never adds up
            self._work_s = self._coming_s = 0.0
            self._ends.clear()
            return
        self._work_s = max(0.0, self._work_s - ticket.work_s)
        self._coming_s = max(0.0, self._coming_s - ticket.coming_s)
        if len(self._ends) > 2 * len(self._of) + _SPARE_ENTRIES:
            self._ends = [(s, t.number, t.key) for t in self._of.values() for s in (t.due_s, t.ends_s)]
            heapq.heapify(self._ends)

    def pass_time(self, now: float) -> None:
        """Tickets that are due are no demand to come any more; those that nobody has come back with end."""
        while self._ends and self._ends[0][0] <= now:
            _, number, key = heapq.heappop(self._ends)
            ticket = self._of.get(key)
            if ticket is None or ticket.number != number:
                continue
            self._coming_s = max(0.0, self._coming_s - ticket.coming_s)
            ticket.coming_s = 0.0
            if ticket.ends_s <= now:
                self._drop(ticket)


def _key(request: Request) -> Key:
    if request.idempotency_key is not None:
        return request.tenant, request.idempotency_key
    return request.tenant, f"#{request.id}" if request.body_hash is None else request.body_hash
