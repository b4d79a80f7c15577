"""The scaling part of a service's status: conditions, figures and the last decisions. Pure.

Problem: every figure moves at every tick. A status that follows each of them costs the API server a write per second.

Idea: a report is built when the state behind it changes (a count, the status or reason of a condition), and every ten
seconds for the figures alone, more rarely where there are many services. A figure that has moved by less than a
tolerance keeps its old text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from plimsoll.api.conditions import Condition, ConditionReason, ConditionType
from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.controllers.autoscale import chunk_retuning, cost_report, learned_state, scaling_conditions, slo_status
from plimsoll.controllers.autoscale.signal_health import (
    HealthReport,
)
from plimsoll.core import units
from plimsoll.core.admission.publication import AdmissionLimits
from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot
from plimsoll.core.autoscaling.model_mismatch import sizing_mismatches
from plimsoll.core.autoscaling.observations import LATENCY_WINDOW_S, SizingResult
from plimsoll.core.autoscaling.scaling_decision import ScalingDecision, ScalingLimit
from plimsoll.core.autoscaling.scaling_policy import ScalingMode
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.autoscaling.sizing_batch import TierCapacity
from plimsoll.core.autoscaling.startup_time import Eta, Overdue, StartingPod, eta
from plimsoll.core.autoscaling.tier_state import TierState
from plimsoll.core.types import Role, Unavailable
from plimsoll.resources import engine_server
from plimsoll.resources.engine_tuning import MeasuredChunk

Object = dict[str, Any]

# Upper bound on the learned state that a restart loses while nothing else makes the status change.
CHECKPOINT_INTERVAL_SECONDS: Final = 900.0
# The load of a new service, and of one after a restart, is known after a minute at most.
FROZEN_SECONDS: Final = LATENCY_WINDOW_S
_FIGURES: Final = re.compile(r"[0-9.]+")


@dataclass(frozen=True)
class ScalingReport:
    """One service's report.

    state_key: a report is due when it changes. desired: replicas of each tier, by role. published: the admission limits
    that the gateways have. checkpoint: the learned state, as text. The other fields are parts of the status in their
    JSON form.
    """

    state_key: tuple[object, ...]
    desired: Mapping[str, int]
    conditions: tuple[Condition, ...]
    tiers: Mapping[str, Object]
    slo: Object
    limited_by: str | None
    recovery: str | None
    checkpoint: str | None
    checkpoint_s: float  # seconds since the epoch at which `checkpoint` was made
    cost: Object
    published: AdmissionLimits | None
    slow_transfer_message: str | None  # why remote prefill does not pay; None if it pays or if that is unknown
    is_feasibility_known: bool = False  # whether the measured capacity tells if the SLO can be met
    frozen_since_s: float = math.inf  # seconds since the epoch; infinite while no replica count is frozen
    measured_chunk: MeasuredChunk | None = None  # that engines of the tier `serve` are to get


def initial_report(checkpoint: str | None, now_s: float) -> ScalingReport:
    """An empty report that carries over the checkpoint of an earlier process."""
    return ScalingReport((), {}, (), {}, {}, None, None, checkpoint, now_s, {}, None, None)


def failed_report(old: ScalingReport, error: Exception) -> ScalingReport:
    """The old report with ScalingInactive. Its empty state key makes the next decision build a new report."""
    message = (
        f"the scaling decision failed with {type(error).__name__}: the replica count is frozen, the operator retries."
        " See the operator's log"
    )
    inactive = Condition(ConditionType.SCALING_INACTIVE, True, ConditionReason.DECISION_FAILED, message)
    others = [condition for condition in old.conditions if condition.type is not ConditionType.SCALING_INACTIVE]
    return replace(old, state_key=(), conditions=(inactive, *others))


def _find(conditions: Iterable[Condition], kind: ConditionType) -> Condition | None:
    return next((condition for condition in conditions if condition.type is kind), None)


def state_key(
    service: InferenceService,
    service_state: ServiceState,
    snapshot: ServiceSnapshot,
    health: HealthReport,
    is_shedding_now: bool,
    limited: Condition | None,
    spec: ScalingSpec,
    previous: Iterable[Condition],
) -> tuple[object, ...]:
    """The state whose change is reported at once, as a comparable tuple; empty before the first decision.

    It includes the generation of the spec, because any field of it may appear in the report. limited: condition
    ScalingLimited, None if it is not true. previous: the last conditions, for the hysteresis of SLOMet.
    """
    if service_state.last_decision is None:
        return ()
    tiers = service_state.last_decision.decision.tiers
    return (
        service.metadata.generation,
        service_state.retuning.wanted,
        health,
        is_shedding_now,
        ()
        if spec.slo is None
        else slo_status.slo_state(snapshot, spec.slo, spec.slos, _find(previous, ConditionType.SLO_MET)),
        limited and (limited.reason, limited.bound),
        *(
            (
                (
                    name,
                    tier_decision.replicas,
                    tier_decision.recommended,
                    ScalingLimit.INFEASIBLE in tier_decision.limits,
                    tier_decision.is_held,
                    bool(tier_decision.overdue),
                    tier_decision.replicas_set_by,
                    _unsized_reason(service_state, name),
                    _has_mismatch(service_state, name),
                ),
                (
                    isinstance(service_state.tiers[name].capacity, TierCapacity),
                    service_state.tiers[name].startup_model.total.startups,
                    service_state.tiers[name].startup_model.restart_total,
                ),
                (snapshot.tiers[name].ready, len(snapshot.tiers[name].starting)) if name in snapshot.tiers else (0, 0),
            )
            for name, tier_decision in tiers.items()
        ),
    )


def _unsized_reason(service_state: ServiceState, name: str) -> str | None:
    """Why a tier is not sized, without the figures, which move at every tick; None if it is sized."""
    sizing = service_state.sizings.get(name)
    return _FIGURES.sub("", sizing.reason) if isinstance(sizing, Unavailable) else None


def _has_mismatch(service_state: ServiceState, name: str) -> bool:
    """Whether measurement corrects the tier's sizing."""
    sizing = service_state.sizings.get(name)
    return isinstance(sizing, SizingResult) and bool(sizing_mismatches(sizing))


