"""The gate of one service as this gateway keeps it: its own share, its own clock, and requests in place of numbers.

Problem: the pure gate knows replicas that are ready and ends that are told; here engines come and go and come back with
what they hold, Envoy carries requests that the gate never saw, and what the operator has told is of another clock and
for all gateways together.

Idea: what is running is remembered beside the gate, so that a replica that returns, or a gate made anew for other
classes, begins with what is there. Requests at an engine that are none of ours count as another gateway's share of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final

import msgspec

from plimsoll.core.admission import Decision, Gate, Limits, Outcome, Outlook, Request
from plimsoll.core.admission.answers import AnswerBytes
from plimsoll.core.admission.fairness import TENANT_MEMORY_S
from plimsoll.core.admission.newcomers import Newcomers
from plimsoll.gateway.accesslog import Outcome as Ending
from plimsoll.gateway.accesslog import Record
from plimsoll.gateway.policy import Policy
from plimsoll.gateway.settings import LONGEST_HOLD_SECONDS
from plimsoll.gateway.visit import Visit

MOST_TENANTS: Final = 1000  # remembered by name; further ones share a turn
# A prompt's tokens are guessed from its bytes: a guess alone never says that it fits nowhere, unless it is far off.
SURE_ROOM: Final = 0.75
DOUBT: Final = 4


class Running(msgspec.Struct, eq=False):
    """A request at an engine. waited_s: from its question until it was let in."""

    request: Request
    place: str
    address: str
    waited_s: float
    stream: bool
    adopted: bool = False  # by a gate that has not let it in: nothing is learned from its end


class Guard:
    """One service. Raises ValueError for a policy that is not gated."""

    def __init__(self, key: str, policy: Policy, gateway: str, answers: AnswerBytes, now: float) -> None:
        self.key = key
        self.policy = policy  # with its limits, which are looked for once
        self._limits = _limits(policy)
        self.gate = Gate(policy.classes, self._limits, policy.tenants)
        self.held: dict[str, Visit] = {}
        self._gateway = gateway
        self._answers = answers
        self._caps: dict[str, int] | None = {}  # None: to be given to the gate anew, none among them
        self._prefills: frozenset[str] = frozenset()
        self._tenants: dict[str, float] = {}  # when each was last seen
        self._overdue: list[str] = []  # tickets held for longer than Envoy waits
        self._newcomers = Newcomers(now)

    @property
    def units(self) -> int:
        """Sequences of each replica that this gateway may use."""
        assert self.policy.published is not None
        return self.policy.published.units(self._gateway)

    @property
    def in_use(self) -> int:
        """Most sequences that this gateway has at one replica."""
        return max((replica.sequences for replica in self.gate.fleet.replicas.values()), default=0)

    def wake_s(self) -> float:
        """When `release` is to be called although nothing has happened; infinity for not at all."""
        return self.gate.wake_s

    def fits(self, policy: Policy) -> bool:
        """Whether the gate can go on with this policy; else another one is needed."""
        return policy.classes == self.policy.classes

    def told(self, policy: Policy, now: float, unix: float) -> None:
        """What the operator or the user has changed."""
        if policy is self.policy:
            return
        before, limits = self.policy, self._limits
        self.policy, self._limits = policy, _limits(policy)
        if policy.tenants != before.tenants:
            self.gate.set_tenants(policy.tenants)
        moved = limits != self._limits
        self.gate.tick(now, self._outlook(now, unix), self._limits if moved else None)
        if moved:
            self._caps = None  # shares are of the batch, which may be another one

    def place(self, caps: Mapping[str, int], prefills: frozenset[str], running: Iterable[Running], now: float) -> bool:
        """The ready replicas with what this gateway may have there; True if anything has changed.

        running: all requests at engines of this service; those at a replica that is new here are counted.
        """
        if caps == self._caps and prefills == self._prefills:
            return False
        new = caps.keys() - (self._caps or {}).keys()
        self._caps, self._prefills = dict(caps), prefills
        self.gate.set_replicas(caps, now, prefills)
        for one in running if new else ():
            if one.address in new and self.gate.adopt(self._known(one.request), one.address, now):
                one.adopted = True
        return True

    def comes_back(self, visit: Visit, now: float) -> bool:
        """Whether it was refused here before and told to come again."""
        return self.gate.tickets.find(self._request(visit), now) is not None

    def offer(self, visit: Visit, now: float, room: bool) -> Decision:
        """Decide about it; it is kept where it is held. room: whether the gateway can hold any more."""
        request = self._request(visit)
        decision = self.gate.offer(request, now)
        if decision.outcome is Outcome.HELD:
            if not room or len(self.held) >= self.policy.max_held:
                self.gate.cancel(visit.ticket, now)
                return self.gate.refuse(request, now)
            self.held[visit.ticket] = visit
        return decision

    def refuse(self, visit: Visit, now: float) -> Decision:
        """Turn it away for a reason that the gate does not know, and to nowhere else."""
        return self.gate.refuse(replace(self._request(visit), fallback=False), now)

    def forgive(self, visit: Visit, now: float) -> None:
        """A refusal that its client is not told: it has no ticket here."""
        ticket = self.gate.tickets.find(self._request(visit), now)
        if ticket is not None:
            self.gate.tickets.settle(ticket)

    def too_small(self, visit: Visit) -> Limits | None:
        """The limits of an engine, where even an empty one could not hold it."""
        fleet = self.gate.fleet
        return None if fleet.could_hold(fleet.need(self._request(visit))) else fleet.limits

    def release(self, now: float) -> list[tuple[Visit, Decision]]:
        """Those who waited and need not any longer."""
        decisions = self.gate.release(now)
        overdue, self._overdue = self._overdue, []
        decisions += [self._give_up(self.held[ticket], now) for ticket in overdue if ticket in self.held]
        return [(self.held.pop(decision.id), decision) for decision in decisions]

    def cancel(self, ticket: str, now: float) -> bool:
        """Its client has left; False if it is not held."""
        if self.held.pop(ticket, None) is None:
            return False
        self.gate.cancel(ticket, now)
        return True

    def withdraw(self, ticket: str, now: float) -> None:
        """It was let in, or is held, and goes nowhere."""
        if not self.cancel(ticket, now):
            self.gate.end(ticket, now)

    def end(self, ticket: str, one: Running, record: Record | None, now: float) -> None:
        """A request at an engine has ended; record: None where it is lost."""
        ttft_s = output = None
        first_s = None if record is None else record.ttft_s
        if record is not None and first_s is not None:
            output = self._output(one, record)
            if record.host in (None, "", one.address) and not one.adopted:
                ttft_s = first_s - (record.received_us or 0) / 1e6 - one.waited_s
        self.gate.end(ticket, now, output, None if ttft_s is None else max(ttft_s, 0.0))

    def tick(self, now: float, unix: float) -> None:
        """Once a second."""
        self._newcomers.look(self.gate.offered_work_s, now)
        self.gate.tick(now, self._outlook(now, unix))
        self._overdue = [t for t, visit in self.held.items() if now - visit.arrived_s >= LONGEST_HOLD_SECONDS]
        for name in [name for name, seen_s in self._tenants.items() if now - seen_s > TENANT_MEMORY_S]:
            del self._tenants[name]

    def _give_up(self, visit: Visit, now: float) -> Decision:
        self.gate.cancel(visit.ticket, now)
        return self.gate.refuse(self._request(visit), now)

    def _request(self, visit: Visit) -> Request:
        """The request as the gate is asked."""
        if visit.request is None:
            prompt, klass = visit.prompt, self.policy.class_of(visit.klass).name
            visit.request = Request(  # by position: names would cost a microsecond
                visit.ticket,
                klass,
                self._tenant(visit.tenant, visit.arrived_s),
                visit.arrived_s,
                self._tokens(prompt.tokens, prompt.sequences),
                0,
                visit.max_tokens,
                prompt.sequences,
                None,
                visit.digest,
                visit.idempotency_key,
                visit.fallback is not None,
                visit.blocks,
                visit.retry,
            )
        return visit.request

    def _outlook(self, now: float, unix: float) -> Outlook:
        """What is told, on this clock and as far as it is this gateway's share."""
        assert self.policy.published is not None
        return self.policy.published.outlook(self._gateway, self._newcomers.work, now - unix)

    def _output(self, one: Running, record: Record) -> int | None:
        if not one.stream or record.outcome is not Ending.ANSWERED:
            return None
        return self._answers.tokens(record.sent or 0, one.request.sequences, self._limits.output_mean)

    def _tenant(self, name: str, now: float) -> str:
        if name not in self._tenants and name not in self.policy.tenants and len(self._tenants) >= MOST_TENANTS:
            return ""
        self._tenants[name] = now
        return name

    def _tokens(self, tokens: int, sequences: int) -> int:
        sure = int(SURE_ROOM * self._limits.kv_tokens / sequences)
        return tokens if tokens <= sure else max(sure, tokens // DOUBT)

    def _known(self, request: Request) -> Request:
        """A running request in the words of this gate, whose classes may be others."""
        klass = self.policy.class_of(request.klass.encode()).name
        return request if request.klass == klass else replace(request, klass=klass)


def _limits(policy: Policy) -> Limits:
    if policy.published is None or policy.published.limits is None:
        raise ValueError("nothing is told by which requests could be let in")
    return policy.published.limits


def caps(units: int, strangers: Mapping[str, int], doubtful: Collection[str]) -> dict[str, int]:
    """Sequences that this gateway may have at each endpoint, by address.

    strangers: requests at each that are none of ours. doubtful: to be avoided while there are others.
    """
    avoid = doubtful if len(doubtful) < len(strangers) else ()
    return {a: 0 if a in avoid else max(0, units - others) for a, others in strangers.items()}
