"""Who is let in, who waits, who is sent away: the gate of one service at one gateway.

Problem: past the knee every further request makes less goodput, and what breaks first is not the newcomer's own time to
first token but the pace of everyone who is already there.

Idea: a request goes to a replica only if, with it there, its first token is predicted in time, the mean step of all
residents stays within the budget, and the KV of all fits. Otherwise it waits while that can still come true, and is
refused at once, with a ticket, when it cannot. State is explicit, and time is told with every call: who is let in
later comes out of `release`, to be called when a request ends, when replicas change, and at `wake_s`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from plimsoll.core.admission.fairness import Held, Lane
from plimsoll.core.admission.fleet import Fleet, Place
from plimsoll.core.admission.limits import ClassPolicy, Limits, Need
from plimsoll.core.admission.margin import Margin
from plimsoll.core.admission.outcome import NOT_AGAIN, Decision, Outcome, Request, Told
from plimsoll.core.admission.queue import HoldQueue
from plimsoll.core.admission.quota import Quotas, TenantPolicy
from plimsoll.core.admission.tickets import LONGEST_TOLD_S, Ticket, Tickets

_ANYBODY: Final = TenantPolicy()
PRESSED_S: Final = 10.0  # others want a place for so long (by e) after one was refused: longer than a burst
_NEVER: Final = frozenset({Outcome.SHED_NO_CAPACITY, Outcome.SHED_DEADLINE})  # coming back does not help


@dataclass(frozen=True)
class Outlook:
    """When there will be more capacity, as told at each tick. Absolute time on the gate's clock.

    ready_at_s: None if nobody knows. spare: GPU seconds of work a second that it will leave beyond what newcomers
    bring. starting: replicas start, or will when asked for; False: nothing will come of waiting for the first. later:
    when there will be still more, in their order, each with the spare from then on.
    """

    ready_at_s: float | None = None
    spare: float = 0.0
    starting: bool = True
    later: tuple[tuple[float, float], ...] = ()


class Gate:
    """Admission of one service. All times are of one clock; where it goes back, time stands still."""

    def __init__(self, classes: tuple[ClassPolicy, ...], limits: Limits, tenants: Mapping[str, TenantPolicy]) -> None:
        """Raises ValueError for no or equal classes, and for limits that were made for other ones."""
        self._index = {c.name: k for k, c in enumerate(classes)}
        if not classes or len(self._index) != len(classes):
            raise ValueError("classes must be at least one, each with a name of its own")
        if len(limits.tpot_s) != len(classes):
            raise ValueError("limits were made for other classes")
        self._classes = classes
        self._tenants = dict(tenants)
        self._now = -math.inf
        self._queue = HoldQueue(classes)
        self._quotas = Quotas()
        self._outlook = Outlook()
        self._margins = [Margin(c.slo.ttft_s) for c in classes]
        self._full_s = -math.inf  # when somebody found no room for the last time
        self._again_s = math.inf
        self.fleet = Fleet(limits)
        self.tickets = Tickets()
        self.outcomes = dict.fromkeys(Outcome, 0)  # how many requests have had each
        self.offered_work_s = 0.0  # GPU seconds of first attempts, whatever became of them
        self.retries = 0  # attempts that were known as a demand counted before

    @property
    def held(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @property
    def held_work_s(self) -> float:
        """GPU seconds of what waits."""
        return self._queue.work_s

    @property
    def tenants_known(self) -> int:
        """Tenants that are remembered for fairness."""
        return len(self._queue.accounts)

    @property
    def wakes(self) -> bool:
        """Whether somebody waits while no replica is ready: the service is to be woken."""
        return bool(self._queue) and not self.fleet.replicas

    @property
    def wake_s(self) -> float:
        """When `release` is to be called although nothing has happened; infinity for not at all."""
        return min(self._queue.expiry_s(), self._again_s if self._queue else math.inf)

    def tick(self, now: float, outlook: Outlook, limits: Limits | None = None) -> None:
        """The operator's outlook and, where it has changed, the model; forgets what is old. Raises ValueError."""
        now = self._advance(now)
        if limits is not None:
            if len(limits.tpot_s) != len(self._classes):
                raise ValueError("limits were made for other classes")
            self.fleet.set_limits(limits)
        self.fleet.settle()
        self._outlook = outlook
        self.tickets.expect(outlook.ready_at_s, outlook.spare, outlook.later)
        self.tickets.pass_time(now)
        self._queue.tidy(now)
        self._quotas.forget(self._tenants)

    def set_tenants(self, tenants: Mapping[str, TenantPolicy]) -> None:
        """Weights and quotas from now on; tenants without an entry weigh 1 and have no quota."""
        self._tenants = dict(tenants)

    def set_replicas(self, caps: Mapping[str, int], now: float, prefills: frozenset[str] = frozenset()) -> None:
        """The ready replicas, each with the sequences that this gateway may have there, and those that only prefill.

        Requests on a replica that is gone are forgotten. `release` is to be called next.
        """
        now = self._advance(now)
        before = bool(self.fleet.prefills)
        self.fleet.set_replicas(caps, now)
        self.fleet.set_prefills(set(prefills), now)
        if before != bool(prefills):  # prompts are read elsewhere than was reckoned for those that wait
            self._queue.measure(self.fleet.need, now)

    def offer(self, request: Request, now: float) -> Decision:
        """A request has come. Raises ValueError for an unknown class and for an id that is held or running."""
        now = self._advance(now)
        klass = self._index.get(request.klass)
        if klass is None:
            raise ValueError(f"klass must be one of {', '.join(self._index)}, not {request.klass!r}")
        if request.id in self._queue or request.id in self.fleet:
            raise ValueError(f"id {request.id!r} is held or running already")
        need = self.fleet.need(request)
        ticket = self.tickets.find(request, now)
        tenant = self._tenants.get(request.tenant, _ANYBODY)
        if ticket is not None or request.again:
            self.retries += 1
        else:
            self.offered_work_s += need.work_s
        if ticket is None:
            wait_s = self._quotas.take(request.tenant, tenant, need.kv_mean_tokens, now)
            if wait_s > 0:
                return self._over_quota(request, wait_s)
        if request.deadline_s is not None and request.deadline_s <= now:
            return self._shed(request, need, Outcome.SHED_DEADLINE, now)
        if not self.fleet.could_hold(need):
            return self._shed(request, need, Outcome.SHED_NO_CAPACITY, now)
        held = self._waiting(request, klass, need, ticket, tenant.weight, now)
        if not self.fleet.replicas:
            return self._from_zero(held, ticket, now)
        return self._let_in_or_hold(held, ticket, now)

    def release(self, now: float) -> list[Decision]:
        """Whoever waited and is now let in, or need not wait any longer."""
        now = self._advance(now)
        decisions = [self._expire(held, now) for held in self._queue.expired(now)]
        self._again_s = math.inf
        while self.fleet.replicas:
            held = self._queue.first()
            if held is None:
                break
            place = self._place(held, now)
            if place.replica is None and held.lane is Lane.LATE:
                held = self._queue.first(late=False)  # what misses anyway keeps nobody waiting
                if held is None:
                    break
                place = self._place(held, now)
            if place.replica is not None:
                self._queue.remove(held.request.id)
                decisions.append(self._let_in(held, place, now))
            elif place.first_token_s < math.inf:  # there is room, but it would be late
                self._queue.remove(held.request.id)
                decisions.append(self._expire(held, now))
            else:
                break
        return decisions

    def refuse(self, request: Request, now: float) -> Decision:
        """Turn away a request that is neither held nor running, for a reason that the gate does not know.

        Such as that too many wait already, or that the fallback service will not have it.
        """
        now = self._advance(now)
        need = self.fleet.need(request)
        if not self.fleet.could_hold(need):
            return self._shed(request, need, Outcome.SHED_NO_CAPACITY, now)
        outcome = Outcome.SHED_SATURATED if self.fleet.replicas else Outcome.SHED_STARTING
        return self._shed(request, need, outcome, now)

    def adopt(self, request: Request, address: str, now: float) -> bool:
        """Count a request that runs on a replica already, its prompt computed; False where that cannot be."""
        now = self._advance(now)
        replica, klass = self.fleet.replicas.get(address), self._index.get(request.klass)
        if replica is None or klass is None or request.id in self._queue or request.id in self.fleet:
            return False
        need = self.fleet.need(request)._replace(stall_s=0.0, prefill_s=0.0)
        ran_s = max(0.0, now - request.arrived_s)
        self.fleet.add(request, klass, Place(replica, -ran_s, math.inf, need), now)
        return True

    def end(self, id: str, now: float, output_tokens: int | None = None, ttft_s: float | None = None) -> bool:
        """A running request has ended; False if it is not known. `release` is to be called next.

        output_tokens: of all its sequences, and ttft_s: from its admission to its first token, where known. Without a
        first token what is left of its prompt is taken as not read: the engine refused it, or its client left.
        """
        now = self._advance(now)
        resident = self.fleet.remove(id, now, output_tokens, ttft_s)
        if resident is None:
            return False
        if output_tokens is not None:
            need = resident.need
            more = output_tokens / need.output_tokens - 1.0
            self._queue.accounts.correct(resident.tenant, more * (need.work_s - need.stall_s))
        if ttft_s is not None:
            self._margins[resident.klass].observe(ttft_s - resident.predicted_s)
            if resident.leg is not None:
                done_s = min(resident.admitted_s + ttft_s - resident.leg.rest_s, now)
                resident.leg.line.ended(resident.leg, done_s, self.fleet.limits.leg_step_s)
        elif resident.leg is not None:
            resident.leg.line.withdrawn(resident.leg, now)
        return True

    def cancel(self, id: str, now: float) -> Decision | None:
        """The client of a held request has left; None if it is not held (one that runs ends by `end`)."""
        self._advance(now)
        held = self._queue.remove(id)
        return None if held is None else self._decided(Decision(id, Outcome.CLIENT_GONE))

    def _advance(self, now: float) -> float:
        if now > self._now:  # false for NaN, too
            self._now = now
        if self._now == -math.inf:
            raise ValueError(f"now must be a number, not {now}")
        return self._now

    def _waiting(
        self, request: Request, klass: int, need: Need, ticket: Ticket | None, weight: float, now: float
    ) -> Held:
        """The request with its lane and its times."""
        policy = self._classes[klass]
        slo = policy.slo
        arrived_s = min(request.arrived_s, now)
        target_s = math.inf
        if slo.ttft_s is not None:
            target_s = slo.ttft_s + slo.ttft_per_1k_tokens_s * request.prompt_tokens / 1000
        if slo.e2e_s is not None:
            target_s = min(target_s, slo.e2e_s - self._rest_s(need, klass))
        patience_s = arrived_s + policy.hold_s
        due_s = arrived_s + target_s
        if request.deadline_s is not None:
            patience_s, due_s = min(patience_s, request.deadline_s), min(due_s, request.deadline_s)
        if need.alone_s > target_s:
            return Held(request, klass, Lane.LATE, need, weight, patience_s, patience_s)
        lane = Lane.TICKET if ticket is not None and self.tickets.is_due(ticket, now) else Lane.IN_TIME
        if due_s == math.inf:
            return Held(request, klass, lane, need, weight, patience_s, patience_s)
        return Held(request, klass, lane, need, weight, due_s, due_s - need.alone_s)

    def _rest_s(self, need: Need, klass: int) -> float:
        """What an answer of the expected length takes after its first token, at the pace that its class is held to."""
        tpot_s = self.fleet.limits.tpot_s[klass]
        return 0.0 if tpot_s == math.inf else max(need.output_tokens / need.sequences - 1.0, 0.0) * tpot_s

    def _from_zero(self, held: Held, ticket: Ticket | None, now: float) -> Decision:
        """No replica is ready: wait as long as its class may, unless it is known that this will not do."""
        patience_s = min(held.request.arrived_s, now) + self._classes[held.klass].hold_s
        if held.request.deadline_s is not None:
            patience_s = min(patience_s, held.request.deadline_s)
        held.due_s = held.until_s = patience_s
        ready_at_s = self._outlook.ready_at_s
        if not self._outlook.starting:
            return self._shed(held.request, held.need, Outcome.SHED_NO_CAPACITY, now)
        if held.request.fallback or patience_s <= now or (ready_at_s is not None and ready_at_s > patience_s):
            return self._shed(held.request, held.need, Outcome.SHED_STARTING, now)
        return self._hold(held, ticket, now)

    def _let_in_or_hold(self, held: Held, ticket: Ticket | None, now: float) -> Decision:
        queue = self._queue
        late = False
        if not queue.waits(held.klass, held.lane):
            place = self._place(held, now)
            if place.replica is not None:
                if ticket is not None:
                    self.tickets.settle(ticket)
                return self._let_in(held, place, now)
            late = place.first_token_s < math.inf
        ahead_s = queue.ahead_s(held.klass, held.lane, held.request.tenant, held.weight)
        # Half by a mean request's slack: large ones have less of it, but they also go first.
        latest_s = held.until_s
        if held.until_s < held.due_s:
            latest_s += (held.need.alone_s - self.fleet.limits.alone_s) / 2
        if (
            late
            or held.request.fallback
            or held.until_s <= now
            or now + ahead_s / max(self.fleet.drain, 1e-9) >= latest_s
        ):
            return self._shed(held.request, held.need, Outcome.SHED_SATURATED, now)
        return self._hold(held, ticket, now)

    def _place(self, held: Held, now: float) -> Place:
        policy = self._classes[held.klass]
        fill = policy.fill
        if fill < 1.0 and self._queue.owed(held.klass) == held.klass:
            fill = 1.0
        within_s = math.inf  # its class's patience is how long it may wait, not when its first token is wanted
        if held.lane is not Lane.LATE and held.until_s < held.due_s:
            within_s = held.due_s - now - self._kept_free_s(held, now)
        place = self.fleet.place(held.request, held.need, held.klass, fill, within_s, now)
        self._again_s = min(self._again_s, place.again_s)
        return place

    def _kept_free_s(self, held: Held, now: float) -> float:
        """How much sooner than due its first token must be predicted while others want the place: by the error of
        predictions, and at the line of prefill replicas, where all are promised the same, by what it is shorter than a
        mean request. Else the short ones slip into what each moment leaves there, past the longer ones, and what is
        refused is the work of these."""
        margin, slo = self._margins[held.klass], self._classes[held.klass].slo
        shorter_s = 0.0
        if self.fleet.prefills and not slo.ttft_per_1k_tokens_s:
            shorter_s = min(max(0.0, self.fleet.limits.alone_s - held.need.alone_s), margin.widest_s)
        return math.exp((self._full_s - now) / PRESSED_S) * (margin.margin_s + shorter_s)

    def _let_in(self, held: Held, place: Place, now: float) -> Decision:
        request = held.request
        self.fleet.add(request, held.klass, place, now)
        self._queue.give(request.tenant, held.weight, held.klass, held.lane, place.need.work_s, now)
        assert place.replica is not None
        address = place.replica.address
        return self._decided(Decision(request.id, Outcome.ADMITTED, address, place.prefill, place.first_token_s))

    def _hold(self, held: Held, ticket: Ticket | None, now: float) -> Decision:
        if ticket is not None:
            self.tickets.settle(ticket)
        self._queue.push(held, now)
        return self._decided(Decision(held.request.id, Outcome.HELD))

    def _expire(self, held: Held, now: float) -> Decision:
        """It would be late. Its deadline is to blame where it waited for no target but its class's patience."""
        if held.due_s == held.until_s <= now:
            outcome = Outcome.SHED_DEADLINE
        else:
            outcome = Outcome.SHED_SATURATED if self.fleet.replicas else Outcome.SHED_STARTING
        return self._shed(held.request, held.need, outcome, now)

    def _shed(self, request: Request, need: Need, outcome: Outcome, now: float) -> Decision:
        if outcome is Outcome.SHED_SATURATED:
            self._full_s = now
        if request.fallback and outcome is not Outcome.SHED_DEADLINE:
            ticket = self.tickets.find(request, now)
            if ticket is not None:
                self.tickets.settle(ticket)
            return self._decided(Decision(request.id, Outcome.DOWNGRADED))
        again = outcome not in _NEVER
        told = self.tickets.issue(request, need.work_s, self._queue.work_s, now) if again else NOT_AGAIN
        return self._decided(Decision(request.id, outcome, told=told))

    def _over_quota(self, request: Request, wait_s: float) -> Decision:
        again = wait_s <= LONGEST_TOLD_S
        told = Told(wait_s, max(1, math.ceil(wait_s)) if again else None, again)
        return self._decided(Decision(request.id, Outcome.SHED_QUOTA, told=told))

    def _decided(self, decision: Decision) -> Decision:
        self.outcomes[decision.outcome] += 1
        return decision
