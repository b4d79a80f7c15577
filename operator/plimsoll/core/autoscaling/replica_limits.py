"""Steps 7 and 8: limits of the user and the cluster, and the scaling mode.

Problem: limits contradict each other (a minimum against unschedulable pods, a rate limit against a need), and the user
must learn which of them applies.

Idea: a fixed order, in which later limits override earlier ones: rate limits, scheduling back-off, minReplicas and
maxReplicas (with the schedule). The step names every limit that changed the count.
"""

from __future__ import annotations

from plimsoll.core.autoscaling.decision_state import MAX_MARKS, NO_BACKOFF, TimedReplicas
from plimsoll.core.autoscaling.scaling_decision import MODE_STEP, ScalingLimit
from plimsoll.core.autoscaling.scaling_policy import ScalingMode, ScalingPolicy
from plimsoll.core.autoscaling.startup_time import extend_backoff
from plimsoll.core.autoscaling.tier_context import TierContext
from plimsoll.core.units import format_wait


def apply_limits(context: TierContext, now_s: float) -> None:
    """Step 7 of a tier."""
    messages: list[str] = []
    count = _apply_rate_limits(context, context.count, now_s, messages)
    count = _apply_bounds(context, _apply_scheduling_backoff(context, count, now_s, messages), messages)
    if messages:
        context.add_step("limits", "{0}", "; ".join(messages), messages[-1], count=count, brief="{1}")
    else:
        context.add_step("limits", "within {} to {}", *context.bounds, count=count)


def _apply_bounds(context: TierContext, count: int, messages: list[str]) -> int:
    minimum, maximum = context.bounds
    unscheduled = (context.policy.min_replicas, context.policy.max_replicas)
    scheduled = "" if context.bounds == unscheduled else " by the schedule"
    if count < minimum:
        context.add_limit(ScalingLimit.MIN)
        messages.append(f"minReplicas is {minimum}{scheduled}")
        return minimum
    if count > maximum:
        bound, detail = f"maxReplicas is {maximum}{scheduled}", f"{count} needed"
        context.add_limit(ScalingLimit.MAX, bound, detail)
        messages.append(f"{detail}, {bound}")
        return maximum
    return count


def _apply_rate_limits(context: TierContext, count: int, now_s: float, messages: list[str]) -> int:
    """Apply the rate limits, relative to the lowest or highest count that was ordered within their window."""
    up, down, current = context.policy.scale_up_limit, context.policy.scale_down_limit, context.observation.replicas
    longest_s = max((limit.per_s for limit in (up, down) if limit is not None), default=0.0)
    if not longest_s:
        context.set_state("order_history", ())
        return count
    history = [TimedReplicas(mark.replicas, min(mark.since_s, now_s)) for mark in context.state.order_history]
    if not history or history[-1].replicas != current:
        history.append(TimedReplicas(current, now_s))
    expired = [index for index, mark in enumerate(history) if mark.since_s <= now_s - longest_s]
    history = history[expired[-1] if expired else 0 :][-MAX_MARKS:]
    context.set_state("order_history", tuple(history))
    if up is not None and count > (
        maximum := max(current, min(_counts_since(history, now_s - up.per_s)) + up.replicas)
    ):
        bound, detail = f"scaleUp allows {up.replicas} more in {format_wait(up.per_s)}", f"{count} needed"
        context.add_limit(ScalingLimit.RATE, bound, detail)
        messages.append(f"{detail}, {bound}")
        return maximum
    if down is not None and count < (
        minimum := min(current, max(_counts_since(history, now_s - down.per_s)) - down.replicas)
    ):
        bound, detail = f"scaleDown allows {down.replicas} fewer in {format_wait(down.per_s)}", f"{count} needed"
        context.add_limit(ScalingLimit.RATE, bound, detail)
        messages.append(f"{detail}, {bound}")
        return minimum
    return count


def _counts_since(history: list[TimedReplicas], from_s: float) -> list[int]:
    """Return the counts that were in force at any time after `from_s`."""
    ends = [mark.since_s for mark in history[1:]] + [float("inf")]
    return [mark.replicas for mark, end_s in zip(history, ends, strict=True) if end_s > from_s]


def _apply_scheduling_backoff(context: TierContext, count: int, now_s: float, messages: list[str]) -> int:
    """While pods are unschedulable, order no more until the back-off ends."""
    current = context.observation.replicas
    unschedulable = [pod for pod in context.observation.starting if pod.unschedulable_reason is not None]
    if not unschedulable:
        context.set_state("scheduling_backoff", NO_BACKOFF)
        return count
    previous = context.state.scheduling_backoff
    context.set_state("scheduling_backoff", extend_backoff(previous, now_s))
    is_new_attempt = previous.tries > 0 and context.state.scheduling_backoff != previous
    detail = f"{len(unschedulable)} pending, {unschedulable[0].unschedulable_reason}"
    # The pod that replaces a ready one in a rollout withholds no replica: the tier's health reports it.
    bound = "pods are unschedulable" if count > context.observation.ready else ""
    context.add_limit(ScalingLimit.UNSCHEDULABLE, bound, detail)
    if count <= current or is_new_attempt:
        return count
    left_s = context.state.scheduling_backoff.until_s - now_s
    messages.append(f"{count} needed, but pods are unschedulable; next attempt in {format_wait(left_s)}")
    return current


def apply_mode(context: TierContext, policy: ScalingPolicy) -> int:
    """Step 8: apply the scaling mode. Returns the recommended count."""
    decided, current = context.count, context.observation.replicas
    if policy.paused:
        context.add_step(
            MODE_STEP, "paused: replica count stays at {}, recommended {}", current, decided, count=current
        )
    elif policy.mode is ScalingMode.AUTO and context.hold_reason is None:
        context.add_step(MODE_STEP, "mode is Auto", count=decided)
    elif policy.mode is ScalingMode.AUTO:
        context.add_step(MODE_STEP, "mode is Auto, demand unknown: {}", context.hold_reason, count=decided)
    else:
        context.add_step(
            MODE_STEP,
            "mode is {}: replica count stays at {}, recommended {}",
            policy.mode,
            current,
            decided,
            count=current,
        )
    return decided
