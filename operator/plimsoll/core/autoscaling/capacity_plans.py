"""Phase 2 of a tick: which SLO capacities are computed again."""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.core.autoscaling.ingest import IngestedService
from plimsoll.core.autoscaling.observations import SizingResult
from plimsoll.core.autoscaling.tier_state import TierState, ttft_outside_tier_s
from plimsoll.core.capacity.tier_model import TierSpec
from plimsoll.core.types import Unavailable


class CapacityPlan(NamedTuple):
    """An SLO capacity to compute. replicas: needed count."""

    tier: TierState
    tier_spec: TierSpec
    replicas: int


def is_due(service: IngestedService) -> bool:
    """Whether the SLO capacity of a tier is due for a check."""
    return any([tier.capacity_state.is_due(service.now_s) for tier in service.state.tiers.values()])


def checked_s(service: IngestedService) -> float:
    """Return the time of the oldest check of a tier's SLO capacity."""
    return min([tier.capacity_state.checked_s for tier in service.state.tiers.values()], default=0.0)


def plan_capacities(service: IngestedService, limit: int) -> tuple[int, list[CapacityPlan]]:
    """Check the due tiers up to the given number of plans. Returns the number of checks, and the plans."""
    state, snapshot, spec, now_s = service
    plans: list[CapacityPlan] = []
    if spec.slo is None or isinstance(state.workload, Unavailable):
        return 0, plans
    checked = 0
    tiers, ttft_offset_s, gateway_count = (
        [*state.tiers.values()],
        state.ttft_feedback.offset_s,
        snapshot.metrics.gateway_count,
    )
    for name, tier in state.tiers.items():
        capacity_state = tier.capacity_state
        if len(plans) >= limit or not capacity_state.is_due(now_s) or name not in snapshot.tiers:
            continue
        decided = state.decision_state.tiers.get(name)
        tpot_tail_scale = 1.0 if decided is None else decided.tpot_tail_scale
        arrival_cv2 = capacity_state.measured_arrival_cv2(tier.forecast_state)
        by_value = (spec.slo, tpot_tail_scale, arrival_cv2, gateway_count, ttft_offset_s)
        if not state.cache.has_new_input(name, tiers, (state.workload,), by_value):
            capacity_state.checked_s = now_s
            continue
        checked += 1
        tier_spec = capacity_state.plan(
            tier.engines,
            tier.forecast_state,
            now_s,
            spec.slo,
            state.workload,
            tpot_tail_scale,
            ttft_outside_tier_s(tiers, tier, state.workload) + ttft_offset_s,
            gateway_count,
        )
        if tier_spec is not None:
            needed = _needed(state.sizings.get(name), snapshot.tiers[name].replicas)
            plans.append(CapacityPlan(tier, tier_spec, needed))
    return checked, plans


def _needed(sizing: SizingResult | Unavailable | None, ordered: int) -> int:
    """Return the replicas of a tier by its last sizing, else those ordered.

    More replicas serve more each. So a standby replica that is ordered would make itself look superfluous, and
    missing once it is removed.
    """
    return sizing.replicas if isinstance(sizing, SizingResult) else ordered
