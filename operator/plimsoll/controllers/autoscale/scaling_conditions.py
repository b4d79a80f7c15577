"""The scaling conditions of a service, from its state, metrics and figures. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from plimsoll.api.conditions import Condition, ConditionReason, ConditionType
from plimsoll.api.message_text import MAX_QUOTE_CHARS, shorten
from plimsoll.controllers.autoscale.signal_health import (
    ENGINE_SILENCE_SECONDS,
    GATEWAY_SILENCE_SECONDS,
    HealthReport,
)
from plimsoll.core import units
from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot
from plimsoll.core.autoscaling.observations import SizingResult
from plimsoll.core.autoscaling.scaling_decision import TierDecision
from plimsoll.core.autoscaling.scaling_policy import ScalingMode
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.slo import Slo
from plimsoll.core.types import Unavailable

Object = dict[str, Any]

SHEDDING_SHARE: Final = 0.01  # share of rejected requests above which AdmissionHealthy is false
_PROMETHEUS_ONLY: Final = (
    "gateways answer; engines of {} do not answer the operator, and their metrics come from Prometheus with a delay."
    " Check that the operator can reach port 8001 of the engine pods (NetworkPolicy, mesh)"
)


def is_shedding(snapshot: ServiceSnapshot, old_conditions: Iterable[Condition]) -> bool:
    """Whether the service sheds load. It starts above SHEDDING_SHARE, and ends after a minute without a rejection."""
    share = snapshot.metrics.rejected_share
    was_shedding = any(c.type is ConditionType.ADMISSION_HEALTHY and c.holds is False for c in old_conditions)
    return not isinstance(share, Unavailable) and share > (0.0 if was_shedding else SHEDDING_SHARE)


def scaling_active(service_state: ServiceState, spec: ScalingSpec) -> Condition:
    def inactive(reason: ConditionReason, message: str) -> Condition:
        return Condition(ConditionType.SCALING_ACTIVE, False, reason, message)

    if spec.policy.paused:
        return inactive(ConditionReason.PAUSED, "spec.scaling.paused is true: decisions are reported, but not applied")
    if spec.policy.mode is not ScalingMode.AUTO:
        return inactive(
            ConditionReason.RECOMMEND_ONLY
            if spec.policy.mode is ScalingMode.RECOMMEND
            else ConditionReason.SCALING_OFF,
            f"spec.scaling.mode is {spec.policy.mode}: the autoscaler does not change replica counts",
        )
    if spec.slo is None:
        return inactive(
            ConditionReason.NO_SLO, "spec.slo is not set: the tiers are not sized, and each tier keeps its minReplicas"
        )
    decided = {} if service_state.last_decision is None else service_state.last_decision.decision.tiers
    unsized = {name: sizing.reason for name, sizing in service_state.sizings.items() if isinstance(sizing, Unavailable)}
    without_demand = {
        n for n in unsized if n in decided and not decided[n].is_held and decided[n].steps[0].name == "demand"
    }
    without_target = [name for name in unsized if not spec.slo.has_target_for(name)]
    frozen = {
        name: reason for name, reason in unsized.items() if name not in without_demand and name not in without_target
    }
    frozen |= {  # a size computed from an old sample does not count as current
        n: _step_reason(t, "demand") for n, t in decided.items() if t.is_held and n not in frozen
    }
    if frozen:
        reasons = "; ".join(f"{name}: {why}" for name, why in frozen.items())
        return inactive(ConditionReason.DEMAND_UNKNOWN, f"the replica count is frozen: {reasons}")
    decision = service_state.last_decision.decision if service_state.last_decision else None
    binding = (decision and decision.binding_tier) or "none"
    overrides = [f"; {n}: {t.override}" for n, t in (decision.tiers if decision else {}).items() if t.override]
    message = f"each tier is sized for its forecast; binding tier: {binding}"
    if without_demand:
        message = (
            "no request arrives, waits or runs, as all gateways and engines report: each tier keeps its minReplicas"
        )
    message += "".join(f"; {n}: spec.slo.ttft is not set, so it keeps its minReplicas" for n in without_target)
    message += "".join(overrides)
    return Condition(ConditionType.SCALING_ACTIVE, True, ConditionReason.SCALING_ON_FORECAST, message)


def is_partial(snapshot: ServiceSnapshot) -> bool:
    """Whether some gateways or engines report and others do not."""
    coverages = [snapshot.metrics.coverage, *(tier.coverage for tier in snapshot.metrics.tiers.values())]
    return any(0.0 < coverage < 1.0 for coverage in coverages)


def metrics_available(snapshot: ServiceSnapshot, health: HealthReport) -> Condition:
    if health.gateways_silent:
        message = (
            f"no gateway replica has reported request metrics for {GATEWAY_SILENCE_SECONDS:.0f} s: demand is unknown,"
            " and the replica count is frozen"
        )
        return Condition(ConditionType.METRICS_AVAILABLE, False, ConditionReason.METRICS_MISSING, message)
    if health.silent_tiers:
        message = (
            f"no ready engine of {', '.join(health.silent_tiers)} has sent metrics for {ENGINE_SILENCE_SECONDS:.0f} s,"
            " no tier scales down. Check that the operator can reach port 8001 of its pods (NetworkPolicy, mesh)"
        )
        return Condition(ConditionType.METRICS_AVAILABLE, False, ConditionReason.METRICS_MISSING, message)
    if is_partial(snapshot):
        message = "some gateways or engines do not report metrics: tiers can scale up, but not down"
        return Condition(ConditionType.METRICS_AVAILABLE, True, ConditionReason.METRICS_PARTIAL, message)
    if health.prometheus_only_tiers:
        message = _PROMETHEUS_ONLY.format(", ".join(health.prometheus_only_tiers))
        return Condition(ConditionType.METRICS_AVAILABLE, True, ConditionReason.METRICS_FRESH, message)
    return Condition(
        ConditionType.METRICS_AVAILABLE, True, ConditionReason.METRICS_FRESH, "all gateways and engines report metrics"
    )


def slo_feasible(service_state: ServiceState, slo: Slo) -> Condition:
    """Whether some replica count meets the SLO. A tier on which no target depends does not count."""
    infeasible_tiers = {
        n: tier_sizing
        for n, tier_sizing in service_state.sizings.items()
        if isinstance(tier_sizing, SizingResult) and tier_sizing.infeasible is not None
    }
    for name, sizing in infeasible_tiers.items():
        assert sizing.infeasible is not None
        nearest = sizing.infeasible.nearest_slo
        targets = () if nearest is None else nearest.targets
        targets_text = ", ".join(
            f"slo.{name.lower()} {units.format_rounded_duration(value)}" for name, value in targets if value is not None
        )
        violation = f"{sizing.infeasible.constraint} violates it"
        brief = f"{name}: no replica count meets spec.slo, {violation}; feasible: {targets_text}"
        message = f"{brief}{sizing.infeasible.hint}"
        return Condition(ConditionType.SLO_FEASIBLE, False, ConditionReason.INFEASIBLE, message, brief)
    sizings = [sizing for name, sizing in service_state.sizings.items() if slo.has_target_for(name)]
    if sizings and all(isinstance(sizing, SizingResult) for sizing in sizings):
        return Condition(
            ConditionType.SLO_FEASIBLE, True, ConditionReason.FEASIBLE, "the SLO can be met at the current request mix"
        )
    return Condition(
        ConditionType.SLO_FEASIBLE, None, ConditionReason.NOT_MEASURED, "the SLO capacity of the tiers is not known yet"
    )


def admission_healthy(
    service_state: ServiceState,
    snapshot: ServiceSnapshot,
    old_conditions: Iterable[Condition],
    health: HealthReport,
    starting: Object,
) -> Condition:
    """Whether requests are admitted. starting: `status.tiers.*.starting` of the tier that serves clients."""
    is_shedding_now = is_shedding(snapshot, old_conditions)
    if health.stale_gateways is not None:
        problem = health.stale_gateways.split(". ")[0]
        brief = f"{shorten(problem, MAX_QUOTE_CHARS)}; see condition AdmissionHealthy"
        return Condition(
            ConditionType.ADMISSION_HEALTHY, None, ConditionReason.GATEWAY_CONFIG_STALE, health.stale_gateways, brief
        )
    if not is_shedding_now:
        message = f"at most {SHEDDING_SHARE:.0%} of requests are rejected"
        return Condition(ConditionType.ADMISSION_HEALTHY, True, ConditionReason.ADMITTING_ALL, message)
    tier, sizing = service_state.client_tier, service_state.sizings.get(service_state.client_tier)
    tier_snapshot, rate = snapshot.tiers.get(tier), snapshot.metrics.rate_per_s
    parts = [f"{snapshot.metrics.rejected_share:.0%} of the last minute's requests were rejected"]
    if tier_snapshot is not None and isinstance(sizing, SizingResult) and not isinstance(rate, Unavailable):
        capacity_per_s = tier_snapshot.ready * sizing.replica_work / sizing.request_gpu_s
        replicas = f"{tier_snapshot.ready} ready {tier} {'replica' if tier_snapshot.ready == 1 else 'replicas'}"
        parts.append(
            f"arrival rate {units.format_rate(rate)}, SLO capacity {units.format_rate(capacity_per_s)} with {replicas}"
        )
    if starting:
        due = f", the next ready at {starting['nextReady']}" if "nextReady" in starting else ""
        parts.append(f"{starting['count']} starting{due}")
    return Condition(ConditionType.ADMISSION_HEALTHY, False, ConditionReason.SHEDDING, "; ".join(parts))


def _step_reason(tier: TierDecision, name: str) -> str:
    return next((step.reason for step in tier.steps if step.name == name), tier.summary)


# ---------------------------------------------------------------- figures
