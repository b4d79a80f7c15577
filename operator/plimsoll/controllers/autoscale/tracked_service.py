"""One service in this process: what is known of it between two ticks, and its report."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from plimsoll.api.conditions import ConditionType
from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.controllers import pod_startup, tier_workload
from plimsoll.controllers.autoscale import learned_state, scaling_conditions, scaling_status
from plimsoll.controllers.autoscale.limit_status import LimitTracker
from plimsoll.controllers.autoscale.recommendation_events import AnnouncedCount, restore_announced
from plimsoll.controllers.autoscale.replica_contests import ReplicaContests
from plimsoll.controllers.autoscale.scaling_status import ScalingReport
from plimsoll.controllers.autoscale.signal_health import GATEWAY_SILENCE_SECONDS, HealthReport, SignalHealth
from plimsoll.core import codec
from plimsoll.core.admission.publication import AdmissionLimits
from plimsoll.core.autoscaling import cadence
from plimsoll.core.autoscaling.admission_publisher import AdmissionPublisher
from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.autoscaling.startup_models import Variant
from plimsoll.core.demand.metrics_aggregator import MetricsAggregator
from plimsoll.core.demand.service_metrics import ServiceMetrics
from plimsoll.core.engine_model.kv_transfer import TransferAssessment, TransferStats, assess, recompute_s_per_token
from plimsoll.core.ports import ServiceReading
from plimsoll.core.types import Role, Unavailable

Object = dict[str, Any]

REPORT_INTERVAL_SECONDS: Final = 10.0  # least interval at which the figures in a status are refreshed
FIGURE_WRITES_PER_SECOND: Final = 17.0  # most of them for figures: of all services, and of those that shed load
IDLE_INTERVAL_SECONDS: Final = 4.0  # decision interval of an idle service; a request ends it at once
TRANSFER_ASSESSMENT_SECONDS: Final = 10.0  # interval at which KV transfer is assessed
FAILURE_BACKOFF_SECONDS: Final = 30.0  # pause after a failed decision


@dataclass
class TrackedService:
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
    contests: ReplicaContests = field(default_factory=ReplicaContests)
    limits: LimitTracker = field(default_factory=LimitTracker)
    arrivals_by_gateway: dict[str, float] = field(default_factory=dict)  # last arrival counter of each gateway
    variants: dict[str, tuple[Object, Variant]] = field(
        default_factory=dict
    )  # by tier, with the workload it was read from
    idle_until_s: float = -math.inf  # no decision is due before
    last_failure_s: float = -math.inf  # time of the last failed decision
    announced: dict[str, AnnouncedCount] = field(
        default_factory=dict
    )  # by tier: recommended counts that Events announced
    has_queue: bool = False  # a gateway reported queued requests since the last decision
    decided_object: Object | None = None
    last_metrics: tuple[float, ServiceMetrics] | None = None  # time and metrics of the last tick that decided

    def mark_active(self, gateway: str, reading: ServiceReading) -> None:
        """Record a gateway's arrivals and queue; an arrival ends the idle period."""
        if self.arrivals_by_gateway.get(gateway) != reading.arrived:
            self.idle_until_s = -math.inf
        self.arrivals_by_gateway[gateway] = reading.arrived
        self.has_queue = self.has_queue or reading.queued > 0.0

    def prune(self, gateways: Iterable[str], pods: Iterable[str]) -> None:
        """Drop deleted gateways, and pods that were deleted before they became ready."""
        for gateway in self.arrivals_by_gateway.keys() - set(gateways):
            del self.arrivals_by_gateway[gateway]
        self.starting_pods &= set(pods)

    def startup_variant(self, tier: str, workload: Object) -> Variant:
        """The start-up variant of a tier's new pods, cached per version of its workload."""
        cached = self.variants.get(tier)
        if cached is None or cached[0] is not workload:
            cached = self.variants[tier] = (
                workload,
                pod_startup.startup_variant(tier_workload.pod_template(workload)),
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
        if tier is None or isinstance(workload, Unavailable):
            return
        model, limits = tier.engines.model, tier.engines.limits
        if model is None or limits is None:
            return
        recompute_s = recompute_s_per_token(model, workload, limits.token_budget)
        if not isinstance(recompute_s, Unavailable):
            assessment = assess(
                transfer_stats, recompute_s, self.transfer_assessment is None or self.transfer_assessment.pays
            )
            if not isinstance(assessment, Unavailable):
                self.transfer_assessment = assessment

    @property
    def is_shedding(self) -> bool:
        """Whether the last report says that the service sheds load."""
        return self.report is not None and any(one.type is ConditionType.SHEDDING for one in self.report.conditions)

    @property
    def is_changing_chunk(self) -> bool:
        """Whether the last report asks for engines with another chunk, other than to undo a change."""
        asks = self.report is not None and self.report.measured_chunk is not None
        return asks and not self.service_state.retuning.is_undo

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

    def has_turn(self, service_object: Object, tick: int, busy_services: int) -> bool:
        """Whether the service is decided at this tick, if it is busy: at once if it has a queue or a new spec."""
        has_news = self.has_queue or service_object is not self.decided_object
        return has_news or cadence.has_turn(self.uid, tick, busy_services)

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
        self.decided_object, self.has_queue = service_object, False
        self.idle_until_s = now_s + self._idle_seconds(now_s) if can_idle else -math.inf

    def _idle_seconds(self, now_s: float) -> float:
        """Until the service's own place in the interval, so that idle services are not all decided at one tick."""
        place_s = IDLE_INTERVAL_SECONDS * zlib.crc32(self.uid.encode()) / 2**32
        return IDLE_INTERVAL_SECONDS - (now_s - place_s) % IDLE_INTERVAL_SECONDS

    def follow_demand_source(self, service: InferenceService) -> None:
        """Count the demand where the spec says that requests pass, from now on. What was learned stays."""
        from_engines = not service.spec.takes_requests
        if self.aggregator.demand_from_engines != from_engines:
            roles = [Role(role) for role in service.spec.sized_tiers]
            self.aggregator = MetricsAggregator(roles, demand_from_engines=from_engines)
            self.publisher, self.signal_health = AdmissionPublisher(), SignalHealth()

    def initial_report(self, now_s: float) -> ScalingReport:
        """The report that precedes the first one of this process."""
        return scaling_status.initial_report(self.checkpoint, now_s)

    def fail(self, error: Exception, now_s: float) -> None:
        """Record a failed decision: the replica counts are frozen, and the report shows the error."""
        self.last_failure_s = now_s
        self.report = scaling_status.failed_report(self.report or self.initial_report(now_s), error)

    def _health(
        self, service: InferenceService, snapshot: ServiceSnapshot, gateways: tuple[str, ...], now_s: float
    ) -> HealthReport:
        published, targets = self.publisher.published, service.spec.targets
        has_limits = published is not None and published.cost_model is not None
        health = self.signal_health.report(snapshot, has_limits, gateways, now_s)
        demand_ports = "" if targets is None or targets.take_requests else targets.metrics_ports
        return health._replace(demand_ports=demand_ports, is_target=targets is not None)

    def _awaits_signals(self, spec: ScalingSpec, now_s: float) -> bool:
        """After a restart the old status is better than one without any signal."""
        has_unknown_sizing = spec.slo is not None and any(
            isinstance(need, Unavailable) and spec.slo.has_target_for(name)
            for name, need in self.service_state.sizings.items()
        )
        return bool(self.checkpoint) and has_unknown_sizing and now_s - self.tracked_since_s < GATEWAY_SILENCE_SECONDS

    def update_report(
        self,
        service: InferenceService,
        snapshot: ServiceSnapshot,
        spec: ScalingSpec,
        gateways: tuple[str, ...],
        prometheus_only_tiers: tuple[str, ...],
        other_writer: str | None,
        services: int,
        shedding: int,
        now_s: float,
    ) -> bool:
        """Rebuild the report when its state changes, and every `report_interval_s` for its figures.

        Admission limits are published in between, without new figures. Returns whether the report has changed.
        other_writer: who else sets the replica count of a target, None if no other writer does. services: how many the
        operator has. shedding: how many of them shed load.
        """
        old_report = self.report
        published = self.publisher.published
        health = self._health(service, snapshot, gateways, now_s)._replace(
            prometheus_only_tiers=prometheus_only_tiers,
            other_writer=other_writer,
            contested=self.contests.update(snapshot.tiers, now_s),
        )
        is_shedding = scaling_conditions.is_shedding(snapshot, () if old_report is None else old_report.conditions)
        last_decision = self.service_state.last_decision
        limited = None
        if last_decision is not None:
            limited = self.limits.update(last_decision.decision, now_s, service.metadata.generation)
        self.assess_transfer(snapshot.metrics.transfer_stats, now_s)
        slow_transfer = self.slow_transfer_message
        if slow_transfer is not None and old_report is not None and old_report.slow_transfer_message is not None:
            slow_transfer = old_report.slow_transfer_message  # keeps the message while only its figures move
        state_key = scaling_status.state_key(
            service, self.service_state, snapshot, health, is_shedding, limited, spec,
            () if old_report is None else old_report.conditions,
        )  # fmt: skip
        if (
            old_report is not None
            and old_report.state_key == state_key
            and bool(old_report.slow_transfer_message) == bool(slow_transfer)
            and now_s - self.report_made_s < report_interval_s(shedding if is_shedding else services)
        ):
            if old_report.published is published:
                return False
            self.report = replace(old_report, published=published)
            return True
        if old_report is None and self._awaits_signals(spec, now_s):
            return False
        previous = old_report or self.initial_report(now_s)
        new_report = scaling_status.build_report(
            service, self.service_state, snapshot, spec, previous, published, slow_transfer, health, limited, now_s
        )
        self.report_made_s = now_s
        if new_report == old_report:
            return False
        self.report = new_report
        return True


def report_interval_s(services: int) -> float:
    """Seconds between two refreshes of a status whose state does not change. They keep the writes of all in bounds.

    services: all, or those that shed load for one of these: they are few, and their users look at the rejected share.
    """
    return max(REPORT_INTERVAL_SECONDS, services / FIGURE_WRITES_PER_SECOND)


def track(
    service_object: Object, service: InferenceService, checkpoint: str | None, admission: Object | None, now_s: float
) -> TrackedService:
    """Start to track a service, with the state that an earlier process left.

    checkpoint: its learned state. admission: its InferenceServiceAdmission.
    """
    roles = list(service.spec.sized_tiers)
    aggregator = MetricsAggregator([Role(role) for role in roles], demand_from_engines=not service.spec.takes_requests)
    publisher, uid = AdmissionPublisher.restore(_published_before(admission)), service_object["metadata"]["uid"]
    tracked = TrackedService(ServiceState.for_roles(roles), aggregator, publisher, uid, checkpoint, now_s)
    tracked.limits.form = "tiers" if service.spec.targets is None else "targets"
    if checkpoint is not None:
        learned_state.restore(tracked.service_state, checkpoint)
        tracked.announced = restore_announced(tracked.service_state)
    return tracked


def _published_before(admission: Object | None) -> AdmissionLimits | None:
    """The admission limits that an earlier process published; None if there are none or they cannot be read."""
    try:
        return None if admission is None else codec.decode(AdmissionLimits, admission.get("limits"))
    except ValueError:
        return None
