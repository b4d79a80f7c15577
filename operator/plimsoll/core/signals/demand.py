"""Arrivals and what became of them, from however many gateways there are.

Problem: gateways start, restart, leave and fall silent, each on its own, and answer at slightly different times. A sum
of what they last said counts some moments twice and others never; a difference of such sums is negative when one left.

Idea: each gateway adds its own intervals to what is pending of it. A sample is taken once every gateway that is not
silent has had its say, and takes all that is pending, so that nothing is counted twice. A silent gateway is taken to
carry as much as the others, up to the total that was known with it: where it died, they have its clients already, and
scaling up what they count would double the demand. One that has not spoken yet, or just begun anew, carries nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from plimsoll.core.forecast import Unknown
from plimsoll.core.ports import ServiceReading
from plimsoll.core.signals.intervals import (
    GAP_S,
    ServiceInterval,
    is_answer,
    is_fresh,
    is_later,
    is_time,
    service_interval,
    together,
)
from plimsoll.core.signals.memory import Recent

TRUST_S: Final = 5.0  # a gateway is asked every second
_LEAST_S: Final = 0.5  # less time than this says nothing of a rate


@dataclass(slots=True)
class _Gateway:
    """last: its start, time and reading. pending: since the last sample. anew: it has begun (again) since then."""

    last: tuple[str, float, ServiceReading]
    pending: ServiceInterval | None = None
    anew: bool = True

    @property
    def told(self) -> bool:
        """Whether it has said something since the last sample that makes a rate, or that it makes none yet."""
        return self.anew or (self.pending is not None and self.pending.seconds >= _LEAST_S)


class Present(NamedTuple):
    """What there is at all gateways now, as `Heard` has it."""

    held: float | Unknown
    held_work_s: float | Unknown
    returning_s: float | Unknown
    in_flight: float | Unknown


@dataclass(frozen=True, slots=True)
class Sample:
    """Means over the time since the sample before, 1/s, of all gateways; taken at at_s."""

    at_s: float
    rate_per_s: float
    answered_per_s: float
    failed_per_s: float


class Demand:
    """Of one service. heard: told every interval of every gateway, with its end."""

    def __init__(self, heard: Callable[[float, ServiceInterval], None] = lambda at_s, interval: None) -> None:
        self._gateways: dict[str, _Gateway] = {}
        self._heard = heard
        self._sample: Sample | None = None
        self._whole_per_s: float | None = None  # the last rate that no gateway was missing from
        self.recent: Recent[ServiceInterval] = Recent()

    def hear(self, gateway: str, born: str, at_s: float, reading: ServiceReading) -> None:
        """One reading; late ones, and such as are no answer, are ignored."""
        if not is_time(at_s) or not is_answer(reading):
            return
        known, new = self._gateways.get(gateway), (born, at_s, reading)
        if known is None:
            self._forget(at_s, ())
            self._gateways[gateway] = _Gateway(new)
            return
        if not is_later(at_s, known.last[1]):
            return
        interval, known.last = service_interval(known.last, new), new
        if interval is None:
            known.anew = True
            return
        known.pending = interval if known.pending is None else together(known.pending, interval)
        self.recent.add(at_s, interval)
        self._heard(at_s, interval)

    def take(self, now_s: float, gateways: Collection[str]) -> bool:
        """Take a sample if one is due; whether it was. gateways: those that exist."""
        answering = self._answering(now_s, gateways)
        if not answering or not all(gateway.told for gateway in answering):
            return False
        silent = sum(name in self._gateways for name in gateways) - len(answering)
        listed = [gateway.pending for gateway in answering if gateway.pending]
        gone = [known.pending for name, known in self._gateways.items() if known.pending and name not in gateways]
        for gateway in self._gateways.values():
            gateway.pending, gateway.anew = None, False
        self._forget(now_s, gateways)
        if not listed and not gone:
            return False
        self._sample = self._drawn(now_s, listed + gone, len(answering) / (len(answering) + silent))
        return True

    def rates(self, now_s: float) -> Sample | Unknown:
        """The last sample while it holds."""
        if self._sample is None:
            return Unknown("no gateway has answered twice yet")
        if not is_fresh(self._sample.at_s, now_s, GAP_S):
            return Unknown(f"the last known rate is {now_s - self._sample.at_s:.0f} s old")
        return self._sample

    def coverage(self, now_s: float, gateways: Collection[str]) -> float:
        """Share of the gateways whose word is fresh; 0 without any."""
        return len(self._answering(now_s, gateways)) / len(gateways) if gateways else 0.0

    def age_s(self, now_s: float, gateways: Collection[str]) -> float | None:
        """How old the oldest word is that counts; None without any."""
        return max((max(0.0, now_s - one.last[1]) for one in self._answering(now_s, gateways)), default=None)

    def present(self, now_s: float, gateways: Collection[str]) -> Present:
        """What there is now, scaled up to the gateways that are silent."""
        last = [gateway.last[2] for gateway in self._answering(now_s, gateways)]
        if not last:
            return Present(*[Unknown("no gateway answers")] * 4)
        held = held_work_s = returning = in_flight = 0.0
        for reading in last:
            held += reading.waiting
            held_work_s += reading.held_work_s
            returning += reading.ticket_work_s
            in_flight += sum(reading.inflight.values())
        whole = len(gateways) / len(last)
        return Present(held * whole, held_work_s * whole, returning * whole, in_flight * whole)

    def _answering(self, now_s: float, gateways: Collection[str]) -> list[_Gateway]:
        known = [self._gateways[name] for name in gateways if name in self._gateways]
        return [gateway for gateway in known if is_fresh(gateway.last[1], now_s, TRUST_S)]

    def _drawn(self, now_s: float, parts: Sequence[ServiceInterval], coverage: float) -> Sample:
        known_per_s = math.fsum(_per_s(part.arrived, part) for part in parts)
        scaled_per_s = known_per_s / coverage
        if coverage < 1.0 and self._whole_per_s is not None:
            scaled_per_s = max(known_per_s, min(scaled_per_s, self._whole_per_s))
        else:
            self._whole_per_s = scaled_per_s if coverage == 1.0 else None
        factor = scaled_per_s / known_per_s if known_per_s > 0.0 else 1.0 / coverage
        answered = math.fsum(_per_s(part.answered, part) for part in parts)
        failed = math.fsum(_per_s(part.failed, part) for part in parts)
        return Sample(now_s, scaled_per_s, answered * factor, failed * factor)

    def _forget(self, now_s: float, gateways: Collection[str]) -> None:
        """Drop gateways that are neither listed nor lately heard."""
        for name in [name for name in self._gateways if name not in gateways]:
            if not is_fresh(self._gateways[name].last[1], now_s, GAP_S):
                del self._gateways[name]


def _per_s(amount: float, interval: ServiceInterval) -> float:
    return amount / max(interval.seconds, _LEAST_S)
