"""Cadence of a large fleet: which services a tick decides, and that their counts follow those of complete ticks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from plimsoll.core.autoscaling.cadence import DECISION_INTERVAL_S
from plimsoll.core.autoscaling.capacity_plans import plan_capacities
from plimsoll.core.autoscaling.fleet_decisions import SMALL_FLEET, decide_all
from plimsoll.core.autoscaling.ingest import IngestedService
from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot, TierSnapshot
from plimsoll.core.autoscaling.observations import LaggingSignals, SizingResult
from plimsoll.core.autoscaling.scaling_policy import ReplicaRateLimit, ScalingPolicy, TierPolicy
from plimsoll.core.autoscaling.service_decision import is_decision_due
from plimsoll.core.autoscaling.service_state import ServiceState, ServiceTick
from plimsoll.core.autoscaling.sizing_batch import TierCapacity
from plimsoll.core.autoscaling.startup_time import StartingPod
from plimsoll.core.autoscaling.tier_demand import ObservedService
from plimsoll.core.autoscaling.tier_state import TierState
from plimsoll.core.demand.demand_state import DemandState
from plimsoll.core.demand.service_metrics import ServiceMetrics, TierMetrics
from plimsoll.core.ports import EngineInfo, SelfBenchmark
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role, Unavailable
from plimsoll.core.workload import Workload, from_samples

START_S = 1.8e9
SLO = Slo(0.95, ttft_s=4.0, tpot_s=0.05)
LADDER = SelfBenchmark(
    prefill=((128, 0.02), (1024, 0.06), (4096, 0.2)),
    decode=((1, 128, 0.0152), (4, 128, 0.0158), (8, 128, 0.0166)),
)
ABOUT = EngineInfo("vllm", "0", "some GPU", 1, 128, 400_000, 8192, 16, self_benchmark=LADDER)
PAIR = (Role.PREFILL, Role.DECODE)
COMPLETE = 1 << 30
SECONDS = 80  # of which the last ten come after all that happens


def mix() -> Workload:
    rng = np.random.default_rng(0)
    return from_samples(rng.lognormal(6.7, 0.4, 64), np.zeros(64), rng.lognormal(5.3, 0.4, 64))


MIX = mix()


def policies() -> Iterator[ScalingPolicy]:
    usual = TierPolicy(1, 50)
    yield ScalingPolicy(dict.fromkeys(PAIR, usual), slo=SLO)
    yield ScalingPolicy({Role.SERVE: usual}, slo=SLO)
    yield ScalingPolicy(dict.fromkeys(PAIR, TierPolicy(0, 50)), slo=SLO)
    yield ScalingPolicy({Role.SERVE: TierPolicy(0, 3)}, slo=SLO)
    yield ScalingPolicy({Role.SERVE: replace(usual, warm_replicas=2)}, slo=SLO)
    yield ScalingPolicy({Role.SERVE: replace(usual, scale_down_limit=ReplicaRateLimit(1, 20.0))}, slo=SLO)
    yield ScalingPolicy(dict.fromkeys(PAIR, usual), slo=SLO, prefill_per_decode=(0.5, 2.0))
    yield ScalingPolicy(dict.fromkeys(PAIR, usual), slo=SLO, miss_cost=200.0)


POLICIES = list(policies())


def checked(tier: TierState, checked_s: float) -> TierState:
    """Return a tier that shares nothing with this one, whose SLO capacity was checked at that time."""
    return replace(
        tier, engines=replace(tier.engines), capacity_state=replace(tier.capacity_state, checked_s=checked_s)
    )


class Fleet:
    """Services with one line for each role, so that none takes its time to be made."""

    def __init__(self, services: int) -> None:
        self.services: dict[int, ServiceState] = {}
        made: dict[tuple[str, ...], ServiceState] = {}
        self.wishes = {n: ScalingSpec(POLICIES[n % len(POLICIES)], SLO) for n in range(services)}
        self.counts = {n: dict.fromkeys(scaling_spec.policy.tiers, 1) for n, scaling_spec in self.wishes.items()}
        for n, scaling_spec in self.wishes.items():
            roles = tuple(scaling_spec.policy.tiers)
            if roles not in made:
                made[roles] = ServiceState.for_roles(roles)
                observed = self.snapshot_of(n, 1.0, {})
                decide_all({n: (made[roles], observed, scaling_spec)}, START_S - 60.0)
            self.services[n] = ServiceState.for_roles(roles)
            for role in roles:
                known = made[roles].tiers[role]
                assert isinstance(known.capacity, TierCapacity)
                self.services[n].tiers[role] = replace(checked(known, START_S + n % 5), forecast_state=DemandState())

    def snapshot_of(
        self, n: int, rate: float | Unavailable, starting: dict[str, tuple[StartingPod, ...]], tpot_s: float = 0.02
    ) -> ServiceSnapshot:
        tiers = {
            Role(role): TierMetrics(LaggingSignals(tpot_s=tpot_s, waiting=0.0), 1.0, 1.0) for role in self.counts[n]
        }
        said = ServiceMetrics(
            rate,
            True,
            1.0,
            workload=MIX,
            queued=0.0,
            queued_work_s=0.0,
            reserved_work_s=0.0,
            in_flight=0.0,
            tiers=tiers,
        )
        there = {
            role: TierSnapshot(count, max(0, count - len(starting.get(role, ()))), starting.get(role, ()), ABOUT)
            for role, count in self.counts[n].items()
        }
        return ServiceSnapshot(said, there)

    def tick(self, now_s: float, observed: dict[int, ServiceSnapshot], small_fleet: int) -> None:
        body = {n: (self.services[n], observed[n], self.wishes[n]) for n in self.services}
        found = decide_all(body, now_s, small_fleet)
        assert found.keys() == self.services.keys()
        for n, decision in found.items():
            self.counts[n] = {name: tier.replicas for name, tier in decision.tiers.items()}


def rates(rng: np.random.Generator, means: NDArray[np.float64], second: int) -> list[float | Unavailable]:
    """Steady, leaping, falling to nothing, from nothing, none at all, now and then not known, and in bursts."""
    kinds = np.arange(len(means)) // len(POLICIES) % 7
    found = rng.poisson(means).astype(float)
    found[(kinds == 1) & (second > 60)] *= 4.0
    found[(kinds == 2) & (second > 70)] = 0.0
    found[(kinds == 3) & (second < 50)] = 0.0
    found[kinds == 4] = 0.0
    found[(kinds == 6) & (second % 30 < 15)] *= 6.0
    lost = (kinds == 5) & (rng.random(len(means)) < 0.2)
    return [Unavailable("silent") if gone else float(rate) for rate, gone in zip(found, lost, strict=True)]


def decided_now(fleet: Fleet, observed: dict[int, ServiceSnapshot], now_s: float) -> dict[int, ServiceState]:
    """Return what the services would be if all of them were decided now. The fleet itself stays as it is."""
    copies = {}
    for n, service in fleet.services.items():
        copies[n] = copy.copy(service)
        copies[n].tiers = {
            name: replace(tier, engines=copy.copy(tier.engines), capacity_state=copy.copy(tier.capacity_state))
            for name, tier in service.tiers.items()
        }
        copies[n].activity = copy.copy(service.activity)
        copies[n].corrections = copy.deepcopy(service.corrections)
        copies[n].decisions = service.decisions.copy()
    decide_all({n: (copies[n], observed[n], fleet.wishes[n]) for n in copies}, now_s, COMPLETE)
    return copies


@pytest.mark.parametrize("seed", [1, 2, 5])
def test_what_a_tick_does_not_decide_would_stay(seed: int) -> None:
    """On a random trajectory, a service that is not due has the replicas that a decision would give it."""
    rng = np.random.default_rng(seed)
    services = 7 * len(POLICIES)
    means, fleet, rested, differing = rng.uniform(0.5, 20.0, services), Fleet(services), 0, 0
    for second in range(SECONDS):
        now_s = START_S + second
        drawn, tpots = rates(rng, means, second), rng.uniform(0.016, 0.03, services)
        late = (StartingPod("p", now_s - 5.0),) if second in (40, 41) else ()
        observed = {
            n: fleet.snapshot_of(n, rate, {Role.SERVE: late} if n % 7 == 0 else {}, float(tpots[n]))
            for n, rate in enumerate(drawn)
        }
        fleet.tick(now_s, observed, 0)
        complete = decided_now(fleet, observed, now_s)
        for n, service in fleet.services.items():
            assert service.last_decision is not None
            assert now_s - service.last_decision.at_s <= DECISION_INTERVAL_S
            decision = complete[n].last_decision
            assert decision is not None
            for name, tier in decision.decision.tiers.items():
                sizing = complete[n].sizings[name]
                if isinstance(sizing, SizingResult) and service.last_decision.at_s < now_s:
                    needed = min(sizing.replicas, fleet.wishes[n].policy.tiers[name].max_replicas)
                    assert needed <= fleet.counts[n][name], "a service that is short of replicas is due"
                if service.last_decision.at_s < now_s:
                    rested += 1
                    differing += tier.replicas != fleet.counts[n][name]
    assert rested > 0.2 * SECONDS * services, "hardly any service rested: nothing was tried"
    assert differing < 0.002 * rested


@pytest.mark.parametrize("known", [True, False])
def test_queued_work_wakes_both_tiers_of_a_pair(known: bool) -> None:
    fleet = Fleet(3)
    now_s = START_S
    if known:  # arrivals have been seen, and have ended long ago
        for rate in (5.0,) * 20 + (0.0,) * 400:
            now_s += 1.0
            fleet.tick(now_s, {n: fleet.snapshot_of(n, rate, {}) for n in range(3)}, COMPLETE)
    fleet.counts[2] = dict.fromkeys(PAIR, 0)
    now_s += 1.0
    observed = {n: fleet.snapshot_of(n, 0.0, {}) for n in range(3)}
    line = fleet.services[2].tiers[Role.DECODE].capacity
    work_s = 400.0 * (line.request_gpu_s if known and isinstance(line, TierCapacity) else 1.0)
    observed[2] = replace(observed[2], metrics=replace(observed[2].metrics, queued=400.0, queued_work_s=work_s))
    fleet.tick(now_s, observed, COMPLETE)
    assert all(count >= 1 for count in fleet.counts[2].values()), fleet.counts[2]
    if known:
        decode = fleet.services[2].sizings[Role.DECODE]
        assert isinstance(decode, SizingResult)
        horizon_s = fleet.services[2].horizon_s(Role.DECODE, fleet.wishes[2])
        assert decode.rate_per_s == pytest.approx(400.0 / horizon_s), "cleared within one start-up"


def test_newly_ready_replica_is_noticed_without_other_changes() -> None:
    """Percentiles of those that waited for it are no evidence for a minute from then on."""
    fleet = Fleet(2)
    for second in range(60):
        now_s = START_S + second
        late = {Role.SERVE: (StartingPod("p", START_S),)} if 45 <= second < 50 else {}
        fleet.tick(now_s, {0: fleet.snapshot_of(0, 5.0, {}), 1: fleet.snapshot_of(1, 5.0, late)}, 0)
    assert fleet.services[1].decision_state.tiers[Role.SERVE].ready_increased_s == START_S + 50


# Which services are decided


class SteadyFleet(Fleet):
    """Serve services with random arrivals that have settled. `decided`: those that the last tick decided."""

    def __init__(self, services: int, rate: float = 5.0) -> None:
        super().__init__(services)
        self.rng, self.rate, self.now_s = np.random.default_rng(4), rate, START_S
        self.wishes = {n: ScalingSpec(POLICIES[1], SLO) for n in self.services}
        pattern = self.services[1].tiers[Role.SERVE]
        for n in self.services:
            self.services[n] = ServiceState.for_roles((Role.SERVE,))
            self.services[n].tiers[Role.SERVE] = checked(pattern, START_S + n % 5)
            self.counts[n] = {Role.SERVE: 1}
        self.decided: set[int] = set()

    def advance(self, seconds: int, changes: dict[int, Callable[[ServiceSnapshot], ServiceSnapshot]] = {}) -> None:  # noqa: B006
        """Tick once a second. changes: of what is seen of a service."""
        for _ in range(seconds):
            self.now_s += 1.0
            drawn = self.rng.poisson(self.rate, len(self.services))
            observed = {n: self.snapshot_of(n, float(drawn[n]), {}) for n in self.services}
            self.tick(self.now_s, observed | {n: change(observed[n]) for n, change in changes.items()}, 0)
            self.decided = {
                n
                for n, service in self.services.items()
                if service.last_decision is not None and service.last_decision.at_s == self.now_s
            }

    def advance_until_rested(self, n: int) -> None:
        """Go on until a service has just been decided at its regular time, so that it is not due at the next tick."""
        for _ in range(100):
            self.advance(1)
            basis = self.services[n].basis
            if n in self.decided and basis is not None and basis.due_s > self.now_s + 2.0:
                return
        raise AssertionError("the service never rests")


@pytest.fixture(scope="module")
def settled_fleet() -> SteadyFleet:
    fleet = SteadyFleet(20)
    fleet.advance(200)
    return fleet


def with_metrics(**changes: object) -> Callable[[ServiceSnapshot], ServiceSnapshot]:
    return lambda observed: replace(observed, metrics=replace(observed.metrics, **changes))


def with_tier(**changes: object) -> Callable[[ServiceSnapshot], ServiceSnapshot]:
    def change(observed: ServiceSnapshot) -> ServiceSnapshot:
        return replace(observed, tiers={Role.SERVE: replace(observed.tiers[Role.SERVE], **changes)})

    return change


def test_settled_services_are_decided_once_per_interval() -> None:
    fleet = SteadyFleet(200)
    fleet.advance(30)  # they have settled after 14
    shares, last = [], dict.fromkeys(fleet.services, fleet.now_s)
    for _ in range(15):
        fleet.advance(1)
        shares.append(len(fleet.decided) / len(fleet.services))
        last |= dict.fromkeys(fleet.decided, fleet.now_s)
        assert fleet.now_s - min(last.values()) <= DECISION_INTERVAL_S
    assert max(shares) <= 0.16, shares
    assert 0.06 <= float(np.mean(shares)) <= 0.1, shares


def test_small_fleet_is_decided_completely() -> None:
    fleet = Fleet(SMALL_FLEET)
    for second in range(30):
        now_s = START_S + second
        body = {n: (service, fleet.snapshot_of(n, 5.0, {}), fleet.wishes[n]) for n, service in fleet.services.items()}
        decide_all(body, now_s)
        assert all(service.last_decision and service.last_decision.at_s == now_s for service in fleet.services.values())


def test_leap_in_demand_is_decided_at_next_tick(settled_fleet: SteadyFleet) -> None:
    settled_fleet.advance_until_rested(7)
    before = settled_fleet.counts[7][Role.SERVE]
    settled_fleet.advance(1, {7: with_metrics(rate_per_s=200.0)})
    assert 7 in settled_fleet.decided
    settled_fleet.advance(5, {7: with_metrics(rate_per_s=200.0)})
    assert settled_fleet.counts[7][Role.SERVE] > before


@pytest.mark.parametrize(
    "change",
    [
        with_metrics(queued=1.0),
        with_metrics(reserved_work_s=1.0),
        with_metrics(rejected_share=0.01),
        with_tier(ready=0),
        with_tier(replicas=9, ready=9),
        with_tier(replicas_set_by="an HPA"),
        with_tier(starting=(StartingPod("p", START_S),)),
    ],
)
def test_trigger_makes_service_due(
    settled_fleet: SteadyFleet, change: Callable[[ServiceSnapshot], ServiceSnapshot]
) -> None:
    settled_fleet.advance_until_rested(3)
    service, observed = settled_fleet.services[3], settled_fleet.snapshot_of(3, settled_fleet.rate, {})
    tick = ServiceTick(service, observed, settled_fleet.wishes[3], settled_fleet.now_s + 1.0)
    assert not is_decision_due(ObservedService(tick))
    settled_fleet.advance(1, {3: change})
    assert 3 in settled_fleet.decided


def test_changed_spec_or_capacity_makes_service_due(settled_fleet: SteadyFleet) -> None:
    settled_fleet.advance_until_rested(5)
    settled_fleet.wishes[5] = replace(settled_fleet.wishes[5], headroom=0.1)
    settled_fleet.advance(1)
    assert 5 in settled_fleet.decided
    settled_fleet.advance_until_rested(5)
    tier = settled_fleet.services[5].tiers[Role.SERVE]
    assert isinstance(tier.capacity, TierCapacity)
    tier.capacity_state.result = replace(tier.capacity)
    settled_fleet.advance(1)
    assert 5 in settled_fleet.decided


def test_request_without_replica_makes_service_due() -> None:
    fleet = SteadyFleet(3, rate=0.0)
    fleet.wishes = dict.fromkeys(fleet.services, ScalingSpec(POLICIES[3], SLO))
    fleet.advance(900)
    assert fleet.counts[1] == {Role.SERVE: 0}
    fleet.advance_until_rested(1)
    fleet.advance(1, {1: with_metrics(rate_per_s=1.0)})
    assert 1 in fleet.decided
    assert fleet.counts[1] == {Role.SERVE: 1}


def test_unsettled_service_is_decided_at_every_tick(settled_fleet: SteadyFleet) -> None:
    """Six times the load, and then the usual load again: it waits for its stabilization window."""
    settled_fleet.advance(90, {9: with_metrics(rate_per_s=30.0)})
    high = settled_fleet.counts[9][Role.SERVE]
    waited = 0
    for _ in range(600):
        waiting = bool(settled_fleet.services[9].decision_state.tiers[Role.SERVE].downscale_candidates)
        settled_fleet.advance(1)
        waited += waiting
        assert not waiting or 9 in settled_fleet.decided
        if settled_fleet.counts[9][Role.SERVE] < high:
            break
    assert settled_fleet.counts[9][Role.SERVE] < high
    assert waited > 1


def test_capacity_is_of_the_needed_replicas_not_of_the_ordered() -> None:
    """Each of two replicas serves more than one alone, so a standby replica would make itself look superfluous."""
    fleet = Fleet(2)
    fleet.counts[1] = {Role.SERVE: 3}
    service, snapshot, spec = fleet.services[1], fleet.snapshot_of(1, 0.5, {}), fleet.wishes[1]
    for second in range(20):
        decide_all({1: (service, snapshot, spec)}, START_S + second)
    sizing = service.sizings[Role.SERVE]
    assert isinstance(sizing, SizingResult)
    assert sizing.replicas == 1

    tighter = replace(spec, slo=replace(SLO, tpot_s=0.04))
    _, [plan] = plan_capacities(IngestedService(ServiceTick(service, snapshot, tighter, START_S + 60.0)), 1)
    assert plan.replicas == 1
