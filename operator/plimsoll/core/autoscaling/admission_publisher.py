"""Publication of admission limits: the engine cost model of a service, and its expected capacity.

Problem: the model and the expected start-up times change slightly at every tick. The limits are in an object that all
gateways watch, so every write reaches each of them.

Idea: the limits are computed with the SLO capacity, and published only if a gateway would decide differently.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final

from plimsoll.core.admission.cost_model import ClassPolicy, EngineCostModel, engine_cost_model
from plimsoll.core.admission.publication import (
    MAX_CAPACITY_STEPS,
    MAX_TOKEN_RATIO,
    MIN_TOKEN_RATIO,
    AdmissionLimits,
    has_changed,
)
from plimsoll.core.admission.share_controller import ShareController
from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot
from plimsoll.core.autoscaling.scaling_decision import ScalingDecision
from plimsoll.core.autoscaling.scaling_policy import ScalingMode
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.autoscaling.sizing_batch import TierCapacity
from plimsoll.core.autoscaling.tier_engines import (
    DEFAULT_BLOCK_TOKENS,
    DEFAULT_KV_TOKENS,
    DEFAULT_MAX_SEQUENCES,
    DEFAULT_TOKEN_BUDGET,
)
from plimsoll.core.capacity.tier_model import TierSpec
from plimsoll.core.engine_model.kv_transfer import HYSTERESIS_RATIO, TRANSFER_MEMORY_S, TransferStats, transit_s
from plimsoll.core.engine_model.step_time import StepModel
from plimsoll.core.types import Role

MIN_PUBLISH_INTERVAL_S: Final = 2.0  # between two publications
MIN_TRANSFER_CHANGE_S: Final = 1e-6  # per token; a smaller change shifts a prompt of 1,000 tokens by less than 1 ms
UNKNOWN_REPLICA_WORK: Final = 0.5  # GPU-seconds of work per second of a replica whose SLO capacity is unknown


@dataclass
class AdmissionPublisher:
    """Admission limits of one service. published: the current limits, None without an SLO."""

    sharing: ShareController = field(default_factory=ShareController)
    published: AdmissionLimits | None = None
    published_s: float = -math.inf
    _kv_transfer_token_s: float | None = None
    _transfer_measured_s: float = math.inf  # last measurement; infinity: by an earlier process
    _cost_model_cache: (
        tuple[TierSpec, StepModel | None, tuple[ClassPolicy, ...], float | None, EngineCostModel] | None
    ) = field(default=None, repr=False)

    @classmethod
    def restore(cls, published: AdmissionLimits | None) -> AdmissionPublisher:
        """Continue from the limits that an earlier process published."""
        kv_transfer_token_s = (
            None if published is None or published.cost_model is None else published.cost_model.kv_transfer_token_s
        )
        return cls(
            ShareController(published.shares if published is not None else None),
            published,
            _kv_transfer_token_s=kv_transfer_token_s,
        )

    def publish(
        self,
        service: ServiceState,
        snapshot: ServiceSnapshot,
        spec: ScalingSpec,
        gateways: Collection[str],
        now_s: float,
    ) -> bool:
        """Update `published`. Returns whether it has changed. gateways: names of the existing gateways."""
        self.sharing.keep_only(gateways)
        desired = self._build(service, snapshot, spec, gateways, now_s)
        if desired is None:
            changed, self.published = self.published is not None, None
            return changed
        if not has_changed(self.published, desired) or 0.0 <= now_s - self.published_s < MIN_PUBLISH_INTERVAL_S:
            return False
        self.published, self.published_s = desired, now_s
        return True

    def _build(
        self,
        service: ServiceState,
        snapshot: ServiceSnapshot,
        spec: ScalingSpec,
        gateways: Collection[str],
        now_s: float,
    ) -> AdmissionLimits | None:
        if not spec.classes or service.last_decision is None:
            return None
        names = tuple(request_class.name for request_class in spec.classes)
        cost_model = self._cost_model(
            service, spec.classes, self._updated_kv_transfer_token_s(snapshot.metrics.transfer_stats, now_s)
        )
        permissive, tier_snapshot = (
            _permissive_cost_model(len(names), service.client_tier),
            snapshot.tiers.get(service.client_tier),
        )
        if (
            cost_model is None
            and self.published is not None
            and self.published.classes == names
            and self.published.cost_model != permissive
        ):
            cost_model = self.published.cost_model  # a new process has no model yet
        decided = service.last_decision.decision.tiers.get(service.client_tier)
        if tier_snapshot is not None and (not tier_snapshot.ready or (decided is not None and not decided.replicas)):
            cost_model = cost_model or permissive
        published = AdmissionLimits(names, cost_model, token_ratios=self._token_ratios(snapshot))
        if cost_model is not None:
            published = replace(published, shares=self.sharing.allocate(cost_model.batch, gateways, now_s))
        return _with_expected_capacity(published, service, snapshot, spec, service.last_decision.decision, now_s)

    def _token_ratios(self, snapshot: ServiceSnapshot) -> Mapping[str, float]:
        """Return the learned ratios within the published range; those in force before there are any."""
        learned = snapshot.metrics.token_ratios
        if not learned:
            return {} if self.published is None else self.published.token_ratios
        return {kind: min(max(ratio, MIN_TOKEN_RATIO), MAX_TOKEN_RATIO) for kind, ratio in learned.items()}

    def _updated_kv_transfer_token_s(self, transfer_stats: TransferStats, now_s: float) -> float | None:
        """Return the KV transfer time per token, s.

        It changes with a significantly different measurement. Without transfers for TRANSFER_MEMORY_S it is None, so
        that remote prefills are tried and measured again.
        """
        measured, previous = transit_s(transfer_stats), self._kv_transfer_token_s
        self._transfer_measured_s = min(self._transfer_measured_s, now_s)
        if isinstance(measured, float):
            self._transfer_measured_s = now_s
            if previous is None or abs(measured - previous) > max(
                (HYSTERESIS_RATIO - 1.0) * previous, MIN_TRANSFER_CHANGE_S
            ):
                self._kv_transfer_token_s = measured
        elif now_s - self._transfer_measured_s > TRANSFER_MEMORY_S:
            self._kv_transfer_token_s = None
        return self._kv_transfer_token_s

    def _cost_model(
        self, service: ServiceState, classes: tuple[ClassPolicy, ...], kv_transfer_token_s: float | None
    ) -> EngineCostModel | None:
        tier_spec = service.tiers[service.client_tier].capacity_state.tier_spec
        if tier_spec is None:
            return None
        prefill_tier = service.tiers.get(Role.PREFILL)
        prefill_spec = None if prefill_tier is None else prefill_tier.capacity_state.tier_spec
        prefill = None if prefill_spec is None else prefill_spec.model
        cached = self._cost_model_cache
        is_current = (
            cached is not None
            and cached[0] is tier_spec
            and cached[1] is prefill
            and cached[2:4] == (classes, kv_transfer_token_s)
        )
        if cached is None or not is_current:
            cost_model = engine_cost_model(tier_spec, classes, prefill, kv_transfer_token_s)
            cached = self._cost_model_cache = tier_spec, prefill, classes, kv_transfer_token_s, cost_model
        return cached[4]


@cache
def _permissive_cost_model(classes: int, answering: str) -> EngineCostModel:
    """Return the cost model of an unknown engine: requests are queued until it is ready, and then all are admitted.

    Prefill engines, if any, compute prompts in no time.
    """
    return EngineCostModel(
        base_s=0.02, prefill_step_s=0.0, prefill_token_s=5e-5, prefill_pair_s=0.0, sequence_s=2e-5, cached_token_s=0.0,
        post_fixed_s=0.0, post_block_s=0.0, block_tokens=DEFAULT_BLOCK_TOKENS if answering == Role.DECODE else 0,
        remote_base_s=1e-6, remote_token_s=0.0, remote_pair_s=0.0, token_budget=DEFAULT_TOKEN_BUDGET,
        kv_tokens=DEFAULT_KV_TOKENS, max_sequences=DEFAULT_MAX_SEQUENCES, output_mean=200.0, output_variance=4e4,
        batch=DEFAULT_MAX_SEQUENCES, step_budget_s=(math.inf,) * classes, tpot_s=(math.inf,) * classes,
        full_utilization=UNKNOWN_REPLICA_WORK, max_spread_s=0.0, stall_s=0.02, idle_ttft_s=0.1,
        kv_transfer_token_s=None,
    )  # fmt: skip


def _with_expected_capacity(
    published: AdmissionLimits,
    service: ServiceState,
    snapshot: ServiceSnapshot,
    spec: ScalingSpec,
    decision: ScalingDecision,
    now_s: float,
) -> AdmissionLimits:
    """Return the limits with the expected times and capacities of starting replicas."""
    is_automatic = spec.policy.mode is ScalingMode.AUTO and not spec.policy.paused
    tier_snapshot, tier_decision = snapshot.tiers.get(service.client_tier), decision.tiers.get(service.client_tier)
    if tier_snapshot is None or tier_decision is None:
        return replace(published, starting=is_automatic)
    tier = service.tiers[service.client_tier]
    ordered = max(0, tier_decision.replicas - tier_snapshot.replicas) if is_automatic else 0
    expected_ready = tier_snapshot.ready + len(tier_decision.etas_s) + ordered
    # At SLO capacity a replica may reject the share that the SLO allows, so retries use the served share only.
    slo_share = 0.0 if spec.slo is None else spec.slo.share
    replica_work = tier.capacity.replica_work if isinstance(tier.capacity, TierCapacity) else UNKNOWN_REPLICA_WORK
    work_per_replica = replica_work * slo_share
    published = replace(
        published,
        ready_capacity=expected_ready * work_per_replica,
        starting=is_automatic or bool(tier_snapshot.starting),
    )
    if not tier.startup_models.has_startups:  # no Retry-After from an unmeasured start-up time
        return published
    likely_s = tier.startup_model.total.quantile_s(0.5)  # of a replica without a pod: as once its pod starts
    if is_automatic and not expected_ready:  # a request starts the first replica
        return replace(published, ready_capacity=work_per_replica, startup_s=likely_s)
    if not tier_decision.etas_s:
        etas_s = [
            tier_plan.etas_s[0] for tier_plan in decision.tiers.values() if tier_plan.etas_s
        ]  # the prefill tier may be the short one
        etas_s += [likely_s] * bool(ordered)
        return replace(published, ready_at_s=now_s + etas_s[0]) if etas_s else published
    capacity_steps = [
        (now_s + eta_s, (tier_snapshot.ready + n) * work_per_replica)
        for n, eta_s in enumerate(sorted([*tier_decision.etas_s, *[likely_s] * ordered]), start=1)
    ]
    return replace(
        published,
        ready_at_s=capacity_steps[0][0],
        capacity_steps=_downsampled(capacity_steps) if len(capacity_steps) > 1 else (),
    )


def _downsampled(capacity_steps: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return at most MAX_CAPACITY_STEPS steps, with the first and the last one."""
    if len(capacity_steps) <= MAX_CAPACITY_STEPS:
        return tuple(capacity_steps)
    return tuple(
        capacity_steps[k * (len(capacity_steps) - 1) // (MAX_CAPACITY_STEPS - 1)] for k in range(MAX_CAPACITY_STEPS)
    )
