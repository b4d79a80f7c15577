"""Steps 4 and 5: starting replicas, and coordination of the two tiers.

Problem: a hanging pod must not count as capacity, and its replacement must not exhaust the cluster. A prefill tier
without a decode tier, or at an unsuitable ratio to it, serves no requests. Yet no tier may wait for the other's pods.

Idea: starting replicas are part of the ordered count, each with an expected start-up time. An overdue replica gets a
replacement while replicas are missing, at most twice the need in all. Does it hang, or do all starts take longer now?
A start in time since its order shows that it hangs. Until then one replacement is the test, because more of them would
be as late. If most replicas of a tier are on nodes that do not report, the reports are lost rather than the nodes:
replacements wait for the start-up limit. Rules across tiers use what the tiers need, not which pods are ready.
"""

from __future__ import annotations

import math

from plimsoll.core.autoscaling.observations import TierDemand, TierObservation
from plimsoll.core.autoscaling.startup_time import Eta, Overdue, eta
from plimsoll.core.autoscaling.tier_context import TierContext
from plimsoll.core.types import Unavailable
from plimsoll.core.units import format_number, format_wait

PREFILL, DECODE = "prefill", "decode"


def credit_pending(context: TierContext, now_s: float) -> None:
    """Step 4: count starting replicas, and order replacements for overdue ones."""
    observation = context.observation
    if not observation.starting:
        context.add_step("pending", "{} ready, none starting", observation.ready)
        return
    unschedulable = [pod for pod in observation.starting if pod.unschedulable_reason is not None]
    expectations = [
        (pod, eta(observation.startup_model, pod, now_s))
        for pod in observation.starting
        if pod.unschedulable_reason is None
    ]
    etas = context.etas_s = tuple(
        sorted(expectation.likely_s for _, expectation in expectations if isinstance(expectation, Eta))
    )
    overdue = {pod.pod: expectation for pod, expectation in expectations if isinstance(expectation, Overdue)}
    context.overdue = tuple(overdue)
    parts = [f"{observation.ready} ready"]
    if etas:
        parts.append(f"{len(etas)} starting, the next in {format_wait(etas[0])}, the last in {format_wait(etas[-1])}")
    silent_nodes = sorted(pod.silent_node for pod in observation.starting if pod.silent_node is not None)
    if silent_nodes:
        parts.append(f"{len(silent_nodes)} on nodes that do not report, not counted ({silent_nodes[0]})")
    if awaited := _awaited(observation, now_s):
        limit = format_wait(observation.startup_model.overdue_s)
        parts.append(f"{awaited} of them not replaced for {limit}, because most replicas are on such nodes")
    if late := [one for one in overdue.values() if one.limit_s]:
        longest = max(late, key=lambda one: one.elapsed_s)
        parts.append(f"{len(late)} overdue by {format_wait(longest.elapsed_s - longest.limit_s)} and not counted")
        parts[-1] += f" (start-up limit {format_wait(longest.limit_s)})"
    if overdue:
        replacements, note = _replacements(context, len(overdue) - len(late) - awaited, late, now_s)
        if replacements:
            context.scale_up_target, context.scale_down_target = (
                context.scale_up_target + replacements,
                max(context.scale_down_target, context.scale_up_target + replacements),
            )
            parts.append(f"replacements ordered: {replacements}{note}")
    if unschedulable:
        parts.append(f"{len(unschedulable)} unschedulable: {unschedulable[0].unschedulable_reason}")
    context.add_step("pending", "{}", ", ".join(parts))


def _replacements(context: TierContext, lost: int, late: list[Overdue], now_s: float) -> tuple[int, str]:
    """Return how many overdue replicas are replaced, and why not all of them as the end of a sentence.

    lost: those on silent nodes. late: those beyond the start-up limit.
    """
    missing = context.scale_up_target - context.observation.ready
    if context.hold_reason or missing <= 0:
        return 0, ""
    replaced = max(_hanging(context, late, now_s), min(1, len(late)))
    note = ", until a start in time shows that they hang" if replaced < len(late) else ""
    return min(min(lost, missing) + replaced, context.scale_up_target), note


