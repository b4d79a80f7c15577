"""One tick of all services: vectorised observation and sizing, and single decisions where a count may change.

Problem: 1,000 services decide once per second. A full decision takes a fraction of a millisecond, and nearly all repeat
the previous one.

Idea: a vectorised check (`unchanged`) finds the services whose decision would change nothing. They keep the last
decision, except for the oldest ones, which are refreshed at each tick. A small fleet is always decided completely.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from heapq import nsmallest
from typing import Final, TypeVar

from plimsoll.core.autoscaling.decision_state import DecisionState
from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot
from plimsoll.core.autoscaling.scaling_decision import ScalingDecision
from plimsoll.core.autoscaling.service_state import (
    MIN_OBSERVATION_S,
    NO_TIER_METRICS,
    CapacityPlan,
    ServiceState,
    metrics_coverage,
)
from plimsoll.core.autoscaling.sizing_batch import record_sizes, size_batch, tier_capacities
from plimsoll.core.autoscaling.tier_state import TierState
from plimsoll.core.autoscaling.unchanged import UnchangedQuery, UnchangedTier, settled, unchanged_states
from plimsoll.core.demand.batched_observe import observe_all
from plimsoll.core.slo import Slo
from plimsoll.core.types import Unavailable

K = TypeVar("K", bound=Hashable)
ServiceEntry = tuple[ServiceState, ServiceSnapshot, ScalingSpec]

MAX_CAPACITIES_PER_TICK: Final = 12  # an SLO capacity takes 1.6 ms; the rest follows in later ticks
MAX_CHECKS_PER_TICK: Final = 60  # checks whether an SLO capacity is still valid, 0.3 ms each
REFRESHED_PER_TICK: Final = 40  # unchanged services with a full decision


def decide_all(
    services: Mapping[K, ServiceEntry], now_s: float, refreshed_per_tick: int = REFRESHED_PER_TICK
) -> dict[K, ScalingDecision]:
    """Return a decision for each service, and update its state. now_s: seconds since the epoch.

    refreshed_per_tick: unchanged services that get a full decision; the others keep their last one.
    """
    for service, snapshot, spec in services.values():
        service.ingest(snapshot, spec, now_s)
    _update_capacities(services.values(), now_s)
    _observe_demand(services.values(), now_s)
    if len(services) <= refreshed_per_tick:
        return _decide(services, now_s, record=False)
    oldest = nsmallest(refreshed_per_tick, services, key=lambda key: _decided_s(services[key][0]))
    unchanged = _unchanged_decisions(services, services.keys() - set(oldest), now_s)
    moving = {key: entry for key, entry in services.items() if key not in unchanged}
    return {**unchanged, **_decide(moving, now_s, record=True)}


def _update_capacities(services: Iterable[ServiceEntry], now_s: float) -> None:
    """Update the SLO capacities that are due, oldest first, up to the limits per tick, in one batch."""
    plans: list[CapacityPlan] = []
    checks = 0
    due = [entry for entry in services if entry[0].is_due(now_s)]
    for service, snapshot, spec in sorted(due, key=lambda entry: entry[0].checked_s):
        checked, new_plans = service.plan_capacities(snapshot, spec, now_s, MAX_CAPACITIES_PER_TICK - len(plans))
        checks, plans = checks + checked, plans + new_plans
        if checks >= MAX_CHECKS_PER_TICK:
            break
    capacities = tier_capacities([plan.tier_spec for plan in plans], [plan.replicas for plan in plans])
    for plan, capacity in zip(plans, capacities, strict=True):
        plan.tier.apply_capacity(capacity)


def _decided_s(service: ServiceState) -> float:
    return -math.inf if service.last_decision is None else service.last_decision.at_s


def _observe_demand(services: Iterable[ServiceEntry], now_s: float) -> None:
    """Update the demand state of every tier with its sample."""
    tiers: list[TierState] = []
    works: list[float] = []
    rates: list[float] = []
    for service, snapshot, spec in services:
        for tier, work, rate in service.samples(snapshot, spec, now_s):
            tiers.append(tier)
            works.append(work)
            rates.append(rate)
    states = observe_all([tier.forecast_state for tier in tiers], now_s, works, rates)
    for tier, state in zip(tiers, states, strict=True):
        tier.forecast_state = state


def _decide(services: Mapping[K, ServiceEntry], now_s: float, record: bool) -> dict[K, ScalingDecision]:
    """Decide for all given services. record: cache the sizing results for later ticks."""
    demand = {key: service.demand(snapshot, spec, now_s) for key, (service, snapshot, spec) in services.items()}
    requests = {
        (key, tier): request
        for key, (service, snapshot, spec) in services.items()
        for tier, request in service.sizing_requests(snapshot, spec, demand[key], now_s).items()
    }
    batch = list(requests.values())
    results = size_batch(batch)
    if record:
        record_sizes(batch, results)
    results_by_tier = dict(zip(requests, results, strict=True))
    return {
        key: service.decide(
            snapshot,
            spec,
            demand[key],
            {t: results_by_tier[key, t] for t in service.tiers if (key, t) in results_by_tier},
            now_s,
        )
        for key, (service, snapshot, spec) in services.items()
    }


def _unchanged_query(entry: ServiceEntry, now_s: float) -> UnchangedQuery | None:
    """Return the query of a service in which only the load may have changed since the last decision; else None."""
    service, snapshot, spec = entry
    watch, metrics, policies, policy = service.cache, snapshot.metrics, spec.policy.tiers, spec.policy
    if spec.slo is None or service.risk is None or not watch.is_quiet_under(policy):
        return None
    rests = watch.rests(service.last_decision, lambda: _settled_counts(service))
    if (
        rests is None
        or not len(rests) == len(snapshot.tiers) == len(policies)
        or _rejects_beyond_slo(snapshot, spec.slo)
    ):
        return None
    unchanged_tiers, states = [], service.decision_state.tiers
    for name, count in rests.items():
        tier, tier_snapshot, kept = service.tiers[name], snapshot.tiers.get(name), watch.of(name)
        capacity = tier.capacity
        if tier_snapshot is None or capacity is not kept.line or isinstance(capacity, Unavailable):
            return None
        if (
            tier_snapshot.starting
            or not tier_snapshot.ready == tier_snapshot.replicas == count
            or tier_snapshot.replicas_set_by is not None
            or (not count and metrics.queued)
        ):
            return None
        tier_metrics = metrics.tiers.get(tier.role, NO_TIER_METRICS)
        if now_s - tier.first_arrival_s < MIN_OBSERVATION_S or metrics_coverage(metrics, tier_metrics, count) != 1.0:
            return None
        horizon_s, tpot_s = service.horizon_s(name, spec), tier_metrics.lagging.tpot_s
        unchanged_tiers.append(
            UnchangedTier(
                name,
                policies[name],
                capacity,
                states[name],
                count,
                tier.forecast_state,
                horizon_s,
                kept.chances,
                tpot_s,
            )
        )
    passed_s = 0.0 if service.decision_state.at_s is None else max(0.0, now_s - service.decision_state.at_s)
    return UnchangedQuery(
        unchanged_tiers, policy.miss_cost, spec.headroom, service.risk.quantile, service.risk.slo_share, passed_s
    )


def _settled_counts(service: ServiceState) -> dict[str, int] | None:
    """Return the decided count of each tier if the last decision left nothing pending; else None."""
    if service.last_decision is None or not all(
        correction.is_negligible for correction in service.corrections.values()
    ):
        return None
    counts = {}
    for name in service.tiers:
        decided, state = service.last_decision.decision.tiers.get(name), service.decision_state.tiers.get(name)
        if decided is None or state is None or decided.is_held or decided.previous_replicas != decided.replicas:
            return None
        if not settled(state, decided.replicas) or isinstance(service.sizings.get(name), Unavailable):
            return None
        counts[name] = decided.replicas
    return counts


def _rejects_beyond_slo(snapshot: ServiceSnapshot, slo: Slo) -> bool:
    """Whether more requests are rejected than the SLO allows, or retries are reserved."""
    rejected_share, reserved_work_s = snapshot.metrics.rejected_share, snapshot.metrics.reserved_work_s
    has_retry_backlog = not isinstance(reserved_work_s, Unavailable) and reserved_work_s > 0.0
    return has_retry_backlog or (not isinstance(rejected_share, Unavailable) and rejected_share > 1.0 - slo.share)


def _unchanged_decisions(
    services: Mapping[K, ServiceEntry], keys: Iterable[K], now_s: float
) -> dict[K, ScalingDecision]:
    """Return the last decisions of the unchanged services, and update their states."""
    still: dict[int, dict[K, UnchangedQuery]] = {}
    for key in keys:
        query = _unchanged_query(services[key], now_s)
        if query is not None:
            still.setdefault(len(query.tiers), {})[key] = query
    unchanged: dict[K, ScalingDecision] = {}
    for some in still.values():
        for key, after in zip(some, unchanged_states(list(some.values()), now_s), strict=True):
            service = services[key][0]
            if service.last_decision is None or after is None:
                continue
            tiers = service.decision_state.tiers
            service.decision_state = DecisionState(now_s, {**tiers, **after} if after else tiers)
            unchanged[key] = service.last_decision.decision
    return unchanged
