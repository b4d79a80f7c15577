"""How long a service is asked for nothing, and whether to wait for the next request is worth a replica's time.

Problem: a mean rate says little of the next request where few come: it fades for minutes after the last of them, and
regular callers, bursts and nights have the same mean. Yet whether to keep the last replica is a bet on just that.

Idea: the lengths of pauses are learned as a life table (Kaplan and Meier 1958, forgetting): of the pauses that reached
a length, the share that ended before the next one; lengths grow by sqrt(2) from one to the next. The prior knows
nothing of them: a pause that has lasted t ends within another x with x / (t + x) (Gott 1993), weighed as one pause.
Keep-alive times from histograms of idle times: Shahrad et al. 2020.

To wait for the next request until x takes E[min(pause left, x)] of the replica's time, and saves the cost of a cold
return with probability P(it comes until x). Waiting goes on while some x makes that a gain (optimal stopping). Under
the prior alone it ends when the pause is as long as the cold return costs: ski rental, never more than twice the price
of who knows the future (Karlin et al. 1988).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

VERSION: Final = 1
RATIO: Final = math.sqrt(2.0)
LENGTHS_S: Final = tuple(2.0 ** (step / 2.0) for step in range(30))  # 1 s to 6.4 h; longer pauses are of one kind
LEAST_S: Final = LENGTHS_S[0]
PRIOR: Final = 1.0 - 1.0 / RATIO  # share of the pauses that reach a length and end before the next, by Gott
KEEP: Final = 31.0 / 32.0  # of what is known of a length when one more pause reaches it
_ZEROS: Final = (0.0,) * len(LENGTHS_S)


class Pauses(NamedTuple):
    """What is remembered. reached, ended: pauses by LENGTHS_S, faded: those at least so long, those that ended there.

    since_s: when the pause that lasts began; None while there is none, or while that is not known. returned_s, came:
    when the last long pause ended, and requests since. bursts, requests: such returns and what came with them, faded.
    """

    reached: tuple[float, ...] = _ZEROS
    ended: tuple[float, ...] = _ZEROS
    since_s: float | None = None
    returned_s: float | None = None
    came: float = 0.0
    bursts: float = 0.0
    requests: float = 0.0


class Wait(NamedTuple):
    """Waiting until a time from now, at best: seconds of a replica that it takes, chance that a request comes."""

    within_s: float
    takes_s: float
    chance: float

    def saves_s(self, cold_s: float) -> float:
        """Replica-seconds beyond what it takes, where a cold return costs so many."""
        return self.chance * cold_s - self.takes_s


class Pause(NamedTuple):
    """Where a service stands. active: requests come, wait or run just now. away_s: else, for how long none has, as far
    as that was seen. powers: by LENGTHS_S, see `_powers`. burst: requests that come within a start once it ends, 1 or
    more.
    """

    active: bool
    away_s: float
    powers: tuple[float, ...]
    burst: float

    def chance(self, within_s: float) -> float:
        """Probability that a request comes within so many seconds from now."""
        return self._until(max(self.away_s, LEAST_S) + within_s).chance

    def best(self, cold_s: float) -> Wait:
        """The wait that saves most, if any does. cold_s: what a cold return costs, seconds of a replica.

        Within one length the rate of return falls as power / age, so a wait is best where that is 1 / cold_s.
        """
        away_s, waits = max(self.away_s, LEAST_S), [Wait(0.0, 0.0, 0.0)]
        for from_s, until_s, power in _pieces(away_s, self.powers):
            at_s = min(max(power * cold_s, from_s), until_s)
            if at_s > from_s:
                waits.append(self._until(at_s))
        return max(waits, key=lambda wait: wait.saves_s(cold_s))

    def _until(self, age_s: float) -> Wait:
        """Waiting until the pause is so long."""
        away_s, left, takes_s = max(self.away_s, LEAST_S), 1.0, 0.0
        for from_s, until_s, power in _pieces(away_s, self.powers):
            to_s = min(until_s, age_s)
            if to_s <= from_s:
                break
            grown, slower = math.log(to_s / from_s), 1.0 - power
            takes_s += left * from_s * (math.expm1(slower * grown) / slower if slower else grown)
            left *= math.exp(-power * grown)
        return Wait(age_s - away_s, takes_s, 1.0 - left)


def hear(pauses: Pauses, now_s: float, idle: bool | None, arrived: float, start_s: float) -> Pauses:
    """The pauses after one more look. idle: nothing comes, waits or runs; None: that is not known. arrived: requests
    since the last look. start_s: of a replica: what comes within it of a return finds none."""
    if idle is None:
        return pauses._replace(since_s=None, returned_s=None)
    pauses = _counted(pauses, now_s, arrived, start_s)
    if idle:
        known = pauses.since_s is not None and pauses.since_s <= now_s
        return pauses if known else pauses._replace(since_s=now_s)
    if pauses.since_s is None:
        return pauses
    lasted_s = now_s - pauses.since_s
    if lasted_s >= LEAST_S:
        pauses = _ended(pauses, lasted_s)
    if lasted_s >= start_s:
        pauses = pauses._replace(returned_s=now_s, came=max(1.0, arrived))
    return pauses._replace(since_s=None)


def _counted(pauses: Pauses, now_s: float, arrived: float, start_s: float) -> Pauses:
    """What comes after a return is counted for the time of a start."""
    if pauses.returned_s is None:
        return pauses
    if 0.0 <= now_s - pauses.returned_s < start_s:
        return pauses._replace(came=pauses.came + arrived)
    bursts, requests = KEEP * pauses.bursts + 1.0, KEEP * pauses.requests + pauses.came
    return pauses._replace(returned_s=None, came=0.0, bursts=bursts, requests=requests)


def _ended(pauses: Pauses, lasted_s: float) -> Pauses:
    place = bisect_right(LENGTHS_S, lasted_s) - 1
    reached = [KEEP * n + 1.0 if i <= place else n for i, n in enumerate(pauses.reached)]
    ended = [KEEP * n + (i == place) if i <= place else n for i, n in enumerate(pauses.ended)]
    return pauses._replace(reached=tuple(reached), ended=tuple(ended))


def lasting(pauses: Pauses, now_s: float) -> Pause:
    """The pause as it stands at now_s, when it was known whether there is one."""
    away_s = 0.0 if pauses.since_s is None else max(0.0, now_s - pauses.since_s)
    burst = (1.0 + pauses.requests) / (1.0 + pauses.bursts)
    return Pause(pauses.since_s is None, away_s, _powers(pauses), max(1.0, burst))


def _powers(pauses: Pauses) -> tuple[float, ...]:
    """By length, the k for which pauses that reach it outlast t with (its length / t)^k, up to the next length."""
    shares = [(e + PRIOR) / (r + 1.0) for r, e in zip(pauses.reached, pauses.ended, strict=True)]
    return (*(-math.log1p(-share) / math.log(RATIO) for share in shares[:-1]), 1.0)


def _pieces(away_s: float, powers: tuple[float, ...]) -> Iterator[tuple[float, float, float]]:
    """From the age of away_s on: ages from and until which one power holds."""
    for place in range(bisect_right(LENGTHS_S, away_s) - 1, len(LENGTHS_S)):
        until_s = LENGTHS_S[place + 1] if place + 1 < len(LENGTHS_S) else math.inf
        yield max(away_s, LENGTHS_S[place]), until_s, powers[place]


def to_dict(pauses: Pauses) -> dict[str, Any]:
    """What was learned, as JSON can hold it; the pause that lasts is to be seen anew."""
    return {
        "version": VERSION,
        "reached": [round(n, 3) for n in pauses.reached],
        "ended": [round(n, 3) for n in pauses.ended],
        "bursts": pauses.bursts,
        "requests": pauses.requests,
    }


def from_dict(stored: Mapping[str, Any]) -> Pauses:
    """The pauses that `to_dict` gave. Raises ValueError for anything else, other versions included."""
    try:
        if stored["version"] != VERSION:
            raise ValueError(f"not of version {VERSION}")
        reached, ended = (tuple(map(_amount, stored[name])) for name in ("reached", "ended"))
        if not len(reached) == len(ended) == len(LENGTHS_S) or any(e > r for r, e in zip(reached, ended, strict=True)):
            raise ValueError("the table of lengths does not fit")
        return Pauses(reached, ended, bursts=_amount(stored["bursts"]), requests=_amount(stored["requests"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no pauses: {error}") from error


def _amount(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < 1e9:
        raise ValueError(f"{value!r:.40} where an amount is expected")
    return float(value)
