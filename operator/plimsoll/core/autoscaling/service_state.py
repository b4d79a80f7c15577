"""State of one service over time: ingests metrics, requests sizing of its tiers, and stores its decisions."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from plimsoll.core import histogram, units
from plimsoll.core.autoscaling import cadence, retry_backlog
from plimsoll.core.autoscaling.cadence import DecisionBasis
from plimsoll.core.autoscaling.decide import decide
from plimsoll.core.autoscaling.decision_cache import DecisionCache
from plimsoll.core.autoscaling.decision_state import DecisionState
from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot, TierSnapshot
from plimsoll.core.autoscaling.observations import (
    LATENCY_WINDOW_S,
    LaggingSignals,
    NoDemand,
    ServiceObservation,
    SizingResult,
    TierDemand,
    TierObservation,
)
from plimsoll.core.autoscaling.rejection_feedback import CapacityCorrection, RejectionSample
from plimsoll.core.autoscaling.retry_backlog import RetryBacklog
from plimsoll.core.autoscaling.scaling_decision import ScalingDecision
from plimsoll.core.autoscaling.scaling_policy import ScalingPolicy
from plimsoll.core.autoscaling.sizing_batch import SizingRequest, TierCapacity
from plimsoll.core.autoscaling.startup_models import UNKNOWN_VARIANT, Variant, record_startup, select_variant
from plimsoll.core.autoscaling.tier_state import NO_TARGET, TierState, ttft_outside_tier_s, without_kv_posting
from plimsoll.core.capacity.tier_model import MAX_RATE_PER_S, TierSpec
from plimsoll.core.demand import idle_periods
from plimsoll.core.demand.forecasting import Forecast
from plimsoll.core.demand.forecasting import forecast as forecast_demand
from plimsoll.core.demand.idle_periods import IdlePeriod, IdleStats
from plimsoll.core.demand.risk_control import RiskControl, initial_control, update_control
from plimsoll.core.demand.service_metrics import ServiceMetrics, TierMetrics
from plimsoll.core.demand.uncertainty import tier_miss_cost
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role, Unavailable
from plimsoll.core.workload import Workload

TICK_S: Final = 1.0
MIN_OBSERVATION_S: Final = (
    10.0  # of arrivals before anything is made of them: the first two of a service may come together
)
MAX_KEPT_DECISIONS: Final = 6  # last decisions that changed a count
NO_COMPLETED_REQUEST: Final = Unavailable("no request has completed since the operator started")
NO_IDLE_STATS: Final = IdleStats()
NO_TIER_METRICS: Final = TierMetrics(LaggingSignals(), 0.0, None, ())


class CapacityPlan(NamedTuple):
    """An SLO capacity to compute. replicas: ordered count."""

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
    risk: RiskControl | None = None
    decisions: deque[TimedDecision] = field(default_factory=lambda: deque(maxlen=MAX_KEPT_DECISIONS))
    last_decision: TimedDecision | None = None
    basis: DecisionBasis | None = field(default=None, repr=False)
    workload: Workload | Unavailable = NO_COMPLETED_REQUEST
    sizings: dict[str, SizingResult | Unavailable] = field(default_factory=dict)
    corrections: dict[str, CapacityCorrection] = field(default_factory=dict)
    cache: DecisionCache = field(default_factory=DecisionCache, repr=False)
    idle_stats: IdleStats = NO_IDLE_STATS
    is_idle: bool | Unavailable = NO_COMPLETED_REQUEST  # without arriving, queued or running requests
    has_retry_backlog: bool = False  # retries are reserved, at the last forecast
    _risk_updated_s: float | None = field(default=None, repr=False)
    _sampled_s: float | None = field(default=None, repr=False)  # time of the last arrival sample
    _unready_s: float = field(default=-math.inf, repr=False)  # last time a tier had no ready replica
    _was_active: bool = field(default=False, repr=False)  # a request was seen

    @classmethod
    def for_roles(cls, roles: Sequence[str]) -> ServiceState:
        return cls({role: TierState(Role(role)) for role in roles})

    @property
    def client_tier(self) -> str:
        """Tier that serves client requests: decode or serve."""
        return next(name for name, tier in self.tiers.items() if tier.role is not Role.PREFILL)

    @property
    def checked_s(self) -> float:
        """Time of the oldest check of a tier's SLO capacity."""
        return min([tier.checked_s for tier in self.tiers.values()], default=0.0)

    def is_due(self, now_s: float) -> bool:
        """Whether the SLO capacity of a tier is due for a check."""
        return any([tier.is_due(now_s) for tier in self.tiers.values()])

    def record_startup(
        self, tier: str, phases_s: Sequence[tuple[str, float]], variant: Variant = UNKNOWN_VARIANT
    ) -> None:
        """Record the start-up of an engine that became ready. Invalid durations are ignored."""
        if phases_s and all(0.0 <= seconds < 86400.0 for _, seconds in phases_s):
            self.tiers[tier].startup_models = record_startup(self.tiers[tier].startup_models, variant, phases_s)

    def ingest(self, snapshot: ServiceSnapshot, spec: ScalingSpec, now_s: float) -> None:
        """Ingest the metrics of one tick: engines, lengths, speeds, arrivals, misses."""
        if not isinstance(snapshot.metrics.workload, Unavailable):
            self.workload = snapshot.metrics.workload
        for name, tier in self.tiers.items():
            tier_snapshot = snapshot.tiers.get(name)
            if tier_snapshot is not None:
                tier.startup_models = select_variant(tier.startup_models, tier_snapshot.variant)
            if (
                tier_snapshot is not None
                and tier_snapshot.engine_info is not None
                and self.cache.news(name, tier_snapshot.engine_info)
            ):
                tier.on_engine_info(tier_snapshot.engine_info)
                self.cache.met(name, tier_snapshot.engine_info)
            tier_metrics = snapshot.metrics.tiers.get(tier.role, NO_TIER_METRICS)
            if tier_metrics.windows:
                tier.update_model(without_kv_posting(tier_metrics.windows, tier_metrics.kv_post_share), self.workload)
        if any([tier_snapshot.ready == 0 for tier_snapshot in snapshot.tiers.values()]):
            self._unready_s = now_s
        startup_s = max([tier.startup_s for tier in self.tiers.values()])
        self._update_idle(snapshot, spec, startup_s, now_s)
        self._update_risk(snapshot.metrics, spec.slo, startup_s, now_s)

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
            if not self.cache.moved(
                name,
                tiers,
                (self.workload,),
                (spec.slo, tpot_tail_scale, tier.measured_arrival_cv2(), snapshot.metrics.gateway_count),
            ):
                tier.checked_s = now_s
                continue
            checked += 1
            ttft_outside_s = ttft_outside_tier_s(tiers, tier, self.workload)
            tier_spec = tier.plan_capacity(
                now_s, spec.slo, self.workload, tpot_tail_scale, ttft_outside_s, snapshot.metrics.gateway_count
            )
            if tier_spec is not None:
                plans.append(CapacityPlan(tier, tier_spec, snapshot.tiers[name].replicas))
        return checked, plans

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
        self.has_retry_backlog = self._retry_gpu_s(self.client_tier, snapshot.metrics) > 0.0
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
        assert self.risk is not None
        risk, cost = self.risk, self.miss_cost(name, spec.policy)
        tier_forecast = forecast_demand(tier.forecast_state, now_s, horizon_s, risk.quantile, risk.slo_share, cost)
        if isinstance(tier_forecast, Unavailable):
            return tier_forecast
        return TierDemand(tier_forecast, self.cache.of(name).growth_distribution(tier.forecast_state, horizon_s))

    def miss_cost(self, name: str, policy: ScalingPolicy) -> float:
        """Cost of a missed GPU-second of a tier with a known SLO capacity, as `uncertainty.tier_miss_cost`.

        While the refused are to come back it has no price, and all of the doubt counts: they want what is beyond the
        level, so that what a replica for the doubt serves is more than the uppermost bit of the load.
        """
        if self.has_retry_backlog:
            return math.inf
        tiers, policies = self.tiers.items(), policy.tiers
        request_gpu_s = {
            n: t.capacity.request_gpu_s * max(policies[n].gpus_per_replica, 1)
            for n, t in tiers
            if not isinstance(t.capacity, Unavailable)
        }
        return tier_miss_cost(policy.miss_cost, request_gpu_s, name)

    def horizon_s(self, tier: str, spec: ScalingSpec) -> float:
        """Return the forecast horizon of a tier, s."""
        if spec.horizon_s is not None:
            return spec.horizon_s
        return self.tiers[tier].startup_s + TICK_S

    def sizing_requests(
        self, snapshot: ServiceSnapshot, spec: ScalingSpec, demand: Mapping[str, TierDemand | Unavailable], now_s: float
    ) -> dict[str, SizingRequest]:
        """Return sizing requests for the tiers with known demand and SLO capacity."""
        requests = {}
        for name, tier_demand in demand.items():
            capacity, tier_snapshot = self.tiers[name].capacity, snapshot.tiers.get(name)
            if isinstance(tier_demand, TierDemand) and isinstance(capacity, TierCapacity) and tier_snapshot is not None:
                counts, backlog = (
                    (tier_snapshot.replicas, tier_snapshot.ready),
                    self._backlog_gpu_s(name, snapshot.metrics),
                )
                retry_backlog = self._retry_backlog(
                    name, tier_snapshot, capacity, tier_demand.forecast, snapshot, spec, now_s
                )
                requests[name] = SizingRequest(
                    capacity, tier_demand.forecast, *counts, spec.headroom, backlog, *retry_backlog
                )
        return requests

    def _retry_backlog(
        self,
        name: str,
        tier_snapshot: TierSnapshot,
        capacity: TierCapacity,
        tier_forecast: Forecast,
        snapshot: ServiceSnapshot,
        spec: ScalingSpec,
        now_s: float,
    ) -> RetryBacklog:
        """Return the retry backlog of the tier."""
        retry_gpu_s, tier, sizing = self._retry_gpu_s(name, snapshot.metrics), self.tiers[name], self.sizings.get(name)
        if retry_gpu_s <= 0.0:
            return retry_backlog.NO_BACKLOG
        if _is_fully_ready(tier_snapshot) and spec.slo is not None:
            error_budget, in_flight = 1.0 - spec.slo.share, _in_flight(snapshot.metrics)
            return retry_backlog.significant_backlog(
                retry_gpu_s, tier_forecast, capacity.request_gpu_s, error_budget, in_flight, tier.arrival_cv2
            )
        replica_work = sizing.replica_work if isinstance(sizing, SizingResult) else 0.0
        return retry_backlog.backlog_during_startup(
            retry_gpu_s, tier, tier_snapshot, tier_forecast, replica_work, now_s
        )

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
        self.sizings = {name: sizings.get(name) or self._sizing_unavailable(name, demand) for name in self.tiers}
        self._apply_corrections(snapshot, spec, now_s)
        idle_period = (
            self.is_idle if isinstance(self.is_idle, Unavailable) else idle_periods.current_idle(self.idle_stats, now_s)
        )
        no_demand = known_no_demand(snapshot, idle_period)
        tiers = {
            name: self._tier_observation(name, tier_snapshot, snapshot.metrics, demand[name], no_demand, now_s)
            for name, tier_snapshot in snapshot.tiers.items()
            if name in self.tiers
        }
        decision = decide(ServiceObservation(tiers, self.decision_state, idle_period=idle_period), spec.policy, now_s)
        self.decision_state = decision.state
        self.last_decision = TimedDecision(now_s, decision)
        self.basis = self._decision_basis(snapshot, spec, demand, decision, key, now_s)
        changes = _replica_changes(decision)
        if changes and not (self.decisions and _replica_changes(self.decisions[-1].decision) == changes):
            self.decisions.append(self.last_decision)
        return decision

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

    def _apply_corrections(self, snapshot: ServiceSnapshot, spec: ScalingSpec, now_s: float) -> None:
        """Raise the need of the tier that is nearest to its load line by what refusals say.

        They say it of the whole service: while any tier is short of replicas, they may be on its account.
        """
        sizings = {
            name: sizing
            for name, sizing in self.sizings.items()
            if isinstance(sizing, SizingResult) and name in snapshot.tiers
        }
        if not sizings or spec.slo is None:
            return
        rejected_share, in_flight = snapshot.metrics.rejected_share, _in_flight(snapshot.metrics)
        most_utilized = max(
            sizings, key=lambda name: _forecast_utilization(sizings[name], snapshot.tiers[name].replicas)
        )
        fully_ready = all(map(_is_fully_ready, snapshot.tiers.values()))
        for name, sizing in sizings.items():
            tier_snapshot, correction = snapshot.tiers[name], self.corrections.setdefault(name, CapacityCorrection())
            tier_rejected = 0.0 if isinstance(rejected_share, Unavailable) or name != most_utilized else rejected_share
            required, cv2 = _fractional_replicas(sizing, sizing.replicas), self.tiers[name].arrival_cv2
            feedback = RejectionSample(tier_rejected, snapshot.metrics.arrivals, 1.0 - spec.slo.share, in_flight, cv2)
            correction.update(required, tier_snapshot.ready, fully_ready, feedback, now_s)
            if not correction.is_negligible:
                counts = required, _fractional_replicas(sizing, sizing.scale_down_replicas)
                replicas, scale_down_replicas = (math.ceil(count * correction.factor - 1e-9) for count in counts)
                scale_down_replicas = max(replicas, scale_down_replicas)
                self.sizings[name] = replace(
                    sizing,
                    replicas=replicas,
                    scale_down_replicas=scale_down_replicas,
                    capacity_correction=correction.factor,
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
            backlog_gpu_s=self._backlog_gpu_s(name, metrics),
            coverage=metrics_coverage(metrics, tier_metrics, tier_snapshot.ready),
            lagging=LaggingSignals() if is_warming_up else tier_metrics.lagging,
            replicas_set_by=tier_snapshot.replicas_set_by,
            serving_s=self._serving_s(now_s),
        )

    def _serving_s(self, now_s: float) -> float:
        """Return for how long every tier has had a ready replica, s; infinite if no request was seen before that."""
        serving_s = max(0.0, now_s - self._unready_s)
        return serving_s if serving_s == 0.0 or self._was_active else math.inf

    def _backlog_gpu_s(self, name: str, metrics: ServiceMetrics) -> float:
        """Return the work of queued requests for a tier, GPU-seconds."""
        return (
            0.0 if isinstance(metrics.queued_work_s, Unavailable) else metrics.queued_work_s * self._relative_work(name)
        )

    def _retry_gpu_s(self, name: str, metrics: ServiceMetrics) -> float:
        """Return the work of reserved retries for a tier, GPU-seconds."""
        return (
            0.0
            if isinstance(metrics.reserved_work_s, Unavailable)
            else metrics.reserved_work_s * self._relative_work(name)
        )

    def _relative_work(self, name: str) -> float:
        """What a request is to a tier, over what it is to the one that answers, in which gateways reckon."""
        capacity, client_capacity = self.tiers[name].capacity, self.tiers[self.client_tier].capacity
        if isinstance(capacity, Unavailable) or isinstance(client_capacity, Unavailable):
            return 1.0
        return capacity.request_gpu_s / client_capacity.request_gpu_s

    def _update_risk(self, metrics: ServiceMetrics, slo: Slo | None, startup_s: float, now_s: float) -> None:
        """Once per start-up time, adjust the sizing quantile by the share of missed requests."""
        if slo is None:
            return
        budget = 1.0 - slo.share
        if self.risk is None or self.risk.budget != budget:
            self.risk = initial_control(budget)
        if self._risk_updated_s is None or now_s < self._risk_updated_s:
            self._risk_updated_s = now_s
        elif now_s - self._risk_updated_s >= startup_s:
            self._risk_updated_s = now_s
            missed = slo_miss_share(metrics, slo)
            waited_for_startup = (
                0.0 <= now_s - self._unready_s < 2.0 * LATENCY_WINDOW_S
            )  # for a start: no forecast could have helped
            if missed is not None and not waited_for_startup:
                self.risk = update_control(self.risk, missed)


