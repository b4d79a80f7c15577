"""The scaling tick: ingest the metrics of all services, decide in one pass, and apply the changed replica counts.

Only `spec.replicas` is written here, through the scale subresource and with a field manager of its own. The write
cannot conflict with the rest of the Deployment, and another autoscaler can own that field instead.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from plimsoll.adapters.kube_client import KubeClient
from plimsoll.adapters.launcher import StartupProgress
from plimsoll.api import labels
from plimsoll.api.events import MAX_EVENT_MESSAGE_CHARS, Event, EventReason
from plimsoll.api.message_text import join_within
from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.controllers import pod_startup
from plimsoll.controllers.autoscale import decision_document, learned_state, pod_deletion_cost, scaling_status
from plimsoll.controllers.autoscale.history_backfill import HistoryBackfill
from plimsoll.controllers.autoscale.limit_status import NOT_LIMITED, LimitTracker
from plimsoll.controllers.autoscale.scaling_status import ScalingReport
from plimsoll.controllers.autoscale.signal_health import GATEWAY_SILENCE_SECONDS, SignalHealth
from plimsoll.controllers.isolation import ObjectErrors, Stage
from plimsoll.controllers.metrics_export import ScalingGauges
from plimsoll.controllers.object_cache import Key, ObjectCache, key_of, resource_version, role_of
from plimsoll.controllers.replicas_owner import replicas_set_by
from plimsoll.core.admission.publication import AdmissionLimits, from_dict
from plimsoll.core.autoscaling.admission_publisher import AdmissionPublisher
from plimsoll.core.autoscaling.fleet_decisions import decide_all
from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot, TierSnapshot
from plimsoll.core.autoscaling.scale_down_candidates import replica_load
from plimsoll.core.autoscaling.scaling_decision import TierDecision
from plimsoll.core.autoscaling.scaling_policy import ScalingMode
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.autoscaling.startup_models import Variant
from plimsoll.core.demand.metrics_aggregator import MetricsAggregator
from plimsoll.core.demand.service_metrics import ServiceMetrics
from plimsoll.core.engine_model.kv_transfer import TransferAssessment, TransferStats, assess, recompute_s_per_token
from plimsoll.core.errors import ClusterError, InvalidSpec, NotFound
from plimsoll.core.ports import EngineInfo, EngineReading, GatewayReading, MetricsHistory
from plimsoll.core.types import Role, Unavailable
from plimsoll.resources import object_meta
from plimsoll.telemetry import metrics
from plimsoll.telemetry.service_log import ServiceLog

Object = dict[str, Any]
RecordEvent = Callable[[Object, Event], Awaitable[None]]
DecisionInput = tuple[ServiceState, ServiceSnapshot, ScalingSpec]

log = ServiceLog(__name__)

REPORT_INTERVAL_SECONDS = 60.0  # interval at which the figures in the status are refreshed
IDLE_INTERVAL_SECONDS = 4.0  # decision interval of an idle service; a request ends it at once
STARTUP_REPORT_GRACE_SECONDS = 15.0  # wait for the launcher's final start-up report
TRANSFER_ASSESSMENT_SECONDS = 10.0  # interval at which KV transfer is assessed
FAILURE_BACKOFF_SECONDS = 30.0  # pause after a failed decision
DEFAULT_SLO_SHARE = 0.95  # percentile that is measured for a service without an SLO


def _published_before(status: Object) -> AdmissionLimits | None:
    """The admission limits that an earlier process published; None if there are none or they cannot be read."""
    try:
        return from_dict(status["admission"]) if "admission" in status else None
    except ValueError:
        return None


def scaling_spec(service: InferenceService, now_s: float) -> ScalingSpec:
    """The spec in the core's terms."""
    service_spec = service.spec
    slo = None if service_spec.slo is None else service_spec.slo.to_core()
    return ScalingSpec(
        service.policy(now_s), slo, service_spec.scaling.headroom_share, service_spec.scaling.horizon_s, service.classes
    )


