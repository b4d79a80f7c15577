"""Arrivals and their outcomes, aggregated over all gateways of a service.

Problem: gateways start, restart, stop and go silent independently, and report at slightly different times. A sum of
their last readings counts some moments twice and misses others. A difference of such sums is negative when a gateway
stops.

Idea: each gateway adds its own intervals to its pending sum. A sample is taken once every responding gateway has
reported, and takes all pending sums, so nothing counts twice. A silent gateway is assumed to carry as much as the
others, or as it carried itself if that is more: all requests of a service may count at their owner. The total stays at
the last one at full coverage, because the others have the clients of a gateway that died.

A gateway that has restarted counts too little for some seconds, because Envoy lets requests pass until its health check
has reached the picker, and because its first reading forms no interval. Until then it is assumed to carry at least what
it carried before. A gateway that has never reported carries nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from plimsoll.core.demand.counter_delta import (
    MAX_READING_GAP_S,
    ServiceInterval,
    demand_rejections,
    is_fresh,
    is_newer,
    is_valid_reading,
    is_valid_time,
    merge_intervals,
    service_interval,
)
from plimsoll.core.demand.sliding_window import SlidingWindow
from plimsoll.core.ports import ServiceReading
from plimsoll.core.slo import Slo
from plimsoll.core.types import Unavailable

GATEWAY_FRESH_S: Final = 5.0  # gateways are polled every second
RESTART_SETTLE_S: Final = 10.0  # from a restarted picker's first reading until it counts all its requests
SPEC_DELAY_S: Final = 2.0  # until all gateways have seen a change of the spec, and have been polled
_MIN_INTERVAL_S: Final = 0.5  # too short an interval for a rate
_USUAL_RATE_S: Final = 15.0  # time constant of a gateway's usual rate: more than the chance of one sample


@dataclass(slots=True)
class _GatewayState:
    """last_reading: instance id, time and reading. quiet_since_s: time since which its readings form intervals without
    a request. pending: the interval since the last sample. is_restarted: it (re)started since then. settled_from_s:
    when it counts all its requests again after a restart. usual_per_s: its mean rate at full coverage, 1/s.
    """

    last_reading: tuple[str, float, ServiceReading]
    quiet_since_s: float
    pending: ServiceInterval | None = None
    is_restarted: bool = True
    settled_from_s: float = -math.inf
    usual_per_s: float | None = None

    @property
    def has_rate(self) -> bool:
        """Whether it has reported a rate since the last sample."""
        return self.pending is not None and self.pending.seconds >= _MIN_INTERVAL_S

    @property
    def pending_per_s(self) -> float:
        """Arrivals since the last sample, 1/s; 0 where they form no interval."""
        return 0.0 if self.pending is None else _per_s(self.pending.arrivals, self.pending)

    def is_sure(self, now_s: float) -> bool:
        """Whether its pending interval has all its requests."""
        return self.has_rate and now_s >= self.settled_from_s

    def learn_usual(self) -> None:
        """Update its usual rate by the pending interval."""
        if self.pending is None:
            return
        weight = 1.0 if self.usual_per_s is None else -math.expm1(-self.pending.seconds / _USUAL_RATE_S)
        before = self.usual_per_s or 0.0
        self.usual_per_s = before + weight * (self.pending_per_s - before)


class GatewayGauges(NamedTuple):
    """Current gauges of all gateways, as in `ServiceMetrics`."""

    queued: float | Unavailable
    queued_work_s: float | Unavailable
    reserved_work_s: float | Unavailable
    in_flight: float | Unavailable


@dataclass(frozen=True, slots=True)
class ArrivalSample:
    """Mean rates (1/s) of all gateways since the sample before; taken at at_s."""

    at_s: float
    rate_per_s: float
    succeeded_per_s: float
    failed_per_s: float


class GatewayAggregator:
    """Aggregates the gateways of one service. on_interval: receives every interval of every gateway, with its end."""

    def __init__(self, on_interval: Callable[[float, ServiceInterval], None] = lambda at_s, interval: None) -> None:
        self._gateways: dict[str, _GatewayState] = {}
        self._on_interval = on_interval
        self._last_sample: ArrivalSample | None = None
        self._full_coverage_per_s: float | None = None  # the rate at the last full coverage, or the usual one if higher
        self._targets: tuple[tuple[float | None, ...], ...] | None = None
        self._targets_known_from_s = -math.inf  # when all gateways counted against them
        self.last_minute: SlidingWindow[ServiceInterval] = SlidingWindow()

    def set_slos(self, slos: tuple[Slo, ...], now_s: float) -> None:
        """Set what gateways count responses against. What they counted against others no longer says anything."""
        targets = tuple((slo.ttft_s, slo.ttft_per_1k_tokens_s, slo.e2e_s) for slo in slos)
        if self._targets is not None and targets != self._targets:
            self._targets_known_from_s = now_s + SPEC_DELAY_S
            self.last_minute.update(ServiceInterval.without_slo_counts)
        self._targets = targets

    def observe(self, gateway: str, instance_id: str, at_s: float, reading: ServiceReading) -> None:
        """Add one reading; late or invalid readings are ignored."""
        if not is_valid_time(at_s) or not is_valid_reading(reading):
            return
        state, current = self._gateways.get(gateway), (instance_id, at_s, reading)
        if state is None:
            self._evict_stale(at_s, ())
            self._gateways[gateway] = _GatewayState(current, at_s)
            return
        if not is_newer(at_s, state.last_reading[1]):
            return
        previous, state.last_reading = state.last_reading, current
        interval = service_interval(previous, current)
        if interval is None or _has_requests(previous[2], reading):
            state.quiet_since_s = at_s
        if interval is None:
            state.is_restarted = True
            if previous[0] != instance_id:
                state.settled_from_s = at_s + RESTART_SETTLE_S
            return
        state.pending = interval if state.pending is None else merge_intervals(state.pending, interval)
        is_of_old_targets = at_s - interval.seconds < self._targets_known_from_s
        self.last_minute.add(at_s, interval.without_slo_counts() if is_of_old_targets else interval)
        self._on_interval(at_s, interval)

    def take_sample(self, now_s: float, gateways: Collection[str]) -> bool:
        """Take a sample if one is due; return whether it was. gateways: the existing gateways."""
        responding = self._responding(now_s, gateways)
        if not responding or not all(gateway.is_restarted or gateway.has_rate for gateway in responding):
            return False
        silent = [
            self._gateways[name] for name in gateways if name in self._gateways and not self._is_responding(name, now_s)
        ]
        departed = [state for name, state in self._gateways.items() if state.pending and name not in gateways]
        has_interval = any(state.pending for state in (*responding, *departed))
        if has_interval:
            self._last_sample = self._sample(now_s, responding, silent, departed)
        for gateway in self._gateways.values():
            gateway.pending, gateway.is_restarted = None, False
        self._evict_stale(now_s, gateways)
        return has_interval

    def latest_sample(self, now_s: float) -> ArrivalSample | Unavailable:
        """The last sample, `Unavailable` if there is none or it is too old."""
        if self._last_sample is None:
            return Unavailable("no gateway has answered twice yet")
        if not is_fresh(self._last_sample.at_s, now_s, MAX_READING_GAP_S):
            return Unavailable(f"the last known rate is {now_s - self._last_sample.at_s:.0f} s old")
        return self._last_sample

    def coverage(self, now_s: float, gateways: Collection[str]) -> float:
        """Share of the gateways with a fresh reading; 0 without any."""
        return len(self._responding(now_s, gateways)) / len(gateways) if gateways else 0.0

    def silent(self, now_s: float, gateways: Collection[str]) -> tuple[str, ...]:
        """The gateways without a fresh reading, in order."""
        return tuple(sorted(name for name in gateways if not self._is_responding(name, now_s)))

    def knows_any(self, gateways: Collection[str]) -> bool:
        """Whether one of the gateways has ever reported the service."""
        return any(name in self._gateways for name in gateways)

    def age_s(self, now_s: float, gateways: Collection[str]) -> float | None:
        """Age in seconds of the oldest fresh reading; None without any."""
        return max(
            (max(0.0, now_s - state.last_reading[1]) for state in self._responding(now_s, gateways)), default=None
        )

    def quiet_s(self, now_s: float, gateways: Collection[str]) -> float:
        """Seconds for which every gateway has reported no request, as in `ServiceMetrics`."""
        responding = self._responding(now_s, gateways)
        if not responding or len(responding) < len(gateways):
            return 0.0
        return max(0.0, min(state.last_reading[1] - state.quiet_since_s for state in responding))

    def gauges(self, now_s: float, gateways: Collection[str]) -> GatewayGauges:
        """Current gauges, scaled up to the silent gateways."""
        readings = [gateway.last_reading[2] for gateway in self._responding(now_s, gateways)]
        if not readings:
            return GatewayGauges(*[Unavailable("no gateway answers")] * 4)
        queued = queued_work_s = reserved_work_s = in_flight = 0.0
        for reading in readings:
            queued += reading.queued
            queued_work_s += reading.queued_work_s
            reserved_work_s += reading.reserved_work_s
            in_flight += sum(reading.inflight.values())
        scale_factor = len(gateways) / len(readings)
        return GatewayGauges(
            queued * scale_factor,
            queued_work_s * scale_factor,
            reserved_work_s * scale_factor,
            in_flight * scale_factor,
        )

    def _responding(self, now_s: float, gateways: Collection[str]) -> list[_GatewayState]:
        return [self._gateways[name] for name in gateways if self._is_responding(name, now_s)]

    def _is_responding(self, name: str, now_s: float) -> bool:
        state = self._gateways.get(name)
        return state is not None and is_fresh(state.last_reading[1], now_s, GATEWAY_FRESH_S)

    def _sample(
        self,
        now_s: float,
        responding: Sequence[_GatewayState],
        silent: Sequence[_GatewayState],
        departed: Sequence[_GatewayState],
    ) -> ArrivalSample:
        """Return the sample of the pending intervals, with what silent and restarted gateways are assumed to carry."""
        known_per_s = math.fsum(state.pending_per_s for state in (*responding, *departed))
        unsure = [gateway for gateway in responding if not gateway.is_sure(now_s)]
        if silent or unsure:
            total_per_s = self._assumed_per_s(known_per_s, now_s, responding, silent)
        else:
            total_per_s = known_per_s
            for gateway in responding:
                gateway.learn_usual()
            usual_per_s = math.fsum(gateway.usual_per_s or 0.0 for gateway in responding)
            self._full_coverage_per_s = max(known_per_s, usual_per_s)
        # Requests end at the gateway that carries them, so only silent gateways lack them.
        most = 1.0 + len(silent) / len(responding)
        factor = min(total_per_s / known_per_s, most) if known_per_s > 0.0 else most
        intervals = [state.pending for state in (*responding, *departed) if state.pending]
        succeeded_per_s = math.fsum(_per_s(interval.succeeded, interval) for interval in intervals)
        failed_per_s = math.fsum(_per_s(interval.failed, interval) for interval in intervals)
        return ArrivalSample(now_s, total_per_s, succeeded_per_s * factor, failed_per_s * factor)

    def _assumed_per_s(
        self,
        known_per_s: float,
        now_s: float,
        responding: Sequence[_GatewayState],
        silent: Sequence[_GatewayState],
    ) -> float:
        """Return the total rate, at least the known one, where some gateways are silent or count too little."""
        sure = [gateway for gateway in responding if gateway.is_sure(now_s)]
        missing_per_s = math.fsum(gateway.usual_per_s or 0.0 for gateway in silent)
        missing_per_s += math.fsum(
            max(0.0, (gateway.usual_per_s or 0.0) - gateway.pending_per_s)
            for gateway in responding
            if not gateway.is_sure(now_s)
        )
        like_others_per_s = math.fsum(gateway.pending_per_s for gateway in sure) / max(1, len(sure))
        expected_per_s = max(known_per_s + missing_per_s, like_others_per_s * (len(responding) + len(silent)))
        if self._full_coverage_per_s is None:
            return expected_per_s
        return max(known_per_s, min(expected_per_s, self._full_coverage_per_s))

    def _evict_stale(self, now_s: float, gateways: Collection[str]) -> None:
        """Drop gateways that neither exist nor have a recent reading."""
        for name in [name for name in self._gateways if name not in gateways]:
            if not is_fresh(self._gateways[name].last_reading[1], now_s, MAX_READING_GAP_S):
                del self._gateways[name]


def _has_requests(previous: ServiceReading, current: ServiceReading) -> bool:
    """Whether a request that is demand arrived or ended between two readings, or any waits, runs or has a reservation
    at the second.
    """
    has_gauge = current.queued > 0.0 or current.reserved_work_s > 0.0 or any(current.inflight.values())
    return has_gauge or _counters(previous) != _counters(current)


def _counters(reading: ServiceReading) -> tuple[float, ...]:
    return (
        reading.arrived,
        reading.retried,
        reading.succeeded,
        reading.failed,
        reading.cancelled,
        demand_rejections(reading),
    )


def _per_s(amount: float, interval: ServiceInterval) -> float:
    return amount / max(interval.seconds, _MIN_INTERVAL_S)
