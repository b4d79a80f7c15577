"""One tick of all services: observation of all of them, and decisions of those that are due.

Problem: 1,000 services are sampled once per second, and a decision of all of them would take half a core.

Idea: each phase of a tick takes what the one before returned: `ingest` (metrics), `capacity_plans` (SLO capacities),
`tier_demand` (samples and forecasts), sizing in batches, and `service_decision`. A service that is not due (`cadence`)
keeps its last decision. All decisions take the same path. A small fleet is decided completely at each tick.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Final, TypeVar

from plimsoll.core.autoscaling.capacity_plans import CapacityPlan, checked_s, is_due, plan_capacities
from plimsoll.core.autoscaling.ingest import IngestedService, ingest
from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot
from plimsoll.core.autoscaling.scaling_decision import ScalingDecision
from plimsoll.core.autoscaling.service_decision import decide_service, is_decision_due
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.autoscaling.sizing_batch import size_batch, tier_capacities
from plimsoll.core.autoscaling.sizing_requests import sizing_requests
from plimsoll.core.autoscaling.tier_demand import ObservedService, observe, service_demand

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
ServiceEntry = tuple[ServiceState, ServiceSnapshot, ScalingSpec]

MAX_CAPACITIES_PER_TICK: Final = 12  # an SLO capacity takes 1.6 ms; the rest follows in later ticks
MAX_CHECKS_PER_TICK: Final = 60  # checks whether an SLO capacity is still valid, 0.3 ms each
SLICE_SIZE: Final = 100  # services that are observed before other work of the event loop
BATCH_SIZE: Final = 200  # services whose tiers are sized in one batch: 0.02 ms each, alone 1 ms
DECISIONS_PER_SLICE: Final = 40  # 0.5 ms each
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
    ingested: dict[K, IngestedService] = {}
    for number, (key, (service, snapshot, spec)) in enumerate(services.items(), 1):
        ingested[key] = ingest(service, snapshot, spec, now_s)
        if number % SLICE_SIZE == 0:
            yield {}
    yield {}
    _update_capacities(ingested.values())
    yield {}
    is_small = len(ingested) <= small_fleet
    due: dict[K, ObservedService] = {}
    for part in _slices(ingested, SLICE_SIZE):
        observed = dict(zip(part, observe(part.values(), now_s), strict=True))
        due |= {key: one for key, one in observed.items() if is_small or is_decision_due(one)}
        kept = {key: one.state.last_decision for key, one in observed.items() if key not in due}
        yield {key: last.decision for key, last in kept.items() if last is not None}
    for batch in _slices(due, BATCH_SIZE):
        yield from _decide(batch)


def _slices(entries: Mapping[K, V], size: int) -> Iterator[dict[K, V]]:
    """Yield the entries in slices; none for no entry."""
    rest = iter(entries.items())
    while part := dict(islice(rest, size)):
        yield part


def _update_capacities(services: Iterable[IngestedService]) -> None:
    """Update the SLO capacities that are due, oldest first, up to the limits per tick, in one batch."""
    plans: list[CapacityPlan] = []
    checks = 0
    for service in sorted(filter(is_due, services), key=checked_s):
        checked, new_plans = plan_capacities(service, MAX_CAPACITIES_PER_TICK - len(plans))
        checks, plans = checks + checked, plans + new_plans
        if checks >= MAX_CHECKS_PER_TICK:
            break
    capacities = tier_capacities([plan.tier_spec for plan in plans], [plan.replicas for plan in plans])
    for plan, capacity in zip(plans, capacities, strict=True):
        plan.tier.apply_capacity(capacity)


def _decide(services: Mapping[K, ObservedService]) -> Iterator[dict[K, ScalingDecision]]:
    """Decide all given services in slices; their sizings are computed in one batch."""
    demand = {key: service_demand(service) for key, service in services.items()}
    yield {}
    requests = {
        (key, tier): request
        for key, (state, snapshot, spec, now_s) in services.items()
        for tier, request in sizing_requests(
            state.tiers, state.sizings, snapshot, spec, demand[key].tiers, now_s
        ).items()
    }
    results = dict(zip(requests, size_batch(list(requests.values())), strict=True))
    yield {}
    for part in _slices(services, DECISIONS_PER_SLICE):
        yield {
            key: decide_service(
                service,
                demand[key],
                {tier: results[key, tier] for tier in service.state.tiers if (key, tier) in results},
                key,
            )
            for key, service in part.items()
        }
