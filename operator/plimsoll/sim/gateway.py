"""One gateway of the simulated fleet: the real gate (`core.admission`), kept in line as the gateway keeps it.

Problem: the decision is the core's, but what it is told, when, and what it learns from an answer's end is the gateway's
doing, and half of admission's errors live there.

Idea: the same calls in the same order as `plimsoll.gateway` makes them (guard, admission, picker): offer, hold, release
when something has ended or changed and when the gate wakes, one tick a second, a share of each engine as published.
Answers' tokens are guessed from their bytes, here one for each token. Without a gate, the engine with the least in
flight takes a request, as the picker does it. Clients that come back say so: what is known here as refused before, or
as the holder of a ticket, is no new demand.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Final

from plimsoll.core import buckets
from plimsoll.core.admission import ClassPolicy, Decision, Gate, Outcome, Outlook, Request, TenantPolicy
from plimsoll.core.admission.answers import AnswerBytes
from plimsoll.core.admission.newcomers import Newcomers
from plimsoll.core.admission.published import Published
from plimsoll.core.admission.returning import Refused
from plimsoll.core.picking.choose import BLOCK_TOKENS, Standing
from plimsoll.core.picking.endpoint import Endpoint, Load, Prompt, Role
from plimsoll.core.ports import Buckets, ServiceReading
from plimsoll.sim.visit import Visit

LONGEST_HOLD_S: Final = 120.0
_HASHES: Final = 2**64
_DEFAULT_CLASS: Final = "default"
_REASONS: Final = {
    Outcome.DOWNGRADED: "downgraded",
    Outcome.SHED_SATURATED: "overloaded",
    Outcome.SHED_STARTING: "model_starting",
    Outcome.SHED_QUOTA: "quota_exceeded",
    Outcome.SHED_DEADLINE: "deadline_exceeded",
    Outcome.SHED_NO_CAPACITY: "no_endpoint",
}


class Gateway:
    """Of one service. All times are of the simulation's clock; epoch_s: its zero, seconds since the epoch. fallback:
    whether another service takes what this one cannot."""

    def __init__(
        self,
        name: str,
        classes: tuple[ClassPolicy, ...],
        tenants: Mapping[str, TenantPolicy],
        max_held: int,
        epoch_s: float,
        fallback: bool = False,
    ) -> None:
        self.name = name
        self.gate: Gate | None = None
        self.held: dict[str, Visit] = {}
        self.running: dict[str, Visit] = {}
        self.told: Published | None = None
        self._classes, self._tenants, self._max_held, self._epoch_s = classes, tenants, max_held, epoch_s
        self._fallback = fallback
        self._names = {one.name for one in classes}
        self._default = default_class(classes)
        self._endpoints: list[Endpoint] = []
        self._loads: dict[str, Load] = {}
        self._standing = Standing((), self._loads)
        self._turn = 0
        self._caps: dict[str, int] = {}
        self._prefills: frozenset[str] = frozenset()
        self._newcomers = Newcomers(0.0)
        self._overdue: list[str] = []
        self._answers = AnswerBytes()
        self._arrived = self._arrived_tokens = self._retried = self._answered = self._failed = 0
        self._lately = Refused()
        self._refused: Counter[str] = Counter()
        self._outcomes: Counter[str] = Counter()
        self._ttft = [0.0] * len(buckets.LATENCY_EDGES_S)
        self._ttft_s = 0.0
        self._e2e = [0.0] * len(buckets.LATENCY_EDGES_S)
        self._e2e_s = 0.0

    @property
    def wake_s(self) -> float:
        """When `release` is to be called although nothing has happened."""
        return math.inf if self.gate is None or not self.held else self.gate.wake_s

    # ---------------------------------------------------------------- what it is told

    def set_told(self, told: Published | None, now_s: float) -> list[Visit]:
        """What the operator publishes; returns those who waited at a gate that is no more."""
        before, self.told = self.told, told
        if told is None or told.limits is None:
            stranded, self.held, self.gate = list(self.held.values()), {}, None
            return stranded
        if self.gate is None:
            self.gate = Gate(self._classes, told.limits, self._tenants)
            self._caps, self._newcomers = {}, Newcomers(now_s)
            self.tick(now_s)
        else:
            moved = before is None or before.limits != told.limits
            self.gate.tick(now_s, self._outlook(now_s), told.limits if moved else None)
            if moved:
                self._caps = {}
        self._place(now_s)
        return []

    def set_endpoints(self, endpoints: list[Endpoint], now_s: float) -> None:
        """The engines that can be used."""
        self._endpoints = endpoints
        for gone in self._loads.keys() - {one.address for one in endpoints}:
            del self._loads[gone]
        for one in endpoints:
            self._loads.setdefault(one.address, Load())
        self._standing = Standing(endpoints, self._loads)
        self._place(now_s)

    def tick(self, now_s: float) -> None:
        """Once a second; `release` is to be called next."""
        if self.gate is None:
            return
        self._newcomers.look(self.gate.offered_work_s, now_s)
        self.gate.tick(now_s, self._outlook(now_s))
        self._overdue = [key for key, one in self.held.items() if now_s - one.asked.at_s >= LONGEST_HOLD_S]

    # ---------------------------------------------------------------- requests

    def offer(self, visit: Visit, now_s: float, *, first: bool = True) -> Decision | None:
        """Decide about a request; None: there is no gate. first: it has only just come."""
        again = first and self._is_retry(visit, now_s)
        if again:
            self._retried += 1
        elif first:
            self._arrived += 1
            self._arrived_tokens += visit.asked.prompt_tokens
        if self.gate is None:
            return None
        request = self._request(visit)
        if again:
            request = visit.request = replace(request, again=True)
        decision = self.gate.offer(request, now_s)
        if decision.outcome is Outcome.HELD:
            if len(self.held) >= self._max_held:
                self.gate.cancel(request.id, now_s)
                return self.gate.refuse(request, now_s)
            self.held[request.id] = visit
            visit.waited = True
            self._outcomes[Outcome.HELD] += 1
        return decision

    def release(self, now_s: float) -> list[tuple[Visit, Decision | None]]:
        """Those who waited and need not any longer."""
        if self.gate is None or not self.held:
            return []
        decisions = self.gate.release(now_s)
        overdue, self._overdue = self._overdue, []
        for key in overdue:
            if key in self.held:
                self.gate.cancel(key, now_s)
                decisions.append(self.gate.refuse(self._request(self.held[key]), now_s))
        return [(self.held.pop(one.id), one) for one in decisions]

    def choose(self, visit: Visit, decision: Decision | None) -> tuple[str, str]:
        """Address of its engine and of its prefill engine; "" for none."""
        tokens = visit.asked.prompt_tokens
        if decision is not None and decision.address is not None:
            whole = tokens >= BLOCK_TOKENS and decision.prefill is not None
            return decision.address, decision.prefill or "" if whole else ""
        found = self._standing.pick(Prompt(tokens))
        if found is None:
            return "", ""
        return found.endpoint.address, found.prefill.address if found.prefill else ""

    def began(self, visit: Visit, gated: bool) -> None:
        """It goes to an engine."""
        self._turn += 1
        self.running[str(visit.id)] = visit
        if gated:
            self._outcomes[Outcome.ADMITTED] += 1
        for address in filter(None, (visit.address, visit.prefill)):
            load = self._loads.setdefault(address, Load())
            load.busy(load.inflight + 1, self._turn)

    def shed(self, visit: Visit, decision: Decision, now_s: float) -> str:
        """It was refused, or goes to the fallback; why, as the gateway's answer has it."""
        reason = _REASONS[decision.outcome]
        if decision.outcome is Outcome.SHED_NO_CAPACITY and self.gate is not None and self.gate.fleet.replicas:
            reason = "request_too_large"
        self._outcomes[decision.outcome] += 1
        if decision.outcome is not Outcome.DOWNGRADED:
            self.refuse(visit, reason, now_s)
        return reason

    def refuse(self, visit: Visit, reason: str, now_s: float) -> None:
        """It was refused, by a gate or without one."""
        self._refused[reason] += 1
        self._lately.remember(visit.id, now_s)

    def ended(self, visit: Visit, answered: bool, now_s: float) -> None:
        """A request at an engine has ended. `release` is to be called next."""
        key = str(visit.id)
        self.running.pop(key, None)
        for address in filter(None, (visit.address, visit.prefill)):
            if address in self._loads:
                self._loads[address].inflight -= 1
        ttft_s = output = None
        if answered and visit.first_s is not None and visit.admitted_s is not None:
            self._answered += 1
            whole_s = visit.first_s - visit.asked.at_s
            self._ttft[buckets.index(buckets.LATENCY_EDGES_S, whole_s)] += 1
            self._ttft_s += whole_s
            e2e_s = now_s - visit.asked.at_s
            self._e2e[buckets.index(buckets.LATENCY_EDGES_S, e2e_s)] += 1
            self._e2e_s += e2e_s
            limits = None if self.told is None else self.told.limits
            mean = None if limits is None else limits.output_mean
            output = self._answers.tokens(visit.asked.output_tokens, 1, mean)
            ttft_s = None if visit.adopted else visit.first_s - visit.admitted_s
        else:
            self._failed += 1
        if self.gate is not None:
            self.gate.end(key, now_s, output, ttft_s)

    def reading(self) -> ServiceReading:
        """What it tells the operator."""
        gate, told = self.gate, self.told
        replicas = () if gate is None else gate.fleet.replicas.values()
        return ServiceReading(
            arrived=self._arrived,
            arrived_tokens=self._arrived_tokens,
            retried=self._retried,
            answered=self._answered,
            failed=self._failed,
            cancelled=0,
            refused=dict(self._refused),
            ttft_s=Buckets(buckets.LATENCY_EDGES_S, tuple(self._ttft), self._ttft_s),
            waiting=len(self.held),
            held_work_s=0.0 if gate is None else gate.held_work_s,
            ticket_work_s=0.0 if gate is None else gate.tickets.coming_s,
            units=0 if gate is None or told is None else told.units(self.name),
            in_use=max((one.sequences for one in replicas), default=0),
            outcomes={str(outcome): float(count) for outcome, count in self._outcomes.items()},
            inflight={address: load.inflight for address, load in self._loads.items()},
            e2e_s=Buckets(buckets.LATENCY_EDGES_S, tuple(self._e2e), self._e2e_s),
        )

    # ---------------------------------------------------------------- inside

    def _place(self, now_s: float) -> None:
        """The gate's replicas, each with what this gateway may have there."""
        if self.gate is None or self.told is None:
            return
        units = self.told.units(self.name)
        caps = {one.address: units for one in self._endpoints if one.role is not Role.PREFILL}
        prefills = frozenset(one.address for one in self._endpoints if one.role is Role.PREFILL)
        if caps == self._caps and prefills == self._prefills:
            return
        new = caps.keys() - self._caps.keys()
        self._caps, self._prefills = caps, prefills
        self.gate.set_replicas(caps, now_s, prefills)
        for visit in self.running.values() if new else ():
            if visit.address in new and self.gate.adopt(self._request(visit), visit.address, now_s):
                visit.adopted = True

    def _request(self, visit: Visit) -> Request:
        if visit.request is None:
            asked = visit.asked
            visit.request = Request(
                id=str(visit.id),
                klass=asked.klass if asked.klass in self._names else self._default,
                tenant=asked.tenant,
                arrived_s=asked.at_s,
                prompt_tokens=asked.prompt_tokens,
                max_tokens=visit.known,
                body_hash=visit.id,
                fallback=self._fallback,
                blocks=_blocks(asked.ids, asked.prompt_tokens),
            )
        return visit.request

    def _outlook(self, now_s: float) -> Outlook:
        assert self.told is not None
        return self.told.outlook(self.name, self._newcomers.work, -self._epoch_s)

    def _is_retry(self, visit: Visit, now_s: float) -> bool:
        """Whether it is known here that it was counted before."""
        if visit.attempt == 1:
            return False
        if self._lately.is_retry(True, visit.id, now_s):
            return True
        return self.gate is not None and self.gate.tickets.find(self._request(visit), now_s) is not None


def default_class(classes: Iterable[ClassPolicy]) -> str:
    """The class of requests that name none: the one called so, else the least."""
    known = list(classes)
    names = [one.name for one in known]
    if _DEFAULT_CLASS in names or not known:
        return _DEFAULT_CLASS
    return min(known, key=lambda one: one.priority).name


def _blocks(ids: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """Names of the prompt's blocks of 128 tokens, from those of its larger ones."""
    if not ids:
        return ()
    each = max(1, round(tokens / len(ids) / BLOCK_TOKENS))
    parts = ((name * each + part) % _HASHES for name in ids for part in range(each))
    return tuple(islice(parts, tokens // BLOCK_TOKENS))
