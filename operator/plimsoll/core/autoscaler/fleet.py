"""One tick of all services: sized in one vectorised call, then decided one by one."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Final, TypeVar

from plimsoll.core.autoscaler.seen import Seen, Wish
from plimsoll.core.autoscaler.service import Service
from plimsoll.core.scaling import Decision, needs

K = TypeVar("K", bound=Hashable)

LINES_A_TICK: Final = 12  # a line takes 2 to 3 ms: a fleet whose lines are all old gets new ones over some ticks


def decide_all(services: Mapping[K, tuple[Service, Seen, Wish]], now_s: float) -> dict[K, Decision]:
    """A decision for each service; what is remembered of it is brought up to date. now_s: seconds since the epoch."""
    left = LINES_A_TICK
    for service, seen, wish in services.values():
        service.hear(seen, wish, now_s)
    for service, seen, wish in sorted(services.values(), key=lambda entry: entry[0].looked_s):
        left -= service.draw(seen, wish, now_s, left)
    demand = {key: service.demand(seen, wish, now_s) for key, (service, seen, wish) in services.items()}
    asks = {
        (key, tier): ask
        for key, (service, seen, wish) in services.items()
        for tier, ask in service.asks(seen, wish, demand[key]).items()
    }
    sized = dict(zip(asks, needs(list(asks.values())), strict=True))
    return {
        key: service.decide(
            seen, wish, demand[key], {t: sized[key, t] for t in service.tiers if (key, t) in sized}, now_s
        )
        for key, (service, seen, wish) in services.items()
    }
