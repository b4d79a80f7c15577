"""The gates of all services at this gateway, kept in line with the fleet and with what the operator tells.

Problem: services and engines come and go, classes change, and what the operator tells can vanish, while requests wait;
and a fault in admission must not cost a request.

Idea: level-triggered, like the fleet itself: after each change every service has the guard that it should have, and who
waited at one that is no more is handed back to be decided anew. A guard that fails is thrown away with its trace in the
log; its requests go on without a gate until the next look makes a new one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from plimsoll.core.admission import Decision, Limits, Request
from plimsoll.core.admission.answers import AnswerBytes
from plimsoll.core.picking.choose import eligible
from plimsoll.core.picking.endpoint import Role
from plimsoll.gateway.accesslog import Record
from plimsoll.gateway.endpoints import Fleet, Service
from plimsoll.gateway.guard import Guard, Running, caps
from plimsoll.gateway.inflight import InFlight
from plimsoll.gateway.policy import Policy
from plimsoll.gateway.visit import Visit

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class Admission:
    """Of one gateway pod. All times are monotonic seconds, `unix` is the same moment since the epoch."""

    def __init__(self, gateway: str, inflight: InFlight) -> None:
        self.guards: dict[str, Guard] = {}
        self._gateway = gateway
        self._inflight = inflight
        self._fleet: Fleet | None = None
        self._running: dict[str, Running] = {}
        self._answers: dict[str, AnswerBytes] = {}
        self._stranded: list[Visit] = []

    def __len__(self) -> int:
        """Requests at engines."""
        return len(self._running)

    def set_fleet(self, fleet: Fleet, now: float, unix: float) -> None:
        """From now on this is the fleet. `stranded` and `release` of all are to be called next."""
        self._fleet = fleet
        for key in self._answers.keys() - fleet.services.keys():
            del self._answers[key]
        for key in list(self.guards):
            if key not in fleet.services:
                self._dissolve(key)
        for service in fleet.services.values():
            self._safely(service.key, self._follow, service, now, unix)
        self.refresh(now)

    def refresh(self, now: float) -> list[str]:
        """Bring all guards in line with the engines that can be used; returns those with a change."""
        return [key for key in list(self.guards) if self._safely(key, self._place, key, now)]

    def tick(self, now: float, unix: float) -> None:
        """To be called every second; `release` of all is to be called next."""
        for key, guard in list(self.guards.items()):
            self._safely(key, guard.tick, now, unix)

    def comes_back(self, visit: Visit, now: float) -> bool:
        """Whether the request was refused at its place and told to come again."""
        guard = self.guards.get(visit.place)
        if guard is None or not guard.gate.tickets:
            return False
        return bool(self._safely(guard.key, guard.comes_back, visit, now))

    def offer(self, visit: Visit, now: float, room: bool = True) -> Decision | None:
        """Decide about a request at its place; None: there is no gate. room: it may be held."""
        guard = self.guards.get(visit.place)
        return None if guard is None else self._safely(guard.key, guard.offer, visit, now, room)

    def refuse(self, visit: Visit, now: float) -> Decision | None:
        """Turn a request away at its place; None: there is no gate."""
        guard = self.guards.get(visit.place)
        return None if guard is None else self._safely(guard.key, guard.refuse, visit, now)

    def forgive(self, visit: Visit, now: float) -> None:
        """The refusal at its place is one that its client is not told."""
        guard = self.guards.get(visit.place)
        if guard is not None:
            self._safely(guard.key, guard.forgive, visit, now)

    def release(self, key: str, now: float) -> list[tuple[Visit, Decision]]:
        """Who waited for this service and need not wait any longer."""
        guard = self.guards.get(key)
        if guard is None or not guard.held:
            return []
        return self._safely(key, guard.release, now) or []

    def stranded(self) -> list[Visit]:
        """Who waited at a gate that is no more: each is to be decided anew."""
        if not self._stranded:
            return []
        stranded, self._stranded = self._stranded, []
        for visit in stranded:
            visit.request = None
        return stranded

    def wake_s(self, key: str) -> float:
        """When `release` of this service is to be called although nothing has happened; infinity for not at all."""
        guard = self.guards.get(key)
        if guard is None or not guard.held:
            return math.inf
        woken = self._safely(key, guard.wake_s)
        return math.inf if woken is None else woken

    def began(self, visit: Visit, address: str, now: float) -> None:
        """The request goes to an engine, let in by its gate or without one."""
        request = visit.request
        if request is None:
            prompt = visit.prompt
            request = Request(
                visit.ticket, "", visit.tenant, visit.arrived_s, prompt.tokens,
                max_tokens=visit.max_tokens, sequences=prompt.sequences,
            )  # fmt: skip
        waited_s = now - visit.arrived_s
        self._running[visit.ticket] = Running(request, visit.place, address, waited_s, visit.stream)

    def end(self, ticket: str, record: Record | None, now: float) -> None:
        """A request at an engine has ended; record: None where it is lost. `release` is to be called next."""
        one = self._running.pop(ticket, None)
        guard = None if one is None else self.guards.get(one.place)
        if one is not None and guard is not None:
            self._safely(guard.key, guard.end, ticket, one, record, now)

    def cancel(self, visit: Visit, now: float) -> None:
        """The client of a held request has left."""
        guard = self.guards.get(visit.place)
        if guard is not None:
            self._safely(guard.key, guard.cancel, visit.ticket, now)

    def withdraw(self, visit: Visit, now: float) -> None:
        """A request that its gate has just let in, or holds again, will not be sent."""
        guard = self.guards.get(visit.place)
        if guard is not None:
            self._safely(guard.key, guard.withdraw, visit.ticket, now)

    def why(self, visit: Visit) -> tuple[int, Limits | None]:
        """What a refusal at its place is explained by: ready engines, and what one holds where that is too little."""
        guard = self.guards.get(visit.place)
        if guard is None:
            return 0, None
        return len(guard.gate.fleet.replicas), self._safely(guard.key, guard.too_small, visit)

    def signals(self, key: str) -> dict[str, Any]:
        """The gate's part of `admission` in `/signals`; all zero for a service without a gate."""
        guard = self.guards.get(key)
        if guard is None:
            return {"held": 0, "held_work_s": 0.0, "ticket_work_s": 0.0, "in_use": 0, "units": 0}
        gate = guard.gate
        used = [r.sequences + self._inflight.strangers(r.address) for r in gate.fleet.replicas.values()]
        return {
            "held": len(guard.held),
            "held_work_s": round(gate.held_work_s, 6),
            "ticket_work_s": round(gate.tickets.coming_s, 6),
            "in_use": max(used, default=0),
            "units": guard.units,
        }

    def learned(self, key: str) -> tuple[float, float]:
        """Of the engine where it is the most: its steps' time over the model's, and seconds that first tokens are later
        than the model says; 1 and 0 where nothing is known."""
        guard = self.guards.get(key)
        replicas = () if guard is None else guard.gate.fleet.replicas.values()
        return max((r.pace for r in replicas), default=1.0), max((r.unseen_s for r in replicas), default=0.0)

    def _follow(self, service: Service, now: float, unix: float) -> None:
        """Give the service the guard that its policy wants."""
        policy, guard = service.policy, self.guards.get(service.key)
        if policy is None or policy.published is None or policy.published.limits is None:
            self._dissolve(service.key)
        elif not policy.gated:
            return  # the model is still that of the classes before: so is the guard, if there is one
        elif guard is not None and guard.fits(policy):
            guard.told(policy, now, unix)
        else:
            self._dissolve(service.key)
            made = self.guards[service.key] = self._made(service.key, policy, now, unix)
            if guard is not None:
                made.gate.tickets = guard.gate.tickets  # what clients were told holds

    def _made(self, key: str, policy: Policy, now: float, unix: float) -> Guard:
        answers = self._answers.setdefault(key, AnswerBytes())
        guard = Guard(key, policy, self._gateway, answers, now)
        guard.tick(now, unix)
        return guard

    def _dissolve(self, key: str) -> None:
        guard = self.guards.pop(key, None)
        if guard is not None:
            self._stranded += guard.held.values()

    def _place(self, key: str, now: float) -> bool:
        assert self._fleet is not None
        guard, service, loads = self.guards[key], self._fleet.services[key], self._inflight.loads
        able = [e for e in service.endpoints if e.routable and e.role is not Role.PREFILL]
        sure = {e.address for e in eligible(able, loads)}
        strangers = {e.address: self._inflight.strangers(e.address) for e in able}
        revisions = {e.revision for e in able if e.role is Role.DECODE}
        pairs = (e for e in service.endpoints if e.role is Role.PREFILL and e.revision in revisions)
        prefills = frozenset(e.address for e in eligible(pairs, loads))
        return guard.place(caps(guard.units, strangers, strangers.keys() - sure), prefills, self._running_at(key), now)

    def _running_at(self, key: str) -> Iterator[Running]:
        return (one for one in self._running.values() if one.place == key)

    def _safely(self, key: str, act: Callable[P, T], *args: P.args, **named: P.kwargs) -> T | None:
        """What `act` returns; None if it fails, and then the guard is no more."""
        try:
            return act(*args, **named)
        except Exception:  # the boundary between admission and the requests that must not suffer from it
            log.exception("admission of %s failed; its requests are picked without it until the next look", key)
            self._dissolve(key)
            return None