def _is_fully_ready(tier_snapshot: TierSnapshot) -> bool:
    """Whether all ordered replicas are ready."""
    return tier_snapshot.ready == tier_snapshot.replicas > 0 and not tier_snapshot.starting


def _in_flight(metrics: ServiceMetrics) -> float:
    return 0.0 if isinstance(metrics.in_flight, Unavailable) else metrics.in_flight


def idle_status(snapshot: ServiceSnapshot) -> bool | Unavailable:
    """Whether no request comes, waits, runs or has been told to come back. One that is seen is proof; that there is
    none is known only from all gateways and engines."""
    metrics, rate, unavailable = snapshot.metrics, plausible_rate(snapshot.metrics), None
    for amount in (rate if metrics.has_new_rate else 0.0, metrics.queued, metrics.reserved_work_s, metrics.in_flight):
        if isinstance(amount, Unavailable):
            unavailable = amount
        elif amount > 0.0:
            return False
    for name, tier_snapshot in snapshot.tiers.items():
        tier_metrics = metrics.tiers.get(Role(name), NO_TIER_METRICS)
        if not isinstance(tier_metrics.in_flight, Unavailable) and tier_metrics.in_flight > 0.0:
            return False
        if metrics_coverage(metrics, tier_metrics, tier_snapshot.ready) < 1.0:
            unavailable = unavailable or Unavailable(
                f"only {tier_metrics.coverage:.0%} of the {name} engines report metrics"
            )
    if isinstance(rate, Unavailable):
        return rate
    if metrics.coverage < 1.0:
        return Unavailable(f"only {metrics.coverage:.0%} of the gateways report metrics")
    return unavailable or True


