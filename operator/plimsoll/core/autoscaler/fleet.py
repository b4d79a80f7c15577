"""One tick of all services: observed and sized in vectorised calls, decided one by one where something may move.

Problem: a thousand services decide once a second, a decision that explains itself takes a part of a millisecond, and
nearly all of them come to what they came to before.

Idea: of every service it is asked, in figures alone, whether its decision would leave all as it is (`scaling.quiet`).
If so the last one stands, but for those that have stood longest: so many are made anew at each tick, for the words. A
fleet no larger than that is decided whole.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from heapq import nsmallest
from typing import Final, TypeVar

from plimsoll.core.autoscaler.seen import Seen, Wish
from plimsoll.core.autoscaler.service import NOT_HEARD, WATCH_S, Draft, Service, coverage
from plimsoll.core.autoscaler.tier import Tier
from plimsoll.core.forecast import Unknown
from plimsoll.core.forecast.fleet import observe_all
from plimsoll.core.scaling import Decision, State, lines, needs
from plimsoll.core.scaling.quiet import Asked, Quiet, settled, stay
from plimsoll.core.scaling.sized import remember
from plimsoll.core.slo import Slo

K = TypeVar("K", bound=Hashable)
Entry = tuple[Service, Seen, Wish]

LINES_A_TICK: Final = 12  # a line takes 1.6 ms: a fleet whose lines are all old gets new ones over some ticks
LOOKS_A_TICK: Final = 60  # at whether a line still holds: a third of a millisecond each
DECIDED_A_TICK: Final = 40  # services decided anew though nothing moves


def decide_all(services: Mapping[K, Entry], now_s: float, decided_a_tick: int = DECIDED_A_TICK) -> dict[K, Decision]:
    """A decision for each service; what is remembered of it is brought up to date. now_s: seconds since the epoch.

    decided_a_tick: services whose decision is made anew though it is the same; the others' last one stands.
    """
    for service, seen, wish in services.values():
        service.hear(seen, wish, now_s)
    _draw(services.values(), now_s)
    _observe(services.values(), now_s)
    if len(services) <= decided_a_tick:
        return _decide(services, now_s, learn=False)
    oldest = nsmallest(decided_a_tick, services, key=lambda key: _decided_s(services[key][0]))
    quiet = _quiet(services, services.keys() - set(oldest), now_s)
    moving = {key: entry for key, entry in services.items() if key not in quiet}
    return {**quiet, **_decide(moving, now_s, learn=True)}


def _draw(services: Iterable[Entry], now_s: float) -> None:
    """The lines that are due, those that wait longest first, as far as a tick has time, and all in one call."""
    drafts: list[Draft] = []
    looks = 0
    due = [entry for entry in services if entry[0].due(now_s)]
    for service, seen, wish in sorted(due, key=lambda entry: entry[0].looked_s):
        looked, found = service.drafts(seen, wish, now_s, LINES_A_TICK - len(drafts))
        looks, drafts = looks + looked, drafts + found
        if looks >= LOOKS_A_TICK:
            break
    made = lines([draft.sized for draft in drafts], [draft.replicas for draft in drafts])
    for draft, line in zip(drafts, made, strict=True):
        draft.tier.redraw(line)


def _decided_s(service: Service) -> float:
    return -math.inf if service.last is None else service.last.at_s


def _observe(services: Iterable[Entry], now_s: float) -> None:
    """Every tier takes in its sample."""
    tiers: list[Tier] = []
    works: list[float] = []
    rates: list[float] = []
    for service, seen, wish in services:
        for tier, work, rate in service.samples(seen, wish, now_s):
            tiers.append(tier)
            works.append(work)
            rates.append(rate)
    states = observe_all([tier.demand for tier in tiers], now_s, works, rates)
    for tier, state in zip(tiers, states, strict=True):
        tier.demand = state


def _decide(services: Mapping[K, Entry], now_s: float, learn: bool) -> dict[K, Decision]:
    """learn: remember what rates need, for later ticks."""
    demand = {key: service.demand(seen, wish, now_s) for key, (service, seen, wish) in services.items()}
    asks = {
        (key, tier): ask
        for key, (service, seen, wish) in services.items()
        for tier, ask in service.asks(seen, wish, demand[key], now_s).items()
    }
    asked = list(asks.values())
    found = needs(asked)
    if learn:
        remember(asked, found)
    sized = dict(zip(asks, found, strict=True))
    return {
        key: service.decide(
            seen, wish, demand[key], {t: sized[key, t] for t in service.tiers if (key, t) in sized}, now_s
        )
        for key, (service, seen, wish) in services.items()
    }


def _still(entry: Entry, now_s: float) -> Asked | None:
    """A service under which nothing is under way, load apart, since the last decision; else None."""
    service, seen, wish = entry
    watch, heard, policies, policy = service.watch, seen.heard, wish.policy.tiers, wish.policy
    if wish.slo is None or service.risk is None or not watch.is_quiet_under(policy):
        return None
    rests = watch.rests(service.last, lambda: _rests(service))
    if rests is None or not len(rests) == len(seen.tiers) == len(policies) or _refuses(seen, wish.slo):
        return None
    found, states = [], service.state.tiers
    for name, count in rests.items():
        tier, there, kept = service.tiers[name], seen.tiers.get(name), watch.of(name)
        line = tier.line
        if there is None or line is not kept.line or isinstance(line, Unknown):
            return None
        if there.starting or not there.ready == there.replicas == count or (not count and heard.held):
            return None
        told = heard.tiers.get(tier.role, NOT_HEARD)
        if now_s - tier.watched_s < WATCH_S or coverage(heard, told, count) != 1.0:
            return None
        horizon_s, tpot_s = service.horizon_s(name, wish), told.measured.tpot_s
        found.append(
            Quiet(name, policies[name], line, states[name], count, tier.demand, horizon_s, kept.chances, tpot_s)
        )
    passed_s = 0.0 if service.state.at_s is None else max(0.0, now_s - service.state.at_s)
    return Asked(found, policy.miss_cost, wish.headroom, service.risk.quantile, service.risk.promised, passed_s)


def _rests(service: Service) -> dict[str, int] | None:
    """The count at which each tier was left by the last decision, if that left nothing under way; else None."""
    if service.last is None or not all(short.is_none for short in service.shortages.values()):
        return None
    found = {}
    for name in service.tiers:
        decided, state = service.last.decision.tiers.get(name), service.state.tiers.get(name)
        if decided is None or state is None or decided.held or decided.before != decided.replicas:
            return None
        if not settled(state, decided.replicas) or isinstance(service.needs.get(name), Unknown):
            return None
        found[name] = decided.replicas
    return found


def _refuses(seen: Seen, slo: Slo) -> bool:
    """Whether more is refused than the promise allows: the model may be wrong; or some are to come back."""
    shed, returning_s = seen.heard.shed_share, seen.heard.returning_s
    owing = not isinstance(returning_s, Unknown) and returning_s > 0.0
    return owing or (not isinstance(shed, Unknown) and shed > 1.0 - slo.share)


def _quiet(services: Mapping[K, Entry], keys: Iterable[K], now_s: float) -> dict[K, Decision]:
    """The last decisions of those services that stay as they are; their states go on."""
    still: dict[int, dict[K, Asked]] = {}
    for key in keys:
        asked = _still(services[key], now_s)
        if asked is not None:
            still.setdefault(len(asked.tiers), {})[key] = asked
    quiet: dict[K, Decision] = {}
    for some in still.values():
        for key, after in zip(some, stay(list(some.values()), now_s), strict=True):
            service = services[key][0]
            if service.last is None or after is None:
                continue
            tiers = service.state.tiers
            service.state = State(now_s, {**tiers, **after} if after else tiers)
            quiet[key] = service.last.decision
    return quiet
