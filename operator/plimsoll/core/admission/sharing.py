"""How one service's replicas are shared by the gateways, as demand moves between them.

Problem: shares that follow demand at every moment would be written every second, and shares that do not follow it make
one gateway refuse while the other has room.

Idea: shares are made anew when a gateway comes or goes, when the cap moves, and when demand has moved by a good part of
the whole for a while. What moves, moves by the ledger: no unit is given to anybody before its holder has said that it
keeps to less.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from plimsoll.core.admission.shares import Ledger, split

MEMORY_S: Final = 30.0  # over which demand is averaged
MOVED: Final = 0.1  # of the whole: a share off by less stays
LEAST_S: Final = 10.0  # between two splits for demand alone


@dataclass(slots=True)
class _Heard:
    """A gateway's count and when it was told; its rate, 1/s, over about the last half minute."""

    born: str
    at_s: float
    arrived: float
    rate_per_s: float | None = None


class Sharing:
    """Of one service. All times are of one clock, seconds."""

    def __init__(self, shares: Mapping[str, int] | None = None) -> None:
        """shares: in force already, as an earlier process left them."""
        self._heard: dict[str, _Heard] = {}
        self._shares = dict(shares or {})
        self._ledger: Ledger | None = None
        self._cap = sum(self._shares.values())
        self._split_s = -math.inf
        if self._cap:
            self._ledger = Ledger(self._cap)
            self._ledger.resplit(self._cap, {name: float(units) for name, units in self._shares.items()})

    def hear(self, gateway: str, born: str, at_s: float, arrived: float, units: int, in_use: int) -> None:
        """What a gateway tells. arrived: first attempts since its start. units: its share as it has taken it up;
        in_use: most sequences that it has at one replica."""
        known = self._heard.get(gateway)
        if known is None or known.born != born or arrived < known.arrived or at_s < known.at_s:
            self._heard[gateway] = _Heard(born, at_s, arrived, None if known is None else known.rate_per_s)
        elif at_s > known.at_s:
            passed_s = at_s - known.at_s
            rate, keep = (arrived - known.arrived) / passed_s, math.exp(-passed_s / MEMORY_S)
            old = known.rate_per_s
            known.rate_per_s = rate if old is None else keep * old + (1.0 - keep) * rate
            known.at_s, known.arrived = at_s, arrived
        if self._ledger is not None and units == self._shares.get(gateway):
            self._ledger.confirm(gateway, in_use)

    def units(self, cap: int, gateways: Collection[str], now_s: float) -> Mapping[str, int]:
        """What each gateway may use of `cap` sequences of a replica: the same object as before where nothing moves.

        gateways: those that exist, silent ones included; with none, what was told last stays.
        """
        for gone in self._heard.keys() - set(gateways):
            del self._heard[gone]
        if not gateways or cap < 1:
            return self._shares
        ledger = self._ledger
        if ledger is None:
            ledger = self._ledger = Ledger(cap)
        if self._due(cap, gateways, now_s):
            ledger.resplit(cap, self._demand(gateways))
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
        wanted = split(cap, self._demand(gateways))
        return any(abs(wanted[name] - self._shares[name]) > max(MOVED * cap, 1.0) for name in wanted)

    def _demand(self, gateways: Collection[str]) -> dict[str, float]:
        """Rates; where little or nothing comes, the shares that are; who is new counts like the mean."""
        rates = {name: self._heard[name].rate_per_s for name in gateways if name in self._heard}
        known = {name: rate for name, rate in rates.items() if rate is not None}
        if math.fsum(known.values()) * MEMORY_S < 1.0:
            known = {name: float(units) for name, units in self._shares.items() if name in set(gateways)}
        mean = math.fsum(known.values()) / len(known) if known else 1.0
        return {name: known.get(name, mean) for name in gateways}
