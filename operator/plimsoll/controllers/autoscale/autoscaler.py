"""The scaling tick: ingest the metrics of all services, decide in one pass, and apply the changed replica counts.

The data flows from readings (`signal_sources`) to a snapshot (`service_snapshot`), a decision (`core.autoscaling`), a
change of a replica count (`scale_action`) and a report (`scaling_status`). `tracked_service` keeps what lasts longer
than a tick.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from plimsoll.adapters.kube_client import KubeClient
from plimsoll.api import labels
from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.controllers.autoscale import chunk_retuning, decision_document
from plimsoll.controllers.autoscale.cost_report import CostGauges, gpus_by_tier
from plimsoll.controllers.autoscale.history_backfill import HistoryBackfill
from plimsoll.controllers.autoscale.recommendation_events import RecommendationEvents
from plimsoll.controllers.autoscale.recommendations import Recommendations
from plimsoll.controllers.autoscale.scale_action import RecordEvent, ScaleChange, ScaleWriter
from plimsoll.controllers.autoscale.scaling_status import ScalingReport
from plimsoll.controllers.autoscale.service_snapshot import SnapshotReader, owned_admission, scaled_object
from plimsoll.controllers.autoscale.signal_health import ConfigVersions
from plimsoll.controllers.autoscale.signal_sources import SignalSources
from plimsoll.controllers.autoscale.tracked_service import TrackedService, track
from plimsoll.controllers.isolation import ObjectErrors, Stage
from plimsoll.controllers.metrics_export import ScalingGauges
from plimsoll.controllers.object_cache import Key, ObjectCache, key_of, resource_version
from plimsoll.controllers.targets.target_state import other_writer_of
from plimsoll.core.autoscaling.fleet_decisions import decide_all, decide_in_slices
from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot
from plimsoll.core.autoscaling.retuning_state import RetuningState
from plimsoll.core.autoscaling.scaling_policy import ScalingMode
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.ports import EngineReading, GatewayReading
from plimsoll.core.types import Role
from plimsoll.resources.engine_tuning import StoredArgument, stored_arguments
from plimsoll.resources.object_meta import tier_name
from plimsoll.telemetry import operator_metrics
from plimsoll.telemetry.service_log import ServiceLog

Object = dict[str, Any]
DecisionInput = tuple[ServiceState, ServiceSnapshot, ScalingSpec]
Services = dict[Key, tuple[Object, InferenceService]]
T = TypeVar("T")
Steps = Generator[list[ScaleChange], None, T]  # pauses of a part of a tick, without changes, and its result

SLICE_SIZE = 10  # services of a tick that are read, or reported, before other work of the event loop
INGEST_SLICE_SIZE = 200  # services of a gateway's reading, likewise

log = ServiceLog(__name__)


def scaling_spec(service: InferenceService, now_s: float) -> ScalingSpec:
    """The spec in the core's terms."""
    service_spec = service.spec
    slo = None if service_spec.slo is None else service_spec.slo.to_core()
    return ScalingSpec(
        service.policy(now_s), slo, service_spec.scaling.headroom_share, service_spec.scaling.horizon_s, service.classes
    )


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
        is_managed: Callable[[Key], bool] = lambda key: True,
    ) -> None:
        """on_report_changed: called with a service whose report has changed. is_managed: whether to scale a service."""
        self._errors = errors or ObjectErrors()
        self._cache = cache
        self._sources = sources
        self._snapshots = SnapshotReader(cache, sources)
        self._writer = ScaleWriter(kube, cache, sources, record_event)
        self._recommended = RecommendationEvents(record_event)
        self._on_report_changed = on_report_changed
        self._monotonic = monotonic
        self._is_managed = is_managed
        self._entries: dict[Key, TrackedService] = {}
        self._tick, self._busy_services = 0, 0  # number of the tick, and services that were not idle at the last one
        self._gauges, self._cost_gauges = ScalingGauges(), CostGauges()
        self._backfill = HistoryBackfill(sources.history)
        self.recommendations = Recommendations(lambda: self._entries, self._state_of)

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
            entry.service_state,
            key,
            time.time(),
            entry.horizon_s,
            entry.last_metrics,
            entry.publisher.published,
            None if entry.report is None else entry.report.slo,
            {tier: self._tuning(key, tier) for tier in entry.service_state.tiers},
        )

    def _tuning(self, key: Key, tier: str) -> tuple[StoredArgument, ...]:
        """The arguments that the operator has set on the engines of a tier."""
        deployment = self._deployment(key, tier)
        return () if deployment is None else stored_arguments(deployment["spec"].get("template", {}))

    def _deployment(self, key: Key, tier: str) -> Object | None:
        return self._cache.get("Deployment", (key[0], tier_name(key[1], tier)))

    def _state_of(self, key: Key) -> ServiceState | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.service_state

    def tick(self, now_s: float) -> float:
        """Decide about all services, and start to write what has changed. now_s: seconds since the epoch.

        Returns the seconds for which it blocked the event loop.
        """
        return sum(self.slices(now_s))

    def slices(self, now_s: float) -> Iterator[float]:
        """A tick in slices, so that other work of the event loop can run in between; yields the seconds of each."""
        started_s = self._monotonic()
        changes: list[ScaleChange] = []
        for found in self._decisions(now_s):
            changes += found
            yield self._monotonic() - started_s
            started_s = self._monotonic()
        self._writer.submit(changes, partial(self._isolate_errors, now_s=now_s))
        self._recommended.submit()
        for key, known in self._entries.items():
            if not known.has_recent_failure(now_s):
                self._errors.clear(Stage.SCALING, key, _subject(key))
        self._backfill.start_next({key: known.service_state for key, known in self._entries.items()}, now_s)
        yield self._monotonic() - started_s

    async def finish_writes(self) -> None:
        """Wait until the replica counts of the last tick, and their Events, are written."""
        await self._writer.finish()
        await self._recommended.finish()

    def cancel_writes(self) -> None:
        """Write no replica count of an earlier tick any more."""
        self._writer.cancel()
        self._recommended.cancel()

    def decide(self, now_s: float) -> list[ScaleChange]:
        """The tiers to scale. Reads only caches."""
        return [change for changes in self._decisions(now_s) for change in changes]

    def _decisions(self, now_s: float) -> Iterator[list[ScaleChange]]:
        """The tiers to scale, a slice of the services at a time. Entries are removed only here."""
        services = yield from self._services(now_s)
        for deleted_key in self._entries.keys() - services.keys():
            del self._entries[deleted_key]
            self._gauges.forget(deleted_key)
            self._cost_gauges.forget(deleted_key)
            yield []
        readings, gateways = self._sources.gateways()
        for _ in self._ingest(tuple(readings), now_s):
            yield []
        inputs = yield from self._inputs(services, tuple(gateways), now_s)
        yield []
        due_changes: list[ScaleChange] = []
        shedding = sum(entry.is_shedding for entry in self._entries.values())
        changing = sum(entry.is_changing_chunk for entry in self._entries.values())
        decided = yield from self._decide_with_fallback(inputs, now_s)
        for number, (key, (_, snapshot, spec)) in enumerate(decided.items(), 1):
            if number % SLICE_SIZE == 0:
                yield due_changes
                due_changes = []
            with self._isolate_errors(key, now_s):
                service_object, service = services[key]
                entry = self._entries[key]
                entry.last_metrics = now_s, snapshot.metrics
                if service.spec.takes_requests:
                    entry.publisher.publish(entry.service_state, snapshot, spec, tuple(gateways), now_s)
                self._gauges.export(key, entry.service_state, snapshot, spec)
                self._cost_gauges.export(key, service, gpus_by_tier(service, snapshot))
                has_turn = changing < max(1, len(services) // chunk_retuning.SERVICES_PER_CHANGE)
                changing += self._retune(key, service, entry.service_state, snapshot, spec, now_s, has_turn=has_turn)
                indirect_tiers = self._sources.prometheus_only_tiers(key)
                other_writer = other_writer_of(self._sources.targets(key))
                if entry.update_report(
                    service,
                    snapshot,
                    spec,
                    tuple(gateways),
                    indirect_tiers,
                    other_writer,
                    len(services),
                    shedding,
                    now_s,
                ):
                    self._on_report_changed(key)
                self._recommended.update(
                    service_object, entry.service_state, spec, entry.announced, other_writer, now_s
                )
                changes = list(self._changes(service_object, entry.service_state, spec))
                entry.mark_idle(service_object, snapshot, spec, bool(changes), now_s)
                due_changes += changes
        yield due_changes

    def _services(self, now_s: float) -> Steps[Services]:
        """The services to decide about."""
        found: Services = {}
        for number, service_object in enumerate(self._cache.all(labels.KIND), 1):
            if number % SLICE_SIZE == 0:
                yield []
            service = self._service(service_object, now_s)
            if service is not None:
                found[key_of(service_object)] = service_object, service
        return found

    def _inputs(self, services: Services, gateways: tuple[str, ...], now_s: float) -> Steps[dict[Key, DecisionInput]]:
        """What a decision reads, for each service for which one is due."""
        inputs: dict[Key, DecisionInput] = {}
        busy_services = 0
        for number, (key, (service_object, service)) in enumerate(services.items(), 1):
            if number % SLICE_SIZE == 0:
                yield []
            with self._isolate_errors(key, now_s):
                entry = self._entries.get(key)
                if entry is None or entry.uid != service_object["metadata"]["uid"]:
                    entry = self._track(key, service_object, service, now_s)
                entry.follow_demand_source(service)
                if entry.is_idle(service_object, now_s) or entry.has_recent_failure(now_s):
                    continue
                busy_services += 1
                if not entry.has_turn(service_object, self._tick, self._busy_services):
                    continue
                spec = self._spec(key, service, now_s)
                inputs[key] = (
                    entry.service_state,
                    self._snapshots.read(key, service_object, entry, spec, gateways, now_s),
                    spec,
                )
        self._tick, self._busy_services = self._tick + 1, busy_services
        return inputs

    def _retune(
        self,
        key: Key,
        service: InferenceService,
        state: ServiceState,
        snapshot: ServiceSnapshot,
        spec: ScalingSpec,
        now_s: float,
        *,
        has_turn: bool,
    ) -> bool:
        """Update what measurements say of the chunk, and return whether a change begins.

        After a failure they begin again, and scaling goes on.
        """
        workload = self._deployment(key, Role.SERVE.value)
        try:
            outcome = chunk_retuning.update(service, state, snapshot, spec, workload, now_s, has_turn=has_turn)
        except Exception:
            log.exception(key, "re-tuning failed; the engines keep their chunk")
            state.retuning = RetuningState(minute_s=now_s)
            return False
        if outcome is not None:
            operator_metrics.OPERATOR_ENGINE_RETUNINGS.labels("/".join(key), outcome).inc()
        return outcome == "changed"

    def _spec(self, key: Key, service: InferenceService, now_s: float) -> ScalingSpec:
        """The spec; of a service whose count somebody else sets, in mode Recommend."""
        spec = scaling_spec(service, now_s)
        if other_writer_of(self._sources.targets(key)) is None:
            return spec
        return replace(spec, policy=replace(spec.policy, mode=ScalingMode.RECOMMEND))

    def _decide_with_fallback(self, inputs: dict[Key, DecisionInput], now_s: float) -> Steps[dict[Key, DecisionInput]]:
        """The inputs that were decided: in batches or, if one fails, each separately. Yields between two of them."""
        decided: dict[Key, DecisionInput] = {}
        try:
            for part in decide_in_slices(inputs, now_s):
                decided |= {key: inputs[key] for key in part}
                yield []
        except Exception:  # caused by one service, which the loop below isolates
            log.exception(None, "batch decision failed; deciding each service separately")
            for key in [one for one in inputs if one not in decided]:
                with self._isolate_errors(key, now_s):
                    decide_all({key: inputs[key]}, now_s)
                    decided[key] = inputs[key]
                yield []
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
                entry.fail(error, now_s)
                self._on_report_changed(key)

    def _service(self, service_object: Object, now_s: float) -> InferenceService | None:
        """The service; None if it is invalid, being deleted, or managed by another release."""
        key, service = key_of(service_object), None
        if service_object["metadata"].get("deletionTimestamp") or not self._is_managed(key):
            return None
        with self._isolate_errors(key, now_s):
            service = self._cache.parsed(service_object)
        return service if isinstance(service, InferenceService) else None

    def _track(self, key: Key, service_object: Object, service: InferenceService, now_s: float) -> TrackedService:
        entry = self._entries[key] = track(
            service_object,
            service,
            self._sources.checkpoint(service_object),
            owned_admission(self._cache, service_object),
            now_s,
        )
        self._backfill.track(key, entry.service_state)
        return entry

    def _ingest(self, readings: Iterable[GatewayReading], now_s: float) -> Iterator[None]:
        """Ingest readings; yields after each slice of their services."""
        for reading in readings:
            for number, (name, service_reading) in enumerate(reading.services.items(), 1):
                if number % INGEST_SLICE_SIZE == 0:
                    yield
                namespace, _, short_name = name.partition("/")
                entry, service_object = (
                    self._entries.get((namespace, short_name)),
                    self._cache.get(labels.KIND, (namespace, short_name)),
                )
                if entry is not None and service_object is not None:
                    with self._isolate_errors((namespace, short_name), now_s):
                        admission = owned_admission(self._cache, service_object)
                        versions = ConfigVersions(
                            resource_version(service_object), 0 if admission is None else resource_version(admission)
                        )
                        entry.signal_health.record(reading.gateway, service_reading.config_state, versions, now_s)
                        entry.mark_active(reading.gateway, service_reading)
                        entry.aggregator.observe_gateway(
                            reading.gateway, reading.instance_id, reading.at_s, service_reading
                        )
                        entry.publisher.sharing.observe(
                            reading.gateway, reading.instance_id, reading.at_s, service_reading
                        )

    def _changes(self, service_object: Object, service_state: ServiceState, spec: ScalingSpec) -> Iterable[ScaleChange]:
        if spec.policy.mode is not ScalingMode.AUTO or spec.policy.paused or service_state.last_decision is None:
            return
        for tier, decision in service_state.last_decision.decision.tiers.items():
            scaled = scaled_object(self._cache, self._sources, service_object, tier)
            if scaled is not None and scaled.replicas != decision.replicas:
                yield ScaleChange(service_object, scaled, tier, decision)


def _subject(key: Key) -> str:
    return f"{labels.KIND} {'/'.join(key)}"
