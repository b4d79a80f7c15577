"""`decide`: computes the replica counts of a service in eight steps."""

from __future__ import annotations

import math

from plimsoll.core.autoscaling import pending_replicas, recommend, replica_limits
from plimsoll.core.autoscaling.decision_state import DecisionState, TierDecisionState
from plimsoll.core.autoscaling.observations import ServiceObservation
from plimsoll.core.autoscaling.scaling_decision import DecisionStep, ScalingDecision, TierDecision
from plimsoll.core.autoscaling.scaling_policy import ScalingPolicy, TierPolicy
from plimsoll.core.autoscaling.stabilize import stabilize
from plimsoll.core.autoscaling.tier_context import TierContext


def decide(observation: ServiceObservation, policy: ScalingPolicy, now_s: float) -> ScalingDecision:
    """Return the replica count of each tier, with the steps of the decision.

    A tier on which no target depends gets its lower bound. One without any observation gets minReplicas or its last
    count.
    now_s: seconds since the epoch. The function is pure; pass `ScalingDecision.state` in the next observation. Raises
    ValueError if `now_s` is not finite.
    """
    if not math.isfinite(now_s):
        raise ValueError(f"now_s must be a finite number of seconds, not {now_s}")
    state = observation.state
    contexts = [
        TierContext(
            name,
            tier_observation,
            tier_policy,
            state.tiers.get(name, TierDecisionState()),
            tier_policy.bounds(now_s, tier_observation.horizon_s),
        )
        for name, tier_policy in policy.tiers.items()
        if (tier_observation := observation.tiers.get(name)) is not None
    ]
    binding = _run_steps(contexts, observation, policy, now_s)
    decisions = {context.name: _tier_decision(context, policy) for context in contexts}
    previous_states = {name: state.tiers[name] for name in policy.tiers if name in state.tiers}
    return ScalingDecision(
        {
            name: decisions.get(name)
            or _decision_without_observation(tier_policy, previous_states.get(name) if policy.sizes(name) else None)
            for name, tier_policy in policy.tiers.items()
        },
        binding,
        DecisionState(now_s, previous_states | {context.name: context.state for context in contexts}),
    )


def _run_steps(
    contexts: list[TierContext], observation: ServiceObservation, policy: ScalingPolicy, now_s: float
) -> str | None:
    """Run steps 1 to 7. Returns the binding tier."""
    if policy.slo is None:
        for context in contexts:
            recommend.keep_minimum(context, "spec.slo")
            replica_limits.apply_limits(context, now_s)
        return None
    previous_s = observation.state.at_s
    elapsed_s = 0.0 if previous_s is None else max(0.0, now_s - previous_s)
    sized = [context for context in contexts if policy.sizes(context.name)]
    for context in contexts:
        if not policy.sizes(context.name):
            recommend.keep_minimum(context, "spec.slo.ttft")
    for context in sized:
        recommend.apply_forecast(context)
    recommend.apply_standby(sized, policy)
    for context in sized:
        recommend.apply_sizing(context, policy, observation.idle_period)
        recommend.track_readiness(context, now_s)
    for context in sized:
        recommend.apply_feedback(context, contexts, policy.slo, elapsed_s, now_s)
        pending_replicas.credit_pending(context, now_s)
    binding = pending_replicas.coordinate_tiers(contexts, policy.prefill_per_decode)
    stabilize(sized, policy.miss_cost, now_s)
    for context in contexts:
        replica_limits.apply_limits(context, now_s)
    return binding


def _tier_decision(context: TierContext, policy: ScalingPolicy) -> TierDecision:
    recommended = replica_limits.apply_mode(context, policy)
    context.set_state("replicas", context.count)
    changed = recommended != context.observation.replicas
    return TierDecision(
        replicas=context.count,
        steps=tuple(context.steps),
        previous_replicas=context.observation.replicas,
        recommended=recommended,
        limits=tuple(context.limits),
        limit_notes=tuple(context.limit_notes),
        counterfactual=recommend.counterfactual(context, policy.slo) if changed else None,
        is_held=context.hold_reason is not None,
        overdue=context.overdue,
        etas_s=context.etas_s,
        replicas_set_by=context.observation.replicas_set_by,
    )


def _decision_without_observation(policy: TierPolicy, previous: TierDecisionState | None) -> TierDecision:
    """Return minReplicas, or the last decided count of a sized service.

    A missing observation does not mean that no replica runs. previous: state of the last decision; None if not sized.
    """
    minimum = policy.min_replicas
    if previous is None or previous.replicas <= minimum:
        return TierDecision(minimum, (DecisionStep("limits", minimum, "minReplicas is {}", (minimum,)),))
    held_replicas = min(previous.replicas, policy.max_replicas)
    return TierDecision(
        held_replicas,
        (DecisionStep("demand", held_replicas, "not observed: replica count stays at {}", (held_replicas,)),),
        is_held=True,
    )
