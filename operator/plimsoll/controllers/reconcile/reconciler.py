"""Reconciles one service: observe, plan, apply, publish the status.

A reconcile is level-triggered and idempotent: if it is killed between two writes, the next one does the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from plimsoll.adapters.kube_client import BY_KIND, CONTROLLERREVISIONS, KubeClient
from plimsoll.api import labels
from plimsoll.api.events import Event
from plimsoll.controllers.autoscale.checkpoint_store import CheckpointStore
from plimsoll.controllers.autoscale.scaling_status import ScalingReport
from plimsoll.controllers.engine_rollout.rollout_controller import ServiceRollout
from plimsoll.controllers.gateway_poller import GatewayView
from plimsoll.controllers.inference_pools.pool_watch import PoolWatch
from plimsoll.controllers.inference_pools.pool_writer import PoolWriter
from plimsoll.controllers.isolation import ObjectErrors, Stage, subject_of
from plimsoll.controllers.metrics_export import TuningGauges
from plimsoll.controllers.object_cache import Key, ObjectCache, role_of
from plimsoll.controllers.reconcile.adapter_status import ReportsByPod
from plimsoll.controllers.reconcile.applied_cache import AppliedCache, annotated
from plimsoll.controllers.reconcile.drain_reports import DrainReports
from plimsoll.controllers.reconcile.engine_publication import left_out_event
from plimsoll.controllers.reconcile.name_claims import NameGrants
from plimsoll.controllers.reconcile.object_plan import ObjectPlan, plan_invalid, plan_objects
from plimsoll.controllers.reconcile.observe import ObservedService, observe
from plimsoll.controllers.reconcile.ownership import require_parent, require_unowned
from plimsoll.controllers.reconcile.pod_diagnosis import PodProblem
from plimsoll.controllers.reconcile.rejected_fields import in_service_terms
from plimsoll.controllers.reconcile.service_namespaces import ServiceNamespaces
from plimsoll.controllers.reconcile.status_inputs import (
    collect_status_inputs,
    desired_replicas,
    names_of,
    with_sets_problem,
)
from plimsoll.controllers.reconcile.status_writer import StatusWriter
from plimsoll.controllers.reconcile.tier_health import TierStatusInputs, is_fully_rolled_out
from plimsoll.controllers.reconcile.tuning_status import chunk_event, deployed_arguments, tuning_events, tuning_line
from plimsoll.controllers.reconcile.volume_problems import with_volume_problems
from plimsoll.controllers.targets.target_state import TargetState, is_unread, routed_selector
from plimsoll.core.errors import (
    BackendUnavailable,
    Conflict,
    Forbidden,
    ObjectRejected,
    PlimsollError,
    ServiceDeleted,
)
from plimsoll.resources.engine_tuning import MeasuredChunk
from plimsoll.resources.platform_config import PlatformConfig

Object = dict[str, Any]

_APPLIED_FIRST: Final = frozenset({"ServiceAccount", labels.ADMISSION_KIND})


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
        self.status = StatusWriter(kube, cache, drain_reports, identity, self._errors)
        self._kube = kube
        self._cache = cache
        self._platform = platform
        self._gateway_view = gateway_view
        self._report = report
        self._drain_reports = drain_reports
        self._later = later
        self._pools = PoolWriter(kube, cache, platform, pool_watch, later)
        self._checkpoints = checkpoints or CheckpointStore(kube)
        self._grants = NameGrants(
            cache,
            frozenset(platform.gateway.short_model_names.namespaces),
            service_namespaces or ServiceNamespaces(kube, platform.gateway.namespace),
            self.status.write,
            lambda key: later(key, 0.0),
        )
        self._applied = AppliedCache()
        self._tuning_gauges = TuningGauges()

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
                await self.status.publish_error(key, raw)
            raise
        raw = self._cache.get(labels.KIND, key)
        if raw is not None:
            self._errors.clear(Stage.RECONCILE, key, subject_of(raw))

    async def _round(self, key: Key) -> None:
        self.status.clear_other_release(key)
        await self._grants.update(key)
        observed = self._observe(key)
        if observed is None:
            self._applied.forget(key)
            self._drain_reports.forget(key)
            self._errors.forget(key)
            self._pools.forget(key)
            self._checkpoints.forget(key)
            self.status.forget(key)
            self._tuning_gauges.export(key, {})
            return
        plan: ObjectPlan | None = None
        rejected: str | None = None
        report = self._report(key)
        if observed.service is not None:
            plan = plan_objects(
                observed,
                observed.service,
                desired_replicas(observed, observed.service, report, self._targets(key)),
                self._platform,
                report,
                has_turn=self._engine_rollout(key).has_turn,
                target_selector=routed_selector(observed.service_object, self._targets(key), "serve"),
                is_target_unread=is_unread(self._targets(key), "serve"),
            )
        wanted = None if plan is None or report is None else report.measured_chunk
        try:
            await self._apply(key, observed, plan or plan_invalid(observed), wanted)
        except (ObjectRejected, Forbidden) as error:
            rejected = str(error)
        pool_condition = None
        if observed.service is not None:
            pool_condition = await self._pools.reconcile(
                observed.service_object, observed.service, self._targets(key).get("serve")
            )
        observed = self._observe(key) or observed
        names = names_of(observed, datetime.datetime.now(datetime.UTC))
        inputs = collect_status_inputs(
            observed, plan, rejected, self._report(key), self._platform, names, self._adapters(key), self._targets(key)
        )
        inputs = replace(inputs, tiers=with_sets_problem(inputs.tiers, observed.service, self._sets_problem(key[0])))
        inputs = replace(
            inputs,
            tiers=await self._with_problems_of_pods(key, inputs.tiers),
            internal_error=self._errors.condition(key),
            engine_rollout=self._engine_rollout(key).condition,
            engine_tuning=self._tuning(key, observed),
            model_revisions=self._model_revisions(key),
            inference_pool=pool_condition,
        )
        await self.status.publish(observed.service_object, inputs)
        if inputs.scaling_report is not None:
            await self._checkpoints.write(observed.service_object, inputs.scaling_report.checkpoint)
        if names.next_s is not None:
            self._later(key, names.next_s)
        if plan is not None:
            await self._prune_revisions(observed, inputs.tiers, plan)
        if rejected is not None:
            raise BackendUnavailable(f"retrying in 10 s: {rejected}", retry_after_seconds=10.0)

    async def _with_problems_of_pods(
        self, key: Key, tiers: tuple[TierStatusInputs, ...]
    ) -> tuple[TierStatusInputs, ...]:
        """The tiers with what neither workloads nor pods say: a namespace that is deleted, and volumes."""
        if any(tier.pending for tier in tiers) and await self._kube.is_terminating(key[0]):
            tiers = tuple(replace(tier, is_namespace_terminating=True) for tier in tiers)
        tiers, next_s = await with_volume_problems(self._kube, key[0], tiers, time.time())
        if next_s is not None:
            self._later(key, next_s)
        return tiers

    def _observe(self, key: Key) -> ObservedService | None:
        return observe(self._cache, self._gateway_view(), key, self._grants.rules)

    async def _apply(
        self, key: Key, observed: ObservedService, object_plan: ObjectPlan, wanted: MeasuredChunk | None
    ) -> None:
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
        events: tuple[Event, ...] = ()
        if object_plan.templates and observed.service is not None:
            deployed = deployed_arguments(observed.service, observed.children)
            events = tuning_events(deployed, object_plan.templates)
        if (chunk_changed := chunk_event(observed.children, object_plan.desired, wanted)) is not None:
            events = (chunk_changed,)
        if object_plan.left_out and any(one["kind"] == labels.ADMISSION_KIND for one in changed):
            events += (left_out_event(object_plan.left_out),)
        for event in events:
            await self.status.record_event(observed.service_object, event)
        for template_revision in object_plan.templates:
            with contextlib.suppress(Conflict):
                self._cache.put(await self._kube.create(template_revision))
        # The service account first: the API server rejects pods without it, and a ReplicaSet keeps that as its reason.
        # So is what gateways need to know of a template before there are pods of it, also if this process ends then.
        for is_first in (True, False):
            group = [one for one in changed if (one["kind"] in _APPLIED_FIRST) is is_first]
            results = await asyncio.gather(
                *(self._apply_one(key, desired_object, observed) for desired_object in group), return_exceptions=True
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
            live = await self._kube.apply(annotated(desired_object), labels.FIELD_MANAGER)
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

    async def _prune_revisions(
        self, observed: ObservedService, tiers: Iterable[TierStatusInputs], object_plan: ObjectPlan
    ) -> None:
        """Delete stored templates that no pod uses, so that a return to an old spec renders a new one."""
        rolled_out_tiers = {tier.role for tier in tiers if is_fully_rolled_out(tier)}
        for name, revision in observed.revisions.items():
            tier = role_of(revision)
            if tier in rolled_out_tiers and name != object_plan.revisions[tier]:
                revision_meta = revision["metadata"]
                await self._kube.delete(CONTROLLERREVISIONS, revision_meta["namespace"], name, revision_meta["uid"])