def _hanging(context: TierContext, late: list[Overdue], now_s: float) -> int:
    """Return how many overdue replicas hang: those since whose order another start ended, in time."""
    ready_s = context.state.ready_increased_s
    if ready_s is None or context.observation.startup_model.slow_starts:
        return 0
    return sum(ready_s > now_s - one.elapsed_s for one in late)


def _awaited(observation: TierObservation, now_s: float) -> int:
    """Pods on silent nodes whose nodes are expected to report again: several, and most pods of the tier."""
    silent = [pod for pod in observation.starting if pod.silent_node is not None]
    if len(silent) <= 1 or 2 * len(silent) <= observation.ready + len(observation.starting):
        return 0
    return sum(now_s - pod.created_s <= observation.startup_model.overdue_s for pod in silent)


def _forecast_utilization(context: TierContext) -> float | None:
    """Return forecast work over the SLO capacity of the ordered replicas; None if unknown, inf without replicas."""
    demand, sizing = context.observation.demand, context.observation.sizing
    if context.hold_reason or not isinstance(demand, TierDemand) or isinstance(sizing, Unavailable):
        return None
    capacity = context.observation.replicas * sizing.replica_work
    return demand.forecast.work / capacity if capacity else (math.inf if demand.forecast.work else 0.0)


def coordinate_tiers(contexts: list[TierContext], ratio: tuple[float, float]) -> str | None:
    """Step 5: enforce the prefill:decode ratio by raising the smaller tier, and keep a tier from zero alone.

    Returns the binding tier, which has the highest utilization of its SLO capacity; None if none is known.
    """
    by_name = {context.name: context for context in contexts}
    utilizations = {
        context.name: utilization for context in contexts if (utilization := _forecast_utilization(context)) is not None
    }
    binding_tier = max(utilizations, key=utilizations.__getitem__) if utilizations else None
    notes: dict[str, str] = {}
    for context in contexts:
        if context.scale_up_target == 0 and any(
            other.target or other.bounds[0] for other in contexts if other is not context
        ):
            context.scale_up_target, context.scale_down_target = 1, max(1, context.scale_down_target)
            notes[context.name] = "at least 1, because the other tier has replicas"
    if PREFILL in by_name and DECODE in by_name:
        _enforce_ratio(by_name[PREFILL], by_name[DECODE], ratio, notes)
    for context in contexts:
        utilization = utilizations.get(context.name)
        note = f"; {notes[context.name]}" if context.name in notes else ""
        if utilization == math.inf:
            context.add_step("ratio", "no replica ordered yet{}", note)
        elif utilization is None:
            context.add_step("ratio", "load unknown; binding tier: {}{}", binding_tier or "none", note)
        else:
            context.add_step(
                "ratio", "{:.0%} of its SLO capacity used; binding tier: {}{}", utilization, binding_tier, note
            )
    return binding_tier


def _enforce_ratio(
    prefill: TierContext, decode: TierContext, ratio: tuple[float, float], notes: dict[str, str]
) -> None:
    """Raise whichever tier falls short of the prefill:decode ratio, including a tier whose count is frozen."""
    min_ratio, max_ratio = ratio
    for raised, other, factor, bound_text, bound in (
        (prefill, decode, min_ratio, "at least", min_ratio),
        (decode, prefill, 1.0 / max_ratio, "at most", max_ratio),
    ):
        for attribute in ("scale_up_target", "scale_down_target"):
            required = math.ceil(factor * getattr(other, attribute) - 1e-9)
            if required > getattr(raised, attribute):
                setattr(raised, attribute, required)
                notes[raised.name] = f"{bound_text} {format_number(bound)} prefill replicas per decode replica"
        raised.scale_down_target = max(raised.scale_down_target, raised.scale_up_target)