def build_report(
    service: InferenceService,
    service_state: ServiceState,
    snapshot: ServiceSnapshot,
    spec: ScalingSpec,
    previous: ScalingReport,
    published: AdmissionLimits | None,
    slow_transfer_message: str | None,
    health: HealthReport,
    limited: Condition | None,
    now_s: float,
) -> ScalingReport:
    """The report at `now_s`. Figures of `previous` are kept where they moved little. Requires a decision."""
    assert service_state.last_decision is not None
    decision = service_state.last_decision.decision
    is_sized = spec.slo is not None and spec.policy.mode is not ScalingMode.OFF
    is_shedding = scaling_conditions.is_shedding(snapshot, previous.conditions)
    current_state = state_key(service, service_state, snapshot, health, is_shedding, limited, spec, previous.conditions)
    keep_checkpoint = previous.state_key in (current_state, ()) and previous.checkpoint is not None
    keep_checkpoint = keep_checkpoint and (not is_sized or now_s - previous.checkpoint_s < CHECKPOINT_INTERVAL_SECONDS)
    tiers = {name: _tier_status(service_state, snapshot, name, previous, now_s) for name in service_state.tiers}
    slo = slo_status.slo_figures(snapshot, spec.slo, spec.slos, previous.slo) if spec.slo is not None else {}
    frozen = scaling_conditions.frozen_tiers(service_state, spec)
    frozen_since_s = min(previous.frozen_since_s, now_s) if frozen else math.inf
    is_lasting = bool(service.spec.engine.missing_for_sizing) or health.gateways_silent or bool(health.silent_tiers)
    if not is_lasting and now_s - frozen_since_s < FROZEN_SECONDS:
        frozen = {}
    return ScalingReport(
        state_key=current_state,
        desired={name: tier.replicas for name, tier in decision.tiers.items()},
        conditions=tuple(
            condition
            for condition in _conditions(
                service, service_state, snapshot, spec, previous, health, frozen, tiers, slo, limited
            )
            if condition is not None
        ),
        tiers=tiers if is_sized else {name: _startup_part(tier) for name, tier in tiers.items()},
        slo=slo,
        limited_by=_limited_by(service_state, decision) if is_sized else None,
        recovery=_recovery(service_state),
        checkpoint=previous.checkpoint if keep_checkpoint else learned_state.encode(service_state),
        checkpoint_s=previous.checkpoint_s if keep_checkpoint else now_s,
        cost=cost_report.cost_status(service, service_state, snapshot),
        published=published,
        slow_transfer_message=slow_transfer_message,
        is_feasibility_known=spec.slo is not None and scaling_conditions.is_feasibility_known(service_state, spec.slo),
        frozen_since_s=frozen_since_s,
        measured_chunk=chunk_retuning.wanted_chunk(service_state.retuning, spec),
    )


