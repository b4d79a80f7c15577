"""From raw readings of one service to what a scaling decision needs. Pure: times come with the readings.

Problem: readings come from many sources at their own times, and a decision wants one moment, whole, that says what it
does not know.

Idea: `hear` whatever comes, in any order of sources; at a decision, `heard` puts together demand, lengths and tiers.
All times are seconds since the epoch by one clock. What it remembers does not grow with time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from plimsoll.core.forecast import Unknown
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.ports import Buckets, EngineReading, Judged, ServiceReading
from plimsoll.core.signals.demand import Demand, Sample
from plimsoll.core.signals.heard import Heard
from plimsoll.core.signals.intervals import ServiceInterval, answered, is_time
from plimsoll.core.signals.lengths import Lengths
from plimsoll.core.signals.percentile import percentile
from plimsoll.core.signals.tier import Tier
from plimsoll.core.transfer import Meter, Moved


class Listener:
    """One service. roles: its tiers; readings of engines in other roles are ignored."""

    def __init__(self, roles: Iterable[Role]) -> None:
        self._tiers = {role: Tier(role) for role in roles}
        self._prefills = {Role.PREFILL} if Role.PREFILL in self._tiers else {Role.SERVE, Role.DECODE}
        self._lengths = Lengths()
        self._demand = Demand(self._lengths.arrived)
        self._transfers = Meter()

    def hear_gateway(self, gateway: str, born: str, at_s: float, reading: ServiceReading) -> None:
        """What one gateway replica counted of the service until at_s, since its start `born`."""
        self._demand.hear(gateway, born, at_s, reading)

    def hear_engine(self, role: Role, reading: EngineReading) -> None:
        """What one engine of a tier says; what is no answer in it counts as not told."""
        tier = self._tiers.get(role)
        if tier is None or not is_time(reading.at_s):
            return
        reading = answered(reading)
        counted = reading.moved_prompt_tokens, reading.transfer_s, reading.post_s
        if role is Role.DECODE and None not in counted:
            self._transfers.hear(reading.pod, reading.born, reading.at_s, Moved(*(value or 0.0 for value in counted)))
        interval = tier.hear(reading)
        if interval is None:
            return
        if role is not Role.PREFILL:
            self._lengths.answered(reading.at_s, interval, tier.answers(reading.pod))
        if role in self._prefills:
            self._lengths.prefilled(reading.at_s, interval)

    def heard(
        self, now_s: float, pods: Mapping[Role, Collection[str]], gateways: Collection[str], share: float
    ) -> Heard:
        """What is known now.

        pods: those that are ready, by tier; others get no requests, and their silence would pass for load. gateways:
        those that exist. share: the promised percentile, 0 to 1.
        """
        fresh = self._demand.take(now_s, gateways)
        self._transfers.keep(pods.get(Role.DECODE, ()))
        told = self._told(now_s, gateways, share)
        return replace(
            told,
            fresh=fresh,
            moved=self._transfers.moved,
            gateways=max(1, len(gateways)),
            workload=self._lengths.workload(now_s, told.prompt_tokens, told.arrived),
            tiers={
                role: tier.heard(now_s, pods.get(role, ()), share, told.ttft_s, told.e2e_s)
                for role, tier in self._tiers.items()
            },
        )

    def _told(self, now_s: float, gateways: Collection[str], share: float) -> Heard:
        """What gateways tell; nothing while none of them does."""
        coverage = self._demand.coverage(now_s, gateways)
        if coverage <= 0.0:
            why = Unknown(f"none of {len(gateways)} gateways answers" if gateways else "there is no gateway")
            return Heard(
                why,
                answered_per_s=why,
                failed_per_s=why,
                prompt_tokens=why,
                ttft_s=why,
                e2e_s=why,
                shed_share=why,
                held=why,
                held_work_s=why,
                returning_s=why,
                in_flight=why,
            )
        rates, minute = self._demand.rates(now_s), self._demand.recent.over(now_s)
        present = self._demand.present(now_s, gateways)
        return Heard(
            rate_per_s=rates.rate_per_s if isinstance(rates, Sample) else rates,
            coverage=coverage,
            age_s=self._demand.age_s(now_s, gateways),
            answered_per_s=rates.answered_per_s if isinstance(rates, Sample) else rates,
            failed_per_s=rates.failed_per_s if isinstance(rates, Sample) else rates,
            prompt_tokens=self._lengths.prompt_tokens(minute),
            ttft_s=_told(minute, None if minute is None else minute.ttft_s, share),
            ttft=None if minute is None else minute.ttft_s,
            e2e_s=_told(minute, None if minute is None else minute.e2e_s, share),
            judged=_judged(minute),
            paced=None if minute is None else minute.paced,
            arrived=0.0 if minute is None else minute.arrived,
            shed_share=_shed(minute),
            held=present.held,
            held_work_s=present.held_work_s,
            returning_s=present.returning_s,
            in_flight=present.in_flight,
        )


def _told(minute: ServiceInterval | None, times: Buckets | None, share: float) -> float | Unknown:
    """A percentile of the last minute's times."""
    if minute is not None and times is None:
        return Unknown("the gateways do not tell")
    value = None if times is None else percentile(times, share)
    return Unknown("nobody was answered in the last minute") if value is None else value


def _judged(minute: ServiceInterval | None) -> Judged | None:
    if minute is None or minute.judged is None:
        return None
    missed = (minute.missed, minute.missed_ttft, minute.missed_e2e)
    return Judged(minute.judged, *(0.0 if part is None else part for part in missed))


def _shed(minute: ServiceInterval | None) -> float | Unknown:
    """Retries are refused too, and arrive once: at most all are."""
    if minute is None or minute.arrived <= 0.0:
        return Unknown("nothing arrived in the last minute")
    return min(1.0, minute.refused / minute.arrived)
