"""The answer to Envoy about one request: refuse it, hold it, or name its cluster, its endpoint and its prefill engine.

State in, answer out: the fleet is set from outside, records of the access log are told, time and chance are passed in.
A request that is held is a future; whoever frees a place for it resolves it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Iterable, Mapping
from random import Random

from plimsoll.core.admission import Decision, Outcome
from plimsoll.core.admission.returning import Refused
from plimsoll.core.picking.choose import Pick, Standing
from plimsoll.core.picking.endpoint import Role
from plimsoll.gateway import words
from plimsoll.gateway.accesslog import Record
from plimsoll.gateway.admission import Admission
from plimsoll.gateway.classify import Request, classify
from plimsoll.gateway.clock import Clock, Handle, LoopClock
from plimsoll.gateway.endpoints import EMPTY, Fleet, Service
from plimsoll.gateway.http1 import go, response
from plimsoll.gateway.inflight import InFlight
from plimsoll.gateway.prefix import blocks
from plimsoll.gateway.replies import Answer, Refusal, answer, to_header
from plimsoll.gateway.retries import claimed, digest
from plimsoll.gateway.tally import Tally
from plimsoll.gateway.visit import RETRY_COUNT, Names, Visit, ticket_of, visit
from plimsoll.gateway.xds import PICK
from plimsoll.telemetry import metrics

log = logging.getLogger(__name__)

Reply = bytes | Awaitable[bytes]

MOST_HELD_BYTES = 256 << 20  # Envoy keeps the bodies of those who wait in its memory

_NO_NAMES = Names()


class Picker:
    """Answers for one fleet. All times are of one monotonic clock, in seconds. `born` names this picker's counts."""

    def __init__(self, random: Random, gateway: str = "", names: Names = _NO_NAMES, clock: Clock | None = None) -> None:
        """gateway: the name of this pod. names: of the headers that tell class and tenant."""
        self.born = secrets.token_hex(8)
        self.fleet: Fleet = EMPTY
        self.inflight = InFlight()
        self.admission = Admission(gateway, self.inflight)
        self.tallies: dict[str, Tally] = {}
        self._standing: dict[str, Standing] = {}  # of services, as far as asked for since the fleet changed
        self._names = names
        self._clock = clock or LoopClock()
        self._held: dict[str, Visit] = {}
        self._held_bytes = 0
        self._wakes: dict[str, tuple[float, Handle]] = {}
        self._refused = Refused()
        self._random = random

    @property
    def held(self) -> int:
        """Requests that wait here."""
        return len(self._held)

    def set_fleet(self, fleet: Fleet) -> None:
        """From now on this is the fleet."""
        now = self._clock.now()
        self.fleet = fleet
        self._standing.clear()
        self.inflight.keep({e.address for service in fleet.services.values() for e in service.endpoints})
        self.admission.set_fleet(fleet, now, self._clock.unix())
        self._release(list(self.admission.guards), now)
        for gone in self.tallies.keys() - fleet.services.keys() - {""}:
            del self.tallies[gone]
            metrics.forget_gateway_service(gone)

    def tally(self, service: str) -> Tally:
        found = self.tallies.get(service)
        if found is None:
            found = self.tallies[service] = Tally(service)
        return found

    def tick(self) -> None:
        """To be called every second."""
        now = self._clock.now()
        self.admission.tick(now, self._clock.unix())
        self._release(list(self.admission.guards), now)

    def looked(self, active: Mapping[str, int]) -> None:
        """Envoy has so many requests at each address."""
        now = self._clock.now()
        self.inflight.settle(now)
        lost = self.inflight.reconcile(active, now)
        for ticket in lost:
            self.admission.end(ticket, None, now)
        changed = self.admission.refresh(now)
        self._release(list(self.admission.guards) if lost else changed, now)

    def doubt(self, address: str) -> None:
        """An endpoint has refused a connection."""
        now = self._clock.now()
        self.inflight.doubt(address, now)
        self._refresh(now)

    def check(self, body: bytes, headers: Mapping[bytes, bytes], now: float) -> Reply:
        """Envoy's question with the client's body, answered as HTTP."""
        return self.decide(classify(body), body, headers, now)

    def decide(self, asked: Request | Refusal, body: bytes, headers: Mapping[bytes, bytes], now: float) -> Reply:
        """The second half of `check`, for a body that was read elsewhere."""
        if isinstance(asked, Refusal):
            return self._refuse(asked, None, now)
        service = self.fleet.by_name.get(asked.model)
        if service is None:
            return self._refuse(words.unknown(asked.model), None, now)
        ticket = ticket_of(headers) or self.inflight.ticket()
        came = visit(ticket, asked, service.key, digest(body), len(body), headers, self._names, now)
        if service.policy is not None:
            came.blocks, came.fallback = blocks(asked.beginning), self._fallback(service)
        came.retry = self._refused.is_retry(claimed(headers.get(RETRY_COUNT)), came.demand, now)
        if self.inflight.settle(now):
            self._refresh(now)
        came.retry = self.admission.comes_back(came, now) or came.retry
        self.tally(service.key).arrive(asked.prompt, retry=came.retry)
        reply = self._first(service, came, now)
        self._release((), now)
        return self._hold(came, now) if reply is None else reply

    def ended(self, record: Record, now: float) -> bool:
        """One line of the access log; True if it is of a request that was picked here."""
        ticket = record.ticket or ""
        flight = self.inflight.end(ticket, record.host or "", now)
        if flight is None:
            if ticket in self._held:
                self._leave(ticket, now)
            return False
        self.admission.end(ticket, record, now)
        if record.code is not None and record.code >= 500:  # told by a header alone: others are faster than the record
            self._refused.remember(flight.demand, now, 0.0)
        if record.reset_before_first_byte:
            self.inflight.doubt(record.host or flight.endpoint, now)
        if flight.service in self.fleet.services:
            self.tally(flight.service).end(record, flight.deadlines)
        if record.reset_before_first_byte or (record.host and record.host != flight.endpoint):
            self._refresh(now)
        self._release((flight.service,), now)
        return True

    def _first(self, service: Service, came: Visit, now: float) -> bytes | None:
        """What follows from its arrival, as `_act` says it. More sequences than any engine accepts are refused."""
        sequences = came.prompt.sequences
        if sequences <= service.max_queued:
            return self._act(came, self.admission.offer(came, now, self._has_room(came)), now)
        to = None if came.fallback is None else self.fleet.services[came.fallback]
        if to is not None and sequences <= to.max_queued:
            return self._downgrade(came, now)
        limit = max(service.max_queued, 0 if to is None else to.max_queued)
        self.tally(service.key).decide(Outcome.SHED_NO_CAPACITY)
        return self._refuse(words.too_many(came.model, sequences, came.n, limit), came, now)

    def _fallback(self, service: Service) -> str | None:
        """Key of the service to which this one's requests may go; None where there is none."""
        key = service.policy.fallback if service.policy is not None else None
        return key if key in self.fleet.services and key != service.key else None

    def _act(self, came: Visit, decision: Decision | None, now: float) -> bytes | None:
        """What follows from a decision, None: it is held; without one the request is picked as it stands."""
        if decision is None or decision.outcome is Outcome.ADMITTED:
            return self._go(came, decision, now)
        if decision.outcome is Outcome.HELD:
            self.tally(came.place).decide(Outcome.HELD)
            return None
        if decision.outcome is Outcome.DOWNGRADED:
            return self._downgrade(came, now)
        if came.downgraded:
            self.admission.forgive(came, now)
            return self._return(came, now)
        return self._shed(came, decision, now)

    def _go(self, came: Visit, decision: Decision | None, now: float) -> bytes:
        service = self.fleet.services.get(came.place)
        chosen = None if service is None else self._choose(service, came, decision)
        if service is None or chosen is None:
            if decision is not None:
                self.admission.withdraw(came, now)
            if came.downgraded:
                return self._return(came, now)
            return self._refuse(_nobody(service, came), came, now)
        tally = self.tally(service.key)
        if came.downgraded:
            self.tally(came.service).decide(Outcome.DOWNGRADED)
            tally.arrive(came.prompt, retry=came.retry)
        if decision is not None:
            tally.decide(Outcome.ADMITTED)
        if chosen.endpoint.role is Role.DECODE:
            tally.prefill(remote=chosen.prefill is not None)
        self.admission.began(came, chosen.endpoint.address, now)
        promised = None if service.policy is None else service.policy.class_of(came.klass).slo
        deadlines = None if promised is None else promised.deadlines(came.prompt.tokens)
        self.inflight.begin(service.key, chosen, came.ticket, now, came.demand, deadlines)
        self._refused.forget(came.demand)
        return _sent(service, chosen, came)

    def _choose(self, service: Service, came: Visit, decision: Decision | None) -> Pick | None:
        """The gate's engine and those to try next; without a gate those with the least in flight."""
        standing = self._standing.get(came.place)
        if standing is None:
            standing = self._standing[came.place] = self.inflight.standing(service.endpoints)
        if decision is not None and decision.address is not None:
            found = standing.pick_at(decision.address, decision.prefill, came.prompt)
            if found is not None:
                return found
        return standing.pick(came.prompt)

    def _downgrade(self, came: Visit, now: float) -> bytes | None:
        """On to the fallback, once: what it will not have is refused where it came from."""
        to = None if came.fallback is None else self.fleet.services.get(came.fallback)
        if came.fallback is None or to is None or not any(e.routable for e in to.endpoints):
            return self._return(came, now)
        came.place, came.fallback, came.request = came.fallback, None, None
        return self._act(came, self.admission.offer(came, now, self._has_room(came)), now)

    def _return(self, came: Visit, now: float) -> bytes:
        """The refusal of the service that the client named."""
        came.place, came.fallback, came.request = came.service, None, None
        decision = self.admission.refuse(came, now)
        if decision is None:
            return self._refuse(_nobody(self.fleet.services.get(came.service), came), came, now)
        return self._shed(came, decision, now)

    def _shed(self, came: Visit, decision: Decision, now: float) -> bytes:
        self.tally(came.service).decide(decision.outcome)
        ready, limits = self.admission.why(came)
        return self._refuse(words.refusal(came, decision, ready, limits, now), came, now)

    def _hold(self, came: Visit, now: float) -> asyncio.Future[bytes]:
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda done: self._leave(came.ticket, self._clock.now()) if done.cancelled() else None)
        came.answer = future
        self._held[came.ticket] = came
        self._held_bytes += came.size
        self._arm(came.place, now)
        return future

    def _has_room(self, came: Visit) -> bool:
        """Whether it could be held here, or is already."""
        return came.answer is not None or self._held_bytes + came.size <= MOST_HELD_BYTES

    def _let_go(self, ticket: str) -> Visit | None:
        """The request is held no more; None if it was not."""
        came = self._held.pop(ticket, None)
        if came is not None:
            self._held_bytes -= came.size
        return came

    def _leave(self, ticket: str, now: float) -> None:
        """The client of a held request has left."""
        left = self._let_go(ticket)
        if left is not None and left.answer is not None:
            self.admission.cancel(left, now)
            self._gone(left)
            left.answer.cancel()

    def _gone(self, left: Visit) -> None:
        for key in {left.place, left.service} & self.fleet.services.keys():
            self.tally(key).decide(Outcome.CLIENT_GONE)

    def _refresh(self, now: float) -> None:
        """Engines have come, gone, or changed in what can be said of them."""
        self._release(self.admission.refresh(now), now)

    def _release(self, keys: Iterable[str], now: float) -> None:
        """Answer whoever need not wait any longer for these services, or for one whose gate is no more."""
        for key in keys:
            for came, decision in self.admission.release(key, now):
                self._resolve(came, decision, now)
            self._arm(key, now)
        for came in self.admission.stranded():
            self._resolve(came, self.admission.offer(came, now), now)

    def _resolve(self, came: Visit, decision: Decision | None, now: float) -> None:
        """Answer a held request by its decision, unless it waits on, perhaps elsewhere."""
        assert came.answer is not None
        if came.answer.cancelled():
            self._let_go(came.ticket)
            self.admission.withdraw(came, now)
            self._gone(came)
            return
        try:
            reply = self._act(came, decision, now)
        except Exception:  # the boundary of one request: the others that are released with it must not suffer
            log.exception("answering a held request failed")
            reply = response(500)
        if reply is None:
            self._arm(came.place, now)
            return
        self._let_go(came.ticket)
        came.answer.set_result(reply)

    def _arm(self, key: str, now: float) -> None:
        """Have the service's held requests looked at when the gate wants it."""
        wake_s = self.admission.wake_s(key)
        armed = self._wakes.get(key)
        if armed is not None and armed[0] == wake_s:
            return
        if armed is not None:
            armed[1].cancel()
            del self._wakes[key]
        if wake_s < float("inf"):
            self._wakes[key] = wake_s, self._clock.call_at(max(wake_s, now), lambda: self._wake(key))

    def _wake(self, key: str) -> None:
        del self._wakes[key]
        self._release((key,), self._clock.now())

    def _refuse(self, refusal: Refusal, came: Visit | None, now: float) -> bytes:
        """came: None where it is for no service."""
        service = "" if came is None or came.service not in self.fleet.services else came.service
        self.tally(service).refuse(refusal.reason)
        reply = answer(refusal, self._random)
        if came is not None:
            self._refused.remember(came.demand, now, reply.wait_s)
        if reply.deniable:
            return written(reply)
        return response(200, (("x-plimsoll-cluster", "picker"), ("x-plimsoll-reply", to_header(reply))))


def written(reply: Answer) -> bytes:
    """A refusal as it goes to the client."""
    return response(reply.status, reply.headers.items(), reply.body)


def _nobody(service: Service | None, came: Visit) -> Refusal:
    if service is None:
        return words.unknown(came.model)
    reachable = any(e.live and e.role is not Role.PREFILL for e in service.endpoints)
    return words.nobody(came.model, reachable)


def _sent(service: Service, chosen: Pick, came: Visit) -> bytes:
    endpoints = ",".join([e.address for e in (chosen.endpoint, *chosen.spares)])
    headers, count = (
        (
            f"x-plimsoll-cluster: {PICK}{service.key}\r\n"
            f"x-plimsoll-endpoint: {endpoints}\r\n"
            f"x-plimsoll-ticket: {came.ticket}\r\n"
        ),
        3,
    )
    if chosen.prefill is not None:
        headers, count = f"{headers}x-plimsoll-prefill: {chosen.prefill.address}\r\n", count + 1
    if came.downgraded:
        headers, count = f"{headers}x-plimsoll-response-model: {service.names[0]}\r\n", count + 1
    return go(headers, count)