def _conditions(
    service: InferenceService,
    service_state: ServiceState,
    snapshot: ServiceSnapshot,
    spec: ScalingSpec,
    previous: ScalingReport,
    health: HealthReport,
    frozen: Mapping[str, str],
    tiers: Mapping[str, Object],
    slo_figures: Object,
    limited: Condition | None,
) -> Iterable[Condition | None]:
    """The conditions; None for one that does not apply.

    frozen: tiers whose count is frozen, and why. tiers, slo_figures: the figures of the status, which the messages
    quote.
    """
    yield scaling_conditions.replicas_contested(health)
    if spec.slo is None and all(tier.min_replicas == tier.max_replicas for tier in spec.policy.tiers.values()):
        return  # fixed replica counts and no SLO: the spec requests no scaling
    engine = service.spec.engine
    yield scaling_conditions.scaling_inactive(
        spec, engine.contract, frozen, health.other_writer, engine.missing_for_sizing
    )
    if spec.slo is None or service_state.last_decision is None:
        return
    yield scaling_conditions.metrics_degraded(snapshot, health, _metrics_ports(service))
    yield scaling_conditions.slo_infeasible(service_state)
    yield scaling_conditions.model_mismatch(service_state)
    previous_slo_met = _find(previous.conditions, ConditionType.SLO_MET)
    yield slo_status.slo_condition(snapshot, spec.slo, spec.slos, slo_figures, previous_slo_met)
    yield limited
    starting = tiers.get(service_state.client_tier, {}).get("starting", {})
    yield scaling_conditions.shedding(service_state, snapshot, previous.conditions, starting)
    yield scaling_conditions.gateway_config_stale(health)


def _metrics_ports(service: InferenceService) -> str:
    targets, port = service.spec.targets, engine_server.metrics_port(service)
    return targets.metrics_ports if targets is not None else "" if port is None else str(port)


def _tier_status(
    service_state: ServiceState, snapshot: ServiceSnapshot, name: str, previous: ScalingReport, now_s: float
) -> Object:
    """The sizing part of `status.tiers`."""
    previous_status = previous.tiers.get(name, {})
    sizing, tier_state = service_state.sizings.get(name), service_state.tiers[name]
    result: Object = {}
    if isinstance(sizing, SizingResult):
        result["needed"] = sizing.replicas
        capacity = units.format_rate(sizing.replica_work / sizing.request_gpu_s, slo_status.STATUS_DIGITS)
        level = _demand_level(service_state, name)
        ready = snapshot.tiers[name].ready if name in snapshot.tiers else 0
        if level is not None and ready and math.isfinite(utilization := sizing.utilization(level, ready)):
            capacity = f"{capacity}, {_round_to_tens(100.0 * utilization)}% used"
        result["capacityPerReplica"] = capacity
    tier_metrics = snapshot.metrics.tiers.get(Role(name))
    if tier_metrics is not None and not isinstance(tier_metrics.draft_acceptance, Unavailable):
        result["draftAcceptance"] = f"{_round_to_tens(100.0 * tier_metrics.draft_acceptance)}%"
    if name in snapshot.tiers and snapshot.tiers[name].starting:
        result["starting"] = _starting_status(
            tier_state, snapshot.tiers[name].starting, previous_status.get("starting", {}), now_s
        )
    return result


def _startup_part(tier_status: Object) -> Object:
    """The part of a tier's status that holds without an SLO."""
    return {name: tier_status[name] for name in ("starting", "draftAcceptance") if name in tier_status}


def _recovery(service_state: ServiceState) -> str | None:
    """`status.recovery`; None before a start or restart was measured."""
    model = service_state.tiers[service_state.client_tier].startup_model
    measured = next((one for one in (model.restart.total, model.total) if one.startups), None)
    return None if measured is None else units.format_rounded_duration(measured.quantile_s(0.5))


def _starting_status(
    tier_state: TierState, pods: Sequence[StartingPod], previous_status: Mapping[str, Any], now_s: float
) -> Object:
    """Count of starting pods and the time at which the first is expected ready. A time within tolerance is kept."""
    result: Object = {"count": len(pods)}
    etas = [eta(tier_state.startup_model, pod, now_s) for pod in pods if pod.unschedulable_reason is None]
    if overdue := sum(isinstance(time, Overdue) for time in etas):
        result["overdue"] = overdue
    if remaining_s := [time.likely_s for time in etas if isinstance(time, Eta)]:
        due_s, previous_time = now_s + min(remaining_s), previous_status.get("nextReady")
        is_near = isinstance(previous_time, str) and abs(
            datetime.fromisoformat(previous_time).timestamp() - due_s
        ) <= max(5.0, slo_status.REPORT_TOLERANCE * min(remaining_s))
        result["nextReady"] = previous_time if is_near else _rfc3339(due_s)
    return result


def _demand_level(service: ServiceState, name: str) -> float | None:
    demand = service.tiers[name].forecast_state
    return None if demand.last_sample_s is None else demand.estimate.level


def _round_to_tens(percent: float) -> int:
    return round(percent / 10.0) * 10


def _limited_by(service_state: ServiceState, decision: ScalingDecision) -> str | None:
    """The binding tier and the constraint that limits its SLO capacity; None if it is not sized."""
    sizing = service_state.sizings.get(decision.binding_tier or "")
    return f"{decision.binding_tier} {sizing.limited_by}" if isinstance(sizing, SizingResult) else None


def _rfc3339(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
