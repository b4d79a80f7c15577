"""The fleet in virtual time: one loop of events in which gateways, engines, starts and the operator take their turns.

Problem: a day of a million requests must run in minutes and twice the same, with the very code that decides in a
cluster, which must see no more here than it would there.

Idea: events have one order (`agenda`), and everything that is drawn comes from one seed. Engines are looked
at when something of theirs ends; the rest of the time they are a formula. The operator and the gates hear of the plant
by what engines and gateways export alone: counters when they are scraped, readiness, and the end of requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Final, TypeVar

from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.core.admission import Decision, Outcome, Told
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.scaling import TierDecision
from plimsoll.sim.agenda import Agenda
from plimsoll.sim.capped import CappedGateway, Capping, parts
from plimsoll.sim.clients import KEPT_S, Clients
from plimsoll.sim.fleet import Cards, Replica, Tier
from plimsoll.sim.gateway import Gateway
from plimsoll.sim.job import Job
from plimsoll.sim.log import Log
from plimsoll.sim.operator import BUSY_S, IDLE_S, POLL_S, TICK_S, Operator
from plimsoll.sim.plant import Plant, quiet_s
from plimsoll.sim.policies.base import Engines, Look, Plimsoll, Policy
from plimsoll.sim.setting import Setting
from plimsoll.sim.times import Times
from plimsoll.sim.visit import Asked, End, Visit

T = TypeVar("T")

_ENDS: Final = {"request_too_large": End.REFUSED, "downgraded": End.DOWNGRADED}  # by the reason, others shed
_STARTING: Final = Told(None, None, True)  # who comes while nothing is ready and there is no gate

_ENGINE, _KV, _SUBMIT, _READY, _ARRIVAL, _WAKE, _DRAIN, _SCRAPE, _POLL, _KILL, _TICK = range(11)


class World:
    """One run. done: called with every attempt when it has ended."""

    def __init__(
        self,
        service: InferenceService,
        plant: Plant,
        policy: Policy,
        setting: Setting,
        done: Callable[[Visit], None],
    ) -> None:
        self.log = Log()
        self.gaps = Times()
        self.in_flight = self._away = 0
        self._plant, self._policy, self._setting, self._done = plant, policy, setting, done
        random = Random(setting.seed)
        self._random = Random(random.getrandbits(64))
        roles = [Role(name) for name, _ in service.spec.tiers.items()]
        cards = Cards(setting.max_gpus)
        self.tiers = {role: Tier(role, plant, Random(random.getrandbits(64)), cards) for role in roles}
        self._clients = Clients(setting.clients, Random(random.getrandbits(64)))
        self._replicas: dict[str, Replica] = {}
        held = 0 if service.when_full == "Shed" else service.max_held
        names = [f"gateway-{n + 1}" for n in range(setting.gateways)]
        cap = policy.cap if isinstance(policy, Capping) else None
        shares = [0] * len(names) if cap is None else parts(cap.requests, len(names))
        doors = [Gateway if cap is None else partial(CappedGateway, cap=cap, part=part) for part in shares]
        about = service.classes, service.tenants, held, setting.epoch_s, service.fallback is not None
        self.gateways = [door(name, *about) for door, name in zip(doors, names, strict=True)]
        self.operator = Operator(service) if policy.operator else None
        own = isinstance(policy, Plimsoll)  # who else scales names nobody
        self._load = self.operator.load if self.operator is not None and own else None
        self._agenda = Agenda()
        self._at = self._agenda.at
        self._wakes = [math.inf] * setting.gateways
        self._coming: Iterator[Asked] = iter(())
        self._made = 0
        self._over = False

    def run(self, asked: Iterable[Asked]) -> None:
        """Everything that is asked, in order of time, until all of it has ended or the tail is over."""
        self._coming = iter(asked)
        for role, tier in self.tiers.items():
            for replica in tier.begin(self._setting.initial[role]):
                self._replicas[replica.name] = replica
                if self.operator is not None and self._setting.knows_starts:
                    self.operator.started(role, replica.phases)
                self._met(replica, 0.0)
        self._route(0.0)
        self.log.look(self.tiers, 0.0)
        self._next_arrival()
        self._at(0.0, _TICK, self._tick)
        self._at(POLL_S / 2, _POLL, self._poll)
        for role, at_s in self._setting.kills:
            self._at(at_s, _KILL, self._kill, role)
        limit_s = self._setting.end_s + self._setting.tail_s
        while self._agenda.next_s <= limit_s and not self._over:
            self._agenda.turn()
        self._finish(limit_s)

    # ---------------------------------------------------------------- events

    def _next_arrival(self) -> None:
        asked = next(self._coming, None)
        if asked is not None:
            self._at(asked.at_s, _ARRIVAL, self._arrive, asked)

    def _arrive(self, now_s: float, asked: Asked) -> None:
        self._next_arrival()
        self._made += 1
        visit = Visit(self._made, asked, asked.output_tokens if self._setting.told_max else None)
        visit.gateway = self._any_gateway()
        self._policy.arrived(asked, now_s)
        self._offer(visit, now_s)

    def _any_gateway(self) -> int:
        return self._random.randrange(len(self.gateways)) if len(self.gateways) > 1 else 0

    def _offer(self, visit: Visit, now_s: float) -> None:
        self.in_flight += 1
        gateway = self.gateways[visit.gateway]
        self._act(visit, gateway.offer(visit, now_s), now_s)
        self._arm(visit.gateway, now_s)

    def _refused(self, visit: Visit, told: Told | None, reason: str, now_s: float) -> None:
        """A gateway has sent it away. told: what the answer says about coming back, None: nothing."""
        visit.reason, end = reason, _ENDS.get(reason, End.SHED)
        self._clients.tell(visit, told)
        self._ended(visit, end, now_s)
        back_s = self._clients.back_s(visit, told) if end is End.SHED else None
        if back_s is not None:
            self._away += 1
            self._at(now_s + back_s, _ARRIVAL, self._back, visit)

    def _back(self, now_s: float, before: Visit) -> None:
        """The client of a refused request tries again."""
        self._away -= 1
        visit = Visit(before.id, replace(before.asked, at_s=now_s), before.known, attempt=before.attempt + 1)
        visit.ticket_s, visit.honours = before.ticket_s, before.honours
        soon = before.end_s is not None and now_s - before.end_s < KEPT_S
        visit.gateway = before.gateway if soon else self._any_gateway()
        self._offer(visit, now_s)

    def _act(self, visit: Visit, decision: Decision | None, now_s: float) -> None:
        """What follows from a decision."""
        if decision is None or decision.outcome is Outcome.ADMITTED:
            self._send(visit, decision, now_s)
        elif decision.outcome is not Outcome.HELD:
            reason = self.gateways[visit.gateway].shed(visit, decision, now_s)
            self._refused(visit, decision.told, reason, now_s)

    def _send(self, visit: Visit, decision: Decision | None, now_s: float) -> None:
        """The request goes to its engine, by way of a prefill engine where there is one."""
        gateway, asked = self.gateways[visit.gateway], visit.asked
        address, prefill = gateway.choose(visit, decision)
        if not address:
            gateway.refuse(visit, "model_starting", now_s)
            self._refused(visit, _STARTING, "model_starting", now_s)
            return
        visit.admitted_s, visit.address, visit.prefill = now_s, address, prefill
        gateway.began(visit, decision is not None)
        self._replicas[address].visits[visit.id] = visit
        if asked.prompt_tokens + asked.output_tokens > self._plant.longest:
            self._lost(visit, End.REFUSED, "request_too_large", now_s)
            return
        visit.job = Job(visit.id, asked.prompt_tokens, asked.output_tokens, asked.ids, remote=bool(prefill))
        front_s = self._plant.frontend_s(asked.prompt_tokens)
        if not prefill:
            self._at(now_s + front_s, _SUBMIT, self._submit, visit)
            return
        self._replicas[prefill].visits[visit.id] = visit
        visit.leg = Job(visit.id, asked.prompt_tokens, 1, asked.ids, produce=True)
        self._at(now_s + self._plant.leg_s + front_s, _SUBMIT, self._submit_leg, visit)

    def _submit_leg(self, now_s: float, visit: Visit) -> None:
        replica = self._replicas.get(visit.prefill)
        if replica is None or visit.leg is None:
            return
        if visit.end is None:
            replica.engine.add(visit.leg, now_s)
            self._watch(replica, now_s)
        else:
            replica.visits.pop(visit.id)
            self._drain(now_s, replica)

    def _submit(self, now_s: float, visit: Visit) -> None:
        replica = self._replicas.get(visit.address)
        if visit.end is None and visit.job is not None and replica is not None:
            if visit.job.remote and visit.prefill not in self._replicas:
                visit.job.remote = False
            replica.engine.add(visit.job, now_s)
            self._watch(replica, now_s)

    def _watch(self, replica: Replica, now_s: float) -> None:
        """Takes in what an engine has done, and has it looked at again when something happens there."""
        engine = replica.engine
        for job, there_s in engine.sent:
            self._at(there_s, _KV, self._there, replica, job)
        engine.sent.clear()
        if engine.firsts:
            for job in engine.firsts:
                visit = replica.visits[job.name]
                if job is visit.job:
                    visit.first_s = job.first_s
            engine.firsts.clear()
        if engine.ends:
            ended, engine.ends = engine.ends, []
            for job in ended:
                self._job_ended(replica, job, now_s)
        if engine.due_s != replica.armed_s and engine.due_s < math.inf:
            self._at(engine.due_s, _ENGINE, self._engine, replica)
        replica.armed_s = engine.due_s

    def _engine(self, now_s: float, replica: Replica) -> None:
        if replica.armed_s == now_s and replica.name in self._replicas:
            replica.engine.advance(now_s)
            self._watch(replica, now_s)
            if replica.draining_s is not None:
                self._drain(now_s, replica)

    def _job_ended(self, replica: Replica, job: Job, now_s: float) -> None:
        visit = replica.visits.pop(job.name)
        if job is visit.leg:
            if visit.end is not None or visit.address not in self._replicas:
                replica.engine.fetched(job, now_s)
                return
            front_s = self._plant.leg_s + self._plant.frontend_s(visit.asked.prompt_tokens)
            self._at(now_s + front_s, _SUBMIT, self._submit, visit)
            return
        self.gateways[visit.gateway].ended(visit, True, now_s)
        self._ended(visit, End.OK, now_s)
        self._release(visit.gateway, now_s)

    def _there(self, now_s: float, replica: Replica, job: Job) -> None:
        """A prompt's KV has come to its decode engine."""
        if replica.name in self._replicas:
            visit = replica.visits[job.name]
            replica.engine.loaded(job, now_s)
            self._watch(replica, now_s)
            self._let_go(visit, now_s)

    def _let_go(self, visit: Visit, now_s: float) -> None:
        """The prefill engine need not keep the prompt's KV any longer."""
        source = self._replicas.get(visit.prefill)
        if source is not None and visit.leg is not None:
            source.engine.fetched(visit.leg, now_s)
            self._watch(source, now_s)
            self._drain(now_s, source)

    # ---------------------------------------------------------------- gateways

    def _release(self, number: int, now_s: float) -> None:
        for visit, decision in self.gateways[number].release(now_s):
            self._act(visit, decision, now_s)
        self._arm(number, now_s)

    def _arm(self, number: int, now_s: float) -> None:
        wake_s = self.gateways[number].wake_s
        if wake_s != self._wakes[number] and wake_s < math.inf:
            self._at(max(wake_s, now_s), _WAKE, self._wake, number, wake_s)
        self._wakes[number] = wake_s

    def _wake(self, now_s: float, number: int, wake_s: float) -> None:
        if self._wakes[number] == wake_s:
            self._wakes[number] = math.inf
            self._release(number, now_s)

    def _route(self, now_s: float) -> None:
        """Tells the gateways which engines there are."""
        endpoints = [one for tier in self.tiers.values() for one in tier.endpoints()]
        for number, gateway in enumerate(self.gateways):
            gateway.set_endpoints(endpoints, now_s)
            self._release(number, now_s)

    def _poll(self, now_s: float) -> None:
        """The operator asks the gateways."""
        if self.operator is not None:
            for gateway in self.gateways:
                self.operator.hear_gateway(gateway.name, self._setting.epoch_s + now_s, gateway.reading())
            self._at(now_s + POLL_S, _POLL, self._poll)

    # ---------------------------------------------------------------- replicas

    def _met(self, replica: Replica, now_s: float) -> None:
        """A replica is ready: it is asked for its metrics from now on."""
        if self.operator is not None:
            self._at(now_s + self._random.uniform(0.0, POLL_S), _SCRAPE, self._scrape, replica, -1)

    def _scrape(self, now_s: float, replica: Replica, steps: int) -> None:
        if not replica.live or self.operator is None:
            return
        reading = replica.engine.scraped(replica.name, now_s, self._setting.epoch_s + now_s)
        self._watch(replica, now_s)
        self.operator.hear_engine(replica.role, reading)
        busy = replica.engine.meters.steps != steps or replica.engine.running or replica.engine.waiting
        every_s = BUSY_S if busy else IDLE_S
        self._at(now_s + every_s, _SCRAPE, self._scrape, replica, replica.engine.meters.steps)

    def _ready(self, now_s: float, replica: Replica) -> None:
        if replica.gone_s is not None:
            return
        replica.ready = True
        if self.operator is not None:
            self.operator.started(replica.role, replica.took)
        self._met(replica, now_s)
        self._route(now_s)
        self.log.look(self.tiers, now_s)

    def _drain(self, now_s: float, replica: Replica) -> None:
        """One that was given back ends when it has nothing left to do."""
        tier = self.tiers[replica.role]
        if tier.may_end(replica, now_s):
            tier.end(replica, now_s)
            self._forget(replica)
            self._place(now_s)
            self.log.look(self.tiers, now_s)

    def _forget(self, replica: Replica) -> None:
        del self._replicas[replica.name]
        self.gaps.add(replica.engine.meters.gaps)

    def _kill(self, now_s: float, role: Role) -> None:
        """The busiest replica of a tier is gone at once, its streams with it; the Deployment makes another one."""
        tier = self.tiers[role]
        live = [one for one in tier.replicas.values() if one.live]
        if not live:
            return
        replica = max(live, key=lambda one: len(one.visits))
        tier.end(replica, now_s)
        self._forget(replica)
        lost, replica.visits = list(replica.visits.values()), {}
        for visit in lost:
            if visit.address == replica.name:
                self._lost(visit, End.FAILED, "", now_s)
            elif visit.job is not None:  # the decode engine reads the prompt itself
                visit.job.remote = False
                self._submit(now_s, visit)
        self._order(role, tier.desired, now_s)
        self._route(now_s)

    def _lost(self, visit: Visit, end: End, reason: str, now_s: float) -> None:
        """A request that was sent to an engine comes to nothing."""
        replica = self._replicas.get(visit.address)
        if replica is not None:
            replica.visits.pop(visit.id, None)
        visit.reason = reason
        self.gateways[visit.gateway].ended(visit, False, now_s)
        self._ended(visit, end, now_s)
        self._let_go(visit, now_s)

    def _order(self, role: Role, wanted: int, now_s: float) -> None:
        made, drained = self.tiers[role].set(wanted, now_s, self._load)
        for replica in made:
            self._replicas[replica.name] = replica
        self._place(now_s)
        for replica in drained:
            self._at(now_s + quiet_s(), _DRAIN, self._drain, replica)
        for name in [name for name, one in self._replicas.items() if one.gone_s is not None]:
            del self._replicas[name]
        if drained:
            self._route(now_s)
        self.log.look(self.tiers, now_s)

    def _place(self, now_s: float) -> None:
        """Nodes for pods that wait for one, as far as there are GPUs, oldest first."""
        waiting = [replica for tier in self.tiers.values() for replica in tier.pending.values()]
        for replica in sorted(waiting, key=lambda one: one.ordered_s):
            if self.tiers[replica.role].place(replica, now_s):
                self._at(replica.ready_s, _READY, self._ready, replica)

    # ---------------------------------------------------------------- the tick

    def _tick(self, now_s: float) -> None:
        decided = None if self.operator is None else self._decide(self.operator, now_s)
        ordered = {role: tier.desired for role, tier in self.tiers.items()}
        counts = None if decided is None else {role: one.replicas for role, one in decided.items()}
        for role, wanted in self._policy.wanted(self._shown(now_s, ordered, counts)).items():
            if wanted != ordered[role]:
                why = wanted if decided is None or decided[role].replicas != wanted else decided[role]
                self.log.changes.append((now_s, role, ordered[role], why))
                self._order(role, wanted, now_s)
        for number, gateway in enumerate(self.gateways):
            gateway.tick(now_s)
            self._release(number, now_s)
        if now_s < self._setting.end_s or self.in_flight or self._away:
            self._at(now_s + TICK_S, _TICK, self._tick)
        else:
            self._over = True

    def _shown(self, now_s: float, ordered: Mapping[Role, int], decided: Mapping[Role, int] | None) -> Look:
        counts = {role: tier.counts() for role, tier in self.tiers.items()}
        at_s = self._setting.epoch_s + now_s
        return Look(
            now_s,
            ordered,
            decided,
            Engines(self.tiers, partial(self._told, now_s, lambda one: one.engine.scraped(one.name, now_s, at_s))),
            tuple(gateway.reading() for gateway in self.gateways),
            {role: ready for role, (_, ready, _, _) in counts.items()},
            {role: starting for role, (_, _, starting, _) in counts.items()},
            Engines(self.tiers, partial(self._told, now_s, lambda one: one.engine.iteration(one.name, now_s))),
        )

    def _told(self, now_s: float, tell: Callable[[Replica], T], role: Role) -> tuple[T, ...]:
        """What a tier's ready engines tell of themselves now."""
        found = []
        for replica in list(self.tiers[role].replicas.values()):
            if replica.live:
                found.append(tell(replica))
                self._watch(replica, now_s)
        return tuple(found)

    def _decide(self, operator: Operator, now_s: float) -> Mapping[Role, TierDecision]:
        epoch_s = self._setting.epoch_s
        seen = {str(role): tier.seen(now_s, epoch_s) for role, tier in self.tiers.items()}
        ready = {role: [one.name for one in tier.replicas.values() if one.live] for role, tier in self.tiers.items()}
        names: Sequence[str] = [gateway.name for gateway in self.gateways]
        told = operator.told
        decision = operator.tick(epoch_s + now_s, seen, ready, names)
        if operator.told is not told:
            for number, gateway in enumerate(self.gateways):
                for visit in gateway.set_told(operator.told, now_s):
                    self._act(visit, None, now_s)
                self._release(number, now_s)
        return {Role(name): tier for name, tier in decision.tiers.items()}

    def _ended(self, visit: Visit, end: End, now_s: float) -> None:
        visit.end, visit.end_s = end, now_s
        self.in_flight -= 1
        self._done(visit)

    def _finish(self, limit_s: float) -> None:
        """What is left has not ended in time."""
        left: dict[int, Visit] = {}
        for replica in [*self._replicas.values()]:
            left |= replica.visits
            self._forget(replica)
        for gateway in self.gateways:
            left |= {one.id: one for one in (*gateway.held.values(), *gateway.running.values())}
        for visit in left.values():
            if visit.end is None:
                self._ended(visit, End.UNFINISHED, limit_s)