@dataclass(frozen=True)
class ScaleChange:
    """A tier whose Deployment has another replica count than decided."""

    service_object: Object
    deployment: Object
    tier: str
    replicas_before: int
    decision: TierDecision

    def event(self, deletion_note: str = "") -> Event:
        """The Event of the change. Clauses that do not fit are left out; `kubectl plimsoll explain` has all of them.

        deletion_note: which pods are deleted; may be empty.
        """
        after, generation = self.decision.replicas, self.deployment["metadata"].get("generation")
        reason = EventReason.SCALED_UP if after > self.replicas_before else EventReason.SCALED_DOWN
        if not (after and self.replicas_before):
            reason = EventReason.SCALED_FROM_ZERO if after else EventReason.SCALED_TO_ZERO
        first, *others = self.decision.brief_reasons
        head = f"{self.tier} {self.replicas_before} -> {after}: {first}"
        advice = ""
        if self.decision.override is not None:
            advice = f"to keep a count, set spec.tiers.{self.tier}.minReplicas and maxReplicas, not the Deployment"
        clauses = (advice, *others, deletion_note, self.decision.counterfactual or "")
        message = join_within(MAX_EVENT_MESSAGE_CHARS, head, *clauses)
        return Event(reason, message, f"{self.tier}/{self.replicas_before}/{after}/{generation}")


@dataclass
class _ServiceEntry:
    """One service in this process.

    starting_pods: pods first seen before they were ready; only their start-up times are recorded.
    """

    service_state: ServiceState
    aggregator: MetricsAggregator
    publisher: AdmissionPublisher
    uid: str  # of the object; a re-created object of the same name starts without state
    checkpoint: str | None  # learned state of an earlier process
    tracked_since_s: float
    transfer_assessment: TransferAssessment | None = None
    transfer_assessed_s: float = -math.inf  # time of the last assessment
    starting_pods: set[str] = field(default_factory=set)
    report: ScalingReport | None = None
    report_made_s: float = -math.inf
    horizon_s: float | None = None  # from the spec at the last tick
    signal_health: SignalHealth = field(default_factory=SignalHealth)
    limits: LimitTracker = field(default_factory=LimitTracker)
    arrivals_by_gateway: dict[str, float] = field(default_factory=dict)  # last arrival counter of each gateway
    variants: dict[str, tuple[Object, Variant]] = field(
        default_factory=dict
    )  # by tier, with the Deployment it was read from
    idle_until_s: float = -math.inf  # no decision is due before
    last_failure_s: float = -math.inf  # time of the last failed decision
    decided_object: Object | None = None
    last_metrics: tuple[float, ServiceMetrics] | None = None  # time and metrics of the last tick that decided

    def mark_active(self, gateway: str, arrivals: float) -> None:
        """Record a gateway's arrival counter; a change ends the idle period."""
        if self.arrivals_by_gateway.get(gateway) != arrivals:
            self.idle_until_s = -math.inf
        self.arrivals_by_gateway[gateway] = arrivals

    def prune(self, gateways: Iterable[str], pods: Iterable[str]) -> None:
        """Drop deleted gateways, and pods that were deleted before they became ready."""
        for gateway in self.arrivals_by_gateway.keys() - set(gateways):
            del self.arrivals_by_gateway[gateway]
        self.starting_pods &= set(pods)

    def startup_variant(self, tier: str, deployment: Object) -> Variant:
        """The start-up variant of a tier's new pods, cached per version of its Deployment."""
        cached = self.variants.get(tier)
        if cached is None or cached[0] is not deployment:
            cached = self.variants[tier] = (
                deployment,
                pod_startup.startup_variant(deployment["spec"].get("template") or {}),
            )
        return cached[1]

    def assess_transfer(self, transfer_stats: TransferStats, now_s: float) -> None:
        """Compare the KV transfer time of the decode engines with the time to recompute the same prompts.

        An assessment stays valid until the next one: where transfers are slow the gateways use few of them, which is
        too little data for an assessment.
        """
        if 0.0 <= now_s - self.transfer_assessed_s < TRANSFER_ASSESSMENT_SECONDS:
            return
        self.transfer_assessed_s = now_s
        tier, workload = self.service_state.tiers.get(Role.DECODE), self.service_state.workload
        if tier is None or tier.model is None or tier.limits is None or isinstance(workload, Unavailable):
            return
        recompute_s = recompute_s_per_token(tier.model, workload, tier.limits.token_budget)
        if not isinstance(recompute_s, Unavailable):
            assessment = assess(
                transfer_stats, recompute_s, self.transfer_assessment is None or self.transfer_assessment.pays
            )
            if not isinstance(assessment, Unavailable):
                self.transfer_assessment = assessment

    @property
    def slow_transfer_message(self) -> str | None:
        """Why remote prefill does not pay; None if it pays or if that is unknown."""
        return (
            self.transfer_assessment.message
            if self.transfer_assessment is not None and not self.transfer_assessment.pays
            else None
        )

    def is_idle(self, service_object: Object, now_s: float) -> bool:
        """Whether the service is idle, and its object is the one of the last decision."""
        return service_object is self.decided_object and 0.0 < self.idle_until_s - now_s <= IDLE_INTERVAL_SECONDS

    def has_recent_failure(self, now_s: float) -> bool:
        """Whether the last failed decision is less than FAILURE_BACKOFF_SECONDS ago."""
        return 0.0 <= now_s - self.last_failure_s < FAILURE_BACKOFF_SECONDS

    def mark_idle(
        self, service_object: Object, snapshot: ServiceSnapshot, spec: ScalingSpec, has_changes: bool, now_s: float
    ) -> None:
        """Start an idle period if the service is not sized, or has no load and is settled."""
        has_no_load = not snapshot.metrics.rate_per_s and snapshot.metrics.coverage == 1.0
        is_settled = all(tier.ready == tier.replicas and not tier.starting for tier in snapshot.tiers.values())
        can_idle = not has_changes and (spec.slo is None or (has_no_load and is_settled))
        self.decided_object = service_object
        self.idle_until_s = now_s + IDLE_INTERVAL_SECONDS if can_idle else -math.inf


