"""How one service's replicas are shared by the gateways, as demand moves between them.

Problem: shares that follow demand at every moment would be written every second, shares that do not follow it make one
gateway refuse while the other has room, and so do shares made by the chance of a few requests.

Idea: what is used is shared by demand, what is free equally: where a replica has room each gateway has, whoever it was
that clients came to so far, and where one is full, or somebody waits or was refused, each has what its demand is of the
whole. Shares are made anew when a gateway comes or goes, when the cap moves, and when they have moved by a good part of
the whole. What moves, moves by the ledger: no unit is given to anybody before its holder has said that it keeps to
less.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from plimsoll.core.admission.outcome import Outcome
from plimsoll.core.admission.shares import Ledger, split
from plimsoll.core.ports import ServiceReading

MEMORY_S: Final = 30.0  # over which demand is averaged, and a wait forgotten (both by e)
HEARD_S: Final = 5.0  # a gateway heard for less than this counts like the mean
PRIOR: Final = 1.0  # arrivals that each gateway is taken to have had: a few requests say little
MOVED: Final = 0.1  # of the whole: a share off by less stays
LEAST_S: Final = 10.0  # between two splits for demand alone
_REJECTED: Final = (Outcome.HELD, Outcome.SHED_SATURATED)


@dataclass(slots=True)
class _Heard:
    """A gateway's counts and when they were told.

    rejected: those who had to wait or were refused since there was no room. seconds, arrivals: both fading. used: most
    sequences at one replica, fading.
    """

    born: str
    at_s: float
    arrived: float
    rejected: float
    seconds: float = 0.0
    arrivals: float = 0.0
    used: float = 0.0


class Sharing:
    """Of one service. All times are of one clock, seconds."""

    def __init__(self, shares: Mapping[str, int] | None = None) -> None:
        """shares: in force already, as an earlier process left them."""
        self._heard: dict[str, _Heard] = {}
        self._shares = dict(shares or {})
        self._ledger: Ledger | None = None
        self._cap = sum(self._shares.values())
        self._split_s = -math.inf
        self._full_s = -math.inf  # when somebody had to wait for the last time
        if self._cap:
            self._ledger = Ledger(self._cap)
            self._ledger.resplit(self._cap, {name: float(units) for name, units in self._shares.items()})

    def hear(self, gateway: str, born: str, at_s: float, counted: ServiceReading) -> None:
        """What a gateway tells; `units` is its share as it has taken it up."""
        known = self._heard.get(gateway)
        arrived, rejected = counted.arrived, sum(counted.outcomes.get(outcome, 0.0) for outcome in _REJECTED)
        if known is None or known.born != born or arrived < known.arrived or at_s < known.at_s:
            known = self._heard[gateway] = _Heard(born, at_s, arrived, rejected)
        passed_s = at_s - known.at_s
        keep = math.exp(-passed_s / MEMORY_S)
        known.seconds = keep * known.seconds + passed_s
        known.arrivals = keep * known.arrivals + arrived - known.arrived
        known.used = max(keep * known.used, counted.in_use)
        if counted.waiting or rejected > known.rejected:
            self._full_s = max(self._full_s, at_s)
        known.at_s, known.arrived, known.rejected = at_s, arrived, rejected
        if self._ledger is not None and counted.units == self._shares.get(gateway):
            self._ledger.confirm(gateway, counted.in_use)

    def keep(self, gateways: Collection[str]) -> None:
        """Forget what those told that are gone."""
        for gone in self._heard.keys() - set(gateways):
            del self._heard[gone]

    def units(self, cap: int, gateways: Collection[str], now_s: float) -> Mapping[str, int]:
        """What each gateway may use of `cap` sequences of a replica: the same object as before where nothing moves.

        gateways: those that exist, silent ones included; with none, what was told last stays.
        """
        if not gateways or cap < 1:
            return self._shares
        ledger = self._ledger
        if ledger is None:
            ledger = self._ledger = Ledger(cap)
        if self._due(cap, gateways, now_s):
            ledger.resplit(cap, self._weights(cap, gateways, now_s))
            self._cap, self._split_s = cap, now_s
        shares = {name: ledger.limit(name) for name in sorted(gateways)}
        if shares != self._shares:
            self._shares = shares
        return self._shares

    def _due(self, cap: int, gateways: Collection[str], now_s: float) -> bool:
        if cap != self._cap or set(gateways) != self._shares.keys():
            return True
        if 0.0 <= now_s - self._split_s < LEAST_S:
            return False
        wanted = split(cap, self._weights(cap, gateways, now_s))
        return any(abs(wanted[name] - self._shares[name]) > max(MOVED * cap, 1.0) for name in wanted)

    def _weights(self, cap: int, gateways: Collection[str], now_s: float) -> dict[str, float]:
        """Parts of the whole: by demand as far as it is used, or lately was not enough, equal for the rest of it."""
        heard = {name: self._heard[name] for name in gateways if name in self._heard}
        if not heard:  # a new process goes on from what it found
            return {name: self._shares.get(name, cap / len(gateways)) for name in gateways}
        used = min(1.0, sum(one.used for one in heard.values()) / cap)
        used = max(used, math.exp(-max(0.0, now_s - self._full_s) / MEMORY_S))
        rates = {n: (h.arrivals + PRIOR) / h.seconds for n, h in heard.items() if h.seconds >= HEARD_S}
        mean = math.fsum(rates.values()) / len(rates) if rates else 1.0
        demand = {name: rates.get(name, mean) for name in gateways}
        whole = math.fsum(demand.values())
        return {name: used * rate / whole + (1.0 - used) / len(demand) for name, rate in demand.items()}
