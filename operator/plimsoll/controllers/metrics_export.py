"""Exports the autoscaler's figures as metrics, for dashboards and other autoscalers.

An unknown value has no series, because a gauge that stays at its last value looks like a measurement.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from plimsoll.api.conditions import Condition
from plimsoll.controllers.autoscale.slo_status import measured_percentiles
from plimsoll.controllers.object_cache import Key
from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot, TierSnapshot
from plimsoll.core.autoscaling.observations import SizingResult
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.autoscaling.slo_attainment import slo_attainment
from plimsoll.core.prompt_tokens import KINDS
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role, Unavailable
from plimsoll.resources.engine_tuning import StoredArgument
from plimsoll.telemetry import operator_metrics
from plimsoll.telemetry.service_gauge import ServiceGauge

STARTUP_QUANTILES = (0.5, 0.9)


class ScalingGauges:
    """Exports the scaling figures of services. `_exported` has the sized tiers of each, and "slo" if it has an SLO."""

    def __init__(self) -> None:
        self._exported: dict[Key, set[str]] = {}

    def export(self, key: Key, service_state: ServiceState, snapshot: ServiceSnapshot, spec: ScalingSpec) -> None:
        """Set the series of a service to its current values, and remove those that are unknown."""
        name = "/".join(key)
        parts = set() if spec.slo is None else {"slo"}
        parts |= {tier for tier, sizing in service_state.sizings.items() if parts and isinstance(sizing, SizingResult)}
        if self._exported.get(key, set()) - parts:
            self.forget(key)
        if service_state.last_decision is None:
            return
        self._exported[key] = parts
        for tier, tier_snapshot in snapshot.tiers.items():
            _export_replicas(name, tier, service_state, tier_snapshot)
            tier_metrics = snapshot.metrics.tiers.get(Role(tier))
            acceptance = None if tier_metrics is None else _value_or_none(tier_metrics.draft_acceptance)
            _set_or_remove(operator_metrics.AUTOSCALER_DRAFT_ACCEPTANCE, acceptance, name, tier)
        if spec.slo is None:
            return
        for tier, sizing in service_state.sizings.items():
            tier_decision = service_state.last_decision.decision.tiers[tier]
            count = tier_decision.replicas if tier_decision.recommended is None else tier_decision.recommended
            operator_metrics.AUTOSCALER_DESIRED.set(count, name, tier)
            if isinstance(sizing, SizingResult) and tier in snapshot.tiers:
                _export_sizing(name, tier, sizing, service_state, snapshot.tiers[tier].ready)
        _export_slo(name, snapshot, spec.slo, spec.slos)
        operator_metrics.AUTOSCALER_TTFT_OFFSET.set(service_state.ttft_feedback.offset_s, name)

    def forget(self, key: Key) -> None:
        """Remove the series of a deleted service."""
        if self._exported.pop(key, None) is not None:
            operator_metrics.remove_scaling_series("/".join(key))


class ConditionGauges:
    """Exports the conditions of services, one series per condition, so that alerts can match a reason."""

    def __init__(self) -> None:
        self._exported: dict[Key, set[tuple[str, str]]] = {}

    def export(self, key: Key, conditions: Iterable[Condition]) -> None:
        """Set the current conditions of a service; an empty `conditions` removes its series."""
        name = "/".join(key)
        current = {(condition.type.value, condition.reason.value): condition.holds for condition in conditions}
        for kind, reason in self._exported.pop(key, set()) - current.keys():
            operator_metrics.SERVICE_CONDITION.remove(name, kind, reason)
        for (kind, reason), holds in current.items():
            operator_metrics.SERVICE_CONDITION.set(-1 if holds is None else holds, name, kind, reason)
        if current:
            self._exported[key] = set(current)

    def add(self, key: Key, condition: Condition) -> None:
        """Add one condition to those that are exported."""
        kind, reason = condition.type.value, condition.reason.value
        holds = -1 if condition.holds is None else condition.holds
        operator_metrics.SERVICE_CONDITION.set(holds, "/".join(key), kind, reason)
        self._exported.setdefault(key, set()).add((kind, reason))


class TuningGauges:
    """Exports the arguments that the operator has set on engines."""

    def __init__(self) -> None:
        self._exported: dict[Key, set[tuple[str, str]]] = {}

    def export(self, key: Key, tiers: Mapping[str, Sequence[StoredArgument]]) -> None:
        """Set the arguments of each tier of a service; without any its series are removed."""
        name = "/".join(key)
        current = {(tier, one.flag.lstrip("-")): one.value for tier, stored in tiers.items() for one in stored}
        for tier, argument in self._exported.pop(key, set()) - current.keys():
            operator_metrics.OPERATOR_ENGINE_TUNING.remove(name, tier, argument)
        for (tier, argument), value in current.items():
            operator_metrics.OPERATOR_ENGINE_TUNING.set(value, name, tier, argument)
        if current:
            self._exported[key] = set(current)


def _export_replicas(name: str, tier: str, service_state: ServiceState, tier_snapshot: TierSnapshot) -> None:
    assert service_state.last_decision is not None
    tier_decision = service_state.last_decision.decision.tiers.get(tier)
    startup = service_state.tiers[tier].startup_model.total
    operator_metrics.AUTOSCALER_READY.set(tier_snapshot.ready, name, tier)
    operator_metrics.AUTOSCALER_OVERDUE.set(0 if tier_decision is None else len(tier_decision.overdue), name, tier)
    if startup.startups:
        for quantile in STARTUP_QUANTILES:
            operator_metrics.AUTOSCALER_STARTUP.set(startup.quantile_s(quantile), name, tier, str(quantile))


def _export_sizing(name: str, tier: str, sizing: SizingResult, service_state: ServiceState, ready: int) -> None:
    level = service_state.tiers[tier].forecast_state.estimate.level
    utilization = sizing.utilization(level, ready)
    operator_metrics.AUTOSCALER_NEEDED.set(sizing.replicas, name, tier)
    operator_metrics.AUTOSCALER_REPLICA_CAPACITY.set(sizing.replica_work / sizing.request_gpu_s, name, tier)
    operator_metrics.AUTOSCALER_LOAD.set(level / sizing.request_gpu_s, name, tier)
    operator_metrics.AUTOSCALER_FORECAST.set(sizing.rate_per_s, name, tier)
    _set_or_remove(
        operator_metrics.AUTOSCALER_UTILIZATION,
        utilization if ready and math.isfinite(utilization) else None,
        name,
        tier,
    )


def _export_slo(name: str, snapshot: ServiceSnapshot, slo: Slo, class_slos: Sequence[Slo]) -> None:
    service_metrics = snapshot.metrics
    attainment = slo_attainment(service_metrics, *class_slos)
    rejected_share = None if isinstance(service_metrics.rejected_share, Unavailable) else service_metrics.rejected_share
    prompt_tokens = (
        0.0 if isinstance(service_metrics.mean_prompt_tokens, Unavailable) else service_metrics.mean_prompt_tokens
    )
    operator_metrics.SLO_OBJECTIVE.set(slo.share, name)
    _set_or_remove(
        operator_metrics.SLO_TTFT_TARGET, None if slo.ttft_s is None else slo.deadlines(prompt_tokens).ttft_s, name
    )
    _set_or_remove(operator_metrics.SLO_TPOT_TARGET, slo.tpot_s, name)
    _set_or_remove(operator_metrics.SLO_E2E_TARGET, slo.e2e_s, name)
    e2e_s, itl_s = measured_percentiles(snapshot)[2:]
    _set_or_remove(operator_metrics.SLO_E2E_MEASURED, None if slo.e2e_s is None else e2e_s, name)
    _set_or_remove(operator_metrics.SLO_ITL_TARGET, slo.itl_s, name)
    _set_or_remove(operator_metrics.SLO_ITL_MEASURED, None if slo.itl_s is None else itl_s, name)
    for target, _ in slo.targets[:-1]:  # inter-token latency is not assessed per request
        _set_or_remove(
            operator_metrics.SLO_TARGET_ATTAINMENT,
            _value_or_none(attainment.by_target.get(target)),
            name,
            target.lower(),
        )
    _set_or_remove(operator_metrics.SLO_ATTAINMENT, _value_or_none(attainment.lower_bound), name)
    _set_or_remove(operator_metrics.SLO_ERROR, attainment.missed_upper_bound, name)
    _set_or_remove(operator_metrics.AUTOSCALER_REJECTED_SHARE, rejected_share, name)
    for kind in KINDS:
        _set_or_remove(operator_metrics.AUTOSCALER_TOKEN_RATIO, service_metrics.token_ratios.get(kind), name, kind)


def _value_or_none(share: float | Unavailable | None) -> float | None:
    return None if isinstance(share, Unavailable) else share


def _set_or_remove(gauge: ServiceGauge, value: float | None, *labels: str) -> None:
    """Set the gauge, or remove its series if the value is unknown."""
    if value is None:
        gauge.remove(*labels)
    else:
        gauge.set(value, *labels)