@dataclass(frozen=True)
class SignalSources:
    """Inputs of the tick.

    gateways: fresh readings, and the names of all gateways. engine_info, startup_progress, running_requests: last
    report of an engine, by pod name. mark_active: called for a service with arrivals, so that its engines are polled
    more often. history: None if no metrics store is configured. prometheus_only_tiers: tiers of a service with an
    engine that is known from the metrics store only. checkpoint: learned state that an earlier process has stored for a
    service.
    """

    gateways: Callable[[], tuple[Iterable[GatewayReading], Iterable[str]]]
    engine_info: Callable[[str], EngineInfo | None]
    startup_progress: Callable[[str], StartupProgress | None]
    running_requests: Callable[[str], float | None] = lambda pod: None
    mark_active: Callable[[Key], None] = lambda key: None
    history: MetricsHistory | None = None
    prometheus_only_tiers: Callable[[Key], tuple[str, ...]] = lambda key: ()
    checkpoint: Callable[[Object], str | None] = lambda service_object: None


class Autoscaler:
    """Decides the replica counts of all services, and keeps the learned state of each."""

    def __init__(
        self,
        cache: ObjectCache,
        kube: KubeClient,
        sources: SignalSources,
        record_event: RecordEvent,
        on_report_changed: Callable[[Key], None],
        monotonic: Callable[[], float] = time.monotonic,
        errors: ObjectErrors | None = None,
    ) -> None:
        """on_report_changed: called with a service whose report has changed."""
        self._errors = errors or ObjectErrors()
        self._cache = cache
        self._kube = kube
        self._sources = sources
        self._record_event = record_event
        self._on_report_changed = on_report_changed
        self._monotonic = monotonic
        self._entries: dict[Key, _ServiceEntry] = {}
        self._gauges = ScalingGauges()
        self._backfill = HistoryBackfill(sources.history)

    def observe_engine(self, key: Key, role: Role, reading: EngineReading) -> None:
        """Ingest an engine's metrics."""
        entry = self._entries.get(key)
        if entry is not None:
            with self._isolate_errors(key, reading.at_s):
                entry.aggregator.observe_engine(role, reading)

    def report(self, key: Key) -> ScalingReport | None:
        """The scaling report of a service; None before its first tick."""
        entry = self._entries.get(key)
        return None if entry is None else entry.report

    def explain(self, key: Key) -> dict[str, Any] | None:
        """The last decisions of a service with their inputs, as JSON; None for an unknown service."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        return decision_document.build_document(
            entry.service_state, key, time.time(), entry.horizon_s, entry.last_metrics
        )

    async def tick(self, now_s: float) -> float:
        """Run one pass over all services. now_s: seconds since the epoch.

        Returns the seconds for which it blocked the event loop.
        """
        started_s = self._monotonic()
        changes = self.decide(now_s)
        decide_s = self._monotonic() - started_s
        for change in changes:
            with self._isolate_errors(key_of(change.service_object), now_s):
                await self._scale(change)
        for key, known in self._entries.items():
            if not known.has_recent_failure(now_s):
                self._errors.clear(Stage.SCALING, key, _subject(key))
        self._backfill.start_next({key: known.service_state for key, known in self._entries.items()}, now_s)
        return decide_s

    def decide(self, now_s: float) -> list[ScaleChange]:
        """The tiers to scale. Reads only caches."""
        services = {
            key_of(service_object): (service_object, service) for service_object, service in self._services(now_s)
        }
        for deleted_key in self._entries.keys() - services.keys():
            del self._entries[deleted_key]
            self._gauges.forget(deleted_key)
        readings, gateways = self._sources.gateways()
        self._ingest(tuple(readings), now_s)
        inputs = {}
        for key, (service_object, service) in services.items():
            with self._isolate_errors(key, now_s):
                entry = self._entries.get(key)
                if entry is None or entry.uid != service_object["metadata"]["uid"]:
                    entry = self._track(key, service_object, service, now_s)
                if entry.is_idle(service_object, now_s) or entry.has_recent_failure(now_s):
                    continue
                spec = scaling_spec(service, now_s)
                inputs[key] = (
                    entry.service_state,
                    self._snapshot(key, service_object, entry, spec, tuple(gateways), now_s),
                    spec,
                )
        due_changes: list[ScaleChange] = []
        for key, (_, snapshot, spec) in self._decide_with_fallback(inputs, now_s).items():
            with self._isolate_errors(key, now_s):
                service_object, service = services[key]
                entry = self._entries[key]
                entry.last_metrics = now_s, snapshot.metrics
                entry.publisher.publish(entry.service_state, snapshot, spec, tuple(gateways), now_s)
                self._update_report(key, service, snapshot, spec, tuple(gateways), now_s)
                changes = list(self._changes(service_object, entry.service_state, spec))
                entry.mark_idle(service_object, snapshot, spec, bool(changes), now_s)
                due_changes += changes
        return due_changes

    def _decide_with_fallback(self, inputs: dict[Key, DecisionInput], now_s: float) -> dict[Key, DecisionInput]:
        """The inputs that were decided: all in one batch or, if that fails, each separately."""
        try:
            decide_all(inputs, now_s)
        except Exception:  # caused by one service, which the loop below isolates
            log.exception(None, "batch decision failed; deciding each service separately")
        else:
            return inputs
        decided = {}
        for key, decision_input in inputs.items():
            with self._isolate_errors(key, now_s):
                decide_all({key: decision_input}, now_s)
                decided[key] = decision_input
        return decided

    @contextlib.contextmanager
    def _isolate_errors(self, key: Key, now_s: float) -> Iterator[None]:
        """Contain an error to one service: its replica count is frozen, and its report shows the error."""
        try:
            yield
        except Exception as error:  # uncaught it would end the operator, also after each restart
            log.exception(key, "scaling decision failed; replica count frozen")
            self._errors.record(Stage.SCALING, key, _subject(key), error)
            entry = self._entries.get(key)
            if entry is not None:
                entry.last_failure_s = now_s
                entry.report = scaling_status.failed_report(entry.report or self._initial_report(entry, now_s), error)
                self._on_report_changed(key)

    def _services(self, now_s: float) -> Iterable[tuple[Object, InferenceService]]:
        for service_object in self._cache.all(labels.KIND):
            service: InferenceService | InvalidSpec | None = None
            if not service_object["metadata"].get("deletionTimestamp"):
                with self._isolate_errors(key_of(service_object), now_s):
                    service = self._cache.parsed(service_object)
            if isinstance(service, InferenceService):
                yield service_object, service

    def _track(self, key: Key, service_object: Object, service: InferenceService, now_s: float) -> _ServiceEntry:
        roles = [kind for kind, _ in service.spec.tiers.items()]
        status = service_object.get("status") or {}
        checkpoint = self._sources.checkpoint(service_object)
        aggregator = MetricsAggregator([Role(role) for role in roles])
        publisher, uid = AdmissionPublisher.restore(_published_before(status)), service_object["metadata"]["uid"]
        entry = _ServiceEntry(ServiceState.for_roles(roles), aggregator, publisher, uid, checkpoint, now_s)
        self._entries[key] = entry
        if checkpoint is not None:
            learned_state.restore(entry.service_state, checkpoint)
        learned_state.restore_decisions(entry.service_state, status)
        self._backfill.track(key, entry.service_state)
        return entry

    def _initial_report(self, entry: _ServiceEntry, now_s: float) -> ScalingReport:
        """The report that precedes the first one of this process."""
        return scaling_status.initial_report(entry.checkpoint, now_s)

    def _ingest(self, readings: Iterable[GatewayReading], now_s: float) -> None:
        for reading in readings:
            for name, service_reading in reading.services.items():
                namespace, _, short_name = name.partition("/")
                entry, service_object = (
                    self._entries.get((namespace, short_name)),
                    self._cache.get(labels.KIND, (namespace, short_name)),
                )
                if entry is not None and service_object is not None:
                    with self._isolate_errors((namespace, short_name), now_s):
                        entry.signal_health.record(
                            reading.gateway, service_reading.config_state, resource_version(service_object), now_s
                        )
                        entry.mark_active(reading.gateway, service_reading.arrived)
                        entry.aggregator.observe_gateway(
                            reading.gateway, reading.instance_id, reading.at_s, service_reading
                        )
                        entry.publisher.sharing.observe(
                            reading.gateway, reading.instance_id, reading.at_s, service_reading
                        )

    def _snapshot(
        self,
        key: Key,
        service_object: Object,
        entry: _ServiceEntry,
        spec: ScalingSpec,
        gateways: tuple[str, ...],
        now_s: float,
    ) -> ServiceSnapshot:
        tiers: dict[str, TierSnapshot] = {}
        ready: dict[Role, list[str]] = {}
        pods = self._cache.children("Pod", key)
        entry.prune(gateways, [pod["metadata"]["name"] for pod in pods])
        for name in entry.service_state.tiers:
            tier_pods = [pod for pod in pods if _belongs_to_tier(pod, name)]
            ready[Role(name)] = [pod["metadata"]["name"] for pod in tier_pods if pod_startup.is_ready(pod)]
            deployment = self._deployment(service_object, name)
            if deployment is not None:
                tiers[name] = self._tier_snapshot(entry, name, deployment, tier_pods, ready[Role(name)], spec, now_s)
        entry.horizon_s = spec.horizon_s
        slo_share = DEFAULT_SLO_SHARE if spec.slo is None else spec.slo.share
        service_metrics = entry.aggregator.collect(now_s, ready, gateways, slo_share)
        if service_metrics.has_new_rate and service_metrics.rate_per_s:
            self._sources.mark_active(key)
        return ServiceSnapshot(service_metrics, tiers)

    def _tier_snapshot(
        self,
        entry: _ServiceEntry,
        name: str,
        deployment: Object,
        pods: list[Object],
        ready: list[str],
        spec: ScalingSpec,
        now_s: float,
    ) -> TierSnapshot:
        ready_names, is_automatic = set(ready), spec.policy.mode is ScalingMode.AUTO and not spec.policy.paused
        starting_pods = [p for p in pods if p["metadata"]["name"] not in ready_names]
        entry.starting_pods |= {p["metadata"]["name"] for p in starting_pods}
        for pod in pods:
            pod_name = pod["metadata"]["name"]
            if pod_name in ready_names and pod_name in entry.starting_pods:
                progress = self._sources.startup_progress(pod_name)
                if (
                    pod_startup.is_complete(progress)
                    or pod_startup.ready_for_s(pod, now_s) > STARTUP_REPORT_GRACE_SECONDS
                ):
                    entry.starting_pods.discard(pod_name)
                    entry.service_state.record_startup(
                        name, pod_startup.phase_durations(pod, progress), pod_startup.startup_variant(pod)
                    )
        return TierSnapshot(
            replicas=int(deployment["spec"].get("replicas", 1)),
            ready=len(ready),
            starting=tuple(
                pod_startup.startup_state(p, self._sources.startup_progress(p["metadata"]["name"]))
                for p in starting_pods
            ),
            engine_info=next(filter(None, map(self._sources.engine_info, ready)), None),
            variant=entry.startup_variant(name, deployment),
            replicas_set_by=replicas_set_by(deployment) if is_automatic else None,  # others own it in other modes
        )

    def _deployment(self, service_object: Object, tier: str) -> Object | None:
        namespace, name = key_of(service_object)
        deployment = self._cache.get("Deployment", (namespace, object_meta.tier_name(name, tier)))
        return (
            deployment
            if deployment is not None and object_meta.owner_uid(deployment) == service_object["metadata"]["uid"]
            else None
        )

    def _changes(self, service_object: Object, service_state: ServiceState, spec: ScalingSpec) -> Iterable[ScaleChange]:
        if spec.policy.mode is not ScalingMode.AUTO or spec.policy.paused or service_state.last_decision is None:
            return
        for tier, decision in service_state.last_decision.decision.tiers.items():
            deployment = self._deployment(service_object, tier)
            replicas_before = None if deployment is None else int(deployment["spec"].get("replicas", 1))
            if deployment is not None and replicas_before is not None and replicas_before != decision.replicas:
                yield ScaleChange(service_object, deployment, tier, replicas_before, decision)

    def _update_report(
        self,
        key: Key,
        service: InferenceService,
        snapshot: ServiceSnapshot,
        spec: ScalingSpec,
        gateways: tuple[str, ...],
        now_s: float,
    ) -> None:
        """Rebuild the report when its state changes, and every REPORT_INTERVAL_SECONDS for its figures.

        Admission limits are published in between, without new figures.
        """
        entry = self._entries[key]
        self._gauges.export(key, entry.service_state, snapshot, spec)
        old_report = entry.report
        published = entry.publisher.published
        health = entry.signal_health.report(
            snapshot, published is not None and published.cost_model is not None, gateways, now_s
        )
        health = health._replace(prometheus_only_tiers=self._sources.prometheus_only_tiers(key))
        is_shedding = scaling_status.is_shedding(snapshot, old_report)
        last_decision = entry.service_state.last_decision
        limited = NOT_LIMITED
        if last_decision is not None:
            limited = entry.limits.update(last_decision.decision, now_s, service.metadata.generation)
        entry.assess_transfer(snapshot.metrics.transfer_stats, now_s)
        slow_transfer = entry.slow_transfer_message
        if slow_transfer is not None and old_report is not None and old_report.slow_transfer_message is not None:
            slow_transfer = old_report.slow_transfer_message  # keeps the message while only its figures move
        state_key = scaling_status.state_key(service, entry.service_state, snapshot, health, is_shedding, limited)
        if (
            old_report is not None
            and old_report.state_key == state_key
            and bool(old_report.slow_transfer_message) == bool(slow_transfer)
            and now_s - entry.report_made_s < REPORT_INTERVAL_SECONDS
        ):
            if old_report.published is not published:
                entry.report = replace(old_report, published=published)
                self._on_report_changed(key)
            return
        has_unknown_sizing = any(isinstance(need, Unavailable) for need in entry.service_state.sizings.values())
        if (
            old_report is None
            and spec.slo is not None
            and entry.checkpoint
            and has_unknown_sizing
            and now_s - entry.tracked_since_s < GATEWAY_SILENCE_SECONDS
        ):
            return  # after a restart the old status is better than one without any signal
        previous = old_report or self._initial_report(entry, now_s)
        new_report = scaling_status.build_report(
            service, entry.service_state, snapshot, spec, previous, published, slow_transfer, health, limited, now_s
        )
        entry.report_made_s = now_s
        if new_report != old_report:
            entry.report = new_report
            self._on_report_changed(key)

    async def _scale(self, change: ScaleChange) -> None:
        """Set the replica count of a tier. A failure is logged; the next tick retries."""
        key, deployment_meta = key_of(change.service_object), change.deployment["metadata"]

        deletion_note = (
            await self._annotate_deletion_costs(change) if change.decision.replicas < change.replicas_before else ""
        )
        try:
            await self._kube.scale(
                deployment_meta["namespace"],
                deployment_meta["name"],
                change.decision.replicas,
                labels.SCALER_FIELD_MANAGER,
            )
        except NotFound:
            return
        except ClusterError as error:
            message = "cannot set the Deployment's replicas; retrying at the next tick"
            log.warning(key, message, deployment=deployment_meta["name"], error=str(error))
            return
        direction = "up" if change.decision.replicas > change.replicas_before else "down"
        metrics.OPERATOR_SCALE_CHANGES.labels(change.tier, direction).inc()
        try:
            await self._record_event(change.service_object, change.event(deletion_note))
        except ClusterError as error:
            message = "Deployment scaled, but its Event cannot be written"
            log.warning(key, message, deployment=deployment_meta["name"], error=str(error))

    async def _annotate_deletion_costs(self, change: ScaleChange) -> str:
        """Annotate the pods to delete; returns the note for the Event. On failure Kubernetes selects the pods."""
        key, replicas = key_of(change.service_object), change.decision.replicas
        service = "/".join(key)
        readings = [one.services[service] for one in self._sources.gateways()[0] if service in one.services]
        selection = pod_deletion_cost.select_pods(
            (p for p in self._cache.children("Pod", key) if _belongs_to_tier(p, change.tier)),
            replicas,
            lambda pod: replica_load(readings, pod, self._sources.running_requests(pod)),
        )
        try:
            await pod_deletion_cost.annotate(self._kube, self._cache, selection)
        except (ClusterError, TimeoutError) as error:
            log.warning(key, "cannot set pod-deletion-cost; Kubernetes selects the pods to delete", error=str(error))
            return "Kubernetes selects the pods to delete, because pod-deletion-cost could not be set"
        return selection.summary


def _subject(key: Key) -> str:
    return f"{labels.KIND} {'/'.join(key)}"


def _belongs_to_tier(pod: Object, tier: str) -> bool:
    return role_of(pod) == tier and not pod_startup.is_terminating(pod)
