"""Seeds the forecasts of services that remember nothing with what a store of metrics knows of them.

Problem: asking and replaying takes seconds, and neither a tick nor a service may wait for it, nor fail by it.

Idea: one service at a time, in a thread, once what a request costs is known; what comes back is put beside what the
forecast has seen itself by then. A store that cannot tell is one line in the log, and is not asked again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from plimsoll.controllers.store import Key
from plimsoll.core.autoscaler import Service
from plimsoll.core.errors import Unavailable
from plimsoll.core.forecast.past import has_past, replay, with_past
from plimsoll.core.forecast.state import State
from plimsoll.core.ports import History
from plimsoll.core.scaling import Line

log = logging.getLogger(__name__)

PAST_S: Final = 14 * 86400.0  # two weeks: as many as the shape of the week needs


class Past:
    """Which services still want their past."""

    def __init__(self, history: History | None) -> None:
        """history: None where there is none, and nothing is ever asked."""
        self._history = history
        self._wanting: set[Key] = set()
        self._asking: asyncio.Task[None] | None = None

    def meet(self, key: Key, service: Service) -> None:
        """A service is new to this process, what was remembered of it put back already."""
        if self._history is not None and not any(has_past(tier.demand) for tier in service.tiers.values()):
            self._wanting.add(key)

    def look(self, services: Mapping[Key, Service], now_s: float) -> None:
        """Begin to ask for a service that wants its past and is ready for it, unless another is asked for."""
        self._wanting &= services.keys()
        if self._history is None or (self._asking is not None and not self._asking.done()):
            return
        due = next((key for key in self._wanting if _ready(services[key])), None)
        if due is not None:
            self._wanting.discard(due)
            self._asking = asyncio.create_task(seed(self._history, "/".join(due), services[due], now_s))


def _ready(service: Service) -> bool:
    return all(isinstance(tier.line, Line) and tier.demand.at_s is not None for tier in service.tiers.values())


async def seed(history: History, name: str, service: Service, now_s: float) -> None:
    """Ask for the past of one service and give it to its forecasts; a failure leaves them as they are."""
    costs = {role: tier.line.request_gpu_s for role, tier in service.tiers.items() if isinstance(tier.line, Line)}
    try:
        pasts = await asyncio.to_thread(_replayed, history, name, costs, now_s)
    except Unavailable as error:
        log.warning("the past is not known", extra={"service": name, "error": str(error)})
        return
    except Exception:  # of a task that nobody awaits
        log.exception("the past cannot be read", extra={"service": name})
        return
    for role, (minutes, past) in pasts.items():
        tier = service.tiers[role]
        tier.demand = with_past(tier.demand, past)
        log.info("the past is known", extra={"service": name, "tier": role, "minutes": minutes})


def _replayed(history: History, name: str, costs: Mapping[str, float], now_s: float) -> dict[str, tuple[int, State]]:
    """By tier: how many minutes were known, and the state after them; nothing where none was."""
    minutes = history.request_rate(name, now_s - PAST_S, now_s)
    return {role: (len(minutes), replay(minutes, cost)) for role, cost in costs.items()} if minutes else {}
