"""One service over time: takes in what is heard, asks for the size of its tiers, and keeps what it decided."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np

from plimsoll.core import buckets
from plimsoll.core.autoscaler import owed
from plimsoll.core.autoscaler.owed import Owed
from plimsoll.core.autoscaler.seen import Seen, TierSeen, Wish
from plimsoll.core.autoscaler.shortage import Refusals, Shortage
from plimsoll.core.autoscaler.tier import Tier, spent_elsewhere_s, without_posting
from plimsoll.core.autoscaler.watch import Watch
from plimsoll.core.forecast import Forecast, Pauses, RiskControl, Unknown, pauses
from plimsoll.core.forecast.doubt import miss_costs
from plimsoll.core.forecast.predict import forecast as forecast_demand
from plimsoll.core.forecast.risk import begin, feed
from plimsoll.core.knee import HIGHEST_RATE
from plimsoll.core.knee import Tier as Sized
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.scaling import (
    Ask,
    Decision,
    Demand,
    Line,
    Measured,
    Need,
    Observation,
    Policy,
    State,
    TierObservation,
    decide,
)
from plimsoll.core.scaling.observation import MEASURED_S
from plimsoll.core.signals import Heard, TierHeard
from plimsoll.core.slo import Slo
from plimsoll.core.variants import UNKNOWN, Variant, becomes, started
from plimsoll.core.workload import Workload

TICK_S: Final = 1.0
WATCH_S: Final = 10.0  # of arrivals before anything is made of them: the first two of a service may come together
KEPT: Final = 6  # decisions that changed something, the last one and a few before it
NO_REQUEST: Final = Unknown("no request has ended yet")
NO_PAUSES: Final = Pauses()
NOT_HEARD: Final = TierHeard(Measured(), 0.0, None, ())


class Draft(NamedTuple):
    """A line that is to be made. replicas: ordered."""

    tier: Tier
    sized: Sized
    replicas: int


class Told(NamedTuple):
    """A decision and when it was made, seconds since the epoch."""

    at_s: float
    decision: Decision


@dataclass
class Service:
    """Lives as long as the InferenceService. decisions: those that changed a count, newest last."""

    tiers: dict[str, Tier]
    state: State = field(default_factory=State)
    risk: RiskControl | None = None
    decisions: deque[Told] = field(default_factory=lambda: deque(maxlen=KEPT))
    last: Told | None = None
    workload: Workload | Unknown = NO_REQUEST
    needs: dict[str, Need | Unknown] = field(default_factory=dict)
    shortages: dict[str, Shortage] = field(default_factory=dict)
    watch: Watch = field(default_factory=Watch, repr=False)
    pauses: Pauses = NO_PAUSES
    idle: bool | Unknown = NO_REQUEST  # of requests, held or running ones included
    owing: bool = False  # some were told when to come back, at the last forecast
    _judged_s: float | None = field(default=None, repr=False)
    _sampled_s: float | None = field(default=None, repr=False)  # when arrivals were last counted
    _absent_s: float = field(default=-math.inf, repr=False)  # when a tier last had nobody ready

    @classmethod
    def of(cls, roles: Sequence[str]) -> Service:
        return cls({role: Tier(Role(role)) for role in roles})

    @property
    def answering(self) -> str:
        """The tier from which clients are answered."""
        return next(name for name, tier in self.tiers.items() if tier.role is not Role.PREFILL)

    @property
    def looked_s(self) -> float:
        """When the tier that waits longest was last looked at: the oldest comes first."""
        return min([tier.looked_s for tier in self.tiers.values()], default=0.0)

    def due(self, now_s: float) -> bool:
        """Is it time to look at a tier?"""
        return any([tier.due(now_s) for tier in self.tiers.values()])

    def started(self, tier: str, took_s: Sequence[tuple[str, float]], variant: Variant = UNKNOWN) -> None:
        """An engine has become ready; its phases in order with their seconds. Nonsense is not recorded."""
        if took_s and all(0.0 <= seconds < 86400.0 for _, seconds in took_s):
            self.tiers[tier].starts = started(self.tiers[tier].starts, variant, took_s)

    def hear(self, seen: Seen, wish: Wish, now_s: float) -> None:
        """Take in one tick's news: engines, lengths, speeds, arrivals, misses."""
        if not isinstance(seen.heard.workload, Unknown):
            self.workload = seen.heard.workload
        for name, tier in self.tiers.items():
            there = seen.tiers.get(name)
            if there is not None:
                tier.starts = becomes(tier.starts, there.variant)
            if there is not None and there.about is not None and self.watch.news(name, there.about):
                tier.meet(there.about)
                self.watch.met(name, there.about)
            told = seen.heard.tiers.get(tier.role, NOT_HEARD)
            if told.windows:
                tier.learn(without_posting(told.windows, told.post_share), self.workload)
        if any([there.ready == 0 for there in seen.tiers.values()]):
            self._absent_s = now_s
        start_s = max([tier.start_s for tier in self.tiers.values()])
        self._pause(seen, wish, start_s, now_s)
        self._judge(seen.heard, wish.slo, start_s, now_s)

    def _pause(self, seen: Seen, wish: Wish, start_s: float, now_s: float) -> None:
        """Take in whether requests come, and let no decision stand of a service that may sleep, or wake, by that."""
        rate, arrived = believed(seen.heard), 0.0
        if seen.heard.fresh and not isinstance(rate, Unknown):
            passed_s = 0.0 if self._sampled_s is None else max(0.0, now_s - self._sampled_s)
            arrived, self._sampled_s = rate * passed_s, now_s
        self.idle = is_idle(seen)
        known = None if isinstance(self.idle, Unknown) else self.idle
        within_s = start_s + TICK_S if wish.horizon_s is None else wish.horizon_s
        self.pauses = pauses.hear(self.pauses, now_s, known, arrived, within_s)
        returning = seen.heard.returning_s
        wrong = known is not None and known != any([there.replicas == 0 for there in seen.tiers.values()])
        if (wrong and any([tier.min_replicas == 0 for tier in wish.policy.tiers.values()])) or (
            not isinstance(returning, Unknown) and returning > 0.0
        ):
            for kept in self.watch.tiers.values():
                kept.line = None

    def drafts(self, seen: Seen, wish: Wish, now_s: float, most: int) -> tuple[int, list[Draft]]:
        """Look at the tiers that are due, until so many lines are to be made; how many were looked at, and those."""
        found: list[Draft] = []
        if wish.slo is None or isinstance(self.workload, Unknown):
            return 0, found
        looked = 0
        tiers = list(self.tiers.values())
        for name, tier in self.tiers.items():
            if len(found) >= most or not tier.due(now_s) or name not in seen.tiers:
                continue
            scale = self.state.tiers[name].tail_scale if name in self.state.tiers else 1.0
            if not self.watch.moved(
                name, tiers, (self.workload,), (wish.slo, scale, tier.bunched(), seen.heard.gateways)
            ):
                tier.looked_s = now_s
                continue
            looked += 1
            elsewhere_s = spent_elsewhere_s(tiers, tier, self.workload)
            sized = tier.draft(now_s, wish.slo, self.workload, scale, elsewhere_s, seen.heard.gateways)
            if sized is not None:
                found.append(Draft(tier, sized, seen.tiers[name].replicas))
        return looked, found

    def samples(self, seen: Seen, wish: Wish, now_s: float) -> Iterator[tuple[Tier, float, float]]:
        """Tiers that have a new sample, with its work (GPU-seconds per second) and rate (1/s), NaN where not known."""
        rate = believed(seen.heard)
        if wish.slo is None:
            return
        for tier in self.tiers.values():
            if isinstance(tier.line, Unknown):
                continue
            if tier.demand.at_s is None or now_s < tier.watched_s:  # or a clock was set back
                tier.watched_s = now_s
            if isinstance(rate, Unknown):
                yield tier, math.nan, math.nan
            elif seen.heard.fresh:
                yield tier, rate * tier.line.request_gpu_s, rate

    def demand(self, seen: Seen, wish: Wish, now_s: float) -> dict[str, Demand | Unknown]:
        """What is coming to each tier over its own start-up time, its last sample being in it."""
        self.owing = self._returning_gpu_s(self.answering, seen.heard) > 0.0
        return {name: self._demand(name, tier, wish, now_s) for name, tier in self.tiers.items()}

    def _demand(self, name: str, tier: Tier, wish: Wish, now_s: float) -> Demand | Unknown:
        if wish.slo is None:
            return Unknown("the service has no slo: nothing is promised, so nothing is sized")
        if isinstance(tier.line, Unknown):
            return tier.line if not isinstance(self.workload, Unknown) else self.workload
        if now_s - tier.watched_s < WATCH_S:
            return Unknown(f"arrivals are watched for {now_s - tier.watched_s:.0f} s, {WATCH_S:.0f} s are needed")
        horizon_s = self.horizon_s(name, wish)
        assert self.risk is not None
        risk, cost = self.risk, self.miss_cost(name, wish.policy)
        found = forecast_demand(tier.demand, now_s, horizon_s, risk.quantile, risk.promised, cost)
        if isinstance(found, Unknown):
            return found
        return Demand(found, self.watch.of(name).chances.at(tier.demand, horizon_s))

    def miss_cost(self, name: str, policy: Policy) -> float:
        """What a missed GPU-second of a tier whose line is known costs in replicas of it; as `doubt.miss_costs`.

        While the refused are to come back it has no price, and all of the doubt counts: they want what is beyond the
        level, so that what a replica for the doubt serves is more than the uppermost bit of the load.
        """
        if self.owing:
            return math.inf
        of, gpus = self.tiers.items(), policy.tiers
        takes = {n: t.line.request_gpu_s * max(gpus[n].gpus, 1) for n, t in of if not isinstance(t.line, Unknown)}
        return float(miss_costs(np.array([policy.miss_cost]), np.array([[*takes.values()]]))[0, [*takes].index(name)])

    def horizon_s(self, tier: str, wish: Wish) -> float:
        """How far to look ahead for a tier."""
        if wish.horizon_s is not None:
            return wish.horizon_s
        return self.tiers[tier].start_s + TICK_S

    def asks(self, seen: Seen, wish: Wish, demand: Mapping[str, Demand | Unknown], now_s: float) -> dict[str, Ask]:
        """What is to be sized: the tiers whose demand and line are known."""
        found = {}
        for name, coming in demand.items():
            line, there = self.tiers[name].line, seen.tiers.get(name)
            if isinstance(coming, Demand) and isinstance(line, Line) and there is not None:
                counts, backlog = (there.replicas, there.ready), self._backlog_gpu_s(name, seen.heard)
                told = self._owed(name, there, line, coming.forecast, seen, wish, now_s)
                found[name] = Ask(line, coming.forecast, *counts, wish.headroom, backlog, *told)
        return found

    def _owed(
        self, name: str, there: TierSeen, line: Line, coming: Forecast, seen: Seen, wish: Wish, now_s: float
    ) -> Owed:
        """Work of those told when to come back, as far as replicas of this tier are for it."""
        told_gpu_s, tier, need = self._returning_gpu_s(name, seen.heard), self.tiers[name], self.needs.get(name)
        if told_gpu_s <= 0.0:
            return owed.NOTHING
        if _is_whole(there) and wish.slo is not None:
            missed, running = 1.0 - wish.slo.share, _running(seen.heard)
            return owed.by_chance(told_gpu_s, coming, line.request_gpu_s, missed, running, tier.arrival_cv2)
        work = need.replica_work if isinstance(need, Need) else 0.0
        return owed.while_some_start(told_gpu_s, tier, there, coming, work, now_s)

    def decide(
        self,
        seen: Seen,
        wish: Wish,
        demand: Mapping[str, Demand | Unknown],
        needs: Mapping[str, Need | Unknown],
        now_s: float,
    ) -> Decision:
        """The decision of this tick, remembered."""
        self.needs = {name: needs.get(name) or self._unsized(name, demand) for name in self.tiers}
        self._look_for_shortage(seen, wish, now_s)
        tiers = {
            name: self._observed(name, there, seen.heard, demand[name], now_s)
            for name, there in seen.tiers.items()
            if wish.slo is not None and name in self.tiers
        }
        pause = self.idle if isinstance(self.idle, Unknown) else pauses.lasting(self.pauses, now_s)
        decision = decide(Observation(tiers, self.state, pause=pause), wish.policy, now_s)
        self.state = decision.state
        self.last = Told(now_s, decision)
        self.watch.decided(wish.policy, {name: tier.line for name, tier in self.tiers.items()})
        moves = _moves(decision)
        if moves and not (self.decisions and _moves(self.decisions[-1].decision) == moves):
            self.decisions.append(self.last)
        return decision

    def _look_for_shortage(self, seen: Seen, wish: Wish, now_s: float) -> None:
        """Raise the need of the tier that is nearest to its load line by what refusals say.

        They say it of the whole service: while any tier is short of replicas, they may be on its account.
        """
        known = {name: need for name, need in self.needs.items() if isinstance(need, Need) and name in seen.tiers}
        if not known or wish.slo is None:
            return
        shed, running = seen.heard.shed_share, _running(seen.heard)
        nearest = max(known, key=lambda name: _used(known[name], seen.tiers[name].replicas))
        whole = all(map(_is_whole, seen.tiers.values()))
        for name, need in known.items():
            there, short = seen.tiers[name], self.shortages.setdefault(name, Shortage())
            refused = 0.0 if isinstance(shed, Unknown) or name != nearest else shed
            asked, cv2 = _fraction(need, need.replicas), self.tiers[name].arrival_cv2
            refusals = Refusals(refused, seen.heard.arrived, 1.0 - wish.slo.share, running, cv2)
            short.hear(asked, there.ready, whole, refusals, now_s)
            if not short.is_none:
                counts = asked, _fraction(need, need.release)
                replicas, release = (math.ceil(count * short.factor - 1e-9) for count in counts)
                release = max(replicas, release)
                self.needs[name] = replace(need, replicas=replicas, release=release, short=short.factor)

    def _unsized(self, name: str, demand: Mapping[str, Demand | Unknown]) -> Unknown:
        coming, line = demand[name], self.tiers[name].line
        if isinstance(coming, Unknown):
            return coming
        return line if isinstance(line, Unknown) else Unknown("not sized")

    def _observed(
        self, name: str, there: TierSeen, heard: Heard, coming: Demand | Unknown, now_s: float
    ) -> TierObservation:
        """One tier; while its first arrivals are watched, latencies and queues of so few requests say nothing."""
        told = heard.tiers.get(Role(name), NOT_HEARD)
        watching = 0.0 <= now_s - self.tiers[name].watched_s < WATCH_S
        return TierObservation(
            replicas=there.replicas,
            ready=there.ready,
            ledger=self.tiers[name].ledger,
            demand=coming,
            need=self.needs[name],
            starting=there.starting,
            backlog_gpu_s=self._backlog_gpu_s(name, heard),
            coverage=coverage(heard, told, there.ready),
            measured=Measured() if watching else told.measured,
        )

    def _backlog_gpu_s(self, name: str, heard: Heard) -> float:
        """Work for a tier of the requests held at the gateways."""
        return 0.0 if isinstance(heard.held_work_s, Unknown) else heard.held_work_s * self._part(name)

    def _returning_gpu_s(self, name: str, heard: Heard) -> float:
        """Work for a tier of the requests told when to come back."""
        return 0.0 if isinstance(heard.returning_s, Unknown) else heard.returning_s * self._part(name)

    def _part(self, name: str) -> float:
        """What a request is to a tier, over what it is to the one that answers, in which gateways reckon."""
        line, answering = self.tiers[name].line, self.tiers[self.answering].line
        if isinstance(line, Unknown) or isinstance(answering, Unknown):
            return 1.0
        return line.request_gpu_s / answering.request_gpu_s

    def _judge(self, heard: Heard, slo: Slo | None, start_s: float, now_s: float) -> None:
        """Once a start-up time: the share of requests that missed moves the quantile that is sized for."""
        if slo is None:
            return
        budget = 1.0 - slo.share
        if self.risk is None or self.risk.budget != budget:
            self.risk = begin(budget)
        if self._judged_s is None or now_s < self._judged_s:
            self._judged_s = now_s
        elif now_s - self._judged_s >= start_s:
            self._judged_s = now_s
            missed = missed_share(heard, slo)
            waited = 0.0 <= now_s - self._absent_s < 2.0 * MEASURED_S  # for a start: no forecast could have helped
            if missed is not None and not waited:
                self.risk = feed(self.risk, missed)


