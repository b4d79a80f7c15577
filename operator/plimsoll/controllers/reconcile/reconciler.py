"""Reconciles one service: observe, plan, apply, publish the status.

A reconcile is level-triggered and idempotent: if it is killed between two writes, the next one does the rest. The
status is written last, once, and only if it differs. Events are written before it, under deterministic names, so that
a repeated write creates no duplicate.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from plimsoll.adapters.kube_client import BY_KIND, CONTROLLERREVISIONS, KubeClient
from plimsoll.api import conditions, labels
from plimsoll.api.conditions import Condition
from plimsoll.api.events import Event, EventReason
from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.controllers import pod_startup
from plimsoll.controllers.autoscale.checkpoint_store import CheckpointStore
from plimsoll.controllers.autoscale.scaling_status import ScalingReport
from plimsoll.controllers.engine_rollout.rollout_controller import ServiceRollout
from plimsoll.controllers.gateway_poller import GatewayView
from plimsoll.controllers.hardware_limits import hardware_limits
from plimsoll.controllers.inference_pools.pool_watch import PoolWatch
from plimsoll.controllers.inference_pools.pool_writer import PoolWriter
from plimsoll.controllers.isolation import ObjectErrors, Stage, subject_of
from plimsoll.controllers.metrics_export import ConditionGauges, TuningGauges
from plimsoll.controllers.object_cache import Key, ObjectCache, key_of, role_of, worker_role_of
from plimsoll.controllers.reconcile import condition_events, service_status
from plimsoll.controllers.reconcile.adapter_status import ReportsByPod, adapters_status
from plimsoll.controllers.reconcile.applied_cache import AppliedCache
from plimsoll.controllers.reconcile.drain_reports import DrainReports
from plimsoll.controllers.reconcile.model_names import ModelNames, model_names
from plimsoll.controllers.reconcile.name_claims import ADAPTERS, NameGrants
from plimsoll.controllers.reconcile.name_claims import FIELD as NAME_CLAIM
from plimsoll.controllers.reconcile.object_plan import ObjectPlan, plan_objects
from plimsoll.controllers.reconcile.observe import ObservedService, observe
from plimsoll.controllers.reconcile.ownership import require_parent, require_unowned
from plimsoll.controllers.reconcile.pod_diagnosis import PodProblem
from plimsoll.controllers.reconcile.rejected_fields import in_service_terms
from plimsoll.controllers.reconcile.service_namespaces import ServiceNamespaces
from plimsoll.controllers.reconcile.service_status import StatusInputs
from plimsoll.controllers.reconcile.tier_health import TierStatusInputs, is_fully_rolled_out
from plimsoll.controllers.reconcile.tuning_status import deployed_arguments, tuning_events, tuning_line
from plimsoll.controllers.targets.target_state import TargetState
from plimsoll.controllers.tier_workload import find_workload, ordered_replicas
from plimsoll.core.autoscaling.scaling_policy import ScalingMode
from plimsoll.core.errors import (
    BackendUnavailable,
    Conflict,
    Forbidden,
    NotFound,
    ObjectRejected,
    PlimsollError,
    ServiceDeleted,
)
from plimsoll.resources.platform_config import PlatformConfig
from plimsoll.telemetry.service_log import ServiceLog

Object = dict[str, Any]

log = ServiceLog(__name__)


def rfc3339_now() -> str:
    """The current time in the API's format."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Reconciler:
    """Applies the objects of services, and publishes their status."""

    def __init__(
        self,
        kube: KubeClient,
        cache: ObjectCache,
        platform: PlatformConfig,
        gateway_view: Callable[[], GatewayView],
        report: Callable[[Key], ScalingReport | None],
        drain_reports: DrainReports,
        identity: str,
        errors: ObjectErrors | None = None,
        later: Callable[[Key, float], None] = lambda key, seconds: None,
        checkpoints: CheckpointStore | None = None,
        service_namespaces: ServiceNamespaces | None = None,
        adapters: Callable[[Key], ReportsByPod] = lambda key: {},
        targets: Callable[[Key], Mapping[str, TargetState]] = lambda key: {},
        engine_rollout: Callable[[Key], ServiceRollout] = lambda key: ServiceRollout(),
        pool_watch: PoolWatch | None = None,
        sets_problem: Callable[[str], PodProblem | None] = lambda namespace: None,
        model_revisions: Callable[[Key], tuple[str, ...]] = lambda key: (),
    ) -> None:
        """report: scaling report of a service, None before its first tick. later: reconciles a service after some
        seconds. adapters, model_revisions: what the ready engines of a service report of their adapters, and the
        commits or digests of their model. targets: the targets of a service as last read, by role. engine_rollout: what
        the platform's rollout says of a service. pool_watch: None without InferencePools. sets_problem: why no
        LeaderWorkerSet can be applied in a namespace, None if one can."""
        self._sets_problem = sets_problem
        self._engine_rollout = engine_rollout
        self._adapters = adapters
        self._model_revisions = model_revisions
        self._targets = targets
        self._errors = errors or ObjectErrors()
        self._kube = kube
        self._cache = cache
        self._platform = platform
        self._gateway_view = gateway_view
        self._report = report
        self._drain_reports = drain_reports
        self._identity = identity
        self._later = later
        self._pools = PoolWriter(kube, cache, platform, pool_watch, later)
        self._checkpoints = checkpoints or CheckpointStore(kube)
        self._grants = NameGrants(
            cache,
            frozenset(platform.gateway.short_model_names.namespaces),
            service_namespaces or ServiceNamespaces(kube, platform.gateway.namespace),
            self._write_status,
            lambda key: later(key, 0.0),
        )
        self._applied = AppliedCache()
        self._condition_gauges = ConditionGauges()
        self._tuning_gauges = TuningGauges()
        self._other_releases: dict[Key, tuple[str, str]] = {}  # uid and release that a status has
        # Version of an object whose Events are written, but whose status is not. A retry writes the same Events.
        self._event_versions: dict[Key, str] = {}

    async def reconcile(self, key: Key) -> None:
        """Reconcile once. Raises ClusterError if a retry is needed; any other error is first shown in the status.

        A service that is already deleted needs none: its watch brings the deletion, and a successor if there is one.
        """
        try:
            await self._round(key)
        except ServiceDeleted:
            return
        except PlimsollError:
            raise
        except Exception as error:
            raw = self._cache.get(labels.KIND, key)
            if raw is not None:
                self._errors.record(Stage.RECONCILE, key, subject_of(raw), error)
                await self._publish_error(key, raw)
            raise
        raw = self._cache.get(labels.KIND, key)
        if raw is not None:
            self._errors.clear(Stage.RECONCILE, key, subject_of(raw))

    async def publish_other_release(self, key: Key, release: str) -> None:
        """Add to the status that another release manages the service, once: a live one then writes its own status.

        Raises ClusterError if a retry is needed.
        """
        raw = self._cache.get(labels.KIND, key)
        if raw is None:
            self._other_releases.pop(key, None)
            self._condition_gauges.export(key, ())
            return
        if raw["metadata"].get("deletionTimestamp"):
            return
        known = raw["metadata"]["uid"], release
        if self._other_releases.get(key) == known:
            return
        condition = service_status.other_release(key[0], release)
        await self.record_event(raw, Event(EventReason.OTHER_RELEASE, condition.event_message, release))
        await self._add_condition(key, raw, condition)
        self._other_releases[key] = known

    async def _add_condition(self, key: Key, raw: Object, condition: Condition) -> None:
        """Add a condition to the status, in place of one of its type."""
        self._condition_gauges.add(key, condition)
        old = raw.get("status") or {}
        before = old.get("conditions", [])
        others = [one for one in before if one.get("type") != condition.type.value]
        stated = [*others, *conditions.merge(before, (condition,), rfc3339_now())]
        if stated != before:
            await self._write_status(raw, {**old, "conditions": stated})

    async def _round(self, key: Key) -> None:
        self._other_releases.pop(key, None)
        await self._grants.update(key)
        observed = self._observe(key)
        if observed is None:
            self._applied.forget(key)
            self._drain_reports.forget(key)
            self._errors.forget(key)
            self._pools.forget(key)
            self._checkpoints.forget(key)
            self._condition_gauges.export(key, ())
            self._tuning_gauges.export(key, {})
            self._event_versions.pop(key, None)
            return
        plan: ObjectPlan | None = None
        rejected: str | None = None
        if observed.service is not None:
            report = self._report(key)
            plan = plan_objects(
                observed,
                observed.service,
                desired_replicas(observed, observed.service, report, self._targets(key)),
                self._platform,
                report,
                has_turn=self._engine_rollout(key).has_turn,
            )
            try:
                await self._apply(key, observed, plan)
            except (ObjectRejected, Forbidden) as error:
                rejected = str(error)
        pool_condition = None
        if observed.service is not None:
            pool_condition = await self._pools.reconcile(observed.service_object, observed.service)
        observed = self._observe(key) or observed
        names = names_of(observed, datetime.datetime.now(datetime.UTC))
        inputs = collect_status_inputs(
            observed, plan, rejected, self._report(key), self._platform, names, self._adapters(key), self._targets(key)
        )
        inputs = replace(inputs, tiers=with_sets_problem(inputs.tiers, observed.service, self._sets_problem(key[0])))
        if any(tier.pending for tier in inputs.tiers) and await self._kube.is_terminating(key[0]):
            inputs = replace(inputs, tiers=tuple(replace(tier, is_namespace_terminating=True) for tier in inputs.tiers))
        inputs = replace(
            inputs,
            internal_error=self._errors.condition(key),
            engine_rollout=self._engine_rollout(key).condition,
            engine_tuning=self._tuning(key, observed),
            model_revisions=self._model_revisions(key),
            inference_pool=pool_condition,
        )
        await self._publish_status(observed.service_object, inputs)
        if inputs.scaling_report is not None:
            await self._checkpoints.write(observed.service_object, inputs.scaling_report.checkpoint)
        if names.next_s is not None:
            self._later(key, names.next_s)
        if plan is not None:
            await self._prune_revisions(observed, inputs, plan)
        if rejected is not None:
            raise BackendUnavailable(f"retrying in 10 s: {rejected}", retry_after_seconds=10.0)

    def _observe(self, key: Key) -> ObservedService | None:
        return observe(self._cache, self._gateway_view(), key, self._grants.rules)

    async def _apply(self, key: Key, observed: ObservedService, object_plan: ObjectPlan) -> None:
        has_sets = self._sets_problem(key[0]) is None
        changed = [
            desired_object
            for desired_object in object_plan.desired
            if (has_sets or desired_object["kind"] != labels.SET_KIND)
            and not self._applied.is_in_sync(
                key, desired_object, observed.children.get((desired_object["kind"], desired_object["metadata"]["name"]))
            )
        ]
        is_any_missing = any((one["kind"], one["metadata"]["name"]) not in observed.children for one in changed)
        if is_any_missing or object_plan.templates:
            await require_parent(self._kube, observed.service_object)
        if object_plan.templates and observed.service is not None:
            deployed = deployed_arguments(observed.service, observed.children)
            for event in tuning_events(deployed, object_plan.templates):
                await self.record_event(observed.service_object, event)
        for template_revision in object_plan.templates:
            with contextlib.suppress(Conflict):
                self._cache.put(await self._kube.create(template_revision))
        results = await asyncio.gather(
            *(self._apply_one(key, desired_object, observed) for desired_object in changed), return_exceptions=True
        )
        for failure in filter(None, results):
            raise failure
        for pruned in object_plan.prune:
            pruned_meta = pruned["metadata"]
            resource = BY_KIND[pruned["kind"]]
            await self._kube.delete(resource, pruned_meta["namespace"], pruned_meta["name"], pruned_meta["uid"])

    async def _apply_one(self, key: Key, desired_object: Object, observed: ObservedService) -> None:
        if (desired_object["kind"], desired_object["metadata"]["name"]) not in observed.children:
            await require_unowned(self._kube, desired_object, observed.service_object)
        try:
            live = await self._kube.apply(desired_object, labels.FIELD_MANAGER)
        except ObjectRejected as error:
            raise ObjectRejected(in_service_terms(str(error), role_of(desired_object)), error.status) from error
        self._applied.record(key, desired_object, live)
        self._cache.put(live)

    def _tuning(self, key: Key, observed: ObservedService) -> str | None:
        """Export the arguments that the operator has set on engines, and return their line of the status."""
        if observed.service is None or observed.service.spec.targets is not None:
            self._tuning_gauges.export(key, {})
            return None
        deployed = deployed_arguments(observed.service, observed.children)
        self._tuning_gauges.export(key, deployed)
        return tuning_line(observed.service, deployed, self._platform)

    async def _publish_status(self, service_object: Object, inputs: StatusInputs) -> None:
        """Write Events for changed conditions, then the status if it differs."""
        old_status = service_object.get("status") or {}
        stated_conditions = service_status.build_conditions(inputs)
        self._condition_gauges.export(key_of(service_object), stated_conditions)
        drain_events = self._drain_reports.pending(key_of(service_object))
        version = self._event_versions.setdefault(
            key_of(service_object), service_object["metadata"].get("resourceVersion", "")
        )
        for event in (
            *condition_events.changed_events(
                old_status.get("conditions", []),
                stated_conditions,
                service_status.recovery_messages(inputs),
                version,
            ),
            *drain_events,
        ):
            await self.record_event(service_object, event)
        self._drain_reports.ack(key_of(service_object), drain_events)
        former = inputs.model_names.former
        new_status: Object = {
            "observedGeneration": service_object["metadata"].get("generation", 0),
            "url": inputs.url,
            "modelNames": list(inputs.model_names.listed),
            **({NAME_CLAIM: old_status[NAME_CLAIM]} if NAME_CLAIM in old_status else {}),
            **({"formerNames": [str(one) for one in former]} if former else {}),
            **({ADAPTERS: _adapters_status(old_status[ADAPTERS], inputs)} if ADAPTERS in old_status else {}),
            "tiers": service_status.tiers_status(inputs),
            **({"engineTuning": inputs.engine_tuning} if inputs.engine_tuning else {}),
            **service_status.model_revision(inputs, old_status),
            "conditions": conditions.merge(old_status.get("conditions", []), stated_conditions, rfc3339_now()),
            **service_status.scaling_fields(inputs, old_status),
        }
        if new_status != old_status:
            await self._write_status(service_object, new_status)
        self._event_versions.pop(key_of(service_object), None)

    async def _publish_error(self, key: Key, raw: Object) -> None:
        """Add the InternalError condition to the current status. A failed write is left to the next reconcile."""
        condition = self._errors.condition(key)
        if condition is None:
            return
        try:
            await self._add_condition(key, raw, condition)
        except Exception:
            log.exception(key, "cannot write the InternalError condition")

    async def _write_status(self, raw: Object, new: Object) -> None:
        """Write the status of this version of the object.

        Raises Conflict if the object has changed: a status that was computed from an earlier spec, or for a deleted
        object of the same name, could give a model name away or back.
        """
        body = {
            "apiVersion": labels.API_VERSION,
            "kind": labels.KIND,
            "metadata": {name: raw["metadata"][name] for name in ("namespace", "name", "resourceVersion")},
            "status": new,
        }
        with contextlib.suppress(NotFound):
            self._cache.put(await self._kube.apply(body, labels.FIELD_MANAGER, subresource="status"))

    async def record_event(self, service_object: Object, event: Event) -> None:
        """Write an Event. An existing one, or a namespace that is being deleted, is not an error."""
        try:
            await self._kube.create(event.manifest(service_object, self._identity, rfc3339_now()))
        except Conflict:
            return
        except (Forbidden, NotFound):
            pass
        log.info(key_of(service_object), event.message, reason=event.reason.value)

    async def _prune_revisions(self, observed: ObservedService, inputs: StatusInputs, object_plan: ObjectPlan) -> None:
        """Delete stored templates that no pod uses, so that a return to an old spec renders a new one."""
        rolled_out_tiers = {tier.role for tier in inputs.tiers if is_fully_rolled_out(tier)}
        for name, revision in observed.revisions.items():
            tier = role_of(revision)
            if tier in rolled_out_tiers and name != object_plan.revisions[tier]:
                revision_meta = revision["metadata"]
                await self._kube.delete(CONTROLLERREVISIONS, revision_meta["namespace"], name, revision_meta["uid"])


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
        url="" if service is not None and service.spec.targets is not None else platform.gateway.url,
        scales_to_zero=service is not None and _scales_to_zero(service),
        has_stored_cost_model=_has_cost_model(observed.children.get((labels.ADMISSION_KIND, raw_meta["name"]))),
        fallback=observed.fallback,
        hardware_limits=() if service is None else hardware_limits(service, platform.engine.defaults.args),
    )


def _adapters_status(entries: list[Object], inputs: StatusInputs) -> list[Object]:
    """The entries; as before while the tiers are unknown, because the spec is not valid."""
    has_engines = not inputs.tiers or any(tier.ready for tier in inputs.tiers)
    return adapters_status(entries, inputs.adapters, has_engines=has_engines)


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
