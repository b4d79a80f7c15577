"""Divides one service's replicas among the gateways as demand moves between them.

Problem: shares that follow demand continuously would be written every second. Shares that do not follow it make one
gateway reject while another has free slots, and so do shares based on a few random requests.

Idea: divide used capacity by demand and free capacity equally. If replicas have room, every gateway has room. If they
are full, or requests are queued or rejected, each gateway gets its share of demand. Shares are recomputed when a
gateway comes or goes, when the cap changes, and when they are off by `MIN_SHARE_CHANGE`. The `ShareAllocator` moves
slots: a gateway gets a slot only after its holder has released it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from plimsoll.core.admission.capacity_shares import ShareAllocator, split_by_demand
from plimsoll.core.admission.request import AdmissionOutcome
from plimsoll.core.ports import ServiceReading

DEMAND_WINDOW_S: Final = 30.0  # time constant of demand and of past contention
MIN_OBSERVED_S: Final = 5.0  # a gateway observed for less than this counts as the mean
PRIOR_ARRIVALS: Final = 1.0  # prior arrivals per gateway: a few requests are weak evidence
MIN_SHARE_CHANGE: Final = 0.1  # fraction of the cap: a smaller change does not move shares
MIN_REBALANCE_INTERVAL_S: Final = 10.0  # between two rebalances by demand alone
_FULL_OUTCOMES: Final = (AdmissionOutcome.QUEUED, AdmissionOutcome.SHED_SATURATED)


@dataclass(slots=True)
class _GatewayDemand:
    """A gateway's counters at time `at_s`.

    `full_count` counts requests that were queued or shed because replicas were full. `observed_s` and `recent_arrivals`
    decay exponentially. `recent_in_use` is the decaying maximum of sequences at one replica.
    """

    instance_id: str
    at_s: float
    arrival_count: float
    full_count: float
    observed_s: float = 0.0
    recent_arrivals: float = 0.0
    recent_in_use: float = 0.0


class ShareController:
    """The shares of one service. Times are of one clock, in seconds."""

    def __init__(self, shares: Mapping[str, int] | None = None) -> None:
        """`shares` are those in force, published by an earlier process."""
        self._demand: dict[str, _GatewayDemand] = {}
        self._shares = dict(shares or {})
        self._allocator: ShareAllocator | None = None
        self._cap = sum(self._shares.values())
        self._rebalanced_s = -math.inf
        self._last_full_s = -math.inf  # last time a request was queued or shed
        if self._cap:
            self._allocator = ShareAllocator(self._cap)
            self._allocator.rebalance(self._cap, {name: float(slots) for name, slots in self._shares.items()})

    def observe(self, gateway: str, instance_id: str, at_s: float, reading: ServiceReading) -> None:
        """Record a gateway's reading. `reading.slot_limit` is the share that the gateway currently applies."""
        demand = self._demand.get(gateway)
        arrival_count, full_count = (
            reading.arrived,
            sum(reading.outcomes.get(outcome, 0.0) for outcome in _FULL_OUTCOMES),
        )
        if (
            demand is None
            or demand.instance_id != instance_id
            or arrival_count < demand.arrival_count
            or at_s < demand.at_s
        ):
            demand = self._demand[gateway] = _GatewayDemand(instance_id, at_s, arrival_count, full_count)
        elapsed_s = at_s - demand.at_s
        decay = math.exp(-elapsed_s / DEMAND_WINDOW_S)
        demand.observed_s = decay * demand.observed_s + elapsed_s
        demand.recent_arrivals = decay * demand.recent_arrivals + arrival_count - demand.arrival_count
        demand.recent_in_use = max(decay * demand.recent_in_use, reading.slots_in_use)
        if reading.queued or full_count > demand.full_count:
            self._last_full_s = max(self._last_full_s, at_s)
        demand.at_s, demand.arrival_count, demand.full_count = at_s, arrival_count, full_count
        if self._allocator is not None and reading.slot_limit == self._shares.get(gateway):
            self._allocator.confirm(gateway, reading.slots_in_use)

    def keep_only(self, gateways: Collection[str]) -> None:
        """Drop the demand of removed gateways."""
        for removed in self._demand.keys() - set(gateways):
            del self._demand[removed]

    def allocate(self, cap: int, gateways: Collection[str], now_s: float) -> Mapping[str, int]:
        """Returns how many of `cap` sequences each gateway may use. The same object as before if nothing changes.

        `gateways` are all existing gateways, including those without a reading. Without any, the last shares stay.
        """
        if not gateways or cap < 1:
            return self._shares
        allocator = self._allocator
        if allocator is None:
            allocator = self._allocator = ShareAllocator(cap)
        if self._needs_rebalance(cap, gateways, now_s):
            allocator.rebalance(cap, self._demand_weights(cap, gateways, now_s))
            self._cap, self._rebalanced_s = cap, now_s
        shares = {name: allocator.limit(name) for name in sorted(gateways)}
        if shares != self._shares:
            self._shares = shares
        return self._shares

    def _needs_rebalance(self, cap: int, gateways: Collection[str], now_s: float) -> bool:
        if cap != self._cap or set(gateways) != self._shares.keys():
            return True
        if 0.0 <= now_s - self._rebalanced_s < MIN_REBALANCE_INTERVAL_S:
            return False
        target = split_by_demand(cap, self._demand_weights(cap, gateways, now_s))
        return any(abs(target[name] - self._shares[name]) > max(MIN_SHARE_CHANGE * cap, 1.0) for name in target)

    def _demand_weights(self, cap: int, gateways: Collection[str], now_s: float) -> dict[str, float]:
        """Returns each gateway's fraction of the cap: by demand for used or recently full capacity, else equal."""
        observed = {name: self._demand[name] for name in gateways if name in self._demand}
        if not observed:  # a new process keeps the published shares
            return {name: self._shares.get(name, cap / len(gateways)) for name in gateways}
        used_share = min(1.0, sum(gateway_demand.recent_in_use for gateway_demand in observed.values()) / cap)
        used_share = max(used_share, math.exp(-max(0.0, now_s - self._last_full_s) / DEMAND_WINDOW_S))
        rates = {
            gateway: (observed_demand.recent_arrivals + PRIOR_ARRIVALS) / observed_demand.observed_s
            for gateway, observed_demand in observed.items()
            if observed_demand.observed_s >= MIN_OBSERVED_S
        }
        mean = math.fsum(rates.values()) / len(rates) if rates else 1.0
        demand = {name: rates.get(name, mean) for name in gateways}
        total = math.fsum(demand.values())
        return {name: used_share * rate / total + (1.0 - used_share) / len(demand) for name, rate in demand.items()}
