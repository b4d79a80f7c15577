"""Reads one service's snapshot, the input of its decision: metrics, and the replicas of each tier."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from plimsoll.api import labels
from plimsoll.controllers import pod_startup, tier_workload
from plimsoll.controllers.autoscale.signal_sources import SignalSources
from plimsoll.controllers.autoscale.tracked_service import TrackedService
from plimsoll.controllers.object_cache import Key, ObjectCache, key_of, role_of
from plimsoll.controllers.replicas_owner import replicas_set_by
from plimsoll.controllers.targets.target_state import ScaledObject
from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot, TierSnapshot
from plimsoll.core.autoscaling.scaling_policy import ScalingMode
from plimsoll.core.autoscaling.startup_models import UNKNOWN_VARIANT
from plimsoll.core.autoscaling.tier_engines import announced_limits
from plimsoll.core.engine_model.measured_limits import is_one_configuration
from plimsoll.core.types import Role
from plimsoll.resources import object_meta

Object = dict[str, Any]

STARTUP_REPORT_GRACE_SECONDS: Final = 15.0  # wait for the launcher's final start-up report
DEFAULT_SLO_SHARE: Final = 0.95  # percentile that is measured for a service without an SLO


class SnapshotReader:
    """Makes snapshots from the caches and the signals."""

    def __init__(self, cache: ObjectCache, sources: SignalSources) -> None:
        self._cache = cache
        self._sources = sources

    def read(
        self,
        key: Key,
        service_object: Object,
        entry: TrackedService,
        spec: ScalingSpec,
        gateways: tuple[str, ...],
        now_s: float,
    ) -> ServiceSnapshot:
        tiers: dict[str, TierSnapshot] = {}
        ready: dict[Role, list[str]] = {}
        pods = self._cache.pods(key)
        entry.prune(gateways, [pod["metadata"]["name"] for pod in pods])
        for name in entry.service_state.tiers:
            tier_pods = [pod for pod in pods if tier_of(pod) == name]
            ready[Role(name)] = [pod["metadata"]["name"] for pod in tier_pods if pod_startup.is_ready(pod)]
            scaled = scaled_object(self._cache, self._sources, service_object, name)
            if scaled is not None:
                tier_snapshot = self._tier_snapshot(entry, name, scaled, tier_pods, ready[Role(name)], now_s)
                workload = owned_workload(self._cache, service_object, name)
                if workload is not None:
                    is_automatic = spec.policy.mode is ScalingMode.AUTO and not spec.policy.paused
                    tier_snapshot = replace(
                        tier_snapshot,
                        variant=entry.startup_variant(name, workload),
                        replicas_set_by=replicas_set_by(workload) if is_automatic else None,  # else others own it
                    )
                tiers[name] = tier_snapshot
        entry.horizon_s = spec.horizon_s
        slo_share = DEFAULT_SLO_SHARE if spec.slo is None else spec.slo.share
        entry.aggregator.set_slos(() if spec.slo is None else (spec.slo, *spec.slos), now_s)
        service_metrics = entry.aggregator.collect(now_s, ready, gateways, slo_share)
        if service_metrics.has_new_rate and service_metrics.rate_per_s:
            self._sources.mark_active(key)
        return ServiceSnapshot(service_metrics, tiers)

    def _tier_snapshot(
        self,
        entry: TrackedService,
        name: str,
        scaled: ScaledObject,
        pods: list[Object],
        ready: list[str],
        now_s: float,
    ) -> TierSnapshot:
        namespace, ready_names = scaled.metadata["namespace"], set(ready)
        starting_pods = [p for p in pods if p["metadata"]["name"] not in ready_names]
        entry.starting_pods |= {p["metadata"]["name"] for p in starting_pods}
        for pod in pods:
            pod_name = pod["metadata"]["name"]
            if pod_name in ready_names and pod_name in entry.starting_pods:
                progress = self._sources.startup_progress(namespace, pod_name)
                if (
                    pod_startup.is_complete(progress)
                    or pod_startup.ready_for_s(pod, now_s) > STARTUP_REPORT_GRACE_SECONDS
                ):
                    entry.starting_pods.discard(pod_name)
                    entry.service_state.record_startup(
                        name,
                        pod_startup.phase_durations(pod, progress),
                        pod_startup.startup_variant(pod),
                        pod_startup.has_restarted(pod),
                    )
        engine_infos = [info for pod in ready if (info := self._sources.engine_info(namespace, pod)) is not None]
        return TierSnapshot(
            replicas=scaled.replicas,
            ready=len(ready),
            starting=tuple(
                pod_startup.startup_state(p, self._sources.startup_progress(namespace, p["metadata"]["name"]))
                for p in starting_pods
            ),
            engine_info=next(iter(engine_infos), None),
            is_uniform=is_one_configuration([announced_limits(info) for info in engine_infos]),
            unselected=tier_workload.unselected_replicas(scaled.counted, pods),
            variant=pod_startup.startup_variant(max(pods, key=pod_startup.created_s)) if pods else UNKNOWN_VARIANT,
        )


def owned_admission(cache: ObjectCache, service_object: Object) -> Object | None:
    """The InferenceServiceAdmission of a service; None if there is none, or only that of a deleted one of its name."""
    admission = cache.get(labels.ADMISSION_KIND, key_of(service_object))
    return (
        admission
        if admission is not None and object_meta.owner_uid(admission) == service_object["metadata"]["uid"]
        else None
    )


def owned_workload(cache: ObjectCache, service_object: Object, tier: str) -> Object | None:
    """The workload of a tier; None before it is created, or if it belongs to another object."""
    namespace, name = key_of(service_object)
    for resource in tier_workload.TIER_WORKLOADS:
        workload = cache.get(resource.kind, (namespace, object_meta.tier_name(name, tier)))
        if workload is not None and object_meta.owner_uid(workload) == service_object["metadata"]["uid"]:
            return workload
    return None


def scaled_object(cache: ObjectCache, sources: SignalSources, service_object: Object, tier: str) -> ScaledObject | None:
    """The object with a tier's replica count: its workload or its target. None before it exists or can be used."""
    target = sources.targets(key_of(service_object)).get(tier)
    if target is not None:
        return target.scaled
    workload = owned_workload(cache, service_object, tier)
    if workload is None:
        return None
    resource, replicas = tier_workload.resource_of(workload), tier_workload.ordered_replicas(workload)
    counted = tier_workload.counted_replicas(workload)
    return ScaledObject(resource, workload["metadata"], replicas, is_owned=True, counted=counted)


def tier_of(pod: Object) -> str | None:
    """The tier of a pod that is not being deleted, else None."""
    return None if pod_startup.is_terminating(pod) else role_of(pod)