def _is_whole(there: TierSeen) -> bool:
    """Whether all that are ordered are ready."""
    return there.ready == there.replicas > 0 and not there.starting


def _running(heard: Heard) -> float:
    return 0.0 if isinstance(heard.in_flight, Unknown) else heard.in_flight


def is_idle(seen: Seen) -> bool | Unknown:
    """Whether no request comes, waits, runs or has been told to come back. One that is seen is proof; that there is
    none is known only from all gateways and engines."""
    heard, rate, missing = seen.heard, believed(seen.heard), None
    for amount in (rate if heard.fresh else 0.0, heard.held, heard.returning_s, heard.in_flight):
        if isinstance(amount, Unknown):
            missing = amount
        elif amount > 0.0:
            return False
    for name, there in seen.tiers.items():
        told = heard.tiers.get(Role(name), NOT_HEARD)
        if not isinstance(told.running, Unknown) and told.running > 0.0:
            return False
        if coverage(heard, told, there.ready) < 1.0:
            missing = missing or Unknown(f"{told.coverage:.0%} of the {name} engines answer")
    if isinstance(rate, Unknown):
        return rate
    if heard.coverage < 1.0:
        return Unknown(f"{heard.coverage:.0%} of the gateways answer")
    return missing or True


def believed(heard: Heard) -> float | Unknown:
    """First attempts per second, as far as a fleet can have so many: what is beyond is a counter gone wrong."""
    rate = heard.rate_per_s
    if isinstance(rate, Unknown) or rate <= HIGHEST_RATE:
        return rate
    return Unknown(f"{rate:.3g} req/s is no load that comes to a fleet but a wrong count")


