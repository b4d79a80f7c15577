"""One tick of all services: observation of all of them, and decisions of those that are due.

Problem: 1,000 services are sampled once per second, and a decision of all of them would take half a core.

Idea: a service that is not due (`cadence`) keeps its last decision. All decisions take the same path; those of one tick
are sized in batches. A small fleet is decided completely at each tick.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Final, TypeVar

from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot
from plimsoll.core.autoscaling.scaling_decision import ScalingDecision
from plimsoll.core.autoscaling.service_state import CapacityPlan, ServiceState
from plimsoll.core.autoscaling.sizing_batch import size_batch, tier_capacities
from plimsoll.core.autoscaling.sizing_requests import sizing_requests
from plimsoll.core.autoscaling.tier_state import TierState
from plimsoll.core.demand.batched_observe import observe_all

K = TypeVar("K", bound=Hashable)
ServiceEntry = tuple[ServiceState, ServiceSnapshot, ScalingSpec]

MAX_CAPACITIES_PER_TICK: Final = 12  # an SLO capacity takes 1.6 ms; the rest follows in later ticks
MAX_CHECKS_PER_TICK: Final = 60  # checks whether an SLO capacity is still valid, 0.3 ms each
SLICE_SIZE: Final = 100  # services that are decided in one batch, before other work of the event loop
SMALL_FLEET: Final = 40  # services up to which all are decided at each tick


def decide_all(
    services: Mapping[K, ServiceEntry], now_s: float, small_fleet: int = SMALL_FLEET
) -> dict[K, ScalingDecision]:
    """Return the latest decision of each service, and update its state. now_s: seconds since the epoch.

    small_fleet: number of services up to which all of them are decided; of a larger fleet only those that are due.
    """
    return {key: one for part in decide_in_slices(services, now_s, small_fleet) for key, one in part.items()}


def decide_in_slices(
    services: Mapping[K, ServiceEntry], now_s: float, small_fleet: int = SMALL_FLEET
) -> Iterator[dict[K, ScalingDecision]]:
    """As `decide_all`, in steps of a few milliseconds; yields the decisions of each, which may be none."""
    sized: dict[K, ServiceEntry] = {}
    for number, (key, (service, snapshot, spec)) in enumerate(services.items(), 1):
        spec = service.class_targets.apply(spec, snapshot.metrics, now_s)
        service.ingest(snapshot, spec, now_s)
        sized[key] = service, snapshot, spec
        if number % SLICE_SIZE == 0:
            yield {}
    yield {}
    _update_capacities(sized.values(), now_s)
    yield {}
    is_small, entries = len(sized) <= small_fleet, iter(sized.items())
    while part := dict(islice(entries, SLICE_SIZE)):
        _observe_demand(part.values(), now_s)
        decided = _decide(
            {key: entry for key, entry in part.items() if is_small or entry[0].is_decision_due(*entry[1:], now_s)},
            now_s,
        )
        latest = {key: service.last_decision for key, (service, _, _) in part.items()}
        yield {key: decided[key] if last is None or key in decided else last.decision for key, last in latest.items()}


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


def _decide(services: Mapping[K, ServiceEntry], now_s: float) -> dict[K, ScalingDecision]:
    """Decide all given services."""
    demand = {key: service.demand(snapshot, spec, now_s) for key, (service, snapshot, spec) in services.items()}
    requests = {
        (key, tier): request
        for key, (service, snapshot, spec) in services.items()
        for tier, request in sizing_requests(service.tiers, service.sizings, snapshot, spec, demand[key], now_s).items()
    }
    results = dict(zip(requests, size_batch(list(requests.values())), strict=True))
    return {
        key: service.decide(
            snapshot,
            spec,
            demand[key],
            {tier: results[key, tier] for tier in service.tiers if (key, tier) in results},
            now_s,
            key,
        )
        for key, (service, snapshot, spec) in services.items()
    }