def known_no_demand(snapshot: ServiceSnapshot, idle_period: IdlePeriod | Unavailable) -> NoDemand | None:
    """Return the demand of a service that has had no request for LATENCY_WINDOW_S; None if that is not certain.

    All gateways must have reported this over the whole window, and all ready engines must report no request. Engines
    that work without a request at a gateway have traffic that bypasses it.
    """
    if isinstance(idle_period, Unavailable) or idle_period.active:
        return None
    metrics = snapshot.metrics
    if min(idle_period.idle_s, metrics.quiet_s) < LATENCY_WINDOW_S or metrics.arrivals > 0.0:
        return None
    for name, tier_snapshot in snapshot.tiers.items():
        tier_metrics = metrics.tiers.get(Role(name), NO_TIER_METRICS)
        if tier_metrics.completed > 0.0 or (tier_snapshot.ready and tier_metrics.in_flight != 0.0):
            return None
    return NoDemand(idle_period.idle_s)


def plausible_rate(metrics: ServiceMetrics) -> float | Unavailable:
    """Return the arrival rate of first attempts, 1/s; Unavailable if it is implausibly high."""
    rate = metrics.rate_per_s
    if isinstance(rate, Unavailable) or rate <= MAX_RATE_PER_S:
        return rate
    return Unavailable(f"arrival rate {units.format_rate(rate)} is implausible")


