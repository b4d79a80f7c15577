"""Idle periods: how long a service has no requests, and whether keeping a replica until the next request pays off.

Problem: where requests are rare, a mean rate says little about the next one. It decays for minutes after the last
request, and regular callers, bursts and nights have the same mean. Yet whether to keep the last replica depends on the
next request.

Idea: learn the lengths of idle periods as a life table (Kaplan and Meier 1958, with forgetting). For each length, it
has the share of the idle periods reaching it that end before the next length. Lengths grow by a factor of sqrt(2). The
prior knows nothing of the service: an idle period that has lasted t ends within another x with probability x / (t + x)
(Gott 1993). It weighs as much as one idle period. Shahrad et al. 2020 derive keep-alive times from histograms of idle
times.

Waiting until x for the next request costs E[min(remaining idle time, x)] of the replica's time. With probability
P(arrival until x), it saves the cost of a cold start. Waiting continues while some x gives a net saving (optimal
stopping). Under the prior alone, it ends when the idle period is as long as the cost of a cold start. This is ski
rental: at most twice the cost of an oracle (Karlin et al. 1988).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from typing import Annotated, Final, NamedTuple, TypeAlias

from plimsoll.core import codec
from plimsoll.core.codec import Amount, Length, Number

LENGTH_RATIO: Final = math.sqrt(2.0)
IDLE_LENGTHS_S: Final = tuple(
    2.0 ** (step / 2.0) for step in range(30)
)  # 1 s to 6.4 h; longer idle periods count as one length
MIN_IDLE_S: Final = IDLE_LENGTHS_S[0]
PRIOR_END_SHARE: Final = (
    1.0 - 1.0 / LENGTH_RATIO
)  # share of idle periods reaching a length that end before the next one (Gott)
DECAY: Final = 31.0 / 32.0  # of a length's counts, when one more idle period reaches it
_ZEROS: Final = (0.0,) * len(IDLE_LENGTHS_S)
_Counts: TypeAlias = Annotated[
    tuple[Annotated[float, Number(0.0, decimals=3)], ...], Length(len(IDLE_LENGTHS_S), len(IDLE_LENGTHS_S))
]


@codec.stored_as("idle statistics", version=1, omit=("idle_since_s", "burst_started_s", "burst_requests"))
class IdleStats(NamedTuple):
    """Learned idle statistics. All counts are discounted.

    at_risk, ended: idle periods that reached each of IDLE_LENGTHS_S, and those that ended there. idle_since_s: start of
    the current idle period; None without one or while unknown. burst_started_s, burst_requests: end of the last long
    idle period, and requests since. bursts, requests: number of such bursts, and their requests. The current idle
    period is not stored; it is observed again.
    """

    at_risk: _Counts = _ZEROS
    ended: _Counts = _ZEROS
    idle_since_s: float | None = None
    burst_started_s: float | None = None
    burst_requests: float = 0.0
    bursts: Amount = 0.0
    requests: Amount = 0.0

    def validate(self) -> None:
        """Raise ValueError if more idle periods ended at a length than reached it."""
        if any(ended > at_risk for at_risk, ended in zip(self.at_risk, self.ended, strict=True)):
            raise ValueError("more idle periods ended than there were")


class WaitOption(NamedTuple):
    """The option to wait for `within_s`: its cost in seconds of a replica, and the probability of an arrival."""

    within_s: float
    cost_s: float
    arrival_probability: float

    def net_saving_s(self, cold_s: float) -> float:
        """Replica-seconds saved beyond the cost of waiting, where a cold start costs `cold_s` of them."""
        return self.arrival_probability * cold_s - self.cost_s


class IdlePeriod(NamedTuple):
    """Current state of a service.

    active: requests arrive, wait or run. idle_s: otherwise, the observed time without any. powers: by IDLE_LENGTHS_S,
    see `_powers`. burst_size: requests that arrive within one start-up time after the idle period, 1 or more.
    """

    active: bool
    idle_s: float
    powers: tuple[float, ...]
    burst_size: float

    def arrival_probability(self, within_s: float) -> float:
        """Probability that a request arrives within `within_s` seconds from now."""
        return self._wait_until(max(self.idle_s, MIN_IDLE_S) + within_s).arrival_probability

    def optimal_wait(self, cold_s: float) -> WaitOption:
        """The wait with the largest net saving, of length 0 if none saves. cold_s: cost of a cold start, seconds of a
        replica.

        Within one length, the arrival hazard falls as power / age, so the best wait ends where the hazard is 1 /
        cold_s.
        """
        idle_s, waits = max(self.idle_s, MIN_IDLE_S), [WaitOption(0.0, 0.0, 0.0)]
        for from_s, until_s, power in _hazard_pieces(idle_s, self.powers):
            at_s = min(max(power * cold_s, from_s), until_s)
            if at_s > from_s:
                waits.append(self._wait_until(at_s))
        return max(waits, key=lambda wait: wait.net_saving_s(cold_s))

    def _wait_until(self, age_s: float) -> WaitOption:
        """The option to wait until the idle period has the length `age_s`."""
        idle_s, survival, cost_s = max(self.idle_s, MIN_IDLE_S), 1.0, 0.0
        for from_s, until_s, power in _hazard_pieces(idle_s, self.powers):
            to_s = min(until_s, age_s)
            if to_s <= from_s:
                break
            grown, exponent = math.log(to_s / from_s), 1.0 - power
            cost_s += survival * from_s * (math.expm1(exponent * grown) / exponent if exponent else grown)
            survival *= math.exp(-power * grown)
        return WaitOption(age_s - idle_s, cost_s, 1.0 - survival)


def update_idle(stats: IdleStats, now_s: float, idle: bool | None, arrived: float, startup_s: float) -> IdleStats:
    """Return the statistics after one more observation.

    idle: no request arrives, waits or runs; None where that is unknown. arrived: requests since the last observation.
    startup_s: start-up time of a replica, in which arrivals after an idle period find no replica.
    """
    if idle is None:
        return stats._replace(idle_since_s=None, burst_started_s=None)
    stats = _count_burst(stats, now_s, arrived, startup_s)
    if idle:
        started = stats.idle_since_s is not None and stats.idle_since_s <= now_s
        return stats if started else stats._replace(idle_since_s=now_s)
    if stats.idle_since_s is None:
        return stats
    duration_s = now_s - stats.idle_since_s
    if duration_s >= MIN_IDLE_S:
        stats = _record_idle(stats, duration_s)
    if duration_s >= startup_s:
        stats = stats._replace(burst_started_s=now_s, burst_requests=max(1.0, arrived))
    return stats._replace(idle_since_s=None)


def _count_burst(stats: IdleStats, now_s: float, arrived: float, startup_s: float) -> IdleStats:
    """Count arrivals after an idle period for one start-up time."""
    if stats.burst_started_s is None:
        return stats
    if 0.0 <= now_s - stats.burst_started_s < startup_s:
        return stats._replace(burst_requests=stats.burst_requests + arrived)
    bursts, requests = DECAY * stats.bursts + 1.0, DECAY * stats.requests + stats.burst_requests
    return stats._replace(burst_started_s=None, burst_requests=0.0, bursts=bursts, requests=requests)


def _record_idle(stats: IdleStats, duration_s: float) -> IdleStats:
    place = bisect_right(IDLE_LENGTHS_S, duration_s) - 1
    at_risk = [DECAY * n + 1.0 if i <= place else n for i, n in enumerate(stats.at_risk)]
    ended = [DECAY * n + (i == place) if i <= place else n for i, n in enumerate(stats.ended)]
    return stats._replace(at_risk=tuple(at_risk), ended=tuple(ended))


def current_idle(stats: IdleStats, now_s: float) -> IdlePeriod:
    """The current state of the service at now_s."""
    idle_s = 0.0 if stats.idle_since_s is None else max(0.0, now_s - stats.idle_since_s)
    burst = (1.0 + stats.requests) / (1.0 + stats.bursts)
    return IdlePeriod(stats.idle_since_s is None, idle_s, _powers(stats), max(1.0, burst))


def _powers(stats: IdleStats) -> tuple[float, ...]:
    """By length, the exponent k: idle periods reaching it outlast t with probability (length / t)^k, up to the next
    length.
    """
    shares = [
        (ended + PRIOR_END_SHARE) / (at_risk + 1.0) for at_risk, ended in zip(stats.at_risk, stats.ended, strict=True)
    ]
    return (*(-math.log1p(-share) / math.log(LENGTH_RATIO) for share in shares[:-1]), 1.0)


def _hazard_pieces(idle_s: float, powers: tuple[float, ...]) -> Iterator[tuple[float, float, float]]:
    """Age ranges from `idle_s` on, in each of which one exponent applies."""
    for place in range(bisect_right(IDLE_LENGTHS_S, idle_s) - 1, len(IDLE_LENGTHS_S)):
        until_s = IDLE_LENGTHS_S[place + 1] if place + 1 < len(IDLE_LENGTHS_S) else math.inf
        yield max(idle_s, IDLE_LENGTHS_S[place]), until_s, powers[place]
