"""Phase 4 of a tick: sizings become a decision about the service, which its state keeps."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace

from plimsoll.core.autoscaling import cadence
from plimsoll.core.autoscaling.cadence import DecisionBasis
from plimsoll.core.autoscaling.capacity_correction import correct_sizings
from plimsoll.core.autoscaling.decide import decide
from plimsoll.core.autoscaling.model_mismatch import limits_mismatches, speed_mismatches
from plimsoll.core.autoscaling.observations import (
    LaggingSignals,
    NoDemand,
    ServiceObservation,
    SizingResult,
    TierDemand,
    TierObservation,
)
from plimsoll.core.autoscaling.scaling_decision import ScalingDecision
from plimsoll.core.autoscaling.service_state import ServiceState, TimedDecision
from plimsoll.core.autoscaling.sizing_requests import backlog_gpu_s
from plimsoll.core.autoscaling.snapshot_signals import NO_TIER_METRICS, known_no_demand, metrics_coverage
from plimsoll.core.autoscaling.tier_demand import MIN_OBSERVATION_S, ObservedService, ServiceDemand
from plimsoll.core.autoscaling.tier_engines import TierEngines
from plimsoll.core.autoscaling.tier_state import TierState
from plimsoll.core.types import Role, Unavailable

Sizings = Mapping[str, SizingResult | Unavailable]


def is_decision_due(service: ObservedService) -> bool:
    """Whether the service must be decided at this tick."""
    state, snapshot, spec, now_s = service
    return state.basis is None or state.basis.is_due(state.tiers, snapshot, spec, state.activity.is_idle, now_s)


def decide_service(service: ObservedService, demand: ServiceDemand, sizings: Sizings, key: Hashable) -> ScalingDecision:
    """Make and store the decision of this tick. key: of the service, for the phase of its next decision."""
    state, snapshot, spec, now_s = service
    state.sizings = _noted_sizings(service, demand, sizings)
    idle_period = state.activity.idle_period(now_s)
    no_demand = known_no_demand(snapshot, idle_period)
    tiers = {
        name: _tier_observation(service, name, demand.tiers[name], no_demand)
        for name in snapshot.tiers
        if name in state.tiers
    }
    observation = ServiceObservation(tiers, state.decision_state, idle_period=idle_period)
    decision = decide(observation, spec.policy, now_s)
    _record(state, TimedDecision(now_s, decision), _decision_basis(service, demand, decision, key))
    return decision


def _noted_sizings(
    service: ObservedService, demand: ServiceDemand, sizings: Sizings
) -> dict[str, SizingResult | Unavailable]:
    """Return the corrected sizing of each tier, with notes for people, or why there is none."""
    state, snapshot, spec, now_s = service
    known = {
        name: sizings.get(name) or _sizing_unavailable(demand.tiers[name], tier) for name, tier in state.tiers.items()
    }
    corrected = correct_sizings(state.corrections, known, state.tiers, snapshot, spec.slo, now_s)
    target_classes = state.class_targets.by_target
    return {
        name: _with_notes(state.ttft_feedback.mark(sizing), state.tiers[name].engines, target_classes)
        for name, sizing in corrected.items()
    }


def _sizing_unavailable(demand: TierDemand | Unavailable, tier: TierState) -> Unavailable:
    if isinstance(demand, Unavailable):
        return demand
    return tier.capacity if isinstance(tier.capacity, Unavailable) else Unavailable("not sized")


def _with_notes(
    sizing: SizingResult | Unavailable, engines: TierEngines, target_classes: Mapping[str, str]
) -> SizingResult | Unavailable:
    """Return the sizing with what engines contradict in the model, and the classes whose targets it is for."""
    if isinstance(sizing, Unavailable):
        return sizing
    if target_classes:
        sizing = replace(sizing, target_classes=target_classes)
    held = () if engines.limits is engines.announced else limits_mismatches(engines.measured_limits, engines.announced)
    found = (*held, *speed_mismatches(engines.posterior))
    return replace(sizing, engine_mismatches=found) if found else sizing


def _tier_observation(
    service: ObservedService, name: str, demand: TierDemand | Unavailable, no_demand: NoDemand | None
) -> TierObservation:
    """Return the observation of one tier. no_demand: the demand if no forecast of the tier can be sized.

    Latencies and queues of the first few requests are left out, because they show nothing.
    """
    state, snapshot, now_s = service.state, service.snapshot, service.now_s
    tier, tier_snapshot, sizing = state.tiers[name], snapshot.tiers[name], state.sizings[name]
    tier_metrics = snapshot.metrics.tiers.get(Role(name), NO_TIER_METRICS)
    is_warming_up = 0.0 <= now_s - tier.first_arrival_s < MIN_OBSERVATION_S
    return TierObservation(
        replicas=tier_snapshot.replicas,
        ready=tier_snapshot.ready,
        startup_model=tier.startup_model,
        demand=demand if no_demand is None or isinstance(sizing, SizingResult) else no_demand,
        sizing=sizing,
        starting=tier_snapshot.starting,
        backlog_gpu_s=backlog_gpu_s(state.tiers, name, snapshot.metrics),
        coverage=metrics_coverage(snapshot.metrics, tier_metrics, tier_snapshot.ready),
        lagging=LaggingSignals() if is_warming_up else tier_metrics.lagging,
        carried_per_s=state.ttft_feedback.carried_per_s,
        replicas_set_by=tier_snapshot.replicas_set_by,
        serving_s=state.activity.serving_s(now_s),
    )


def _decision_basis(
    service: ObservedService, demand: ServiceDemand, decision: ScalingDecision, key: Hashable
) -> DecisionBasis:
    """Return what the decision was made from."""
    state, snapshot, spec, now_s = service
    carried = {
        name: cadence.carried_work(state.tiers[name].forecast_state, tier_demand, sizing)
        for name, sizing in state.sizings.items()
        if isinstance(sizing, SizingResult) and isinstance(tier_demand := demand.tiers[name], TierDemand)
    }
    return DecisionBasis(
        now_s,
        cadence.due_s(decision, snapshot.tiers, key, now_s),
        spec,
        cadence.snapshot_counts(snapshot.tiers),
        tuple([tier.capacity for tier in state.tiers.values()]),
        carried,
        cadence.known_share(snapshot.metrics.rejected_share),
        demand.has_retry_backlog,
    )


def _record(state: ServiceState, decision: TimedDecision, basis: DecisionBasis) -> None:
    """Store a decision, also among those that changed a count if it did, and not as the one before."""
    state.decision_state, state.last_decision, state.basis = decision.decision.state, decision, basis
    changes = _replica_changes(decision.decision)
    if changes and not (state.decisions and _replica_changes(state.decisions[-1].decision) == changes):
        state.decisions.append(decision)


def _replica_changes(decision: ScalingDecision) -> dict[str, tuple[int, int | None]]:
    """Return old and new counts of the tiers whose count changes."""
    return {
        name: (tier.previous_replicas, tier.recommended)
        for name, tier in decision.tiers.items()
        if tier.previous_replicas is not None and tier.recommended != tier.previous_replicas
    }
