"""The scaling conditions of a service, from its state, metrics and figures. Pure.

Each function returns a condition that is true, or None while there is nothing to report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from plimsoll.api import labels
from plimsoll.api.conditions import Condition, ConditionReason, ConditionType
from plimsoll.api.message_text import MAX_QUOTE_CHARS, shorten
from plimsoll.controllers.autoscale.replica_contests import CONTEST_SECONDS, CONTESTED_WRITES
from plimsoll.controllers.autoscale.signal_health import (
    BYPASS_SECONDS,
    ENGINE_SILENCE_SECONDS,
    GATEWAY_SILENCE_SECONDS,
    UNSELECTED_SECONDS,
    HealthReport,
)
from plimsoll.core import units
from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot
from plimsoll.core.autoscaling.model_mismatch import sizing_mismatches
from plimsoll.core.autoscaling.observations import LATENCY_WINDOW_S, SizingResult, name_constraint
from plimsoll.core.autoscaling.scaling_decision import TierDecision
from plimsoll.core.autoscaling.scaling_policy import ScalingMode
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.slo import Slo
from plimsoll.core.types import Unavailable
from plimsoll.engines.engine import Engine

Object = dict[str, Any]

SHEDDING_SHARE: Final = 0.01  # share of rejected requests above which Shedding is true
_PROMETHEUS_ONLY: Final = (
    "{}engines of {} do not answer the operator, and their metrics come from Prometheus with a delay."
    " Check that the operator can reach port {} of the engine pods (NetworkPolicy, mesh)"
)

_TARGET_LABELS: Final = "Set {} to labels that its pods have"
_TIER_LABELS: Final = (
    f"Look for what removes the label {labels.SERVICE} of the pods (kubectl get pods --show-labels), such as a webhook"
)
_REMEDY: Final = (
    "Remove it, or set spec.scaling.mode to Recommend. After a change by hand, edit the service's spec to scale again"
)
_UNFREEZE: Final = "It changes once they are known: condition MetricsDegraded names metrics that are missing"
_CHECK_PODS: Final = "Check these pods, and that the operator can reach them (NetworkPolicy, mesh)"
_UNSIZED: Final = (
    "replicas are added when requests wait in engines or latency misses the SLO, and removed only while there are no"
    " requests"
)
_ENGINES_SILENT: Final = (
    f"no {{}} has reported at port {{}} for {GATEWAY_SILENCE_SECONDS:.0f} s: demand is unknown, and the replica"
    " count is frozen. Check metricsPort, and that the operator can reach it (NetworkPolicy, mesh)"
)


def is_shedding(snapshot: ServiceSnapshot, old_conditions: Iterable[Condition]) -> bool:
    """Whether the service sheds load. It starts above SHEDDING_SHARE, and ends after a minute without a rejection."""
    share = snapshot.metrics.rejected_share
    was_shedding = any(c.type is ConditionType.SHEDDING for c in old_conditions)
    return not isinstance(share, Unavailable) and share > (0.0 if was_shedding else SHEDDING_SHARE)


def frozen_tiers(service_state: ServiceState, spec: ScalingSpec) -> dict[str, str]:
    """The tiers whose replica count is frozen because their load or their model is unknown, and why."""
    if spec.slo is None:
        return {}
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
    # A tier without replicas is not frozen: the next request starts one.
    return {n: reason for n, reason in frozen.items() if n not in decided or decided[n].replicas}


def scaling_inactive(
    spec: ScalingSpec,
    engine: Engine,
    frozen: Mapping[str, str],
    other_writer: str | None = None,
    missing_signals: Sequence[str] = (),
) -> Condition | None:
    """Why the autoscaler changes no replica count, or only adds replicas.

    frozen: `frozen_tiers` to report. other_writer: who else sets the replica count of a target, None if no other
    writer does. missing_signals: what the engine would have to report to be sized.
    """

    def inactive(reason: ConditionReason, message: str) -> Condition:
        return Condition(ConditionType.SCALING_INACTIVE, True, reason, message)

    if other_writer is not None:
        kind, yields = ConditionType.SCALING_INACTIVE, "Plimsoll yields, and only recommends"
        brief = f"{shorten(other_writer, MAX_QUOTE_CHARS)}: {yields}; see condition {kind}"
        return Condition(kind, True, ConditionReason.REPLICAS_OWNED, f"{other_writer}: {yields}. {_REMEDY}", brief)
    if spec.policy.paused:
        return inactive(
            ConditionReason.PAUSED,
            "spec.scaling.paused is true: decisions are reported, but not applied. Set it to false to scale",
        )
    if spec.policy.mode is not ScalingMode.AUTO:
        return inactive(
            ConditionReason.RECOMMEND_ONLY
            if spec.policy.mode is ScalingMode.RECOMMEND
            else ConditionReason.SCALING_OFF,
            f"spec.scaling.mode is {spec.policy.mode}: the autoscaler does not change replica counts. Set it to Auto to"
            " scale",
        )
    if spec.slo is None:
        return inactive(
            ConditionReason.NO_SLO,
            "spec.slo is not set: the tiers are not sized, and each tier keeps its minReplicas. Set it to scale",
        )
    if frozen:
        if not engine.launched:
            cause = f"{', '.join(frozen)} is not sized ({'; '.join(dict.fromkeys(frozen.values()))})"
            if missing_signals:
                missing = ", no ".join(missing_signals)
                cause = f"engine {engine.name} reports no {missing}, so {', '.join(frozen)} is not sized"
            return inactive(ConditionReason.DEMAND_UNKNOWN, f"{cause}: {_UNSIZED}")
        reasons = "; ".join(f"{name}: {why}" for name, why in frozen.items())
        return inactive(ConditionReason.DEMAND_UNKNOWN, f"the replica count is frozen: {reasons}. {_UNFREEZE}")
    return None


def replicas_contested(health: HealthReport) -> Condition | None:
    """Who sets the counts of tiers again and again, while Plimsoll sets them back."""
    if not health.contested:
        return None
    kind, undo = ConditionType.REPLICAS_CONTESTED, "Plimsoll sets it back, and the two undo each other"
    remedy = "Remove that writer (kubectl get hpa), or set spec.scaling.mode to Recommend"
    brief = f"{shorten(health.contested, MAX_QUOTE_CHARS)}: {undo}"
    return Condition(
        kind,
        True,
        ConditionReason.REPLICAS_OWNED,
        f"{health.contested}, {CONTESTED_WRITES} times or more within {CONTEST_SECONDS / 60:.0f} min: {undo}. {remedy}",
        brief,
    )


def metrics_degraded(snapshot: ServiceSnapshot, health: HealthReport, metrics_ports: str) -> Condition | None:
    """Which metrics are missing or late, and what the autoscaler does meanwhile.

    metrics_ports: those of the engines' metrics; "" if the service names none.
    """

    def degraded(reason: ConditionReason, message: str) -> Condition:
        return Condition(ConditionType.METRICS_DEGRADED, True, reason, message)

    if health.unselected:
        counts = ", ".join(
            f"{count} {'replica' if count == 1 else 'replicas'} of {name}" for name, count in health.unselected
        )
        fields = " and ".join(f"spec.targets.{name}.podSelector" for name, _ in health.unselected)
        where = _TARGET_LABELS.format(fields) if health.is_target else _TIER_LABELS
        message = (
            f"for {UNSELECTED_SECONDS:.0f} s no pod has the labels by which engines are found, while Kubernetes counts"
            f" {counts}: their load is not seen, and they do not count as ready. {where}"
        )
        kind = ConditionType.METRICS_DEGRADED
        brief = f"for {UNSELECTED_SECONDS:.0f} s no pod has the labels of an engine, while Kubernetes counts {counts}"
        return Condition(kind, True, ConditionReason.LABELS_MATCH_NOTHING, message, f"{brief}; see condition {kind}")
    if health.demand_ports and (health.gateways_silent or health.silent_tiers):
        return _engines_silent(snapshot, health)
    if health.gateways_silent:
        message = (
            f"no gateway replica has reported request metrics for {GATEWAY_SILENCE_SECONDS:.0f} s: demand is unknown,"
            " and the replica count is frozen. Check the gateway pods, and that the operator can reach them"
            " (NetworkPolicy)"
        )
        return degraded(ConditionReason.METRICS_MISSING, message)
    if health.silent_tiers and not metrics_ports:
        message = (
            f"the load of {', '.join(health.silent_tiers)} is unknown, no tier scales down: name the engine's metrics "
            "in spec.engine.metrics"
        )
        return degraded(ConditionReason.METRICS_MISSING, message)
    if health.silent_tiers:
        message = (
            f"no ready engine of {', '.join(health.silent_tiers)} has sent metrics for {ENGINE_SILENCE_SECONDS:.0f} s,"
            f" no tier scales down. Check that the operator can reach port {metrics_ports} of its pods (NetworkPolicy, "
            "mesh)"
        )
        return degraded(ConditionReason.METRICS_MISSING, message)
    if health.bypassing and not health.demand_ports:
        message = (
            f"engines run {units.format_figure(health.bypassing)} requests, and for {BYPASS_SECONDS:.0f} s no gateway"
            " has sent one: demand is not seen, and tiers may scale down. Send requests to status.url"
        )
        return degraded(ConditionReason.GATEWAYS_BYPASSED, message)
    if health.partial:
        message = f"no metrics from {health.partial}: tiers can scale up, but not down. {_CHECK_PODS}"
        return degraded(ConditionReason.METRICS_PARTIAL, message)
    if health.prometheus_only_tiers:
        gateways = "" if health.demand_ports else "gateways answer; "
        message = _PROMETHEUS_ONLY.format(gateways, ", ".join(health.prometheus_only_tiers), metrics_ports)
        return degraded(ConditionReason.METRICS_DELAYED, message)
    return None


def _engines_silent(snapshot: ServiceSnapshot, health: HealthReport) -> Condition | None:
    """Which engines of targets do not report; None if none is ready, since Ready or TargetUnusable then says why."""
    if not any(tier.ready for tier in snapshot.tiers.values()):
        return None
    engines = " or ".join(health.silent_tiers if len(health.silent_tiers) < len(snapshot.tiers) else ())
    silent = f"ready {engines} engine" if engines else "ready engine"
    message = _ENGINES_SILENT.format(silent, health.demand_ports)
    return Condition(ConditionType.METRICS_DEGRADED, True, ConditionReason.METRICS_MISSING, message)


def slo_infeasible(service_state: ServiceState) -> Condition | None:
    """Which tier meets the SLO at no replica count, and the nearest feasible targets."""
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
        violation = f"{name_constraint(sizing.infeasible.constraint, sizing.target_classes)} violates it"
        slo = "the targets of its classes" if sizing.target_classes else "spec.slo"
        brief = f"{name}: no replica count meets {slo}, {violation}; feasible: {targets_text}"
        message = f"{brief}{sizing.infeasible.hint}"
        return Condition(ConditionType.SLO_INFEASIBLE, True, ConditionReason.INFEASIBLE, message, brief)
    return None


def model_mismatch(service_state: ServiceState) -> Condition | None:
    """What measurement contradicts in the model, of all tiers."""
    found = {
        name: sizing_mismatches(sizing)
        for name, sizing in service_state.sizings.items()
        if isinstance(sizing, SizingResult)
    }
    message = "; ".join(f"{name}: {one.evidence}. {one.advice}" for name, ones in found.items() for one in ones)
    if not message:
        return None
    return Condition(ConditionType.MODEL_MISMATCH, True, ConditionReason.MEASURED_OTHERWISE, message)


def is_feasibility_known(service_state: ServiceState, slo: Slo) -> bool:
    """Whether the SLO capacity of every tier on which a target depends is known."""
    sizings = [sizing for name, sizing in service_state.sizings.items() if slo.has_target_for(name)]
    return bool(sizings) and all(isinstance(sizing, SizingResult) for sizing in sizings)


def gateway_config_stale(health: HealthReport) -> Condition | None:
    """Which gateways use outdated admission limits or none, and the remedy."""
    if health.stale_gateways is None:
        return None
    kind = ConditionType.GATEWAY_CONFIG_STALE
    problem = health.stale_gateways.split(". ")[0]
    brief = f"{shorten(problem, MAX_QUOTE_CHARS)}; see condition {kind}"
    return Condition(kind, True, ConditionReason.GATEWAY_CONFIG_STALE, health.stale_gateways, brief)


def shedding(
    service_state: ServiceState, snapshot: ServiceSnapshot, old_conditions: Iterable[Condition], starting: Object
) -> Condition | None:
    """The rejected share and load of the last minute, and the tier that binds: one without ready replicas, else the one
    with the least capacity, if that of all tiers is known.

    starting: `status.tiers.*.starting` of the tier that serves clients.
    """
    share = snapshot.metrics.rejected_share
    if isinstance(share, Unavailable) or not is_shedding(snapshot, old_conditions):
        return None
    parts = [_rejected(share, snapshot.metrics.arrivals)]
    capacities = [
        (snapshot.tiers[tier].ready * sizing.replica_work / sizing.request_gpu_s, tier)
        for tier, sizing in service_state.sizings.items()
        if tier in snapshot.tiers and isinstance(sizing, SizingResult)
    ]
    dead = [name for name, tier in snapshot.tiers.items() if not tier.ready]
    if dead:
        parts.append(f"no {' and no '.join(dead)} replica is ready")
    elif capacities and len(capacities) == len(snapshot.tiers):
        capacity_per_s, tier = min(capacities)
        ready = snapshot.tiers[tier].ready
        replicas = f"{ready} ready {tier} {'replica' if ready == 1 else 'replicas'}"
        parts.append(f"SLO capacity {units.format_rate(capacity_per_s)} with {replicas}")
    if starting:
        due = f", the next ready at {starting['nextReady']}" if "nextReady" in starting else ""
        parts.append(f"{starting['count']} starting{due}")
    return Condition(ConditionType.SHEDDING, True, ConditionReason.SHEDDING, "; ".join(parts))


def _rejected(share: float, arrivals: float) -> str:
    """Of few requests, the count: their rate is that of a burst only while the burst lasts a minute."""
    if arrivals < 1.5:
        return "the last minute's only request was rejected"
    if arrivals < LATENCY_WINDOW_S:
        rejected = max(1, round(share * arrivals))
        return f"{rejected} of the last minute's {arrivals:.0f} requests {'was' if rejected == 1 else 'were'} rejected"
    rate = units.format_rate(arrivals / LATENCY_WINDOW_S)
    return f"{format_rejected(share)} of the last minute's requests were rejected (of {rate})"


def format_rejected(share: float) -> str:
    """A share above 0 in whole percent: no rejection reads as none, and no admitted request as rejected."""
    if share < 0.01:
        return "less than 1%"
    return f"{share:.0%}" if share < 0.99 or share >= 1.0 else "99%"


def _step_reason(tier: TierDecision, name: str) -> str:
    return next((step.reason for step in tier.steps if step.name == name), tier.summary)
