"""Order delay: a calm tier orders no replica that only the model requires.

Problem: a new estimate of the request lengths can raise the need by a replica for seconds, and a standby replica that
just pays off may not pay off a moment later. Such replicas are released before they serve. Meanwhile the existing
replicas carry the same load within the SLO.

Idea: measurement outranks the model. A tier is calm after a minute in which all metrics were known, at most half of the
error budget was missed, and the forecast rate did not rise by more than RATE_TOLERANCE. Its replicas then carry this
load, so a need that exceeds them by no more than CARRIED_SHARE does not count. A larger need, and standby replicas that
the service's own growth justifies, count once they have lasted for ORDER_DELAY_S. Arrivals that exceed the rate, or
misses, end the calm at once. Fewer replicas have shown only that they carry the present rate, so load that returns
after a scale-down exceeds it.
"""

from __future__ import annotations

import math
from typing import Final

from plimsoll.core.autoscaling.decision_state import MAX_MARKS, Calm, TierDecisionState, TimedReplicas
from plimsoll.core.autoscaling.tier_context import TierContext
from plimsoll.core.slo import Slo

ORDER_DELAY_S: Final = 60.0
RATE_TOLERANCE: Final = 0.05  # relative; the rate of a constant load is known better than this within a minute
CALM_BUDGET_SHARE: Final = 0.5  # of the error budget
CARRIED_SHARE: Final = 0.25  # relative error of the model's need that measurement outranks


def has_few_misses(missed_share: float | None, slo: Slo | None) -> bool:
    """Whether the missed share of the last minute's arrivals is known, and at most half of the error budget."""
    return slo is not None and missed_share is not None and missed_share <= CALM_BUDGET_SHARE * (1.0 - slo.share)


def order_now(context: TierContext, need: int, wanted: int, rate_per_s: float, few_misses: bool, now_s: float) -> int:
    """Return how many of the wanted replicas to order now, and update the calm in the context's state.

    need: replicas that the forecast of `rate_per_s` needs. wanted: these with warm and standby replicas.
    """
    state = context.state
    ordered = max(context.observation.replicas, state.replicas)  # a count lowered by hand is restored at once
    calm = update_calm(state.calm, rate_per_s, ordered, few_misses and context.observation.coverage == 1.0, now_s)
    context.set_state("calm", calm)
    if calm is None or now_s - calm.since_s < ORDER_DELAY_S:
        context.set_state("wanted", ())
        return wanted
    own_standby = min(context.standby, context.own_growth_replicas)
    steady = carried_need(need, ordered) + max(context.policy.warm_replicas, own_standby)
    context.set_state("wanted", update_wanted(state.wanted, steady, now_s))
    return max(min(wanted, ordered), lasting_replicas(context.state.wanted, now_s))


def next_order_s(state: TierDecisionState, now_s: float) -> float:
    """Return when a wanted count above the decided one has lasted; infinite if there is none."""
    waiting = (entry.since_s + ORDER_DELAY_S for entry in state.wanted if entry.replicas > state.replicas)
    return min((due_s for due_s in waiting if due_s > now_s), default=math.inf)


def end_calm(context: TierContext) -> None:
    """End the calm of a tier whose demand is unknown, or that has none: nothing was carried meanwhile."""
    context.set_state("calm", None)
    context.set_state("wanted", ())


def update_calm(calm: Calm | None, rate_per_s: float, replicas: int, few_misses: bool, now_s: float) -> Calm | None:
    """Return since when few requests have missed, and the forecast rate that the ordered replicas carry.

    None while many miss. Fewer replicas than before carry the present rate, as far as is known.
    """
    if not few_misses:
        return None
    if calm is None or rate_per_s > (1.0 + RATE_TOLERANCE) * calm.rate_per_s or now_s < calm.since_s:
        return Calm(rate_per_s, now_s, replicas)
    if replicas < calm.replicas:
        return Calm(min(rate_per_s, calm.rate_per_s), calm.since_s, replicas)
    return calm


def carried_need(need: int, ordered: int) -> int:
    """Return the need of a calm tier: at most the ordered replicas, unless it exceeds them by more than the model's
    error."""
    return need if need > ordered + max(1, int(CARRIED_SHARE * ordered)) else min(need, ordered)


def update_wanted(wanted: tuple[TimedReplicas, ...], replicas: int, now_s: float) -> tuple[TimedReplicas, ...]:
    """Return the wanted counts, smallest first, each with the time since which at least as many are wanted."""
    kept: list[TimedReplicas] = []
    for entry in wanted:
        kept.append(TimedReplicas(min(entry.replicas, replicas), min(entry.since_s, now_s)))
        if entry.replicas >= replicas:
            return tuple(kept)
    return tuple([*kept, TimedReplicas(replicas, now_s)][-MAX_MARKS:])


def lasting_replicas(wanted: tuple[TimedReplicas, ...], now_s: float) -> int:
    """Return the largest count that has been wanted for ORDER_DELAY_S; 0 if none has."""
    return max((entry.replicas for entry in wanted if now_s - entry.since_s >= ORDER_DELAY_S), default=0)
