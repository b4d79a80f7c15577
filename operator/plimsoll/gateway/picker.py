"""The answer to Envoy about one request: refuse it, or name its cluster, its endpoint and its prefill engine.

State in, answer out: the fleet is set from outside, records of the access log are told, time and chance are passed in.
"""

from __future__ import annotations

import secrets
from random import Random

from plimsoll.core.picking.choose import Pick, pick
from plimsoll.core.picking.endpoint import Role
from plimsoll.gateway.accesslog import Record
from plimsoll.gateway.classify import Request, classify
from plimsoll.gateway.endpoints import EMPTY, Fleet, Service
from plimsoll.gateway.http1 import response
from plimsoll.gateway.inflight import InFlight
from plimsoll.gateway.replies import Answer, Reason, Refusal, answer, to_header
from plimsoll.gateway.retries import Refused
from plimsoll.gateway.tally import Tally
from plimsoll.gateway.xds import PICK
from plimsoll.telemetry import metrics


class Picker:
    """Answers for one fleet. All times are of one monotonic clock, in seconds. `born` names this picker's counts."""

    def __init__(self, random: Random) -> None:
        self.born = secrets.token_hex(8)
        self.fleet: Fleet = EMPTY
        self.inflight = InFlight()
        self.tallies: dict[str, Tally] = {}
        self._refused = Refused()
        self._random = random

    def set_fleet(self, fleet: Fleet) -> None:
        """From now on this is the fleet."""
        for gone in self.tallies.keys() - fleet.services.keys() - {""}:
            del self.tallies[gone]
            metrics.forget_gateway_service(gone)
        self.fleet = fleet
        self.inflight.keep({e.address for service in fleet.services.values() for e in service.endpoints})

    def tally(self, service: str) -> Tally:
        found = self.tallies.get(service)
        if found is None:
            found = self.tallies[service] = Tally(service)
        return found

    def check(self, body: bytes, retry_count: bytes | None, now: float) -> bytes:
        """Envoy's question with the client's body, answered as HTTP."""
        return self.decide(classify(body), body, retry_count, now)

    def decide(self, asked: Request | Refusal, body: bytes, retry_count: bytes | None, now: float) -> bytes:
        """The second half of `check`, for a body that was read elsewhere."""
        if isinstance(asked, Refusal):
            return self._refuse(asked, "", body, now)
        service = self.fleet.by_name.get(asked.model)
        if service is None:
            message = f"The model '{asked.model[:200]}' does not exist. GET /v1/models lists those that do."
            return self._refuse(Refusal(Reason.MODEL_NOT_FOUND, message, param="model"), "", body, now)
        tally = self.tally(service.key)
        tally.arrive(asked.prompt, retry=self._refused.is_retry(retry_count, body, now))
        self.inflight.settle(now)
        chosen = pick(service.endpoints, self.inflight.loads, asked.prompt)
        if chosen is None:
            return self._refuse(_nobody(service, asked.model), service.key, body, now)
        if chosen.endpoint.role is Role.DECODE:
            tally.prefill(remote=chosen.prefill is not None)
        return _go(service, chosen, self.inflight.begin(service.key, chosen, now))

    def ended(self, record: Record, now: float) -> None:
        """One line of the access log."""
        if record.ticket is None:
            if record.host:
                self.inflight.end("", record.host, now)
            return
        flight = self.inflight.end(record.ticket, record.host or "", now)
        if flight is None:
            return
        if record.reset_before_first_byte:
            self.inflight.doubt(record.host or flight.endpoint, now)
        if flight.service in self.fleet.services:
            self.tally(flight.service).end(record)

    def _refuse(self, refusal: Refusal, service: str, body: bytes, now: float) -> bytes:
        self.tally(service).refuse(refusal.reason)
        self._refused.remember(body, now)
        reply = answer(refusal, self._random)
        if reply.deniable:
            return written(reply)
        return response(200, (("x-plimsoll-cluster", "picker"), ("x-plimsoll-reply", to_header(reply))))


def written(reply: Answer) -> bytes:
    """A refusal as it goes to the client."""
    return response(reply.status, reply.headers.items(), reply.body)


def _nobody(service: Service, model: str) -> Refusal:
    if any(e.live and e.role is not Role.PREFILL for e in service.endpoints):
        return Refusal(Reason.NO_ENDPOINT, f"No engine of the model '{model}' can be reached right now.")
    return Refusal(Reason.MODEL_STARTING, f"The model '{model}' is starting: none of its engines is ready yet.")


def _go(service: Service, chosen: Pick, ticket: str) -> bytes:
    endpoints = ",".join(e.address for e in (chosen.endpoint, *chosen.spares))
    headers = [
        ("x-plimsoll-cluster", PICK + service.key),
        ("x-plimsoll-endpoint", endpoints),
        ("x-plimsoll-ticket", ticket),
    ]
    if chosen.prefill is not None:
        headers.append(("x-plimsoll-prefill", chosen.prefill.address))
    return response(200, headers)