def metrics_coverage(metrics: ServiceMetrics, tier_metrics: TierMetrics, ready: int) -> float:
    """Return the share of gateways and engines that report, above 0. Below 1, no tier scales down."""
    engines = tier_metrics.coverage or 0.5 / ready if ready else 1.0
    return min(metrics.coverage or 0.5, engines)


def slo_miss_share(metrics: ServiceMetrics, slo: Slo) -> float | None:
    """Share of the last minute's requests that were refused or late with their first token; None without requests.

    What too few replicas cost: gates hold the pace, so that requests wait or are refused.
    """
    rejected_share = 0.0 if isinstance(metrics.rejected_share, Unavailable) else metrics.rejected_share
    if metrics.ttft_histogram is None or slo.ttft_s is None:
        return rejected_share if rejected_share else None
    tokens = 0.0 if isinstance(metrics.mean_prompt_tokens, Unavailable) else metrics.mean_prompt_tokens
    in_time = _share_in_time(metrics, slo.deadlines(tokens).ttft_s)
    if in_time is None:  # no responses
        return rejected_share or None
    return min(1.0, max(0.0, rejected_share + (1.0 - rejected_share) * (1.0 - in_time)))


def _share_in_time(metrics: ServiceMetrics, first_s: float) -> float | None:
    """Share of the answers whose first token was in time: each by its own class and prompt, as gateways tell it; by
    first_s, that of a mean prompt, where they do not. None of no answers."""
    assert metrics.ttft_histogram is not None
    if metrics.slo_counts is None or metrics.slo_counts.responses <= 0.0:
        return histogram.share_below(metrics.ttft_histogram, first_s)
    return 1.0 - min(1.0, metrics.slo_counts.ttft_missed / metrics.slo_counts.responses)


def _fractional_replicas(sizing: SizingResult, replicas: int) -> float:
    """Of a count that was rounded up what it was rounded from, for it is that which the model is short by; half a
    replica less at least, since what no replica is asked for tells nothing of a model."""
    fractional = sizing.utilization(sizing.rate_per_s * sizing.request_gpu_s, 1) / (1.0 - sizing.headroom)
    return min(float(replicas), max(fractional, replicas - 0.5))


def _forecast_utilization(sizing: SizingResult, replicas: int) -> float:
    """Return the forecast as a share of the replicas' SLO capacity."""
    return sizing.utilization(sizing.rate_per_s * sizing.request_gpu_s, max(replicas, 1))


def _replica_changes(decision: ScalingDecision) -> dict[str, tuple[int, int | None]]:
    """Return old and new counts of the tiers whose count changes."""
    return {
        name: (tier.previous_replicas, tier.recommended)
        for name, tier in decision.tiers.items()
        if tier.previous_replicas is not None and tier.recommended != tier.previous_replicas
    }
