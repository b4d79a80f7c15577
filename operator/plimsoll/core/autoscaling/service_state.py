"""State of one service over time: ingests metrics, requests sizing of its tiers, and stores its decisions."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from plimsoll.core.autoscaling import cadence
from plimsoll.core.autoscaling.cadence import DecisionBasis
from plimsoll.core.autoscaling.capacity_correction import correct_sizings
from plimsoll.core.autoscaling.class_targets import ClassTargets
from plimsoll.core.autoscaling.decide import decide
from plimsoll.core.autoscaling.decision_cache import DecisionCache
from plimsoll.core.autoscaling.decision_state import DecisionState
from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot, TierSnapshot
from plimsoll.core.autoscaling.model_mismatch import limits_mismatches
from plimsoll.core.autoscaling.observations import (
    LATENCY_WINDOW_S,
    LaggingSignals,
    NoDemand,
    ServiceObservation,
    SizingResult,
    TierDemand,
    TierObservation,
)
from plimsoll.core.autoscaling.rejection_feedback import CapacityCorrection
from plimsoll.core.autoscaling.retuning_state import RetuningState
from plimsoll.core.autoscaling.scaling_decision import ScalingDecision
from plimsoll.core.autoscaling.sizing_requests import backlog_gpu_s, client_tier, retry_gpu_s
from plimsoll.core.autoscaling.snapshot_signals import (
    NO_TIER_METRICS,
    idle_status,
    is_fully_ready,
    known_no_demand,
    metrics_coverage,
    plausible_rate,
)
from plimsoll.core.autoscaling.startup_models import UNKNOWN_VARIANT, Variant, record_startup, select_variant
from plimsoll.core.autoscaling.tier_state import NO_TARGET, TierState, ttft_outside_tier_s, without_kv_posting
from plimsoll.core.autoscaling.ttft_feedback import TtftFeedback
from plimsoll.core.capacity.tier_model import TierSpec
from plimsoll.core.demand import idle_periods
from plimsoll.core.demand.forecasting import forecast as forecast_demand
from plimsoll.core.demand.idle_periods import IdleStats
from plimsoll.core.demand.request_lengths import TOO_FEW_COMPLETED
from plimsoll.core.demand.service_metrics import ServiceMetrics
from plimsoll.core.types import Role, Unavailable
from plimsoll.core.workload import Workload

TICK_S: Final = 1.0
MIN_OBSERVATION_S: Final = (
    10.0  # of arrivals before anything is made of them: the first two of a service may come together
)
MAX_KEPT_DECISIONS: Final = 6  # last decisions that changed a count
NO_IDLE_STATS: Final = IdleStats()
NOT_RETUNED: Final = RetuningState()


class CapacityPlan(NamedTuple):
    """An SLO capacity to compute. replicas: needed count."""

    tier: TierState
    tier_spec: TierSpec
    replicas: int


class TimedDecision(NamedTuple):
    """A decision and its time, seconds since the epoch."""

    at_s: float
    decision: ScalingDecision


@dataclass
class ServiceState:
    """State of one InferenceService.

    decisions: those that changed a count, newest last. basis: what the last decision was made from.
    """

    tiers: dict[str, TierState]
    decision_state: DecisionState = field(default_factory=DecisionState)
    decisions: deque[TimedDecision] = field(default_factory=lambda: deque(maxlen=MAX_KEPT_DECISIONS))
    last_decision: TimedDecision | None = None
    basis: DecisionBasis | None = field(default=None, repr=False)
    workload: Workload | Unavailable = TOO_FEW_COMPLETED
    sizings: dict[str, SizingResult | Unavailable] = field(default_factory=dict)
    corrections: dict[str, CapacityCorrection] = field(default_factory=dict)
    ttft_feedback: TtftFeedback = field(default_factory=TtftFeedback)
    class_targets: ClassTargets = field(default_factory=ClassTargets)
    cache: DecisionCache = field(default_factory=DecisionCache, repr=False)
    idle_stats: IdleStats = NO_IDLE_STATS
    retuning: RetuningState = NOT_RETUNED
    is_idle: bool | Unavailable = TOO_FEW_COMPLETED  # without arriving, queued or running requests
    has_retry_backlog: bool = False  # retries are reserved, at the last forecast
    _sampled_s: float | None = field(default=None, repr=False)  # time of the last arrival sample
    _unready_s: float = field(default=-math.inf, repr=False)  # last time a tier had no ready replica
    _was_active: bool = field(default=False, repr=False)  # a request was seen

    @classmethod
    def for_roles(cls, roles: Sequence[str]) -> ServiceState:
        return cls({role: TierState(Role(role)) for role in roles})

    @property
    def client_tier(self) -> str:
        """Tier that serves client requests: decode or serve."""
        return client_tier(self.tiers)

    @property
    def checked_s(self) -> float:
        """Time of the oldest check of a tier's SLO capacity."""
        return min([tier.checked_s for tier in self.tiers.values()], default=0.0)

    def is_due(self, now_s: float) -> bool:
        """Whether the SLO capacity of a tier is due for a check."""
        return any([tier.is_due(now_s) for tier in self.tiers.values()])

    def record_startup(
        self,
        tier: str,
        phases_s: Sequence[tuple[str, float]],
        variant: Variant = UNKNOWN_VARIANT,
        is_restart: bool = False,
    ) -> None:
        """Record the start-up of an engine that became ready. Invalid durations are ignored.

        is_restart: whether the engine restarted in its pod.
        """
        if phases_s and all(0.0 <= seconds < 86400.0 for _, seconds in phases_s):
            models = self.tiers[tier].startup_models
            self.tiers[tier].startup_models = record_startup(models, variant, phases_s, is_restart)

    def ingest(self, snapshot: ServiceSnapshot, spec: ScalingSpec, now_s: float) -> None:
        """Ingest the metrics of one tick: engines, lengths, speeds, arrivals, misses."""
        if not isinstance(snapshot.metrics.workload, Unavailable) or isinstance(self.workload, Unavailable):
            self.workload = snapshot.metrics.workload
        for name, tier in self.tiers.items():
            tier_snapshot = snapshot.tiers.get(name)
            if tier_snapshot is not None:
                tier.startup_models = select_variant(tier.startup_models, tier_snapshot.variant)
            if (
                tier_snapshot is not None
                and tier_snapshot.engine_info is not None
                and self.cache.is_unprocessed(name, tier_snapshot.engine_info)
            ):
                tier.on_engine_info(tier_snapshot.engine_info)
                self.cache.mark_processed(name, tier_snapshot.engine_info)
            tier_metrics = snapshot.metrics.tiers.get(tier.role, NO_TIER_METRICS)
            if tier_snapshot is None or tier_snapshot.is_uniform:  # else former engines would limit the new ones
                tier.update_limits(tier_metrics.batches, now_s)
            if tier_snapshot is not None and tier_snapshot.is_uniform:
                self._ingest_minute(tier, tier_snapshot, snapshot.metrics, spec, now_s)
            if tier_metrics.windows:
                tier.update_model(without_kv_posting(tier_metrics.windows, tier_metrics.kv_post_share), self.workload)
        if any([tier_snapshot.ready == 0 for tier_snapshot in snapshot.tiers.values()]):
            self._unready_s = now_s
        startup_s = max([tier.startup_s for tier in self.tiers.values()])
        self._update_idle(snapshot, spec, startup_s, now_s)
        self.ttft_feedback.update(snapshot, spec, self.tiers, self.workload, self.sizings, now_s)

    def _ingest_minute(
        self, tier: TierState, tier_snapshot: TierSnapshot, metrics: ServiceMetrics, spec: ScalingSpec, now_s: float
    ) -> None:
        """Process preemptions and ITL of the last minute, if it was settled."""
        ready, lagging = tier_snapshot.ready, metrics.tiers.get(tier.role, NO_TIER_METRICS).lagging
        if tier.ends_settled_minute(ready, is_fully_ready(tier_snapshot), now_s):
            tier.update_preemptions(lagging.preemptions_per_s, metrics.arrivals)
            rejected = 0.0 if isinstance(metrics.rejected_share, Unavailable) else metrics.rejected_share
            rate_per_s = metrics.arrivals * (1.0 - rejected) / LATENCY_WINDOW_S / ready
            tier.update_itl(lagging.itl_s, None if spec.slo is None else spec.slo.itl_s, rate_per_s, now_s)

    def _update_idle(self, snapshot: ServiceSnapshot, spec: ScalingSpec, startup_s: float, now_s: float) -> None:
        """Update the idle state."""
        rate, arrivals = plausible_rate(snapshot.metrics), 0.0
        if snapshot.metrics.has_new_rate and not isinstance(rate, Unavailable):
            elapsed_s = 0.0 if self._sampled_s is None else max(0.0, now_s - self._sampled_s)
            arrivals, self._sampled_s = rate * elapsed_s, now_s
        self.is_idle = idle_status(snapshot)
        is_idle = None if isinstance(self.is_idle, Unavailable) else self.is_idle
        self._was_active = self._was_active or is_idle is False
        within_s = startup_s + TICK_S if spec.horizon_s is None else spec.horizon_s
        self.idle_stats = idle_periods.update_idle(self.idle_stats, now_s, is_idle, arrivals, within_s)

    def plan_capacities(
        self, snapshot: ServiceSnapshot, spec: ScalingSpec, now_s: float, limit: int
    ) -> tuple[int, list[CapacityPlan]]:
        """Check the due tiers up to the given number of plans. Returns the number of checks, and the plans."""
        plans: list[CapacityPlan] = []
        if spec.slo is None or isinstance(self.workload, Unavailable):
            return 0, plans
        checked = 0
        tiers = list(self.tiers.values())
        for name, tier in self.tiers.items():
            if len(plans) >= limit or not tier.is_due(now_s) or name not in snapshot.tiers:
                continue
            tpot_tail_scale = (
                self.decision_state.tiers[name].tpot_tail_scale if name in self.decision_state.tiers else 1.0
            )
            if not self.cache.has_new_input(
                name,
                tiers,
                (self.workload,),
                (
                    spec.slo,
                    tpot_tail_scale,
                    tier.measured_arrival_cv2(),
                    snapshot.metrics.gateway_count,
                    self.ttft_feedback.offset_s,
                ),
            ):
                tier.checked_s = now_s
                continue
            checked += 1
            ttft_outside_s = ttft_outside_tier_s(tiers, tier, self.workload) + self.ttft_feedback.offset_s
            tier_spec = tier.plan_capacity(
                now_s, spec.slo, self.workload, tpot_tail_scale, ttft_outside_s, snapshot.metrics.gateway_count
            )
            if tier_spec is not None:
                plans.append(CapacityPlan(tier, tier_spec, self._needed(name, snapshot)))
        return checked, plans

    def _needed(self, name: str, snapshot: ServiceSnapshot) -> int:
        """Replicas of a tier by its last sizing, else those ordered.

        More replicas serve more each. So a standby replica that is ordered would make itself look superfluous, and
        missing once it is removed.
        """
        sizing = self.sizings.get(name)
        return sizing.replicas if isinstance(sizing, SizingResult) else snapshot.tiers[name].replicas

    def samples(
        self, snapshot: ServiceSnapshot, spec: ScalingSpec, now_s: float
    ) -> Iterator[tuple[TierState, float, float]]:
        """Yield tiers with a new sample: work (GPU-seconds per second) and rate (1/s), NaN if unknown."""
        rate = plausible_rate(snapshot.metrics)
        if spec.slo is None:
            return
        for tier in self.tiers.values():
            if isinstance(tier.capacity, Unavailable):
                continue
            if tier.forecast_state.last_sample_s is None or now_s < tier.first_arrival_s:  # or the clock was set back
                tier.first_arrival_s = now_s
            if isinstance(rate, Unavailable):
                yield tier, math.nan, math.nan
            elif snapshot.metrics.has_new_rate:
                yield tier, rate * tier.capacity.request_gpu_s, rate

    def demand(self, snapshot: ServiceSnapshot, spec: ScalingSpec, now_s: float) -> dict[str, TierDemand | Unavailable]:
        """Return the forecast of each tier for its start-up time, including the last sample."""
        self.has_retry_backlog = retry_gpu_s(self.tiers, self.client_tier, snapshot.metrics) > 0.0
        return {name: self._tier_demand(name, tier, spec, now_s) for name, tier in self.tiers.items()}

    def _tier_demand(self, name: str, tier: TierState, spec: ScalingSpec, now_s: float) -> TierDemand | Unavailable:
        if spec.slo is None:
            return Unavailable("spec.slo is not set, so nothing is sized")
        if not spec.slo.has_target_for(tier.role):
            return NO_TARGET
        if isinstance(tier.capacity, Unavailable):
            return tier.capacity if not isinstance(self.workload, Unavailable) else self.workload
        if now_s - tier.first_arrival_s < MIN_OBSERVATION_S:
            return Unavailable(
                f"arrivals observed for {now_s - tier.first_arrival_s:.0f} s, {MIN_OBSERVATION_S:.0f} s required"
            )
        horizon_s = self.horizon_s(name, spec)
        tier_forecast = forecast_demand(tier.forecast_state, now_s, horizon_s, spec.slo.share, self.has_retry_backlog)
        if isinstance(tier_forecast, Unavailable):
            return tier_forecast
        return TierDemand(tier_forecast, self.cache.of(name).growth_distribution(tier.forecast_state, horizon_s))

    def horizon_s(self, tier: str, spec: ScalingSpec) -> float:
        """Return the forecast horizon of a tier, s."""
        if spec.horizon_s is not None:
            return spec.horizon_s
        return self.tiers[tier].startup_s + TICK_S

    def decide(
        self,
        snapshot: ServiceSnapshot,
        spec: ScalingSpec,
        demand: Mapping[str, TierDemand | Unavailable],
        sizings: Mapping[str, SizingResult | Unavailable],
        now_s: float,
        key: Hashable,
    ) -> ScalingDecision:
        """Make and store the decision of this tick. key: of the service, for the phase of its next decision."""
        known = {name: sizings.get(name) or self._sizing_unavailable(name, demand) for name in self.tiers}
        corrected = correct_sizings(self.corrections, known, self.tiers, snapshot, spec.slo, now_s)
        self.sizings = {
            name: self._with_notes(name, self.ttft_feedback.mark(sizing)) for name, sizing in corrected.items()
        }
        idle_period = (
            self.is_idle if isinstance(self.is_idle, Unavailable) else idle_periods.current_idle(self.idle_stats, now_s)
        )
        no_demand = known_no_demand(snapshot, idle_period)
        tiers = {
            name: self._tier_observation(name, tier_snapshot, snapshot.metrics, demand[name], no_demand, now_s)
            for name, tier_snapshot in snapshot.tiers.items()
            if name in self.tiers
        }
        observation = ServiceObservation(tiers, self.decision_state, idle_period=idle_period)
        decision = decide(observation, spec.policy, now_s)
        self.decision_state = decision.state
        self.last_decision = TimedDecision(now_s, decision)
        self.basis = self._decision_basis(snapshot, spec, demand, decision, key, now_s)
        changes = _replica_changes(decision)
        if changes and not (self.decisions and _replica_changes(self.decisions[-1].decision) == changes):
            self.decisions.append(self.last_decision)
        return decision

    def _with_notes(self, name: str, sizing: SizingResult | Unavailable) -> SizingResult | Unavailable:
        """Return the sizing with what engines hold less than announced, and the classes whose targets it is for."""
        if isinstance(sizing, Unavailable):
            return sizing
        tier, target_classes = self.tiers[name], self.class_targets.by_target
        if target_classes:
            sizing = replace(sizing, target_classes=target_classes)
        if tier.limits is tier.announced:
            return sizing
        return replace(sizing, limits_mismatches=limits_mismatches(tier.measured_limits, tier.announced))

    def is_decision_due(self, snapshot: ServiceSnapshot, spec: ScalingSpec, now_s: float) -> bool:
        """Whether the service must be decided at this tick."""
        return self.basis is None or self.basis.is_due(self.tiers, snapshot, spec, self.is_idle, now_s)

    def _decision_basis(
        self,
        snapshot: ServiceSnapshot,
        spec: ScalingSpec,
        demand: Mapping[str, TierDemand | Unavailable],
        decision: ScalingDecision,
        key: Hashable,
        now_s: float,
    ) -> DecisionBasis:
        """Return what the decision was made from."""
        carried = {
            name: cadence.carried_work(self.tiers[name].forecast_state, tier_demand, sizing)
            for name, sizing in self.sizings.items()
            if isinstance(sizing, SizingResult) and isinstance(tier_demand := demand[name], TierDemand)
        }
        return DecisionBasis(
            now_s,
            cadence.due_s(decision, snapshot.tiers, key, now_s),
            spec,
            cadence.snapshot_counts(snapshot.tiers),
            tuple([tier.capacity for tier in self.tiers.values()]),
            carried,
            cadence.known_share(snapshot.metrics.rejected_share),
        )

    def _sizing_unavailable(self, name: str, demand: Mapping[str, TierDemand | Unavailable]) -> Unavailable:
        tier_demand, capacity = demand[name], self.tiers[name].capacity
        if isinstance(tier_demand, Unavailable):
            return tier_demand
        return capacity if isinstance(capacity, Unavailable) else Unavailable("not sized")

    def _tier_observation(
        self,
        name: str,
        tier_snapshot: TierSnapshot,
        metrics: ServiceMetrics,
        tier_demand: TierDemand | Unavailable,
        no_demand: NoDemand | None,
        now_s: float,
    ) -> TierObservation:
        """Return the observation of one tier. no_demand: the demand if no forecast of the tier can be sized.

        Latencies and queues of the first few requests are left out, because they show nothing.
        """
        tier_metrics = metrics.tiers.get(Role(name), NO_TIER_METRICS)
        is_warming_up = 0.0 <= now_s - self.tiers[name].first_arrival_s < MIN_OBSERVATION_S
        return TierObservation(
            replicas=tier_snapshot.replicas,
            ready=tier_snapshot.ready,
            startup_model=self.tiers[name].startup_model,
            demand=tier_demand if no_demand is None or isinstance(self.sizings[name], SizingResult) else no_demand,
            sizing=self.sizings[name],
            starting=tier_snapshot.starting,
            backlog_gpu_s=backlog_gpu_s(self.tiers, name, metrics),
            coverage=metrics_coverage(metrics, tier_metrics, tier_snapshot.ready),
            lagging=LaggingSignals() if is_warming_up else tier_metrics.lagging,
            carried_per_s=self.ttft_feedback.carried_per_s,
            replicas_set_by=tier_snapshot.replicas_set_by,
            serving_s=self._serving_s(now_s),
        )

    def _serving_s(self, now_s: float) -> float:
        """Return for how long every tier has had a ready replica, s; infinite if no request was seen before that."""
        serving_s = max(0.0, now_s - self._unready_s)
        return serving_s if serving_s == 0.0 or self._was_active else math.inf


def _replica_changes(decision: ScalingDecision) -> dict[str, tuple[int, int | None]]:
    """Return old and new counts of the tiers whose count changes."""
    return {
        name: (tier.previous_replicas, tier.recommended)
        for name, tier in decision.tiers.items()
        if tier.previous_replicas is not None and tier.recommended != tier.previous_replicas
    }
