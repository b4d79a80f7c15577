"""A gateway that lets in by a cap on what is in flight, in place of the operator's model.

Problem: followers are yardsticks for sizing. With the operator's admission each of hundreds of runs pays for the
operator too, and what it reaches hangs on what that has learned.

Idea: a plain cap needs nothing. While each engine that answers has `cap` requests, the next ones wait at the gateway,
first come first served, and are refused when they have waited for as long as each may.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, runtime_checkable

from plimsoll.core.admission import ClassPolicy, Decision, Outcome, TenantPolicy
from plimsoll.core.picking.endpoint import Role
from plimsoll.sim.gateway import LONGEST_HOLD_S, Gateway
from plimsoll.sim.visit import Asked, Visit


@dataclass(frozen=True)
class Cap:
    """requests: in flight at one engine that answers, by all gateways. patience_s: how long a request may wait."""

    requests: int
    patience_s: Callable[[Asked], float]


@runtime_checkable
class Capping(Protocol):
    """A policy whose gateways let in by a cap, None where it has none."""

    cap: Cap | None


def parts(requests: int, gateways: int) -> list[int]:
    """What each gateway lets in by itself: together the cap, and none more than another but for one request."""
    return [requests // gateways + (number < requests % gateways) for number in range(gateways)]


class CappedGateway(Gateway):
    """One of those that share a cap. part: requests that it lets in to an engine, of the cap's."""

    def __init__(
        self,
        name: str,
        classes: tuple[ClassPolicy, ...],
        tenants: Mapping[str, TenantPolicy],
        max_held: int,
        epoch_s: float,
        fallback: bool = False,
        *,
        cap: Cap,
        part: int,
    ) -> None:
        super().__init__(name, classes, tenants, max_held, epoch_s, fallback)
        self._part, self._patience_s = part, cap.patience_s
        self._due: list[tuple[float, str]] = []

    @property
    def wake_s(self) -> float:
        """When the next one has waited for too long."""
        while self._due and self._due[0][1] not in self.held:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else math.inf

    def offer(self, visit: Visit, now_s: float, *, first: bool = True) -> Decision | None:
        """None: it may go."""
        super().offer(visit, now_s, first=first)
        if not self.held and self._room():
            return None
        key, due_s = str(visit.id), visit.asked.at_s + min(LONGEST_HOLD_S, max(0.0, self._patience_s(visit.asked)))
        if len(self.held) >= self._max_held or due_s <= now_s:
            return Decision(key, Outcome.SHED_SATURATED)
        self.held[key] = visit
        visit.waited = True
        self._outcomes[Outcome.HELD] += 1
        heapq.heappush(self._due, (due_s, key))
        return Decision(key, Outcome.HELD)

    def release(self, now_s: float) -> list[tuple[Visit, Decision | None]]:
        """Those who need not wait any longer, first come first, and those who waited for too long."""
        found: list[tuple[Visit, Decision | None]] = []
        while self.wake_s <= now_s:
            _, key = heapq.heappop(self._due)
            found.append((self.held.pop(key), Decision(key, Outcome.SHED_SATURATED)))
        for key in list(islice(self.held, self._room() if self.held else 0)):
            found.append((self.held.pop(key), None))
        return found

    def _room(self) -> int:
        """Requests that may go now."""
        answering = (one.address for one in self._endpoints if one.role is not Role.PREFILL)
        return sum(max(0, self._part - self._loads[address].inflight) for address in answering)
