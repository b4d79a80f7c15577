"""Step 6: scale up at once, and scale down after a stabilization window.

Problem: removing a replica too early costs a new start and SLO misses. Keeping it too long costs GPU-hours. A count
that follows every fluctuation flaps.

Idea: ski rental. A replica is kept as long as the expected cost of removing it exceeds the cost of keeping it (Karlin
et al. 1988 for the bound; here probabilities make it an expectation). If the load returns, a new start costs L seconds
of a replica, and for L seconds its requests miss: sloMissCost times its work. Let P be the probability that the load
returns within a start-up time L, S the observed share of such returns, and u the work of a replica per second. The
window is L (P + S sloMissCost u), and at most the time within which returns are counted. Level shifts that were never
observed add no misses, because standby replicas cover them.

A replica that is still starting has a cost of its own: a removal wastes its start so far. It stays until it has been
unneeded for as long as it had been starting, at most L. Of a load that returns in bursts shorter than a start-up
nothing else would be learned, because no replica ever becomes ready.

The state stores for each sufficient count since when it has been sufficient without a break. The tier scales at once to
the smallest count that has been sufficient for its window. `scale_to_zero` decides about the last replica.
"""

from __future__ import annotations

import math
from bisect import bisect_left

from plimsoll.core.autoscaling import downscale_regret
from plimsoll.core.autoscaling.decision_state import MAX_MARKS, DownscaleRegret, TimedReplicas
from plimsoll.core.autoscaling.observations import NoDemand, SizingResult, TierDemand
from plimsoll.core.autoscaling.scaling_decision import STABILIZE_STEP
from plimsoll.core.autoscaling.tier_context import TierContext
from plimsoll.core.demand.standby_value import GrowthDistribution
from plimsoll.core.types import Unavailable
from plimsoll.core.units import format_wait


def stabilize(contexts: list[TierContext], miss_cost: float, now_s: float) -> None:
    """Step 6 for all tiers; they reach zero together. miss_cost: as in the policy."""
    counts = [_stabilized_count(context, miss_cost, now_s) for context in contexts]
    any_stays = any(count for count, _, _ in counts)
    for context, (count, reason, explanation) in zip(contexts, counts, strict=True):
        if any_stays and count == 0:
            count, reason, explanation = 1, "the last replica stays until both tiers can scale to zero", ""
        context.add_step(STABILIZE_STEP, "{}{}", reason, explanation, count=count, brief="{}")


def _stabilized_count(context: TierContext, miss_cost: float, now_s: float) -> tuple[int, str, str]:
    """Return the count, the reason, and its explanation as a suffix."""
    current = context.observation.replicas
    _update_regret(context, now_s)
    if context.scale_up_target >= current or (context.hold_reason is not None and not context.scaled_to_zero):
        context.set_state("downscale_candidates", ())
        return context.scale_up_target, "scale up at once" if context.scale_up_target > current else "no change", ""
    candidates = downscale_candidates(context.state.downscale_candidates, current, context.scale_down_target, now_s)
    context.set_state("downscale_candidates", candidates)
    if not candidates:
        return current, "no change", ""
    # The candidates stay in the state even after a scale-down, because a limit may still prevent it. A larger count has
    # been sufficient for longer and has a shorter window, so the predicate is monotone.
    counts = range(candidates[-1].replicas, current)
    index = bisect_left(
        counts,
        0.0,
        key=lambda count: sufficient_for_s(candidates, count, now_s) - _tier_hold_s(context, miss_cost, count, now_s),
    )
    if index == len(counts):
        hold_s = _tier_hold_s(context, miss_cost, current - 1, now_s)
        remaining_s = hold_s - sufficient_for_s(candidates, current - 1, now_s)
        reason = (
            f"{current - 1} would be enough; scale down in {format_wait(remaining_s)}, "
            f"stabilization window {format_wait(hold_s)}"
        )
        return current, reason, _hold_explanation(context, miss_cost, current - 1, now_s)
    target = counts[index]
    if target == 0 and context.scaled_to_zero:
        return 0, "at once, because an idle replica would cost more than the cold start that it may save", ""
    sufficient_s = sufficient_for_s(candidates, target, now_s)
    hold_s = _tier_hold_s(context, miss_cost, target, now_s)
    reason = f"{target} enough for {format_wait(sufficient_s)}, stabilization window {format_wait(hold_s)}"
    return target, reason, _hold_explanation(context, miss_cost, target, now_s)


def _update_regret(context: TierContext, now_s: float) -> None:
    """Count load returns. An interval with unknown demand does not count as a trial."""
    regret, observation, sizing = context.state.downscale_regret, context.observation, context.observation.sizing
    if context.hold_reason is not None or isinstance(sizing, Unavailable):
        context.set_state("downscale_regret", regret._replace(idle=()))
        return
    counts = observation.replicas, observation.ready, sizing.well_used_replicas, context.scale_down_target
    context.set_state(
        "downscale_regret",
        downscale_regret.record_trials(regret, *counts, context.bounds[0], observation.horizon_s, now_s),
    )


