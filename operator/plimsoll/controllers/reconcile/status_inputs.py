"""The inputs of a service's status, collected from what was observed, planned and reported."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from plimsoll.api import labels
from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.controllers import pod_startup
from plimsoll.controllers.autoscale.scaling_status import ScalingReport
from plimsoll.controllers.hardware_limits import hardware_limits
from plimsoll.controllers.object_cache import key_of, role_of, worker_role_of
from plimsoll.controllers.reconcile.adapter_status import ReportsByPod
from plimsoll.controllers.reconcile.model_names import ModelNames, model_names
from plimsoll.controllers.reconcile.object_plan import ObjectPlan
from plimsoll.controllers.reconcile.observe import ObservedService
from plimsoll.controllers.reconcile.pod_diagnosis import PodProblem
from plimsoll.controllers.reconcile.service_status import StatusInputs
from plimsoll.controllers.reconcile.tier_health import TierStatusInputs
from plimsoll.controllers.targets.target_state import TargetState
from plimsoll.controllers.tier_workload import find_workload, ordered_replicas
from plimsoll.core.autoscaling.scaling_policy import ScalingMode
from plimsoll.resources.platform_config import PlatformConfig

Object = dict[str, Any]


def desired_replicas(
    observed: ObservedService,
    service: InferenceService,
    report: ScalingReport | None,
    targets: Mapping[str, TargetState],
) -> dict[str, int]:
    """Desired replicas by tier; before the first scaling report, those of the workload or target."""
    replicas: dict[str, int] = {}
    for kind, tier in service.spec.sized_tiers.items():
        target = targets.get(kind)
        workload = find_workload(observed.children, service.metadata.name, kind)
        ordered = tier.min_replicas if workload is None else ordered_replicas(workload)
        if target is not None and target.scaled is not None:
            ordered = target.scaled.replicas
        replicas[kind] = ordered if report is None else report.desired.get(kind, ordered)
    return replicas


def names_of(observed: ObservedService, at: datetime.datetime) -> ModelNames:
    """The model names of a service at time `at`."""
    view = observed.gateway_view
    answered = view.models.get(key_of(observed.service_object))
    complete = view.responding == view.replicas
    return model_names(
        observed.service_object, observed.names.claim.model, observed.names.owned, answered, complete, at
    )


def collect_status_inputs(
    observed: ObservedService,
    object_plan: ObjectPlan | None,
    rejection: str | None,
    report: ScalingReport | None,
    platform: PlatformConfig,
    names: ModelNames,
    adapters: ReportsByPod | None = None,
    targets: Mapping[str, TargetState] | None = None,
) -> StatusInputs:
    """The inputs of the status."""
    raw_meta = observed.service_object["metadata"]
    key = (raw_meta["namespace"], raw_meta["name"])
    service = observed.service
    gateway_view = observed.gateway_view
    return StatusInputs(
        service_object=observed.service_object,
        tiers=_tier_inputs(observed, report, targets or {}) if object_plan else (),
        targets=None if service is None or service.spec.targets is None else targets or {},
        takes_requests=service is None or service.spec.takes_requests,
        scaling_report=report,
        gateway_replicas=gateway_view.replicas,
        gateways_error=gateway_view.error,
        routable_endpoints=gateway_view.routable.get(key, 0) if gateway_view.responding else None,
        name_state=observed.names,
        adapter_names=observed.adapter_names,
        adapters=adapters or {},
        model_names=names,
        spec_problems=observed.problems,
        rejection=rejection,
        url="" if service is not None and not service.spec.takes_requests else platform.gateway.url,
        scales_to_zero=service is not None and _scales_to_zero(service),
        has_stored_cost_model=_has_cost_model(observed.children.get((labels.ADMISSION_KIND, raw_meta["name"]))),
        fallback=observed.fallback,
        hardware_limits=() if service is None else hardware_limits(service, platform.engine.defaults.args),
    )


def _has_cost_model(admission: Object | None) -> bool:
    limits = (admission or {}).get("limits")
    return isinstance(limits, dict) and bool(limits.get("costModel"))


def _scales_to_zero(service: InferenceService) -> bool:
    """Whether the autoscaler may scale all tiers to zero, and back up."""
    scaling = service.spec.scaling
    is_active = service.spec.mode is ScalingMode.AUTO and not scaling.paused
    return is_active and all(tier.min_replicas == 0 for tier in service.spec.sized_tiers.values())


def with_sets_problem(
    tiers: tuple[TierStatusInputs, ...], service: InferenceService | None, problem: PodProblem | None
) -> tuple[TierStatusInputs, ...]:
    """The tiers. problem: of those with several nodes, why no LeaderWorkerSet can be applied; None if one can."""
    sets = {kind for kind, tier in service.spec.tiers.items() if tier.nodes > 1} if service is not None else set()
    return tuple(replace(tier, workload_problem=problem) if tier.role in sets else tier for tier in tiers)


def _tier_inputs(
    observed: ObservedService, report: ScalingReport | None, targets: Mapping[str, TargetState]
) -> tuple[TierStatusInputs, ...]:
    assert observed.service is not None
    replicas = desired_replicas(observed, observed.service, report, targets)
    return tuple(
        TierStatusInputs(
            role=kind,
            desired=replicas[kind],
            workload=find_workload(observed.children, observed.service.metadata.name, kind),
            pods=tuple(p for p in observed.pods if role_of(p) == kind),
            workers=tuple(p for p in observed.pods if worker_role_of(p) == kind),
            earlier=sum(role_of(p) == kind and not pod_startup.has_ended(p) for p in observed.earlier_pods),
        )
        for kind in observed.service.spec.sized_tiers
    )
