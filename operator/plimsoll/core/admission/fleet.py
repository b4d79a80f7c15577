"""The replicas of one tier as one gateway sees them, and the place of one more request among them.

Problem: the check must hold on the very replica that the request goes to, and looking at a hundred of them must not
cost more than the decision may.

Idea: only finished numbers are read, and only of the few replicas with the least load, kept in that order by a sort
that finds it almost done. Of those that would keep everyone's promise, the one with the earliest first token is taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import attrgetter
from typing import Final, NamedTuple

from plimsoll.core.admission.limits import KV_QUANTILE, Limits, Need
from plimsoll.core.admission.outcome import Request
from plimsoll.core.admission.replica import Replica, Resident

LOOKS: Final = 4  # replicas with the least load that are looked at for one request
SOON_S: Final = 1e-3  # a replica is not asked again within so short a time
_load: Final = attrgetter("load")


class Place(NamedTuple):
    """Where a request could go. replica None: nowhere now.

    first_token_s: predicted time from now to its first token; where replica is None, infinity if no replica has room,
    else that of the best of those which have. again_s: when a replica that only has too much prefill ahead of its
    share may be asked again.
    """

    replica: Replica | None
    first_token_s: float
    again_s: float = math.inf


class Fleet:
    """Replicas of one serve or decode tier, with the prefill replicas before it where there are any."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.replicas: dict[str, Replica] = {}
        self.prefills: dict[str, float] = {}  # when each is done with what it was given
        self.drain = 0.0  # GPU seconds of work, by the model, that leave in a second while all are full
        self._where: dict[str, Replica] = {}
        self._order: list[Replica] = []

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, id: str) -> bool:
        return id in self._where

    def set_limits(self, limits: Limits) -> None:
        """A new model for all of them."""
        self.limits = limits
        for replica in self.replicas.values():
            replica.set_limits(limits)
        self._drained()

    def set_replicas(self, caps: Mapping[str, int], now: float) -> None:
        """The ready ones, each with the sequences that this gateway may have there; what the others hold is lost."""
        for address in [address for address in self.replicas if address not in caps]:
            for id in self.replicas.pop(address).residents:
                del self._where[id]
        for address, cap in caps.items():
            replica = self.replicas.get(address)
            if replica is None:
                replica = self.replicas[address] = Replica(address, self.limits, now)
            replica.set_share(cap, self.limits.batch)
        self._order = list(self.replicas.values())
        self._drained()

    def set_prefills(self, addresses: set[str], now: float) -> None:
        """The ready prefill replicas; with none, decode replicas compute prompts themselves."""
        self.prefills = {address: self.prefills.get(address, now) for address in sorted(addresses)}

    def need(self, request: Request) -> Need:
        """What the request asks of a replica, with remote prefill where there is one."""
        return self.limits.need(request, bool(self.prefills))

    def could_hold(self, need: Need) -> bool:
        """Whether an empty replica of this tier could hold it."""
        limits = self.limits
        tokens = need.kv_mean_tokens + KV_QUANTILE * math.sqrt(need.kv_variance)
        return need.sequences <= limits.max_sequences and tokens <= limits.kv_tokens

    def place(self, need: Need, klass: int, fill: float, within_s: float, now: float) -> Place:
        """The replica on which all stay in promise and its first token comes within so many seconds from now.

        fill: how full, 0 to 1, replicas may be for it.
        """
        best, best_s, late_s, again_s = None, within_s, math.inf, math.inf
        budget_s = self.limits.step_budget_s[klass]
        leg_s = max(0.0, min(self.prefills.values()) - now) if need.prefill_s and self.prefills else 0.0
        if len(self._order) > LOOKS:
            self._order.sort(key=_load)
        for replica in self._order[:LOOKS]:
            if not replica.has_room(need, budget_s, fill):
                continue
            if replica.sequences and replica.tat_s - now > replica.ahead_s:
                again_s = min(again_s, max(replica.tat_s - replica.ahead_s, now + SOON_S))
                continue
            first_s = replica.first_token_s(need, now) + leg_s
            if first_s <= best_s:
                best, best_s = replica, first_s
            elif first_s < late_s:
                late_s = first_s
        return Place(best, late_s if best is None else best_s, again_s)

    def add(self, request: Request, need: Need, klass: int, place: Place, now: float) -> str | None:
        """The request goes to its place; returns the prefill replica that computes its prompt, None for the same."""
        replica = place.replica
        assert replica is not None
        resident = Resident(need, klass, request.tenant, now, place.first_token_s)
        replica.add(request.id, resident, now)
        self._where[request.id] = replica
        if not (need.prefill_s and self.prefills):
            return None
        address = min(self.prefills, key=lambda name: self.prefills[name])
        self.prefills[address] = max(self.prefills[address], now) + need.prefill_s
        return address

    def remove(self, id: str, now: float) -> tuple[Replica, Resident] | None:
        """The request has ended; None if it is nowhere."""
        replica = self._where.pop(id, None)
        if replica is None:
            return None
        resident = replica.remove(id, now)
        assert resident is not None
        return replica, resident

    def settle(self) -> None:
        """To be called at each tick: what follows from the paces measured meanwhile."""
        self._drained()

    def _drained(self) -> None:
        rho = self.limits.rho
        self.drain = sum(rho / (r.pace * r.scale) for r in self.replicas.values())
