"""State that one decision passes to the next. It is small, so that it fits the service's checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from plimsoll.core.autoscaling.startup_time import Backoff

DECISION_STATE_VERSION: Final = 1
MAX_MARKS: Final = 32  # entries per list; the oldest are dropped
NO_BACKOFF: Final = Backoff()
MIN_TAIL_SCALE, MAX_TAIL_SCALE = 0.6, 2.0  # larger deviations have other causes than the tail


class TimedReplicas(NamedTuple):
    """A replica count, and the time since which it applies, s."""

    replicas: int
    since_s: float


class DownscaleRegret(NamedTuple):
    """Statistics of load returns (see `downscale_regret`).

    idle: sufficient counts, largest first, with the time since which each is sufficient; the first is the starting
    count. served: replicas that the load has needed while they were ready, and that have not been idle for too long.
    trials: discounted number of idle replicas. needed_again: those of them that were needed again.
    """

    idle: tuple[TimedReplicas, ...] = ()
    served: int = 0
    trials: float = 0.0
    needed_again: float = 0.0


NO_REGRET: Final = DownscaleRegret()


class TierDecisionState(NamedTuple):
    """State of one tier.

    downscale_candidates: sufficient counts, largest first, with the time since which each is sufficient. order_history:
    ordered counts, oldest first, for the rate limits. tpot_tail_scale: measured TPOT tail over its prior, for the next
    sizing. scheduling_backoff: back-off after unschedulable pods. replicas: last decided count. ready: ready replicas
    at the last decision, None before it. ready_increased_s: time of their last increase, None without one.
    """

    downscale_candidates: tuple[TimedReplicas, ...] = ()
    order_history: tuple[TimedReplicas, ...] = ()
    tpot_tail_scale: float = 1.0
    scheduling_backoff: Backoff = NO_BACKOFF
    replicas: int = 0
    ready: int | None = None
    ready_increased_s: float | None = None
    downscale_regret: DownscaleRegret = NO_REGRET


@dataclass(frozen=True, slots=True)
class DecisionState:
    """State of one service. at_s: time of the decision, seconds since the epoch; None before the first."""

    at_s: float | None = None
    tiers: Mapping[str, TierDecisionState] = field(default_factory=dict)


def dump_decision_state(state: DecisionState) -> dict[str, Any]:
    """Return the state as a JSON document with a version."""
    return {
        "version": DECISION_STATE_VERSION,
        "at": state.at_s,
        "tiers": {
            name: {
                "lower": [list(mark) for mark in tier.downscale_candidates],
                "ordered": [list(mark) for mark in tier.order_history],
                "tailScale": tier.tpot_tail_scale,
                "backoff": list(tier.scheduling_backoff),
                "replicas": tier.replicas,
                "ready": tier.ready,
                "grown": tier.ready_increased_s,
                "returns": [[list(mark) for mark in tier.downscale_regret.idle], *tier.downscale_regret[1:]],
            }
            for name, tier in state.tiers.items()
        },
    }


def load_decision_state(stored: Mapping[str, Any]) -> DecisionState:
    """Return the state of a stored document. Raises ValueError for an invalid document or another version."""
    if not isinstance(stored, Mapping) or stored.get("version") != DECISION_STATE_VERSION:
        raise ValueError(f"not a scaling state of version {DECISION_STATE_VERSION}: {str(stored)[:80]}")
    try:
        at_s = stored["at"]
        tiers = {str(name): _load_tier(tier) for name, tier in stored["tiers"].items()}
        return DecisionState(None if at_s is None else _checked_number(at_s), tiers)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a scaling state: {error}") from error


def _load_tier(stored: Any) -> TierDecisionState:
    tries, until_s = stored["backoff"]
    scale = _checked_number(stored["tailScale"])
    if not MIN_TAIL_SCALE <= scale <= MAX_TAIL_SCALE:
        raise ValueError(f"tailScale {scale} is out of range")
    backoff = Backoff(_checked_count(tries), _checked_number(until_s))
    marks = _load_marks(stored["lower"]), _load_marks(stored["ordered"])
    ready, ready_increased_s = stored.get("ready"), stored.get("grown")
    return TierDecisionState(
        *marks,
        scale,
        backoff,
        _checked_count(stored["replicas"]),
        None if ready is None else _checked_count(ready),
        None if ready_increased_s is None else _checked_number(ready_increased_s),
        _load_regret(stored["returns"]) if "returns" in stored else NO_REGRET,  # stored by an older release
    )


def _load_regret(stored: Any) -> DownscaleRegret:
    idle, served, trials, needed_again = stored
    if not 0.0 <= _checked_number(needed_again) <= _checked_number(trials):
        raise ValueError(f"{needed_again} returns of {trials} trials is out of range")
    return DownscaleRegret(_load_marks(idle), _checked_count(served), float(trials), float(needed_again))


def _load_marks(stored: Any) -> tuple[TimedReplicas, ...]:
    if not isinstance(stored, list) or len(stored) > MAX_MARKS:
        raise ValueError(f"must have at most {MAX_MARKS} counts, not {str(stored)[:80]}")
    return tuple(TimedReplicas(_checked_count(replicas), _checked_number(since_s)) for replicas, since_s in stored)


def _checked_count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r:.80} must be an integer of at least 0")
    return value


def _checked_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r:.80} must be a finite number")
    return float(value)