def _hold_explanation(context: TierContext, miss_cost: float, replicas: int, now_s: float) -> str:
    """Return the terms of the stabilization window as the end of a sentence."""
    demand, sizing, regret = context.observation.demand, context.observation.sizing, context.state.downscale_regret
    if isinstance(demand, NoDemand):
        return ": one start-up"
    if not isinstance(demand, TierDemand) or isinstance(sizing, Unavailable):
        return ": one start-up, because the load is unknown"
    start_s, prior = demand.forecast.horizon_s, _growth_probability(demand, sizing, replicas)
    return_probability, miss_cost_ratio = (
        downscale_regret.return_probability(regret, prior),
        miss_cost * sizing.replica_work * downscale_regret.observed_return_share(regret),
    )
    explanation = f": start-up {format_wait(start_s)}, {return_probability:.0%} chance that the load returns within it"
    if miss_cost_ratio:
        explanation += f", SLO misses then worth {format_wait(start_s * miss_cost_ratio)}"
    if return_probability + miss_cost_ratio > downscale_regret.REGRET_STARTUPS:
        explanation += f"; at most {downscale_regret.REGRET_STARTUPS:.0f} start-ups"
    if replicas and return_probability > prior:
        within_s = downscale_regret.REGRET_STARTUPS * context.observation.horizon_s
        explanation += (
            f" ({regret.needed_again:.0f} of {regret.trials:.0f} idle replicas were needed again within "
            f"{format_wait(within_s)})"
        )
    if replicas and (start_s := _wasted_start_s(context, replicas, now_s)) > 0.0:
        explanation += f"; a removal wastes a start of {format_wait(start_s)}"
    return explanation


def sufficient_for_s(candidates: tuple[TimedReplicas, ...], replicas: int, now_s: float) -> float:
    """Return how long `replicas` would have been enough, seconds."""
    return now_s - next(candidate.since_s for candidate in candidates if candidate.replicas <= replicas)


def downscale_candidates(
    previous: tuple[TimedReplicas, ...], ordered: int, scale_down_target: int, now_s: float
) -> tuple[TimedReplicas, ...]:
    """Return the sufficient counts, largest first, each with the time since which it is sufficient.

    A higher need removes the smaller counts. previous: the candidates of the last tick. ordered: current replica count.
    scale_down_target: count that is enough now.
    """
    candidates = [
        TimedReplicas(candidate.replicas, min(candidate.since_s, now_s))  # the clock may have been set back
        for candidate in previous
        if scale_down_target <= candidate.replicas < ordered
    ]
    if scale_down_target < ordered and (not candidates or candidates[-1].replicas > scale_down_target):
        candidates.append(TimedReplicas(scale_down_target, now_s))
    return tuple(candidates[-MAX_MARKS:])


def _tier_hold_s(context: TierContext, miss_cost: float, replicas: int, now_s: float) -> float:
    """Return how long `replicas` must have been enough before the tier scales down to it, seconds."""
    demand, sizing = context.observation.demand, context.observation.sizing
    if replicas == 0 and context.scaled_to_zero:
        return 0.0  # scale_to_zero has already waited
    if not isinstance(demand, TierDemand) or isinstance(sizing, Unavailable):
        return context.observation.horizon_s
    miss_cost_ratio = miss_cost * sizing.replica_work
    window_s = stabilization_window_s(
        context.state.downscale_regret,
        demand.forecast.horizon_s,
        _growth_probability(demand, sizing, replicas),
        miss_cost_ratio,
    )
    return max(window_s, _wasted_start_s(context, replicas, now_s)) if replicas else window_s


def _wasted_start_s(context: TierContext, replicas: int, now_s: float) -> float:
    """Return for how long replicas had been starting when `replicas` became enough, at most a start-up time, s.

    The youngest are removed first. Pods that fit on no node have not begun to start.
    """
    observation = context.observation
    ages_s = sorted(now_s - pod.created_s for pod in observation.starting if pod.unschedulable_reason is None)
    removed = min(observation.replicas - replicas, len(ages_s))
    if removed <= 0:
        return 0.0
    sufficient_s = sufficient_for_s(context.state.downscale_candidates, replicas, now_s)
    return min(max(0.0, ages_s[removed - 1] - sufficient_s), observation.horizon_s)


def stabilization_window_s(
    regret: DownscaleRegret, horizon_s: float, growth_probability: float, miss_cost_ratio: float
) -> float:
    """Return the stabilization window in seconds.

    growth_probability: probability that the load outgrows the count within the horizon. miss_cost_ratio: cost of the
    SLO misses of a missing replica, GPU-seconds per second.
    """
    return horizon_s * min(
        downscale_regret.REGRET_STARTUPS,
        downscale_regret.return_probability(regret, growth_probability)
        + miss_cost_ratio * downscale_regret.observed_return_share(regret),
    )


def _growth_probability(demand: TierDemand, sizing: SizingResult, replicas: int) -> float:
    """Return the probability that the load outgrows `replicas` within the horizon; 1 for no replicas.

    Without load no growth factor exists. Load that has been absent for t returns within L with probability L / (t + L)
    if nothing is known about its idle periods (Gott 1993). Replicas without arrivals are thus kept for 0.62 start-ups.
    """
    forecast = demand.forecast
    if replicas == 0:
        return 1.0
    if forecast.level > 0.0:
        return exceedance(demand.growth, replicas * sizing.replica_work / forecast.level)
    idle_s = forecast.level_shift_age_s if forecast.level_shift_age_s is not None else forecast.horizon_s
    return forecast.horizon_s / (forecast.horizon_s + idle_s) if forecast.horizon_s > 0.0 else 0.0


def exceedance(odds: GrowthDistribution, factor: float) -> float:
    """Return the probability that load grows beyond `factor`: 1 up to 1, then interpolated, then a 1/x^2 tail."""
    if factor <= 1.0:
        return 1.0
    largest = odds.factors[-1]
    if factor <= largest:
        return odds.tail_and_integral(factor)[0]
    return odds.exceedance[-1] * (largest / factor) ** 2 if math.isfinite(factor) else 0.0