def coverage(heard: Heard, told: TierHeard, ready: int) -> float:
    """Share of gateways and of the tier's engines that answer: below 1 nothing goes down, above 0 by definition."""
    engines = told.coverage or 0.5 / ready if ready else 1.0
    return min(heard.coverage or 0.5, engines)


def missed_share(heard: Heard, slo: Slo) -> float | None:
    """Share of the last minute's requests that were refused or late with their first token; None without requests.

    What too few replicas cost: gates hold the pace, so that requests wait or are refused.
    """
    shed = 0.0 if isinstance(heard.shed_share, Unknown) else heard.shed_share
    if heard.ttft is None or slo.ttft_s is None:
        return shed if shed else None
    tokens = 0.0 if isinstance(heard.prompt_tokens, Unknown) else heard.prompt_tokens
    met = _in_time(heard, slo.deadlines(tokens).first_s)
    if met is None:  # nobody was answered
        return shed or None
    return min(1.0, max(0.0, shed + (1.0 - shed) * (1.0 - met)))


def _in_time(heard: Heard, first_s: float) -> float | None:
    """Share of the answers whose first token was in time: each by its own class and prompt, as gateways tell it; by
    first_s, that of a mean prompt, where they do not. None of no answers."""
    assert heard.ttft is not None
    if heard.judged is None or heard.judged.answers <= 0.0:
        return buckets.share_below(heard.ttft, first_s)
    return 1.0 - min(1.0, heard.judged.ttft / heard.judged.answers)


def _fraction(need: Need, replicas: int) -> float:
    """Of a count that was rounded up what it was rounded from, for it is that which the model is short by; half a
    replica less at least, since what no replica is asked for tells nothing of a model."""
    used = need.used(need.rate_per_s * need.request_gpu_s, 1) / (1.0 - need.headroom)
    return min(float(replicas), max(used, replicas - 0.5))


def _used(need: Need, replicas: int) -> float:
    """Share of so many replicas' load line that the forecast takes."""
    return need.used(need.rate_per_s * need.request_gpu_s, max(replicas, 1))


def _moves(decision: Decision) -> dict[str, tuple[int, int | None]]:
    """From and to, of the tiers whose count differs from the one observed."""
    return {
        name: (tier.before, tier.recommended)
        for name, tier in decision.tiers.items()
        if tier.before is not None and tier.recommended != tier.before
    }
