"""What every endpoint is busy with, as the picker counts it.

Each request has a ticket that Envoy gives it when it comes in, that the picker is asked with, and that comes back in
the access log's record of its end, picked or not: client ids would not do, two requests may carry the same. Envoy's own
counts correct what tickets cannot know: requests that came before this process or past it, retries on another endpoint,
lost records.
"""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Mapping, Sequence

import msgspec

from plimsoll.core.picking.choose import Pick, Standing
from plimsoll.core.picking.drift import correction
from plimsoll.core.picking.endpoint import Endpoint, Load
from plimsoll.core.slo import Deadlines

DOUBT_SECONDS = 5.0
OLDEST_SECONDS = 7200.0  # a ticket without a record for so long has lost it


class Flight(msgspec.Struct, frozen=True):
    """A request on its way: NAMESPACE/NAME of its service, the addresses that work on it, when it was picked, and what
    its client is known by when it comes back. deadlines: what was promised of it then, None for nothing."""

    service: str
    endpoint: str
    prefill: str | None
    since: float
    demand: Hashable = None
    deadlines: Deadlines | None = None


class InFlight:
    """Tickets and loads. `loads` is what picks read; all times are of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self.loads: dict[str, Load] = {}
        self._epoch = secrets.token_hex(4)  # tickets of an earlier process are none of ours
        self._turn = 0
        self._flights: dict[str, Flight] = {}
        self._drift: dict[str, int] = {}
        self._extra: dict[str, int] = {}
        self._tickets: dict[str, int] = {}
        self._doubts: dict[str, float] = {}
        self._active: dict[str, int] = {}  # Envoy's counts at the last look
        self._looked = float("-inf")

    def __len__(self) -> int:
        return len(self._flights)

    def ticket(self) -> str:
        """A ticket of our own, for a request that came without one."""
        self._turn += 1
        return f"{self._epoch}-{self._turn:x}"

    def standing(self, endpoints: Sequence[Endpoint]) -> Standing:
        """These, to pick from by what they are busy with until the next `keep`."""
        for endpoint in endpoints:
            self._load(endpoint.address)
        return Standing(endpoints, self.loads)

    def begin(
        self,
        service: str,
        pick: Pick,
        ticket: str,
        now: float,
        demand: Hashable = None,
        deadlines: Deadlines | None = None,
    ) -> None:
        """Count a pick under its ticket."""
        self._turn += 1
        address, prefill = pick.endpoint.address, pick.prefill.address if pick.prefill else None
        self._flights[ticket] = Flight(service, address, prefill, now, demand, deadlines)
        self._count(address, 1, self._turn)
        if prefill is not None:
            self._count(prefill, 1, self._turn)

    def end(self, ticket: str, host: str, now: float) -> Flight | None:
        """A request's record has come; None if its ticket is not one of this process.

        A request that was answered by another endpoint than the picked one says that this one refused it.
        """
        flight = self._flights.pop(ticket, None)
        if flight is None:
            if self._extra.get(host, 0) > 0:
                self._extra[host] -= 1
                self._show(host)
            return None
        self._release(flight)
        if host and host != flight.endpoint:
            self.doubt(flight.endpoint, now)
        return flight

    def doubt(self, address: str, now: float) -> None:
        """Avoid an endpoint for a while."""
        self._doubts[address] = now + DOUBT_SECONDS
        self._load(address).doubtful = True

    def settle(self, now: float) -> bool:
        """End the doubts whose time is over; True if there were any."""
        if not self._doubts:
            return False
        over = [address for address, until in self._doubts.items() if until <= now]
        for address in over:
            del self._doubts[address]
            self._load(address).doubtful = False
        return bool(over)

    def strangers(self, address: str) -> int:
        """Requests that Envoy has at an endpoint and that have no ticket of ours."""
        return max(0, self._extra.get(address, 0))

    def reconcile(self, active: Mapping[str, int], now: float) -> list[str]:
        """Correct the counts by Envoy's own, by address; to be called every few seconds with all it has.

        Returns the tickets that were given up.
        """
        lost = self._sweep(active, now)
        for address, count in active.items():
            drift = count - self._tickets.get(address, 0)
            self._extra[address] = correction(self._drift.get(address), drift)
            self._drift[address] = drift
            self._show(address)
        for address in [a for a in self._extra if a not in active]:
            del self._extra[address]
            self._drift.pop(address, None)
            self._show(address)
        self._active = dict(active)
        self._looked = now
        return lost

    def keep(self, addresses: set[str]) -> None:
        """Forget the loads of endpoints that are gone and hold nothing."""
        for address in [a for a, load in self.loads.items() if a not in addresses and not load.inflight]:
            del self.loads[address]
            self._doubts.pop(address, None)
            self._tickets.pop(address, None)

    def _sweep(self, active: Mapping[str, int], now: float) -> list[str]:
        """Drop tickets whose record is lost: very old ones, and those of an endpoint that Envoy knows to be idle."""
        lost = [
            (ticket, flight)
            for ticket, flight in self._flights.items()
            if now - flight.since > OLDEST_SECONDS
            or (flight.since < self._looked and active.get(flight.endpoint) == 0 == self._active.get(flight.endpoint))
        ]
        for ticket, flight in lost:
            del self._flights[ticket]
            self._release(flight)
        for address in {flight.endpoint for _, flight in lost}:
            self._drift.pop(address, None)
        return [ticket for ticket, _ in lost]

    def _release(self, flight: Flight) -> None:
        self._count(flight.endpoint, -1)
        if flight.prefill is not None:
            self._count(flight.prefill, -1)

    def _count(self, address: str, by: int, turn: int | None = None) -> None:
        self._tickets[address] = self._tickets.get(address, 0) + by
        self._show(address, turn)

    def _load(self, address: str) -> Load:
        found = self.loads.get(address)
        if found is None:
            found = self.loads[address] = Load()
        return found

    def _show(self, address: str, turn: int | None = None) -> None:
        """turn: of the pick that chose it now."""
        load = self.loads.get(address) or self._load(address)
        inflight = max(0, self._tickets.get(address, 0) + self._extra.get(address, 0))
        load.busy(inflight, load.turn if turn is None else turn)
