"""What one decision leaves to the next: explicit and small, so that it survives a restart in the service's status."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from plimsoll.core.lifecycle import Backoff

VERSION: Final = 1
MOST_KEPT: Final = 32  # of each kind of mark; the oldest go first
NO_BACKOFF: Final = Backoff()
LEAST_SCALE, MOST_SCALE = 0.6, 2.0  # of the tail: what lies beyond is another trouble than the tail's


class Mark(NamedTuple):
    """A count of replicas, and since when."""

    replicas: int
    since_s: float


class Returns(NamedTuple):
    """How often needs came back (`returns`). idle: counts, largest first, each since when it would have been enough;
    the first is the one from which the others were left. served: replicas that a need has reached while they were
    ready, and that have not been idle for too long since. trials: replicas that were idle, those longest ago faded;
    again: of those, needed again.
    """

    idle: tuple[Mark, ...] = ()
    served: int = 0
    trials: float = 0.0
    again: float = 0.0


NO_RETURNS: Final = Returns()


class TierState(NamedTuple):
    """lower: counts that would have been enough, largest first, and since when without a break.

    ordered: counts that were ordered, oldest first, as far back as a rate limit looks. tail_scale: measured tail of
    TPOT over its prior, to be given to the next sizing. backoff: after pods that fit on no node. replicas: what was
    decided last. ready: replicas able to serve at the last decision, None before it; grown_s: when those became more,
    None where they have not since the tier is known. returns: of needs, as far as they were seen.
    """

    lower: tuple[Mark, ...] = ()
    ordered: tuple[Mark, ...] = ()
    tail_scale: float = 1.0
    backoff: Backoff = NO_BACKOFF
    replicas: int = 0
    ready: int | None = None
    grown_s: float | None = None
    returns: Returns = NO_RETURNS


@dataclass(frozen=True, slots=True)
class State:
    """Of one service. at_s: when it was left, seconds since the epoch; None before the first decision."""

    at_s: float | None = None
    tiers: Mapping[str, TierState] = field(default_factory=dict)


def to_dict(state: State) -> dict[str, Any]:
    """The state as JSON can hold it exactly, with its version."""
    return {
        "version": VERSION,
        "at": state.at_s,
        "tiers": {
            name: {
                "lower": [list(mark) for mark in tier.lower],
                "ordered": [list(mark) for mark in tier.ordered],
                "tailScale": tier.tail_scale,
                "backoff": list(tier.backoff),
                "replicas": tier.replicas,
                "ready": tier.ready,
                "grown": tier.grown_s,
                "returns": [[list(mark) for mark in tier.returns.idle], *tier.returns[1:]],
            }
            for name, tier in state.tiers.items()
        },
    }


def from_dict(stored: Mapping[str, Any]) -> State:
    """The state that `to_dict` gave. Raises ValueError for anything else, other versions included."""
    if not isinstance(stored, Mapping) or stored.get("version") != VERSION:
        raise ValueError(f"not a scaling state of version {VERSION}: {str(stored)[:80]}")
    try:
        at_s = stored["at"]
        tiers = {str(name): _tier(tier) for name, tier in stored["tiers"].items()}
        return State(None if at_s is None else _number(at_s), tiers)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a scaling state: {error}") from error


def _tier(stored: Any) -> TierState:
    tries, until_s = stored["backoff"]
    scale = _number(stored["tailScale"])
    if not LEAST_SCALE <= scale <= MOST_SCALE:
        raise ValueError(f"no tail is scaled by {scale}")
    backoff = Backoff(_count(tries), _number(until_s))
    marks = _marks(stored["lower"]), _marks(stored["ordered"])
    ready, grown_s = stored.get("ready"), stored.get("grown")
    return TierState(
        *marks,
        scale,
        backoff,
        _count(stored["replicas"]),
        None if ready is None else _count(ready),
        None if grown_s is None else _number(grown_s),
        _returns(stored["returns"]) if "returns" in stored else NO_RETURNS,  # a release that counted none
    )


def _returns(stored: Any) -> Returns:
    idle, served, trials, again = stored
    if not 0.0 <= _number(again) <= _number(trials):
        raise ValueError(f"{again} of {trials} needs returned")
    return Returns(_marks(idle), _count(served), float(trials), float(again))


def _marks(stored: Any) -> tuple[Mark, ...]:
    if not isinstance(stored, list) or len(stored) > MOST_KEPT:
        raise ValueError(f"at most {MOST_KEPT} counts are kept, not {str(stored)[:80]}")
    return tuple(Mark(_count(replicas), _number(since_s)) for replicas, since_s in stored)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r:.80} where a whole number of 0 or more is expected")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r:.80} where a finite number is expected")
    return float(value)
